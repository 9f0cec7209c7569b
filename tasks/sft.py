"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from tasks.context import (
    Context,
    commit_stage,
    materialise,
    open_context,
    reuse_or_make,
    source_digest,
    stage_key,
)
from tasks.parents import base_model
from tasks.progress import Progress
from tasks.results import Parent, StageResult
from tasks.scratch import scratch_directory
from tasks.sentences import stage_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@stage_task(name="train-sft")
def train_sft(config: PipelineConfig, dataset: Parent) -> StageResult:
    """Return the SFT model of the preset's base model and of the dataset's demonstrations."""
    context = open_context()
    base = base_model(context, config)
    source = source_digest("sft")
    facts = config.model_dump(mode="json", include={"template", "sft"})
    key = stage_key("sft", config=facts, inputs=[dataset.digest, base.digest], seed=config.seed, source=source)

    def make() -> StageResult:
        return _make(context, config, dataset, base, key, source)

    return reuse_or_make(context, stage="sft", kind="sft", name=config.name, key=key, make=make)


def _make(
    context: Context, config: PipelineConfig, dataset: Parent, base: Parent, key: str, source: str
) -> StageResult:
    from rlhf_core.models.loading import load_tokenizer
    from rlhf_core.models.lora import save_merged

    started = time.perf_counter()
    directory = materialise(context, base)
    tokenizer = load_tokenizer(directory)
    demonstrations = (materialise(context, dataset) / "sft.jsonl").read_bytes()
    model, metrics = _train(config, directory, tokenizer, demonstrations)
    metrics["seconds"] = time.perf_counter() - started
    with scratch_directory(context.settings.home) as folder:
        save_merged(model, folder)
        tokenizer.save_pretrained(folder)
        return commit_stage(
            context,
            stage="sft",
            kind="sft",
            name=config.name,
            files=folder,
            key=key,
            parents=[base, dataset],
            config=config,
            metrics=metrics,
            source=source,
        )


def _train(
    config: PipelineConfig, directory: Path, tokenizer: PreTrainedTokenizerBase, demonstrations: bytes
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the base model as the demonstrations, JSON lines, have made it, and the training's figures."""
    import torch

    from rlhf_core.data import PromptTemplate, problems_from_jsonl
    from rlhf_core.models.loading import default_device, load_causal_lm
    from rlhf_core.trainer.supervised.sft import train_sft as train

    template = PromptTemplate(tokenizer, config.template)
    examples = [
        (template.prompt_ids(problem.prompt), template.response_ids(template.answer_text(problem.answer)))
        for problem in problems_from_jsonl(demonstrations)
    ]
    model = load_causal_lm(directory, "float32", device=default_device())
    progress = Progress("sft", config.sft.epochs * -(-len(examples) // config.sft.batch_size), "step")
    history = train(
        model,
        examples,
        config.sft,
        seed=config.seed,
        autocast_dtype=getattr(torch, config.sft.dtype),
        on_step=lambda step: progress.step(int(step["step"]), loss=step["loss"]),
    )
    return model, {
        "steps": len(history),
        "demonstrations": len(examples),
        "first_loss": history[0]["loss"],
        "last_loss": history[-1]["loss"],
    }
