"""The SFT stage: from whom it starts, what it learns, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlhf_core.config import PipelineConfig
from rlhf_core.data import Problem, problems_to_jsonl
from rlhf_core.errors import DataError
from tasks.context import Context
from tasks.results import Parent, StageResult
from tasks.supervised import train_sft

SHOWN = [Problem(f"{a}+{a}?", str(2 * a)) for a in range(8)]
UNSEEN = [Problem("9+9?", "18"), Problem("Why?"), Problem("1+2?", "3", demonstration="It is 3.")]


def dataset(context: Context, shown: list[Problem] = SHOWN, unseen: list[Problem] = UNSEEN) -> Parent:
    files = {"sft.jsonl": problems_to_jsonl(shown), "evaluation.jsonl": problems_to_jsonl(unseen)}
    made = context.store.commit("dataset", "test", files)
    return Parent(uri=made.uri, digest=made.digest)


def train(model: Path, data: Parent, actor: str | None = None, **sft: object) -> StageResult:
    settings = {"epochs": 4, "batch_size": 4, "micro_batch_size": 4, "lr": 1e-3, "dtype": "float32", **sft}
    config = PipelineConfig.model_validate(
        {"name": "test", "data": {"task": "number_sorting"}, "model": {"path": str(model)}, "sft": settings}
    )
    return train_sft.fn(config, data, actor)


def test_every_step_is_kept_and_the_figures_are_theirs(
    context: Context, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = train(model, dataset(context))
    assert "falling: -" in caplog.messages[-1]
    file = context.store.cached(made.uri) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))  # 8 demonstrations, 4 a step, 4 epochs
    assert rows[0]["lr"] > rows[-1]["lr"] > 0
    losses = [row["loss"] for row in rows]
    assert (made.metrics["first_loss"], made.metrics["last_loss"]) == (losses[0], losses[-1])
    # four steps: slope (-1.5 a - .5 b + .5 c + 1.5 d) / 5, over three steps, relative to the mean
    a, b, c, d = losses[4:]
    slope = (-1.5 * a - 0.5 * b + 0.5 * c + 1.5 * d) / 5
    assert made.metrics["flatness"] == pytest.approx(-3 * slope / ((a + b + c + d) / 4), rel=1e-9)
    assert made.metrics["heldout_demonstrations"] == 1, "what is learnt are answers in tags, and one of those is unseen"
    assert rows[-1]["heldout_loss"] == made.metrics["heldout_loss"] < made.metrics["heldout_loss_before"]


def test_few_steps_have_no_flatness_and_no_unseen_demonstration_no_loss(context: Context, model: Path) -> None:
    metrics = train(model, dataset(context, unseen=[Problem("Why?")]), epochs=1).metrics
    assert not {"flatness", "flatness_error", "heldout_loss", "heldout_loss_before"} & metrics.keys()


def test_it_goes_on_from_another_model_which_is_its_parent(context: Context, model: Path) -> None:
    data = dataset(context)
    first = train(model, data, epochs=1)
    further, anew = train(model, data, first.uri, epochs=2), train(model, data, epochs=2)
    assert [further.uri, anew.uri] == ["sft/test@2", "sft/test@3"]
    parents = [parent.uri for parent in context.store.resolve(further.uri).parents]
    assert parents == [first.uri, data.uri]
    assert further.metrics["heldout_loss_before"] == pytest.approx(first.metrics["heldout_loss"], rel=1e-5)
    again = train(model, data, first.uri, epochs=2)
    assert (again.reused, again.uri) == (True, further.uri)
    weights = [load_file(context.store.cached(each.uri) / "model.safetensors") for each in (further, anew)]
    assert any((weights[0][name] != weights[1][name]).any() for name in weights[0])


def test_adapters_that_change_what_is_below_them_have_weights_of_their_own_and_say_so(
    context: Context, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = train(model, dataset(context), epochs=1, lora={"r": 2, "init": "pissa"})
    assert "the weights below its adapters are its own, not shared: lora.init pissa" in caplog.text
    assert not context.store.resolve(made.uri).has_adapters, "merged: its base is in no file"
    assert not list((context.settings.models_dir / "bases").glob("*"))


def test_no_demonstration_is_refused_before_any_model_is_looked_for(context: Context, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dataset/test@1 has no demonstrations to learn"):
        train(tmp_path / "nowhere", dataset(context, shown=[Problem("Why?")]))
