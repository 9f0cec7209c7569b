"""Problems and preferences, validated, split, and stored by content."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from rlhf_core.config import DataConfig, PipelineConfig
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
from tasks.progress import say
from tasks.results import Parent, StageResult
from tasks.sentences import stage_task

SPLITS = ("sft", "preferences", "ppo", "evaluation")


def with_data(config: PipelineConfig, data: str | None) -> PipelineConfig:
    """Return the configuration with the parameter `data` in it: a problem file or a preference file.

    With a reference (`dataset/...`), it is the configuration that the dataset was made with.

    Raises:
        DataError: the file is missing, empty, malformed, or of neither form.
        ReferenceNotFoundError: there is no such dataset.
    """
    if data is None:
        return config
    if data.startswith("dataset/"):
        made_with = open_context().store.resolve(data).config["data"]
        return config.model_copy(update={"data": DataConfig.model_validate(made_with)})
    from rlhf_core.data import detect_form

    changes = {"preferences": data} if detect_form(data) == "preferences" else {"problems": data, "task": None}
    fields = {**config.data.model_dump(), **changes}
    return config.model_copy(update={"data": DataConfig.model_validate(fields)})


@stage_task(name="prepare-data")
def prepare_data(config: PipelineConfig, reference: str | None) -> StageResult:
    """Return the dataset of a run: the one that is named, or one made from the configuration and stored."""
    context = open_context()
    if reference is not None and reference.startswith("dataset/"):
        return stage_result("data", context.store.resolve(reference), reused=True)
    source = source_digest("data")
    facts = config.data.model_dump(mode="json", exclude={"problems", "preferences"})
    inputs = [_digest(path) for path in (config.data.problems, config.data.preferences)]
    key = stage_key("data", config=facts, inputs=inputs, seed=config.seed, source=source)
    return reuse_or_make(
        context,
        stage="data",
        kind="dataset",
        name=config.name,
        key=key,
        make=lambda: _make(context, config, key, source),
    )


@stage_task(name="check-data")
def check_data(config: PipelineConfig, dataset: Parent, *, reads: tuple[str, ...]) -> None:
    """Refuse, before any training, data that a later stage would stumble over.

    Args:
        config: the resolved preset.
        dataset: what `prepare_data` returned.
        reads: splits that the run reads.

    Raises:
        DataError: a split is missing, or a prompt or answer is longer than its stage's limit.
        ConfigError: the template does not fit the tokenizer.
    """
    from rlhf_core.data import PromptTemplate, check_lengths, problems_from_jsonl
    from rlhf_core.models.loading import load_tokenizer
    from tasks.parents import base_model

    context = open_context()
    held = {entry.path for entry in context.store.resolve(dataset.uri).files}
    missing = sorted({f"{name}.jsonl" for name in reads} - held)
    if missing:
        raise DataError(
            f"{dataset.uri} holds {', '.join(sorted(held))}, but this run needs {', '.join(missing)}; name a dataset "
            "of problems, such as the one that the flow `pipeline` stored"
        )
    template = PromptTemplate(load_tokenizer(materialise(context, base_model(context, config))), config.template)
    directory = materialise(context, dataset)
    splits = {name: problems_from_jsonl((directory / f"{name}.jsonl").read_bytes()) for name in reads}
    check_lengths(template, splits, config)


def _make(context: Context, config: PipelineConfig, key: str, source: str) -> StageResult:
    from rlhf_core.data import load_problems, pairs_to_jsonl, problems_to_jsonl, read_preferences

    started = time.perf_counter()
    splits = load_problems(config.data, seed=config.seed)
    files: dict[str, Path | bytes] = {f"{name}.jsonl": problems_to_jsonl(splits[name]) for name in SPLITS}
    metrics: dict[str, float] = {f"problems_{name}": len(splits[name]) for name in SPLITS}
    if config.data.preferences:
        pairs = read_preferences(config.data.preferences)
        files["pairs.jsonl"] = pairs_to_jsonl(pairs)
        metrics["pairs"] = len(pairs)
        if pairs.dropped:
            say("data", pairs.dropped)
    metrics["seconds"] = time.perf_counter() - started
    counts = ", ".join(
        f"{int(count)} {name.removeprefix('problems_')}" for name, count in metrics.items() if name != "seconds"
    )
    say("data", f"{counts}; no prompt in two splits")
    return commit_stage(
        context,
        stage="data",
        kind="dataset",
        name=config.name,
        files=files,
        key=key,
        parents=[],
        config=config,
        metrics=metrics,
        source=source,
    )


def _digest(path: str | None) -> str:
    from rlhf_core.data.jsonl import existing_file

    return hashlib.sha256(existing_file(path).read_bytes()).hexdigest() if path else ""
