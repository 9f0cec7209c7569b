"""The learner's step against slow definitions on unpadded rows, and its invariances."""

from __future__ import annotations

from itertools import chain
from math import exp, log
from statistics import fmean, pstdev

import pytest
import torch

from rlhf_core.config import LoRAConfig, PPOConfig
from rlhf_core.errors import TrainingError
from rlhf_core.generation import notes_suffice
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora, trainable_state
from rlhf_core.ppo import learner as learner_module
from rlhf_core.ppo.episode import EpisodeLearner, learn_episode
from rlhf_core.ppo.learner import PPOLearner, PPOStats
from rlhf_core.training import micro_batches
from rlhf_core.training.micro_batches import AS_TREE, IN_SHORT_PASSES, MOST_TOKENS, PASS_TOKENS
from rlhf_core.types import Experience
from tests.reference import definitions
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.experience import PROMPTS, RESPONSES, TOKENS, tiny_experience
from tests.unit.training.built import built

CONFIG = PPOConfig(
    prompts_per_episode=8, chunk_size=8, train_batch_size=8, micro_batch_size=8, warmup_steps=0,
    lr=1e-4, critic_lr=1e-3, grad_clip=1.0, temperature=1.0, dtype="float32", lora=None,
)  # fmt: skip
LORA = LoRAConfig(r=2, alpha=4.0)


def learner(**changes: object) -> PPOLearner:
    config = CONFIG.model_copy(update=changes)
    actor = tiny_llama(initializer_range=0.2)
    critic = Critic.from_causal_lm(actor)
    torch.nn.init.normal_(critic.head.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    if config.lora is not None:
        attach_lora(actor, config.lora, seed=1)
        attach_lora(critic.trunk, config.lora, seed=2)
    return built(actor, critic, config)


def unpadded_logits(model: torch.nn.Module, row: int) -> torch.Tensor:
    """Logits that predict each response token, from a forward pass over this row alone."""
    ids = torch.tensor([PROMPTS[row] + RESPONSES[row]])
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[0, len(PROMPTS[row]) - 1 : -1]
    return logits


def unpadded_logprobs(model: torch.nn.Module, row: int, *, temperature: float = 1.0) -> list[float]:
    logits = unpadded_logits(model, row)
    return [
        definitions.log_softmax(at.double().tolist(), temperature)[token]
        for at, token in zip(logits, RESPONSES[row], strict=True)
    ]


def rows_of(table: torch.Tensor) -> list[list[float]]:
    return [row[: len(response)].tolist() for row, response in zip(table, RESPONSES, strict=True)]


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def share_of_clipped_values(values: list[list[float]], experience: Experience) -> float:
    """Of the tokens, by hand: where the old value moved by the clip is further from the return than the new one."""
    assert experience.returns is not None
    clipped = 0
    for new, old, target in zip(
        flat(values), flat(rows_of(experience.values)), flat(rows_of(experience.returns)), strict=True
    ):
        moved = old + max(-CONFIG.value_clip, min(CONFIG.value_clip, new - old))
        clipped += abs(moved - target) > abs(new - target)
    assert 0 < clipped < TOKENS
    return clipped / TOKENS


def test_losses_agree_with_their_definitions_on_rows_without_padding() -> None:
    ours, experience = learner(micro_batch_size=2), tiny_experience(rubbish=float("nan"))
    # old logprobs near the actor's own, so that some ratios are clipped and some are not
    new = [unpadded_logprobs(ours.actor, row) for row in range(8)]
    shift = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)) * 0.3
    old = [[x + s for x, s in zip(row, moved, strict=False)] for row, moved in zip(new, shift.tolist(), strict=True)]
    experience = experience.replace(action_log_probs=torch.tensor([row + [0.0] * (4 - len(row)) for row in old]))
    values = []
    for row in range(8):
        ids = torch.tensor([PROMPTS[row] + RESPONSES[row]])
        with torch.no_grad():
            values.append(ours.critic(ids, torch.ones_like(ids))[0, len(PROMPTS[row]) - 1 : -1].tolist())
    whitened = definitions.whiten(rows_of(experience.advantages))
    assert experience.returns is not None
    returns = rows_of(experience.returns)
    entropies = [definitions.entropy(at.tolist(), 1.0) for row in range(8) for at in unpadded_logits(ours.actor, row)]

    stats = ours.training_step(experience)

    expected = definitions.policy_loss(flat(new), flat(old), flat(whitened), CONFIG.eps_clip) / TOKENS
    assert stats.actor_loss == pytest.approx(expected, rel=1e-3, abs=1e-5)
    expected = definitions.value_loss(flat(values), flat(rows_of(experience.values)), flat(returns), CONFIG.value_clip)
    assert stats.critic_loss == pytest.approx(expected / TOKENS, rel=1e-4)
    assert stats.entropy == pytest.approx(sum(entropies) / TOKENS, rel=1e-4)
    ratios = [exp(x - y) for x, y in zip(flat(new), flat(old), strict=True)]
    clipped = [
        (a > 0 and ratio > 1 + CONFIG.eps_clip) or (a < 0 and ratio < 1 - CONFIG.eps_clip)
        for a, ratio in zip(flat(whitened), ratios, strict=True)
    ]
    assert 0 < stats.clip_fraction == pytest.approx(sum(clipped) / TOKENS)
    kls = [ratio - 1 - log(ratio) for ratio in ratios]
    assert stats.approx_kl == pytest.approx(sum(kls) / TOKENS, rel=1e-3)
    assert stats.value_clip_fraction == pytest.approx(share_of_clipped_values(values, experience))
    said, plain = (flat(rows_of(table)) for table in (experience.values, experience.advantages))
    assert stats.value_mean == pytest.approx(fmean(said), rel=1e-5)
    assert (stats.advantage_mean, stats.advantage_std) == pytest.approx((fmean(plain), pstdev(plain)), rel=1e-5)
    assert stats.explained_variance == pytest.approx(
        definitions.explained_variance(flat(rows_of(experience.values)), flat(returns)), rel=1e-4
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recomputed_logprobs_are_those_of_rows_without_padding(temperature: float) -> None:
    ours = learner(temperature=temperature, micro_batch_size=2)
    found = ours.recompute(tiny_experience(rubbish=float("nan"))).action_log_probs
    for row, logprobs in enumerate(rows_of(found)):
        assert logprobs == pytest.approx(
            unpadded_logprobs(ours.actor, row, temperature=temperature), rel=1e-4, abs=1e-5
        )
    assert torch.equal(found[~tiny_experience().action_mask], torch.zeros(8 * 4 - TOKENS))


@pytest.mark.parametrize(("size", "pass_tokens", "most"), [(1, 64, 2048), (3, 64, 2048), (8, 0, 2048), (8, 64, 16)])
def test_one_micro_batch_of_eight_gives_the_step_of_several(
    size: int, pass_tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for each, cost, tokens in ((8, PASS_TOKENS, MOST_TOKENS), (size, pass_tokens, most)):
        monkeypatch.setattr(micro_batches, "PASS_TOKENS", cost)
        monkeypatch.setattr(micro_batches, "MOST_TOKENS", tokens)
        ours = learner(micro_batch_size=each)
        stats = ours.training_step(ours.recompute(tiny_experience()))
        results.append((stats, ours))
    (whole, first), (pieces, second) = results
    assert pieces == pytest.approx(whole, rel=1e-3, abs=1e-6)
    # The optimizer's first moments are the clipped gradients, times 0.1.
    for ours, other in ((first.actor, second.actor), (first.critic, second.critic)):
        assert ours.training == other.training is False
    for name, moment in first.state().tensors.items():
        if ".exp_avg." in name:
            torch.testing.assert_close(second.state().tensors[name], moment, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("pass_tokens", [0, PASS_TOKENS])
def test_the_first_ratio_is_one_exactly(
    dtype: str, lora: LoRAConfig | None, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batches, "PASS_TOKENS", pass_tokens)
    ours = learner(dtype=dtype, lora=lora, train_batch_size=4, micro_batch_size=2)
    stats = learn_episode(ours, tiny_experience(), seed=0, episode=0)
    assert (stats[0].approx_kl, stats[0].clip_fraction) == (0.0, 0.0)
    assert stats[1].approx_kl > 0  # the second minibatch sees the policy that the first one made


def test_learning_makes_good_tokens_likelier_and_bad_ones_less() -> None:
    ours = learner(lr=1e-3)
    experience = tiny_experience()
    signs = torch.where(torch.arange(8) % 2 == 0, 1.0, -1.0)[:, None].expand(8, 4)
    before = ours.recompute(experience.replace(advantages=signs.contiguous()))
    ours.training_step(before)
    gained = ours.recompute(experience).action_log_probs - before.action_log_probs
    mask = experience.action_mask
    assert gained[(signs > 0) & mask].mean() > 0 > gained[(signs < 0) & mask].mean()


def test_the_critic_learns_the_returns() -> None:
    ours = learner(max_epochs=60, value_clip=10.0, critic_lr=3e-3, lr=1e-9)
    stats = learn_episode(ours, tiny_experience(), seed=0, episode=0)
    assert stats[-1].critic_loss < stats[0].critic_loss / 5


def test_every_epoch_sees_every_sample_and_later_ones_in_another_order() -> None:
    ours = learner(train_batch_size=2, micro_batch_size=2, max_epochs=2)
    seen: list[list[int]] = []
    step = ours.training_step

    def spying(experience, ptx):
        seen.append(experience.policy_version.tolist())
        return step(experience, ptx)

    ours.training_step = spying  # type: ignore[method-assign]
    numbered = tiny_experience().replace(policy_version=torch.arange(8))
    assert len(learn_episode(ours, numbered, seed=0, episode=3)) == 8
    first, second = (list(chain.from_iterable(rows)) for rows in (seen[:4], seen[4:]))
    assert first == list(range(8))
    assert sorted(second) == first != second


def test_frozen_weights_stay_to_the_bit_and_adapters_move() -> None:
    ours = learner(lora=LORA, dtype="bfloat16")
    frozen = {name: p.clone() for name, p in ours.actor.named_parameters() if not p.requires_grad}
    before = trainable_state(ours.actor)
    learn_episode(ours, tiny_experience(), seed=0, episode=0)
    named = dict(ours.actor.named_parameters())
    assert all(torch.equal(named[name], tensor) for name, tensor in frozen.items())
    moved = [name for name, tensor in trainable_state(ours.actor).items() if not torch.equal(tensor, before[name])]
    assert moved
    assert all("lora_B" in name for name in moved)  # A has no gradient while B is zero


def test_advantages_are_whitened_over_the_minibatch_so_their_scale_does_not_matter() -> None:
    stats = []
    for scale, offset in ((1.0, 0.0), (50.0, 3.0)):
        ours, experience = learner(micro_batch_size=2), tiny_experience()
        scaled = experience.replace(advantages=experience.advantages * scale + offset)
        stats.append(ours.training_step(ours.recompute(scaled)).actor_grad_norm)
    assert stats[0] == pytest.approx(stats[1], rel=1e-3)


def test_what_lies_in_the_padding_changes_nothing() -> None:
    results = []
    for rubbish in (0.0, float("nan")):
        ours = learner()
        stats = learn_episode(ours, tiny_experience(rubbish=rubbish), seed=0, episode=0)
        results.append((stats, trainable_state(ours.actor) | trainable_state(ours.critic)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


def test_the_experience_is_not_changed() -> None:
    experience = tiny_experience()
    learn_episode(learner(), experience, seed=0, episode=0)
    for name, tensor in tiny_experience().tensors().items():
        assert torch.equal(experience.tensors()[name], tensor), name


def test_warm_up_is_seen_in_the_stats_and_each_model_has_its_own_rate() -> None:
    ours = learner(warmup_steps=1, train_batch_size=4, micro_batch_size=4)
    stats = learn_episode(ours, tiny_experience(), seed=0, episode=0)
    assert [step.actor_lr for step in stats] == pytest.approx([0.5e-4, 1e-4])
    assert [step.critic_lr for step in stats] == pytest.approx([0.5e-3, 1e-3])


@pytest.mark.parametrize("broken", ["actor", "critic"])
def test_weights_that_are_not_finite_are_told_in_one_sentence(broken: str) -> None:
    ours = learner()
    with torch.no_grad():
        next(iter(getattr(ours, broken).parameters())).fill_(float("nan"))
    with pytest.raises(TrainingError, match=f"the {broken}'s loss is nan"):
        ours.training_step(tiny_experience())


def test_nothing_to_learn_from_is_refused() -> None:
    experience = tiny_experience()
    with pytest.raises(TrainingError, match="trains the critic on returns, but the experience has none"):
        learner().training_step(experience.replace(returns=None))
    for method in (
        lambda rows: learner().recompute(rows),
        lambda rows: learn_episode(learner(), rows, seed=0, episode=0),
    ):
        with pytest.raises(TrainingError, match="at least one response on every rank, got none"):
            method(experience.select([]))


def test_stats_are_plain_numbers_for_the_record() -> None:
    stats = learner().training_step(tiny_experience())
    assert isinstance(stats, PPOStats)
    assert all(type(value) is float for value in stats)


def test_merged_weights_have_the_names_of_models_without_adapters() -> None:
    adapted = learner(lora=LORA)
    plain = tiny_llama()
    assert list(adapted.merged_weights("actor")) == [name for name, _ in plain.named_parameters()]
    critic_names = list(adapted.merged_weights("critic", dtype=torch.bfloat16))
    assert critic_names == [name for name, _ in Critic.from_causal_lm(plain).named_parameters()]


@pytest.mark.parametrize(
    ("lora", "form"),
    [(None, None), (LORA, "joined by rank"), (LORA.model_copy(update={"dropout": 0.1}), "one after the other")],
)
def test_the_state_tells_how_adapters_are_computed(lora: LoRAConfig | None, form: str | None) -> None:
    assert learner(lora=lora).facts()["adapters"] == form


@pytest.mark.parametrize(
    ("rows", "widths"),
    [(None, [7, 7, 7]), (AS_TREE, [4, 4, 18]), (IN_SHORT_PASSES, [4, 13, 13])],
)
def test_a_run_that_an_earlier_release_began_goes_on_with_rows_as_that_cut_them(
    rows: str | None, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batches, "MOST_TOKENS", 16)
    ours = learner(micro_batch_size=3)
    ours.load_facts({"steps": 0, "value_line": None, "rows": rows})
    seen: list[int] = []
    ours.actor.model.embed_tokens.register_forward_hook(lambda _, ids, __: seen.append(ids[0].shape[1]))
    ours.recompute(tiny_experience())
    assert sorted(seen) == widths
    assert ours.facts()["rows"] == rows


ALL_FLOAT32 = {"rollout_dtype": "float32", "max_epochs": 2, "train_batch_size": 4, "micro_batch_size": 4}


def test_the_makers_numbers_of_this_policys_own_rows_teach_what_recomputed_ones_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = learner().recompute(tiny_experience())
    noted, read = learner(**ALL_FLOAT32), learner(**ALL_FLOAT32)
    expected = learn_episode(read, made.replace(policy_version=made.policy_version - 1), seed=0, episode=0)
    monkeypatch.setattr(learner_module, "first_logprobs", None)  # none is called
    found = learn_episode(noted, made, seed=0, episode=0)
    for ours, theirs in zip(found, expected, strict=True):
        assert tuple(ours) == pytest.approx(tuple(theirs), rel=1e-4, abs=1e-5)
    for ours, theirs in zip(noted.actor.parameters(), read.actor.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "version", "rows", "own_makers"),
    [
        ({"rollout_dtype": "bfloat16"}, 0, IN_SHORT_PASSES, True),
        ({"dtype": "bfloat16"}, 0, IN_SHORT_PASSES, True),
        ({"engine": "vllm"}, 0, IN_SHORT_PASSES, True),
        ({"top_k": 5}, 0, IN_SHORT_PASSES, True),
        ({"legacy": True}, 0, IN_SHORT_PASSES, True),
        ({"correction": "truncated"}, 0, IN_SHORT_PASSES, True),
        ({}, -1, IN_SHORT_PASSES, True),
        ({}, 0, AS_TREE, True),
        ({}, 0, IN_SHORT_PASSES, False),
    ],
)
def test_other_rows_are_recomputed(changes: dict[str, object], version: int, rows: str, own_makers: bool) -> None:
    ours = learner(**{**ALL_FLOAT32, **changes})
    ours.load_facts({"steps": 0, "value_line": None, "rows": rows})
    experience = tiny_experience()
    experience.policy_version[3] = version
    learning = EpisodeLearner(ours, seed=0, train_batch_size=4, is_shared=True, own_makers=own_makers)
    learning.begin(experience)
    assert learning.learning is not None
    assert not torch.equal(learning.learning.learnt.action_log_probs, experience.action_log_probs)
    assert learning.learn(1)[0].max_ratio == pytest.approx(1.0, abs=1e-2)


def test_a_model_of_other_arithmetic_than_the_configurations_reads_its_rows_itself() -> None:
    options = CONFIG.model_copy(update=ALL_FLOAT32)
    model = tiny_llama()
    assert notes_suffice(options, options, model)
    model.lm_head.bfloat16()
    assert not notes_suffice(options, options, model)
