"""Supervised fine-tuning as a flow of its own."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.begin import begin
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
    config, dataset = begin(preset, data, trains="sft", reads=("sft",), model=model, seed=seed, overrides=overrides)
    return train_sft(config, dataset.parent)
