"""What a maker is asked for: how responses are drawn, and what is refused in a sentence."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import RewardConfig, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.rewards.scoring import build_scorer
from rlhf_core.rollout.experience import ExperienceMaker
from tests.tiny_llama import tiny_llama, tiny_tokenizer
from tests.unit.rollout.makers import (
    CONFIG,
    PROMPTS,
    TEMPLATE,
    WITH_REWARD_MODEL,
    actor,
    critic,
    make,
    maker,
)

torch.set_num_threads(1)


def test_a_prompt_that_is_too_long_is_named() -> None:
    with pytest.raises(DataError, match=r"has 27 tokens, but ppo.max_prompt_tokens is 20; .* 'Sort 3 1'"):
        make(maker(max_prompt_tokens=20))


def test_rows_without_sample_numbers_are_refused() -> None:
    for prompts, samples in (([], []), (PROMPTS, [0])):
        with pytest.raises(DataError, match="one sample number each"):
            maker().make_experience(prompts, samples, episode=0, policy_version=0)


def test_a_weight_without_its_reward_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ppo.reward.reward_model is 2.0, but there is no reward model"):
        build_scorer(WITH_REWARD_MODEL, None, template=TEMPLATE)


def test_samples_of_a_prompt_that_do_not_stand_together_are_refused() -> None:
    ours = maker(advantage_estimator="rloo", samples_per_prompt=2)
    for prompts in (PROMPTS, PROMPTS[:1]):
        with pytest.raises(DataError, match="rloo compares 2 samples of a prompt"):
            ours.make_experience(prompts, [0] * len(prompts), episode=0, policy_version=0)


def test_generalized_advantages_without_a_critic_are_refused() -> None:
    with pytest.raises(ConfigError, match="gae needs a critic"):
        ExperienceMaker(
            actor(), None, build_scorer(RewardConfig(), None, template=TEMPLATE), None,
            config=CONFIG, template=TEMPLATE, seed=0,
        )  # fmt: skip


def test_models_of_another_vocabulary_are_refused() -> None:
    other = tiny_llama()
    other.resize_token_embeddings(300)
    with pytest.raises(ModelError, match="the actor and the initial model have different vocabularies"):
        ExperienceMaker(
            actor(), critic(), build_scorer(RewardConfig(), None, template=TEMPLATE), other,
            config=CONFIG, template=TEMPLATE, seed=0,
        )  # fmt: skip


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.5}, {"max_length": 32}])
def test_how_responses_are_drawn_is_the_configurations(changes: dict[str, object]) -> None:
    plain, made = make(maker(engine="hf")), make(maker(**changes))
    if "max_length" in changes:
        assert int(made.experience.attention_mask.sum(dim=1).max()) <= 32
    else:  # fewer tokens to choose from make each likelier than the whole distribution has it
        gap = made.experience.rollout_log_probs - made.experience.action_log_probs
        assert gap[made.experience.action_mask].min() > -1e-4
        assert gap.max() > 0.1
    assert plain.experience.sequences.equal(make(maker()).experience.sequences)


def test_closing_the_maker_ends_the_process_of_its_functions() -> None:
    ours = maker(reward=RewardConfig(verifier=0.0, functions={"gsm8k_reward_fn": 1.0}))
    _, samples = make(ours)
    assert {sample.raw_scores["gsm8k_reward_fn"] for sample in samples} == {0.0}
    process = ours.scorer._sources[-1].source._process
    assert process.pid is not None
    ours.close()
    assert process.pid is None


def test_a_stop_string_of_the_template_ends_a_response() -> None:
    plain = make(maker(max_new_tokens=12)).samples
    letter = next(sample.response for sample in plain if sample.length > 2)[1]
    ours = maker(max_new_tokens=12)
    template = PromptTemplate(tiny_tokenizer(), TemplateConfig(stop_strings=(letter,)))
    again = ExperienceMaker(
        ours.actor, ours.critic, ours.scorer, ours.initial_model, config=ours.config, template=template, seed=5
    )
    for before, after in zip(plain, make(again).samples, strict=True):
        head, found, _ = before.response.partition(letter)
        assert after.response == head + found
        assert after.ended == (bool(found) or before.ended)
