"""The reward model, trained on preference pairs and measured on others: what a process does, alone or as one rank.

Actors import it: no Prefect.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.counting import counted
from rlhf_core.errors import DataError
from tasks.context import Context, actors_context, materialise
from tasks.models import load_to_train, with_base, write_base
from tasks.progress import Progress, say, telling
from tasks.results import PAIRS, SHOWN_CONFIDENCE, Parent, StageResult
from tasks.scratch import scratch_directory
from tasks.stages import commit_stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.data import PromptTemplate
    from rlhf_core.data.encoding import EncodedPair
    from rlhf_core.models.reward_model import RewardModel
    from rlhf_core.ray_tools.group import Tell
    from rlhf_core.training.optim import Trained

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RewardModelTraining:
    """All that a process needs to train the reward model, on its own or as one rank of several."""

    config: PipelineConfig
    pairs: Parent
    policy: Parent
    base: Parent
    key: str
    source: str
    flow_run: str | None

    def __call__(self, tell: Tell) -> StageResult | None:
        """Train as one rank, in an actor; the first one measures and stores the model and returns the result."""
        with telling(tell):
            return self._train_and_store(actors_context(self.flow_run))

    def done(self, context: Context) -> StageResult:
        """Train in this process, measure and store the model and return the result."""
        made = self._train_and_store(context)
        assert made is not None  # alone, a process is the first
        return made

    def _train_and_store(self, context: Context) -> StageResult | None:
        from rlhf_core.data import PromptTemplate
        from rlhf_core.data.jsonl import to_jsonl
        from rlhf_core.models.base import check_bases
        from rlhf_core.models.loading import default_device, load_tokenizer
        from rlhf_core.training.boosted import exact

        config, started = self.config, time.perf_counter()
        directory = materialise(context, self.policy)
        tokenizer = load_tokenizer(directory)
        training, heldout = _encoded(
            config, PromptTemplate(tokenizer, config.template), materialise(context, self.pairs) / PAIRS
        )
        trained, history, metrics = self._fit(context, training, heldout)
        with scratch_directory(context.settings.home) as folder:
            with exact(trained.booster, trained.model) as whole:  # every rank's part; the first is given the model
                if whole is None:
                    return None
                model = whole.to(default_device())  # a copy of sharded weights lies in host memory
                metrics |= _measured(config, model, heldout, dropped=metrics.pop("dropped"))
                check_bases(model)
                if config.reward_model.shares_base:
                    model.save_adapters(folder, base=self.base.uri)
                    write_base(folder, self.base)
                else:
                    model.save_pretrained(folder)
            metrics["seconds"] = time.perf_counter() - started
            say("reward-model", _summary(metrics))
            tokenizer.save_pretrained(folder)
            (folder / METRICS).write_bytes(to_jsonl(history))
            return commit_stage(
                context,
                stage="reward-model",
                kind="reward-model",
                name=config.name,
                files=folder,
                key=self.key,
                parents=with_base([self.policy, self.pairs], self.base),
                config=config,
                metrics=metrics,
                source=self.source,
            )

    def _fit(
        self, context: Context, training: list[EncodedPair], heldout: list[EncodedPair]
    ) -> tuple[Trained, list[dict[str, Any]], dict[str, Any]]:
        """Return a reward model on the policy's trunk, what every step said, and the training's figures."""
        import torch

        from rlhf_core.models.lora import attach_lora
        from rlhf_core.models.reward_model import RewardModel
        from rlhf_core.models.trunk import trunk_of
        from rlhf_core.supervised.reward_model import train_reward_model

        settings, seed = self.config.reward_model, self.config.seed
        dtype = getattr(torch, settings.dtype)
        if all(pair.longest > settings.max_length for pair in heldout):
            raise DataError(
                f"every held-out pair ({len(heldout)}) is longer than reward_model.max_length, {settings.max_length} "
                "tokens, so no accuracy could be measured; raise it"
            )
        torch.manual_seed(seed)  # the head starts from random numbers
        model = RewardModel(trunk_of(load_to_train(context, self.policy, self.base, settings)))
        if settings.lora is not None:
            attach_lora(model.trunk, settings.lora, seed=seed)
        batch_size = settings.batch_size * settings.dp
        progress = Progress("reward-model", settings.epochs * -(-len(training) // batch_size), "step")
        run = train_reward_model(
            model,
            training,
            settings,
            seed=seed,
            autocast_dtype=dtype,
            on_step=lambda step: progress.step(int(step["step"]), loss=step["loss"], accuracy=step["accuracy"]),
        )
        rows = [{"step": int(step["step"]), "loss": step["loss"], "accuracy": step["accuracy"]} for step in run.history]
        figures = {"pairs": len(training) - run.dropped, **settings.figures, "dropped": run.dropped}
        return run.trained, rows, {"steps": len(rows), **figures, **_curve(run.history)}


def _encoded(
    config: PipelineConfig, template: PromptTemplate, file: Path
) -> tuple[list[EncodedPair], list[EncodedPair]]:
    """Return the pairs to learn and those to measure on, which share no prompt."""
    from rlhf_core.data import pairs_from_jsonl
    from rlhf_core.data.encoding import encode_pairs
    from rlhf_core.data.preferences import refuse_shared_prompts, split_pairs

    rows = pairs_from_jsonl(file.read_bytes())
    split = split_pairs(rows, config.reward_model, seed=config.seed)
    if left_out := len(rows) - len(split.training) - len(split.heldout):
        say(
            "reward-model",
            f"left out by reward_model.pairs (null takes all): {left_out} of {counted(len(rows), 'pair')}",
        )
    refuse_shared_prompts(split.training, split.heldout)
    return encode_pairs(split.training, template), encode_pairs(split.heldout, template)


def _curve(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the ends of the loss curve, and the accuracy over its last quarter."""
    from rlhf_core.functional.curves import last_quarter

    last = last_quarter(history)
    right = sum(step["accuracy"] * step["pairs"] for step in last)  # measured before each step learnt them
    return {
        "first_loss": history[0]["loss"],
        "last_loss": history[-1]["loss"],
        "training_accuracy": right / sum(step["pairs"] for step in last),
    }


def _measured(
    config: PipelineConfig, model: RewardModel, heldout: list[EncodedPair], *, dropped: int
) -> dict[str, Any]:
    """Return the figures on held-out pairs, after the model's scores were standardised on them."""
    import torch

    from rlhf_core.supervised.measures import measure_pairs, standardise_scores

    settings, dtype = config.reward_model, getattr(torch, config.reward_model.dtype)
    measured = measure_pairs(model, heldout, settings, autocast_dtype=dtype)
    scale = standardise_scores(model, [ids for pair in heldout for ids in pair[:2]], settings, autocast_dtype=dtype)
    well_formed = _share(measured.well_formed_correct, measured.well_formed_pairs)
    return {
        "heldout_pairs": measured.pairs,
        "too_long": dropped + measured.dropped,
        **_share(measured.correct, measured.pairs),
        **{f"well_formed_{name}": value for name, value in well_formed.items()},
        **({"well_formed_pairs": measured.well_formed_pairs} if well_formed else {}),
        "heldout_loss": measured.loss,
        "calibration_error": measured.calibration_error,
        "brier": measured.brier,
        "score_mean": scale.mean,
        "score_std": scale.std,
        "calibration_bins": [asdict(each) for each in measured.bins],
        "score_histogram": asdict(measured.histogram),
    }


def _share(correct: int, pairs: int) -> dict[str, float]:
    """Return the accuracy and its interval, as if no two pairs shared a prompt; nothing where there is no pair."""
    from rlhf_core.functional.intervals import wilson_interval

    if not pairs:
        return {}
    found = wilson_interval(correct, pairs, SHOWN_CONFIDENCE)
    return {"accuracy": found.estimate, "low": found.low, "high": found.high}


def _summary(metrics: Mapping[str, Any]) -> str:
    """Return what was measured in one line."""

    def share(prefix: str) -> str:
        return f"{metrics[f'{prefix}accuracy']:.3f} [{metrics[f'{prefix}low']:.3f}, {metrics[f'{prefix}high']:.3f}]"

    text = f"{share('')} right of {counted(metrics['heldout_pairs'], 'held-out pair')}"
    if "well_formed_accuracy" in metrics:
        text += f"; {share('well_formed_')} of the {metrics['well_formed_pairs']} both well formed"
    return f"{text}; {metrics['training_accuracy']:.3f} while training"
