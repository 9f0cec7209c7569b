"""coati's experience maker, called as coati's is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlhf_core.coati.experience_maker import NaiveExperienceMaker
from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.rewards import RLVRRewardModel, gsm8k_reward_fn
from tests.tiny_llama import tiny_llama, tiny_tokenizer

torch.set_num_threads(1)

SHORT = {"max_new_tokens": 5, "stop_token_ids": [2]}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    found = tokenizer(["Q: 6 x 7", "Q: 2"], padding=True, return_tensors="pt")
    return found.input_ids, found.attention_mask


def maker(reward_model: object = None, **options: object) -> NaiveExperienceMaker:
    model = tiny_llama(seed=1, initializer_range=0.3)
    torch.manual_seed(0)
    judge = reward_model or RewardModel.from_causal_lm(tiny_llama(seed=4, initializer_range=0.2))
    return NaiveExperienceMaker(
        model,
        Critic.from_causal_lm(model),
        judge,
        tiny_llama(seed=2, initializer_range=0.2),
        tiny_tokenizer(),
        **options,
    )


def test_a_batch_of_padded_prompts_becomes_an_experience_with_the_score_at_the_last_token() -> None:
    ours = maker(kl_coef=0.0)
    ids, mask = batch()
    experience = ours.make_experience(input_ids=ids, attention_mask=mask, **SHORT)
    assert torch.equal(experience.sequences[:, : ids.shape[1]], ids)
    for row, sample in enumerate(ours.samples):
        assert experience.reward[row].nonzero().squeeze(-1).tolist() == [sample.length - 1]
        assert experience.reward[row].sum().item() == pytest.approx(sample.score)
        assert sample.raw_scores["reward_model"] == sample.rm_score


def test_every_call_draws_other_noise_and_the_same_calls_the_same() -> None:
    first, second = maker(), maker()
    one, two = (first.make_experience(*batch(), **SHORT) for _ in range(2))
    again = second.make_experience(*batch(), **SHORT)
    assert torch.equal(one.rollout_log_probs, again.rollout_log_probs)
    assert one.rollout_log_probs.shape != two.rollout_log_probs.shape or not torch.equal(
        one.rollout_log_probs, two.rollout_log_probs
    )


def test_greedy_calls_are_alike() -> None:
    ours = maker()
    one, two = (ours.make_experience(*batch(), do_sample=False, **SHORT) for _ in range(2))
    assert torch.equal(one.sequences, two.sequences)
    assert torch.equal(one.rollout_log_probs, two.rollout_log_probs)


@pytest.fixture(scope="module")
def judge() -> Iterator[RLVRRewardModel]:
    """A function of coati's, and one that gives what the reference answer says."""
    made = RLVRRewardModel([gsm8k_reward_fn, lambda *_, gt_answer, **__: float(gt_answer)], tokenizer=tiny_tokenizer())
    yield made
    made.close()


def test_verifiable_rewards_take_the_place_of_a_reward_model(judge: RLVRRewardModel) -> None:
    ours = maker(judge, kl_coef=0.0)
    experience = ours.make_experience(*batch(), gt_answer=["42", "3"], **SHORT)
    assert experience.reward.sum(dim=1).tolist() == [42.0, 3.0]
    assert ours.samples[0].raw_scores["gsm8k_reward_fn"] == 0.0
    assert [sample.answer for sample in ours.samples] == ["42", "3"]


def test_upstreams_numbers_are_clipped_and_paid_on_every_token(judge: RLVRRewardModel) -> None:
    ours = maker(judge, kl_coef=0.0, legacy=True)
    experience = ours.make_experience(*batch(), gt_answer=["10", "5.5"], **SHORT)
    assert torch.equal(experience.reward, 5.0 * experience.action_mask)


def test_samples_of_a_prompt_stand_together_and_need_no_critic_when_they_are_compared() -> None:
    ours = maker(advantage_estimator="rloo", samples_per_prompt=2)
    experience = ours.make_experience(*batch(), **SHORT)
    assert experience.returns is None
    assert not experience.values.any()
    assert [sample.index for sample in ours.samples] == [0, 1, 0, 1]
    for pair in (ours.samples[:2], ours.samples[2:]):
        assert pair[0].key == pair[1].key


def test_without_an_initial_model_the_adapters_are_switched_off() -> None:
    model = tiny_llama(seed=1, initializer_range=0.3)
    attach_lora(model, LoRAConfig(r=2), seed=0)
    judge = RewardModel.from_causal_lm(tiny_llama())
    ours = NaiveExperienceMaker(model, Critic.from_causal_lm(tiny_llama()), judge, None, tiny_tokenizer())
    assert ours.make_experience(*batch(), **SHORT).kl.abs().max() < 1e-5


def test_an_empty_or_all_padded_batch_is_refused() -> None:
    ours, (ids, mask) = maker(), batch()
    with pytest.raises(DataError, match="row 1 of the batch is all padding"):
        ours.make_experience(ids, mask * torch.tensor([[1], [0]]))
    with pytest.raises(DataError, match="batch of prompts is empty"):
        ours.make_experience(ids[:0], mask[:0])
    with pytest.raises(DataError, match="of one shape"):
        ours.make_experience(ids, mask[:, 1:])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_grpo": True}, "cannot take use_grpo: Extra inputs"),
        (
            {"legacy": True, "advantage_estimator": "rloo", "samples_per_prompt": 2},
            "upstream's PPO, which knows no rloo",
        ),
        ({"advantage_estimator": "grpo"}, "set ppo.samples_per_prompt to at least 2"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        maker(**options)
