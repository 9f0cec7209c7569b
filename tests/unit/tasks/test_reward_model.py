"""The reward model's stage: what it says of itself on pairs that it never saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data import PreferencePair, Problem, pairs_from_jsonl, pairs_to_jsonl, problems_to_jsonl
from rlhf_core.errors import DataError
from rlhf_core.functional.intervals import wilson_interval
from tasks.context import Context, open_context
from tasks.preferences import collect_preferences
from tasks.results import Parent, StageResult
from tasks.supervised import train_reward_model


def pairs(*, known: bool) -> list[PreferencePair]:
    """The chosen response ends in a dot; of every third pair, both are said to have the form that is wanted."""
    return [
        PreferencePair(f"q{row}", f"{row}.", f"{row}!", both_well_formed=row % 3 == 0 if known else None)
        for row in range(60)
    ]


def train(context: Context, model: Path, some: list[PreferencePair], **settings: object) -> StageResult:
    made = context.store.commit("dataset", "test", {"pairs.jsonl": pairs_to_jsonl(some)})
    values = {"batch_size": 8, "lr": 1e-3, "head_lr": 1e-2, "dtype": "float32", "epochs": 3, **settings}
    config = PipelineConfig.model_validate(
        {"name": "test", "data": {"task": "number_sorting"}, "model": {"path": str(model)}, "reward_model": values}
    )
    policy = Parent(uri="model/tiny", digest="d", path=str(model))
    return train_reward_model.fn(config, Parent(uri=made.uri, digest=made.digest), policy)


def test_accuracy_is_told_overall_and_on_pairs_both_well_formed(
    context: Context, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = train(context, model, pairs(known=True), pairs=None)
    found = made.metrics
    assert found["pairs"] + found["heldout_pairs"] == 60
    assert 0 < found["well_formed_pairs"] < found["heldout_pairs"]
    for prefix, count in (("", found["heldout_pairs"]), ("well_formed_", found["well_formed_pairs"])):
        right = round(found[f"{prefix}accuracy"] * count)
        told = tuple(found[f"{prefix}{name}"] for name in ("accuracy", "low", "high"))
        assert told == pytest.approx(wilson_interval(right, count, 0.95))
    assert f"of the {found['well_formed_pairs']} both well formed" in caplog.messages[-1]
    rows = [json.loads(line) for line in (context.store.cached(made.uri) / "metrics.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"step", "loss", "accuracy"}] * found["steps"]
    assert [row["step"] for row in rows] == list(range(1, found["steps"] + 1))
    assert found["training_accuracy"] > 0.9, "the last quarter of three passes over an easy preference"


def test_where_nobody_looked_at_the_form_only_the_whole_is_told_and_what_is_left_out_is_said(
    context: Context, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = train(context, model, pairs(known=False), pairs=40, epochs=1)
    assert made.metrics["pairs"] + made.metrics["heldout_pairs"] == 40
    assert not any(name.startswith("well_formed") for name in made.metrics)
    assert "left out by reward_model.pairs (null takes all): 20 of 60 pairs" in caplog.text
    # the mean over the last four steps' pairs, by hand from what each step said of its own eight (or fewer)
    steps = [json.loads(line) for line in (context.store.cached(made.uri) / "metrics.jsonl").read_text().splitlines()]
    sizes = [min(8, made.metrics["pairs"] - 8 * number) for number in range(len(steps))]
    right = [round(step["accuracy"] * size) for step, size in zip(steps, sizes, strict=True)]
    assert made.metrics["training_accuracy"] == pytest.approx(sum(right[-4:]) / sum(sizes[-4:]))


def collect(context: Context, model: Path, **data: object) -> StageResult:
    shown = [Problem(f"q{row}", "1") for row in range(8)]
    made = context.store.commit("dataset", "test", {"preferences.jsonl": problems_to_jsonl(shown)})
    values = {
        "name": "test",
        "data": data,
        "reward_model": {"max_new_tokens": 6, "pairs": None},
        "ppo": {"rollout_dtype": "float32"},
    }
    policy = Parent(uri="model/tiny", digest="d", path=str(model))
    config = PipelineConfig.model_validate(values)
    return collect_preferences.fn(config, Parent(uri=made.uri, digest=made.digest), policy)


def test_samples_are_ordered_by_the_datas_own_verifier_which_is_part_of_the_key(
    context: Context, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_REWARD_MODULES", "tests.unit.tasks.even")
    context = open_context()
    verifier = "tests.unit.tasks.even:letters"
    made = collect(context, model, problems="x.jsonl", verifier=verifier)
    rows = pairs_from_jsonl((context.store.cached(made.uri) / "pairs.jsonl").read_bytes())
    assert rows
    assert not any(len(pair.chosen) % 2 for pair in rows), "a rejected one may be even too, but cut off"
    assert not any(pair.both_well_formed for pair in rows)
    assert collect(context, model, problems="x.jsonl", verifier=verifier).reused
    with pytest.raises(DataError, match="are all equally good"):  # no sample is an answer in its tags
        collect(context, model, problems="x.jsonl")


def test_samples_that_nobody_can_order_are_refused(context: Context, model: Path) -> None:
    with pytest.raises(DataError, match="dataset/test@1 holds no preference pairs, and no verifier is known"):
        collect(context, model, prompts="x.jsonl")
