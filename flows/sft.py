"""Supervised fine-tuning as a flow of its own."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.presets import resolve
from tasks.data import check_data, prepare_data, with_data
from tasks.preflight import preflight
from tasks.results import StageResult
from tasks.sentences import in_one_sentence
from tasks.sft import train_sft


@flow(name="sft", persist_result=False)
@in_one_sentence
def sft(
    preset: str = "quickstart",
    model: str | None = None,
    data: str | None = None,
    seed: int | None = None,
    overrides: dict[str, Any] | None = None,
) -> StageResult:
    """Fine-tune the base model on demonstrations.

    Args:
        preset: name of a preset.
        model: base model: packaged name, directory, or hub name.
        data: problem file, or `dataset/...` reference.
        seed: seed of everything random.
        overrides: configuration by dotted key.
    """
    config = with_data(resolve(preset, model=model, seed=seed, overrides=overrides), data)
    preflight(config, trains="sft")
    dataset = prepare_data(config, data)
    check_data(config, dataset.parent, needs=("sft",))
    return train_sft(config, dataset.parent)
