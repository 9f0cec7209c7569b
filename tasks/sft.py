"""Supervised fine-tuning on demonstrations: what a process does, alone or as one rank; actors import it: no Prefect."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.counting import counted
from tasks.context import Context, actors_context, materialise
from tasks.models import load_to_train, with_base, write_base
from tasks.progress import Progress, say, telling
from tasks.results import Parent, StageResult
from tasks.scratch import scratch_directory
from tasks.stages import commit_stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.data import Problem, PromptTemplate
    from rlhf_core.data.conversation import EncodedConversation
    from rlhf_core.ray_tools.group import Tell
    from rlhf_core.training.optim import Trained

METRICS = "metrics.jsonl"
HELDOUT = 64
"""Most held-out demonstrations whose loss is measured: over-fitting shows, and it takes seconds on a processor."""


@dataclass(frozen=True)
class SFTTraining:
    """All that a process needs to train the model, on its own or as one rank of several."""

    config: PipelineConfig
    dataset: Parent
    start: Parent
    base: Parent
    key: str
    source: str
    flow_run: str | None

    def __call__(self, tell: Tell) -> StageResult | None:
        """Train as one rank, in an actor; the first one stores the model and returns the result."""
        with telling(tell):
            return self._train_and_store(actors_context(self.flow_run))

    def done(self, context: Context) -> StageResult:
        """Train in this process, store the model and return the result."""
        made = self._train_and_store(context)
        assert made is not None  # alone, a process is the first
        return made

    def _train_and_store(self, context: Context) -> StageResult | None:
        from rlhf_core.data import PromptTemplate
        from rlhf_core.data.encoding import encode_demonstrations
        from rlhf_core.data.jsonl import to_jsonl
        from rlhf_core.data.problems import of_the_same_kind
        from rlhf_core.models.adapters import save_adapters
        from rlhf_core.models.base import check_bases
        from rlhf_core.models.loading import load_tokenizer
        from rlhf_core.models.lora import save_merged
        from rlhf_core.training.boosted import exact

        config, started = self.config, time.perf_counter()
        directory, data = materialise(context, self.start), materialise(context, self.dataset)
        tokenizer = load_tokenizer(directory)
        template = PromptTemplate(tokenizer, config.template)
        problems = problems_of(data, "sft")
        unseen = _short_enough(config, template, of_the_same_kind(problems_of(data, "evaluation"), problems))
        trained, history, metrics = self._train(context, encode_demonstrations(problems, template), unseen)
        metrics["seconds"] = time.perf_counter() - started
        with scratch_directory(context.settings.home) as folder:
            with exact(trained.booster, trained.model) as whole:  # every rank's part; the first is given the model
                if whole is None:
                    return None
                say("sft", _summary(metrics))
                check_bases(whole)
                if config.sft.shares_base:
                    save_adapters(whole, folder, base=self.base.uri)
                    write_base(folder, self.base)
                else:
                    save_merged(whole, folder)
            tokenizer.save_pretrained(folder)
            (folder / METRICS).write_bytes(to_jsonl(history))
            return commit_stage(
                context,
                stage="sft",
                kind="sft",
                name=config.name,
                files=folder,
                key=self.key,
                parents=with_base([self.start, self.dataset], self.base),
                config=config,
                metrics=metrics,
                source=self.source,
            )

    def _train(
        self, context: Context, examples: Sequence[EncodedConversation], unseen: Sequence[EncodedConversation]
    ) -> tuple[Trained, list[dict[str, Any]], dict[str, Any]]:
        """Return a model as the demonstrations have made it, what every step said, and the training's figures."""
        import torch

        from rlhf_core.supervised.sft import heldout_loss
        from rlhf_core.supervised.sft import train_sft as train

        config, dtype = self.config, getattr(torch, self.config.sft.dtype)
        model = load_to_train(context, self.start, self.base, config.sft)
        before = heldout_loss(model, unseen, config.sft, autocast_dtype=dtype).loss if unseen else None
        batch_size = config.sft.batch_size * config.sft.dp
        progress = Progress("sft", config.sft.epochs * -(-len(examples) // batch_size), "step")
        history, trained = train(
            model,
            examples,
            config.sft,
            seed=config.seed,
            autocast_dtype=dtype,
            on_step=lambda step: progress.step(int(step["step"]), loss=step["loss"]),
            heldout=unseen,
        )
        figures: dict[str, Any] = {"steps": len(history), "demonstrations": len(examples), **config.sft.figures}
        figures |= _curve([step["loss"] for step in history])
        if before is not None:
            figures |= {"heldout_loss_before": before, "heldout_loss": history[-1]["heldout_loss"]}
            figures["heldout_demonstrations"] = len(unseen)
        names = ("loss", "lr", "heldout_loss")
        rows = [{"step": int(step["step"])} | {name: step[name] for name in names if name in step} for step in history]
        return trained, rows, figures


def problems_of(data: Path, split: str) -> list[Problem]:
    """Return the problems of a split of a data set; none if it has no such split."""
    from rlhf_core.data import problems_from_jsonl

    file = data / f"{split}.jsonl"
    return problems_from_jsonl(file.read_bytes()) if file.is_file() else []


def _short_enough(
    config: PipelineConfig, template: PromptTemplate, problems: Sequence[Problem]
) -> list[EncodedConversation]:
    """Return the first held-out demonstrations, less those that are longer than what training takes."""
    from rlhf_core.data.encoding import encode_demonstrations

    encoded = encode_demonstrations(problems[:HELDOUT], template)
    return [each for each in encoded if len(each.ids) <= config.sft.max_length]


def _curve(losses: Sequence[float]) -> dict[str, float]:
    """Return the ends of a loss curve, and how flat its last quarter is if it has steps enough to say."""
    from rlhf_core.functional.curves import last_quarter, relative_fall

    ends = {"first_loss": losses[0], "last_loss": losses[-1]}
    last = last_quarter(losses)
    if len(last) < 4:  # noqa: PLR2004 - as `last_quarter` wants
        return ends
    fall = relative_fall(last)
    return {**ends, "flatness": fall.relative, "flatness_error": fall.error}


def _summary(metrics: Mapping[str, Any]) -> str:
    """Return the training's end in one line."""
    from rlhf_core.functional.curves import Fall

    parts = [f"loss {metrics['first_loss']:.3g} to {metrics['last_loss']:.3g} in {counted(metrics['steps'], 'step')}"]
    if "flatness" in metrics:
        fall = Fall(metrics["flatness"], metrics["flatness_error"])
        parts.append(f"{fall.word}: {-fall.relative:+.1%} over the last quarter (standard error {fall.error:.1%})")
    if "heldout_loss" in metrics:
        parts.append(f"held out {metrics['heldout_loss_before']:.3g} to {metrics['heldout_loss']:.3g}")
    return "; ".join(parts)
