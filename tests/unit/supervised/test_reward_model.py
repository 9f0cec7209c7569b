"""The reward model learns preferences, and says how well."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from rlhf_core.config import RewardModelConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.errors import DataError, TrainingError
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.supervised import measures
from rlhf_core.supervised.measures import measure_pairs, score_sequences, standardise_scores
from rlhf_core.supervised.reward_model import train_reward_model
from rlhf_core.training import micro_batches
from tests.tiny_llama import tiny_llama

FP32 = torch.float32
CONFIG = RewardModelConfig(
    epochs=8, batch_size=8, micro_batch_size=4, lr=1e-3, head_lr=1e-2, warmup_steps=1, max_length=16
)


def reward_model() -> RewardModel:
    torch.manual_seed(0)
    return RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2))


def pairs(count: int, *, seed: int) -> list[EncodedPair]:
    """The chosen response ends in token 20, the rejected one in 30; lengths and prompts differ."""
    generator = torch.Generator().manual_seed(seed)
    made: list[EncodedPair] = []
    for _ in range(count):
        lengths = torch.randint(2, 6, (2,), generator=generator).tolist()
        good, bad = (torch.randint(40, 200, (n,), generator=generator).tolist() for n in lengths)
        made.append(EncodedPair([*good, 20], [*bad, 30]))
    return made


def test_the_first_loss_and_accuracy_are_those_of_the_untrained_scores() -> None:
    model, some = reward_model(), pairs(8, seed=1)
    differences = [
        (model(torch.tensor([good]), torch.ones(1, len(good))) - model(torch.tensor([bad]), torch.ones(1, len(bad))))
        .detach()
        .item()
        for good, bad, *_ in some
    ]
    history = train_reward_model(model, some, CONFIG, seed=0, autocast_dtype=FP32).history
    expected = sum(math.log(1 + math.exp(-difference)) for difference in differences) / 8
    assert history[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert history[0]["accuracy"] == sum(difference > 0 for difference in differences) / 8


@pytest.mark.parametrize("form", ["log_sigmoid", "log_exp"])
def test_margins_are_subtracted_and_centring_is_added(form: Literal["log_sigmoid", "log_exp"]) -> None:
    model = reward_model()
    some = [pair._replace(margin=0.5 * number) for number, pair in enumerate(pairs(4, seed=1))]
    scores = score_sequences(model, [ids for pair in some for ids in pair[:2]], batch_size=1, autocast_dtype=FP32)
    expected = 0.0
    for number, (good, bad) in enumerate(scores.view(-1, 2).tolist()):
        expected += math.log(1 + math.exp(-(good - bad - 0.5 * number))) + 0.3 * (good + bad) ** 2
    config = CONFIG.model_copy(update={"loss": form, "centring": 0.3})
    history = train_reward_model(model, some, config, seed=0, autocast_dtype=FP32).history
    assert history[0]["loss"] == pytest.approx(expected / 4, rel=1e-5)


def test_a_preference_is_learnt_and_holds_on_pairs_not_seen() -> None:
    model, heldout = reward_model(), pairs(40, seed=2)
    training = train_reward_model(model, pairs(64, seed=1), CONFIG, seed=0, autocast_dtype=FP32)
    assert training.history[-1]["loss"] < 0.1 < training.history[0]["loss"]
    found = measure_pairs(model, heldout, CONFIG, autocast_dtype=FP32)
    assert found.accuracy > 0.95
    turned = measure_pairs(model, [EncodedPair(bad, good) for good, bad, *_ in heldout], CONFIG, autocast_dtype=FP32)
    assert found.correct + turned.correct == found.pairs == 40
    assert not model.training


def test_micro_batches_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [EncodedPair((*pair.chosen, *[9] * number), pair.rejected) for number, pair in enumerate(pairs(8, seed=1))]
    norms = []
    for size, pass_tokens, most in ((1, 64, 2048), (3, 64, 2048), (8, 64, 2048), (8, 0, 2048), (8, 64, 30)):
        monkeypatch.setattr(micro_batches, "PASS_TOKENS", pass_tokens)
        monkeypatch.setattr(micro_batches, "MOST_TOKENS", most)
        config = CONFIG.model_copy(update={"micro_batch_size": size, "epochs": 1})
        norms.append(train_reward_model(reward_model(), some, config, seed=0, autocast_dtype=FP32).history[0])
    for name, rel in (("grad_norm", 1e-4), ("loss", 1e-5), ("accuracy", 1e-5)):
        assert [step[name] for step in norms] == pytest.approx([norms[0][name]] * 5, rel=rel)


def test_long_pairs_are_dropped_and_counted() -> None:
    odd = [([1] * 17, [2]), ([1], [2] * 17), ([1] * 16, [2])]
    some = [*pairs(4, seed=1), *(EncodedPair(*pair) for pair in odd)]
    training = train_reward_model(reward_model(), some, CONFIG, seed=0, autocast_dtype=FP32)
    assert training.dropped == 2
    accuracy = measure_pairs(reward_model(), some, CONFIG, autocast_dtype=FP32)
    assert (accuracy.pairs, accuracy.dropped) == (5, 2)


def test_pairs_both_well_formed_are_counted_on_their_own() -> None:
    model, some = reward_model(), pairs(6, seed=1)
    scores = score_sequences(model, [ids for pair in some for ids in pair[:2]], batch_size=12, autocast_dtype=FP32)
    right = [good > bad for good, bad in scores.view(-1, 2).tolist()]
    assert len({*right[:4]}) == 2, "an untrained model is right of some of them"
    forms = (True, True, True, True, False, None)
    known = [pair._replace(both_well_formed=form) for pair, form in zip(some, forms, strict=True)]
    found = measure_pairs(model, known, CONFIG, autocast_dtype=FP32)
    assert (found.well_formed_correct, found.well_formed_pairs) == (sum(right[:4]), 4)
    assert (found.correct, found.pairs) == (sum(right), 6)


@pytest.mark.parametrize("some", [[], [EncodedPair([1] * 17, [2])]])
def test_no_pair_left_is_refused_before_training(some: list[EncodedPair]) -> None:
    with pytest.raises(DataError, match=f"at least one preference pair within 16 tokens, got {len(some)} pairs?,"):
        train_reward_model(reward_model(), some, CONFIG, seed=0, autocast_dtype=FP32)


def test_a_tie_counts_as_wrong_and_no_pairs_are_refused() -> None:
    same = [EncodedPair([5, 6], [5, 6])]
    measured = measure_pairs(reward_model(), same, CONFIG, autocast_dtype=FP32)
    assert (measured.correct, measured.pairs, measured.accuracy) == (0, 1, 0.0)
    with pytest.raises(DataError, match=r"expected held-out pairs .* got none \(1 were too long\)"):
        measure_pairs(reward_model(), [EncodedPair([1] * 17, [2])], CONFIG, autocast_dtype=FP32)


def test_scores_do_not_depend_on_who_shares_the_batch() -> None:
    rows = [[5, 6, 7, 8], [9], [10, 11]]
    model = reward_model()
    alone, together = (score_sequences(model, rows, batch_size=size, autocast_dtype=FP32) for size in (1, 3))
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)


def test_standardised_scores_of_the_held_out_samples_have_mean_zero_and_deviation_one() -> None:
    model, rows = reward_model(), [list(range(3, 3 + n)) for n in range(2, 9)]
    raw = score_sequences(model, rows, batch_size=2, autocast_dtype=FP32)
    statistics = standardise_scores(model, rows, CONFIG, autocast_dtype=FP32)
    assert statistics.mean == pytest.approx(sum(raw.tolist()) / 7, rel=1e-4)
    standard = model.standardise(raw)
    assert standard.mean().item() == pytest.approx(0, abs=1e-5)
    assert standard.square().mean().item() == pytest.approx(1, rel=1e-4)


def test_equal_scores_are_left_at_their_scale() -> None:
    model = reward_model()
    statistics = standardise_scores(model, [[5, 6], [5, 6]], CONFIG, autocast_dtype=FP32)
    assert statistics.std == model.score_std.item() == 1.0
    with pytest.raises(DataError, match="held-out samples of at most 16 tokens"):
        standardise_scores(model, [], CONFIG, autocast_dtype=FP32)


@pytest.mark.parametrize(
    ("scores", "std"),
    [([1000.1, 1000.1001], 1.0), ([1e-7, 3e-7], 1e-7)],  # two neighbours in float32; and a spread, however small
)
def test_what_is_a_spread_of_scores_is_relative_to_their_size(
    monkeypatch: pytest.MonkeyPatch, scores: list[float], std: float
) -> None:
    assert len(torch.tensor(scores).unique()) == 2
    monkeypatch.setattr(measures, "score_sequences", lambda *_, **__: torch.tensor(scores))
    found = standardise_scores(reward_model(), [[5], [6]], CONFIG, autocast_dtype=FP32)
    assert found.std == pytest.approx(std, rel=1e-5)


def test_weights_that_are_not_finite_stop_the_training() -> None:
    model = reward_model()
    model.head.weight.data.fill_(float("inf"))
    with pytest.raises(TrainingError, match="reward model's loss is nan"):
        train_reward_model(model, pairs(4, seed=1), CONFIG, seed=0, autocast_dtype=FP32)
