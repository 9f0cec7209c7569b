"""Experience is what the models say, put together as the definitions say."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from rlhf_core.config import LoRAConfig, RewardConfig, RolloutConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.rewards.scoring import ScoringBatch, build_scorer
from rlhf_core.rollout import experience as making
from rlhf_core.types import Experience
from tests.reference import definitions
from tests.tiny_llama import tiny_llama, tiny_tokenizer
from tests.unit.rollout.makers import (
    PROBLEMS,
    PROMPTS,
    SAMPLES,
    TEMPLATE,
    WITH_REWARD_MODEL,
    actor,
    make,
    maker,
    reward_model,
)

torch.set_num_threads(1)


def rows_of(table: torch.Tensor, experience: Experience) -> list[list[float]]:
    return [row[counts].tolist() for row, counts in zip(table, experience.action_mask, strict=True)]


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engines_notes_make_the_experience_that_another_pass_of_the_actor_makes(
    temperature: float, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, samples = make(maker(temperature=temperature, engine=engine))
    assert torch.equal(noted.action_log_probs, noted.rollout_log_probs)
    assert len({sample.length for sample in samples}) > 1
    monkeypatch.setattr(making, "notes_suffice", lambda *_: False)
    read, _ = make(maker(temperature=temperature, engine=engine))
    assert not torch.equal(read.action_log_probs, read.rollout_log_probs)
    for name, expected in read.tensors().items():
        torch.testing.assert_close(noted.tensors()[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{"rollout_dtype": "bfloat16"}, {"top_k": 9}, {"top_p": 0.9}, {"legacy": True}])
def test_where_notes_are_not_the_policys_own_the_actor_reads_its_responses(changes: dict[str, object]) -> None:
    experience, _ = make(maker(**changes))
    assert not torch.equal(experience.action_log_probs, experience.rollout_log_probs)


def test_likeliest_tokens_are_read_again() -> None:
    ours = maker()
    ours.greedy = True
    experience, _ = make(ours)
    assert not torch.equal(experience.action_log_probs, experience.rollout_log_probs)


@pytest.mark.parametrize("reward", [RewardConfig(), WITH_REWARD_MODEL])
def test_rewards_advantages_and_returns_agree_with_their_definitions(reward: RewardConfig) -> None:
    experience, samples = make(maker(reward=reward))
    assert experience.returns is not None
    tables = (experience.kl, experience.reward, experience.values, experience.advantages, experience.returns)
    for sample, kl, rewards, values, advantages, returns in zip(
        samples, *(rows_of(table, experience) for table in tables), strict=True
    ):
        assert rewards == pytest.approx(definitions.rewards(sample.score, kl, 0.3), rel=1e-4, abs=1e-5)
        expected = definitions.gae(rewards, values, 0.9, 0.8)
        assert advantages == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert returns == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)], rel=1e-5, abs=1e-6)
        assert sample.kl == pytest.approx(sum(kl), rel=1e-4)


def test_kl_is_between_the_actors_and_the_initial_models_own_forward_passes() -> None:
    ours = maker()
    experience, samples = make(ours)
    for row, sample in enumerate(samples):
        ids = experience.sequences[row][experience.attention_mask[row]]
        start = len(ids) - sample.length
        expected = []
        for place in range(start, len(ids)):
            with torch.no_grad():
                new, old = (
                    torch.log_softmax(model(ids[None, :place]).logits[0, -1], dim=-1)[ids[place]].item()
                    for model in (ours.actor, ours.initial_model)
                )
            expected.append(new - old)
        assert rows_of(experience.kl, experience)[row] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_an_initial_model_equal_to_the_actor_gives_no_kl() -> None:
    ours = maker()
    ours.initial_model = copy.deepcopy(ours.actor)
    experience, _ = make(ours)
    torch.testing.assert_close(experience.kl, torch.zeros_like(experience.kl), rtol=0, atol=1e-5)


def test_adapters_switched_off_serve_as_the_initial_model() -> None:
    adapted = actor()
    attach_lora(adapted, LoRAConfig(r=2), seed=0)
    with torch.no_grad():
        for parameter in trainable_parameters(adapted).values():
            parameter.fill_(0.02)
    found = []
    for initial in (None, actor()):
        ours = maker()
        ours.actor, ours.initial_model = adapted, initial
        found.append(make(ours).experience.kl)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert found[0].abs().max() > 1e-3


def test_without_initial_model_and_adapters_there_is_nothing_to_measure_from() -> None:
    ours = maker()
    ours.initial_model = None
    with pytest.raises(ModelError, match="no adapters to switch off"):
        make(ours)


def test_the_score_is_the_weighted_sum_of_verdict_and_standardised_score() -> None:
    experience, samples = make(maker(reward=WITH_REWARD_MODEL))
    model = reward_model().eval()
    for row, sample in enumerate(samples):
        ids = experience.sequences[row][experience.attention_mask[row]][None]
        raw = model(ids, torch.ones_like(ids)).item()
        assert sample.rm_score == pytest.approx(raw, rel=1e-3, abs=1e-5)
        assert sample.score == pytest.approx(0.5 * sample.verifier + 2.0 * (raw - 0.25) / 0.5, rel=1e-3)


def test_a_demonstrated_answer_is_judged_right() -> None:
    ours = maker(max_new_tokens=30, reward=RewardConfig(verifier=2.0), kl_coef=0.0)
    response = ours.template.response_ids(ours.template.answer_text("1 3"))
    script_responses(ours.actor, response)
    experience, samples = ours.make_experience(PROMPTS[:1], [0], episode=0, policy_version=0)
    assert samples[0].response == "<answer>1 3</answer>"
    assert (samples[0].verifier, samples[0].well_formed, samples[0].score) == (1.0, True, 2.0)
    assert experience.reward[0].tolist() == [0.0] * (len(response) - 1) + [2.0]


def script_responses(model: LlamaForCausalLM, response: list[int]) -> None:
    """Make the model say `response`: after k tokens of it, token k has all the probability."""
    plain, start = model.forward, {}

    def scripted(*args, **kwargs):
        output = plain(*args, **kwargs)
        position = kwargs["position_ids"]
        start.setdefault("prompt", int(position[0, -1]))
        keep = kwargs["logits_to_keep"]
        kept = position[:, keep] if isinstance(keep, torch.Tensor) else position[:, -keep:]
        for row, places in enumerate(kept):
            for column, place in enumerate(places.tolist()):
                output.logits[row, column] = -1e4
                output.logits[row, column, response[min(place - start["prompt"], len(response) - 1)]] = 0.0
        return output

    model.forward = scripted


def test_samples_tell_what_the_experience_holds() -> None:
    ours = maker(max_new_tokens=3)
    experience, samples = ours.make_experience(PROMPTS, [0, 1, 2, 3], episode=0, policy_version=3)
    assert {sample.ended for sample in samples} == {True, False}
    for row, (sample, problem) in enumerate(zip(samples, PROBLEMS, strict=True)):
        assert (sample.prompt, sample.answer, sample.key) == (problem.prompt, problem.answer, problem.key)
        assert sample.index == row
        assert sample.rm_score is None
        assert sample.length == int(experience.action_mask[row].sum())
        text = tiny_tokenizer().decode(experience.sequences[row][experience.attention_mask[row]])
        ending = "<|im_end|>" if sample.ended else ""
        assert text.endswith("assistant\n" + sample.response + ending)
    assert experience.policy_version.tolist() == [3] * 4


def test_the_parts_of_a_samples_score_sum_to_it() -> None:
    _, samples = make(maker(reward=WITH_REWARD_MODEL))
    for sample in samples:
        assert sample.parts.keys() == {"verifier", "reward_model"}
        # the reward model's mean is 0.25 and its deviation 0.5, its weight 2; the verifier's weight is 0.5
        assert sample.parts["verifier"] == 0.5 * sample.verifier
        assert sample.parts["reward_model"] == pytest.approx(2 * (sample.raw_scores["reward_model"] - 0.25) / 0.5)
        assert sum(sample.parts.values()) == pytest.approx(sample.score)


def test_the_same_seed_and_episode_give_the_same_bits_and_another_episode_others() -> None:
    first, again, other = (make(maker(), episode=episode).experience for episode in (0, 0, 1))
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
    assert first.sequences.shape != other.sequences.shape or not torch.equal(first.sequences, other.sequences)


def test_a_chunks_numbers_depend_on_nothing_outside_it() -> None:
    ours = maker(chunk_size=2)
    whole = make(ours)
    for start in (0, 2):
        rows = slice(start, start + 2)
        alone = ours.make_experience(PROMPTS[rows], SAMPLES[rows], episode=0, policy_version=3)
        assert alone.samples == whole.samples[rows]
        width = alone.experience.num_actions
        assert torch.equal(whole.experience.select([start, start + 1]).values[:, :width], alone.experience.values)


def test_what_sampling_needed_is_given_back_before_its_chunk_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(making, "reached", seen.append)
    monkeypatch.setattr(making, "give_back", lambda: seen.append("give back"))
    make(maker(chunk_size=2))
    assert seen == ["generate", "give back", "score"] * 2


def test_every_sample_of_a_prompt_draws_its_own_tokens() -> None:
    ours = maker()
    _, samples = ours.make_experience([PROMPTS[0]] * 4, [0, 1, 2, 3], episode=0, policy_version=0)
    assert len({sample.response for sample in samples}) > 1


def test_nothing_is_left_on_padding_and_nothing_has_a_gradient() -> None:
    experience, _ = make(maker(reward=WITH_REWARD_MODEL))
    outside = ~experience.action_mask
    assert bool(outside.any())
    for name in ("action_log_probs", "values", "reward", "kl", "advantages", "rollout_log_probs", "returns"):
        table = experience.tensors()[name]
        assert not table.requires_grad
        assert (table.dtype, table.device.type) == (torch.float32, "cpu")
        assert torch.equal(table[outside], torch.zeros(int(outside.sum()))), name


def test_models_in_bfloat16_give_float32_experience() -> None:
    ours = maker(rollout_dtype="bfloat16", reward=WITH_REWARD_MODEL)
    judge = reward_model()
    ours.scorer = build_scorer(WITH_REWARD_MODEL, judge, template=TEMPLATE)
    for model in (ours.actor, ours.critic.trunk, ours.initial_model, judge.trunk):
        model.to(torch.bfloat16)
    experience, _ = make(ours)
    assert torch.isfinite(experience.advantages).all()
    assert experience.values.dtype == experience.kl.dtype == torch.float32
    # The sampler's and the scorer's forward passes differ by rounding only.
    gap = (experience.action_log_probs - experience.rollout_log_probs).abs().max()
    assert gap < 0.3


def test_the_time_spent_on_sampling_is_known() -> None:
    ours = maker()
    make(ours)
    assert ours.generate_seconds > 0


def test_logits_never_exist_for_more_rows_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32 = RolloutConfig(rollout_dtype="float32")
    model, width = tiny_llama(initializer_range=0.3), 3
    sequences = torch.randint(3, 200, (5, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(sequences, dtype=torch.bool)
    batch = ScoringBatch([], [], mask[:, 0], sequences, mask, mask[:, -width:])
    whole = making.token_logprobs(model, batch, temperature=1.0, config=fp32)
    rows: list[int] = []
    model.register_forward_hook(lambda _model, _inputs, output: rows.append(len(output.logits)))
    monkeypatch.setattr(making, "LOGITS_BYTES", 2 * 4 * width * model.config.vocab_size)
    torch.testing.assert_close(making.token_logprobs(model, batch, temperature=1.0, config=fp32), whole)
    assert sorted(rows) == [1, 2, 2]
