"""Preference pairs, and the reward model that is trained on them."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import DataError
from tasks.context import (
    Context,
    commit_stage,
    materialise,
    open_context,
    reuse_or_make,
    source_digest,
    stage_key,
    stage_result,
)
from tasks.progress import Progress, say
from tasks.results import SHOWN_CONFIDENCE, Parent, StageResult
from tasks.scratch import scratch_directory
from tasks.sentences import stage_task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.data import Problem, PromptTemplate
    from rlhf_core.data.encoding import EncodedPair
    from rlhf_core.experience_maker.preferences import SampledPairs
    from rlhf_core.models.reward_model import RewardModel

PAIRS, METRICS = "pairs.jsonl", "metrics.jsonl"


@stage_task(name="collect-preferences")
def collect_preferences(config: PipelineConfig, dataset: Parent, policy: Parent) -> StageResult:
    """Return preference pairs: the dataset's own, or pairs of the policy's samples ordered by the verifier."""
    context = open_context()
    manifest = context.store.resolve(dataset.uri)
    held = {entry.path for entry in manifest.files}
    if PAIRS in held:
        return stage_result("preferences", manifest, reused=True)
    if "preferences.jsonl" not in held:
        raise DataError(
            f"{dataset.uri} holds {', '.join(sorted(held))}, but a reward model needs {PAIRS}, or problems to sample "
            "pairs for in preferences.jsonl"
        )
    from rlhf_core.rewards.verifying import judge_facts

    verifier = judge_facts(config)
    if verifier is None:
        raise DataError(
            f"{dataset.uri} holds no preference pairs, and no verifier is known by which samples could be ordered; "
            "give data.preferences, or problems with answers and data.verifier"
        )
    source = source_digest("reward_model")
    facts = {
        "verifier": verifier,
        "template": config.template.model_dump(mode="json"),
        "samples": config.reward_model.samples_per_prompt,
        "max_new_tokens": config.reward_model.max_new_tokens,
        "pairs": config.reward_model.pairs,
        "dtype": config.ppo.rollout_dtype,
    }
    inputs = [dataset.digest, policy.digest]
    key = stage_key("preferences", config=facts, inputs=inputs, seed=config.seed, source=source)

    def make() -> StageResult:
        return _sample_pairs(context, config, dataset, policy, key, source)

    return reuse_or_make(
        context, stage="preferences", kind="dataset", name=f"{config.name}-preferences", key=key, make=make
    )


@stage_task(name="train-reward-model")
def train_reward_model(config: PipelineConfig, pairs: Parent, policy: Parent) -> StageResult:
    """Return a reward model on the policy's trunk, trained on most pairs and measured on the others."""
    context = open_context()
    source = source_digest("reward_model")
    facts = config.model_dump(mode="json", include={"template", "reward_model"})
    inputs = [pairs.digest, policy.digest]
    key = stage_key("reward-model", config=facts, inputs=inputs, seed=config.seed, source=source)

    def make() -> StageResult:
        return _train(context, config, pairs, policy, key, source)

    return reuse_or_make(context, stage="reward-model", kind="reward-model", name=config.name, key=key, make=make)


def _sample_pairs(
    context: Context, config: PipelineConfig, dataset: Parent, policy: Parent, key: str, source: str
) -> StageResult:
    from rlhf_core.data import PromptTemplate, pairs_to_jsonl, problems_from_jsonl
    from rlhf_core.models.loading import load_tokenizer

    started = time.perf_counter()
    directory = materialise(context, policy)
    template = PromptTemplate(load_tokenizer(directory), config.template)
    problems = problems_from_jsonl((materialise(context, dataset) / "preferences.jsonl").read_bytes())
    made = _sampled(context, config, directory, template, problems)
    metrics: dict[str, Any] = {**made.figures, "seconds": time.perf_counter() - started}
    say("preferences", f"{len(made.pairs)} pairs from {len(problems)} prompts")
    return commit_stage(
        context,
        stage="preferences",
        kind="dataset",
        name=f"{config.name}-preferences",
        files={PAIRS: pairs_to_jsonl(made.pairs)},
        key=key,
        parents=[policy, dataset],
        config=config,
        metrics=metrics,
        source=source,
    )


def _sampled(
    context: Context, config: PipelineConfig, directory: Path, template: PromptTemplate, problems: Sequence[Problem]
) -> SampledPairs:
    """Return pairs of the policy's samples, ordered by the data's verifier."""
    from rlhf_core.experience_maker.preferences import sample_pairs
    from rlhf_core.models.loading import default_device, load_causal_lm
    from rlhf_core.rewards.verifying import judge_of

    judge = judge_of(config, template=template, allowed_modules=context.settings.reward_modules)
    assert judge is not None  # `collect_preferences` has seen to it
    with closing(judge):
        progress = Progress("preferences", len(problems), "prompt")
        return sample_pairs(
            load_causal_lm(directory, config.ppo.rollout_dtype, device=default_device()),
            template,
            problems,
            config.reward_model,
            seed=config.seed,
            on_progress=progress.step,
            judge=judge,
        )


def _train(
    context: Context, config: PipelineConfig, pairs: Parent, policy: Parent, key: str, source: str
) -> StageResult:
    from rlhf_core.data import PromptTemplate, pairs_from_jsonl
    from rlhf_core.data.encoding import encode_pairs, refuse_shared_prompts, split_pairs
    from rlhf_core.data.jsonl import to_jsonl
    from rlhf_core.models.loading import load_tokenizer

    started = time.perf_counter()
    directory = materialise(context, policy)
    tokenizer = load_tokenizer(directory)
    template = PromptTemplate(tokenizer, config.template)
    rows = pairs_from_jsonl((materialise(context, pairs) / PAIRS).read_bytes())
    split = split_pairs(rows, config.reward_model, seed=config.seed)
    if left_out := len(rows) - len(split.training) - len(split.heldout):
        say("reward-model", f"{left_out} of {len(rows)} pairs are left out by reward_model.pairs (null takes all)")
    refuse_shared_prompts(split.training, split.heldout)
    training, heldout = encode_pairs(split.training, template), encode_pairs(split.heldout, template)
    model, history, metrics = _fit(config, directory, training, heldout)
    metrics["seconds"] = time.perf_counter() - started
    say("reward-model", _summary(metrics))
    with scratch_directory(context.settings.home) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / METRICS).write_bytes(to_jsonl(history))
        return commit_stage(
            context,
            stage="reward-model",
            kind="reward-model",
            name=config.name,
            files=folder,
            key=key,
            parents=[policy, pairs],
            config=config,
            metrics=metrics,
            source=source,
        )


def _fit(
    config: PipelineConfig, directory: Path, training: list[EncodedPair], heldout: list[EncodedPair]
) -> tuple[RewardModel, list[dict[str, Any]], dict[str, Any]]:
    """Return a reward model on the policy's trunk, what every step said, and its figures on pairs that it never saw."""
    import torch

    from rlhf_core.functional.curves import last_quarter
    from rlhf_core.models.loading import default_device, load_causal_lm
    from rlhf_core.models.reward_model import RewardModel
    from rlhf_core.trainer.supervised.reward_model import train_reward_model

    settings, dtype = config.reward_model, getattr(torch, config.reward_model.dtype)
    if all(pair.longest > settings.max_length for pair in heldout):
        raise DataError(
            f"all {len(heldout)} held-out pairs are longer than reward_model.max_length, {settings.max_length} tokens, "
            "so no accuracy could be measured; raise it"
        )
    torch.manual_seed(config.seed)  # the head starts from random numbers
    model = RewardModel.from_causal_lm(load_causal_lm(directory, "float32", device=default_device()))
    progress = Progress("reward-model", settings.epochs * -(-len(training) // settings.batch_size), "step")
    trained = train_reward_model(
        model,
        training,
        settings,
        seed=config.seed,
        autocast_dtype=dtype,
        on_step=lambda step: progress.step(int(step["step"]), loss=step["loss"], accuracy=step["accuracy"]),
    )
    rows = [{"step": int(step["step"]), "loss": step["loss"], "accuracy": step["accuracy"]} for step in trained.history]
    last = last_quarter(trained.history)
    right = sum(step["accuracy"] * step["pairs"] for step in last)  # measured before each step learnt them
    figures = {
        "steps": len(rows),
        "pairs": len(training) - trained.dropped,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "training_accuracy": right / sum(step["pairs"] for step in last),
    }
    return model, rows, figures | _measured(config, model, heldout, dropped=trained.dropped)


def _measured(
    config: PipelineConfig, model: RewardModel, heldout: list[EncodedPair], *, dropped: int
) -> dict[str, Any]:
    """Return the figures on held-out pairs, after the model's scores were standardised on them."""
    import torch

    from rlhf_core.trainer.supervised.measures import measure_pairs, standardise_scores

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

    text = f"{share('')} right of {metrics['heldout_pairs']} held-out pairs"
    if "well_formed_accuracy" in metrics:
        text += f"; {share('well_formed_')} of the {metrics['well_formed_pairs']} both well formed"
    return f"{text}; {metrics['training_accuracy']:.3f} while training"
