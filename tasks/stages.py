"""What a stage made: the key that it is found under, and how it is stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from infra.artifacts import ArtifactRef, Manifest
from rlhf_core.config import PipelineConfig
from tasks.context import Context
from tasks.plan import recalled, recorded
from tasks.progress import say
from tasks.results import Parent, StageResult
from tasks.taken_over import leave_if_taken_over


def stage_key(stage: str, *, config: Any, inputs: Iterable[str], seed: int, source: str) -> str:
    """Return the SHA-256 under which a stage's result is found again; names and paths are not part of it."""
    facts = {"stage": stage, "config": config, "inputs": list(inputs), "seed": seed, "source": source}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def reuse_or_make(
    context: Context, *, stage: str, kind: str, name: str, key: str, make: Callable[[], StageResult]
) -> StageResult:
    """Return the stage's result from the store, or make it."""
    found = find_made(context, kind, name, key)
    if found is None:
        return make()
    say(stage, f"{found.ref.uri} is in the store already")
    return stage_result(stage, found, reused=True)


def once_in_a_run(context: Context, stage: str, make: Callable[[], StageResult]) -> StageResult:
    """Return what the stage has made or found in this run before; else what `make` returns, which is recorded.

    So a run that is started again goes on after this stage, whatever the key of its inputs would be now: other code has
    other keys, but the later stages of the run have learnt from what an earlier start trained.
    """
    if before := made_before(context, stage):
        return before
    made = make()
    stands = recorded(context, f"result of {stage}", StageResult, made)
    return stands if _is_held(context, stands) else made  # a record stays when what it names was deleted


def made_before(context: Context, stage: str) -> StageResult | None:
    """Return what the stage has made or found in this run before, if the store still holds it."""
    before: StageResult | None = recalled(context, f"result of {stage}", StageResult)
    if before is None or not _is_held(context, before):
        return None
    say(stage, f"{before.uri} is in the store already: this run has come so far before")
    return before


def _is_held(context: Context, result: StageResult) -> bool:
    return context.store.holds(ArtifactRef(result.uri, result.digest))


def find_made(context: Context, kind: str, name: str, key: str) -> Manifest | None:
    """Return what was made under a key, as an artifact of this name; None if nothing was.

    Names are no part of a key. What another name made is stored under this name too, with its parents: the
    bodies are shared, and each name keeps its own versions and aliases.
    """
    found = context.store.find(kind, key)
    if found is None or found.name == name:
        return found
    own = [manifest for manifest in context.store.list(kind, name) if manifest.key == key]
    if own:
        return own[-1]
    leave_if_taken_over()
    reference = context.store.commit(
        kind,
        name,
        context.store.cached(found.ref),
        key=key,
        parents=found.parents,
        config=found.config,
        metrics=found.metrics,
        source_digest=found.source_digest,
        flow_run=context.flow_run,
    )
    return context.store.resolve(reference)


def stage_result(stage: str, manifest: Manifest, *, reused: bool) -> StageResult:
    """Return what a manifest says of the stage that made it."""
    return StageResult(
        stage=stage,
        uri=manifest.ref.uri,
        digest=manifest.digest,
        reused=reused,
        seconds=float(str(manifest.metrics.get("seconds", 0.0))),
        metrics=dict(manifest.metrics),
    )


def commit_stage(
    context: Context,
    *,
    stage: str,
    kind: str,
    name: str,
    files: Mapping[str, Path | bytes] | Path,
    key: str,
    parents: Iterable[Parent],
    config: PipelineConfig,
    metrics: Mapping[str, Any],
    source: str,
) -> StageResult:
    """Store what a stage made, with everything that it is traced by; unless another process has the run by now."""
    leave_if_taken_over()
    reference = context.store.commit(
        kind,
        name,
        files,
        key=key,
        parents=[ArtifactRef(parent.uri, parent.digest) for parent in parents],
        config=config.model_dump(mode="json"),
        metrics=dict(metrics),
        source_digest=source,
        flow_run=context.flow_run,
    )
    return stage_result(stage, context.store.resolve(reference.uri), reused=False)
