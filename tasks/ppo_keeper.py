"""Commits a trainer's states and policy; one that was thought dead finds its episode taken, and stores nothing."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from infra.artifacts import ArtifactRef, ArtifactStore, Manifest, Retention, open_default_store
from infra.errors import StoreError
from infra.settings import settings
from rlhf_core.errors import ModelError
from rlhf_core.ppo.best import DEVELOPMENT, best_episode, why_it_stops
from rlhf_core.ppo.state import (
    EpisodeRecord,
    TrainingState,
    state_from_json,
    state_tensors,
    state_to_json,
)
from rlhf_core.types import Sample
from tasks.models import with_base
from tasks.results import KEPT, PLANNED, RUN, STOPPED, PPORun
from tasks.scratch import FAILED_BATCHES, scratch_directory

logger = logging.getLogger(__name__)

STATE, SAMPLES, METRICS = "state.json", "samples.jsonl", "metrics.jsonl"
BEST = Path("best")
"""Folder of a state with the best episode's policy so far; one that stays shares its bodies with earlier states."""
BEGIN_AGAIN = "begin the stage ppo again under another seed, which keeps what it starts from"
SHARD_BYTES = 64 << 20
_HEADER_BYTES = 128
"""What safetensors notes of a tensor besides its name, at most."""


def last_state(store: ArtifactStore, run: PPORun) -> Manifest | None:
    """Return the last committed state of a run, or of the one that it continues; None before the first.

    Raises:
        ModelError: if its states went when its policy was stored.
    """
    manifest = store.latest("ppo-state", run.name)
    if manifest is not None and manifest.has_ended:
        raise ModelError(
            f"the run {run.name} has ended, and its training states went when its policy was stored; if that was "
            f"deleted, {BEGIN_AGAIN}"
        )
    if manifest is None and run.continues is not None:
        manifest = store.latest("ppo-state", run.continues)
        if manifest is not None and manifest.has_ended:  # another run with that code went to its end
            return None
    return manifest


class StoreKeeper:
    """Commits `ppo-state/<run>@<episode + 1>`: the version is the episode, so an episode is committed once.

    A trainer that was taken for ended finds its version taken and cannot commit over its successor.
    """

    _continued: ArtifactRef | None = None
    """State of the run that this one continues, from which it goes on."""

    def __init__(self, run: PPORun) -> None:
        self._run = run
        self._open = ExitStack()
        self._best: Path | None = None
        """Where the best episode's policy lies; this process ends with the run."""

    @cached_property
    def _store(self) -> ArtifactStore:
        return open_default_store(patient=True, in_run=True)  # an actor, in mid-run

    def __reduce__(self) -> tuple[type[StoreKeeper], tuple[PPORun]]:
        """Leave the open store out of a pickle: a client belongs to one process."""
        return StoreKeeper, (self._run,)

    def commit_state(self, state: TrainingState, samples: list[Sample]) -> None:
        """Store the state after `state.history[-1]`, then delete all but the newest (RLHF_RETENTION, else two)."""
        files: dict[str, Path | bytes] = {
            STATE: json.dumps(state_to_json(state)).encode(),
            SAMPLES: _jsonl([asdict(sample) for sample in samples]),
            **_files_in(self._best, under=BEST),
        }
        with scratch_directory(settings().home) as directory:
            self._store.commit(
                "ppo-state",
                self._run.name,
                files | _shards(state_tensors(state), directory),
                version=len(state.history),
                parents=self._parents(),
                config=self._run.config.model_dump(mode="json"),
                metrics=state.history[-1].as_row(),
                source_digest=self._run.source_digest,
                flow_run=self._run.flow_run,
            )
        try:
            keep = Retention.parse(settings().retention).newest.get("ppo-state")
            if keep is not None:
                self._store.prune("ppo-state", self._run.name, keep=keep)
        except StoreError as error:  # the state is safe; the next commit deletes what is left
            logger.warning("old states of %s are still there: %s", self._run.name, error)

    def last_state(self) -> TrainingState | None:
        """Return the last committed state of the run, verified, or None before the first.

        Raises:
            ModelError: if it is of a format that this release does not read, or the run has ended.
        """
        from safetensors.torch import load_file

        manifest = last_state(self._store, self._run)
        if manifest is None:
            return None
        states = [parent for parent in manifest.parents if parent.uri.startswith("ppo-state/")]
        self._continued = manifest.ref if manifest.name == self._run.continues else next(iter(states), None)
        with scratch_directory(settings().home) as directory:  # not the cache: a state is read once
            self._store.fetch(manifest.ref, directory, keep=False)
            tensors = {
                name: tensor.clone()  # out of the file, which is deleted
                for shard in sorted(directory.glob("*.safetensors"))
                for name, tensor in load_file(shard).items()
            }
            facts = json.loads((directory / STATE).read_text())
            if (directory / BEST).exists():
                self.keep_best(lambda own: shutil.copytree(directory / BEST, own, dirs_exist_ok=True))
        return state_from_json(facts, tensors, where=f"the training state {manifest.uri}", otherwise=BEGIN_AGAIN)

    def keep_best(self, save: Callable[[Path], object]) -> None:
        """Keep the policy of the best episode so far, in place of a former one; the next state holds it, too."""
        with ExitStack() as fresh:
            directory = fresh.enter_context(scratch_directory(settings().home))
            save(directory)
            self._open.close()
            self._open, self._best = fresh.pop_all(), directory

    def commit_policy(self, save: Callable[[Path], None], *, history: tuple[EpisodeRecord, ...]) -> None:
        """Store the policy under the run's key, with the metrics of every episode and its last samples.

        It is the best measured episode's, or else the last one's. A policy of fewer episodes than the run has, where
        nothing has stopped that, is a night's, whose budget ended: it has a key of its own.
        """
        last, config, rows = (
            last_state(self._store, self._run),
            self._run.config.ppo,
            [each.metrics for each in history],
        )
        metrics = run_metrics(history) | config.figures
        best = best_episode(rows)
        stopped = why_it_stops(rows, config) if len(history) < config.episodes else None
        if stopped is not None:
            metrics |= {STOPPED: stopped}
        elif len(history) < config.episodes:
            metrics |= {PLANNED: config.episodes, RUN: self._run.name}
        if best is not None:
            metrics |= {KEPT: best + 1, DEVELOPMENT: rows[best][DEVELOPMENT]}
        with scratch_directory(settings().home) as directory:
            if self._best is None:
                save(directory)
            files: dict[str, Path | bytes] = _files_in(self._best or directory)
            files[METRICS] = _jsonl([record.as_row() for record in history])
            if last is not None:
                files[SAMPLES] = self._store.read_bytes(last, SAMPLES)
            self._store.commit(
                "policy",
                self._run.preset,
                files,
                key=self._run.key_of_policy(None if stopped else len(history)),
                parents=self._parents(),
                config=self._run.config.model_dump(mode="json"),
                metrics=metrics,
                source_digest=self._run.source_digest,
                flow_run=self._run.flow_run,
            )

    def keep_failed_batch(self, save: Callable[[Path], None]) -> str:
        """Write the batch under RLHF_HOME, not into the store, for a person to look at; `rlhf tidy` deletes it."""
        root = settings().home / FAILED_BATCHES
        root.mkdir(parents=True, exist_ok=True)
        directory = Path(mkdtemp(prefix=f"{self._run.name}-", dir=root))
        save(directory)
        return str(directory)

    def _parents(self) -> list[ArtifactRef]:
        parents = [self._run.actor, self._run.dataset]
        if self._run.reward_model is not None:
            parents.insert(1, self._run.reward_model)
        if self._run.base is not None:
            parents = with_base(parents, self._run.base)
        refs = [ArtifactRef(parent.uri, parent.digest) for parent in parents]
        return refs if self._continued is None else [*refs, self._continued]


def _files_in(directory: Path | None, under: Path = Path()) -> dict[str, Path | bytes]:
    """Return the files of a directory by their paths in it; none where there is none."""
    found = sorted(directory.rglob("*")) if directory is not None else []
    return {str(under / file.relative_to(directory)): file for file in found if directory and file.is_file()}


def run_metrics(history: tuple[EpisodeRecord, ...]) -> dict[str, Any]:
    """Return a run's figures: those of its first and last episode, of the kept one, and its time by phase."""
    phases = sorted({phase for record in history for phase in record.seconds})
    times = {f"seconds_{phase}": sum(record.seconds[phase] for record in history) for phase in phases}
    best = best_episode([record.metrics for record in history])
    named = {"first": history[0], "last": history[-1], **({} if best is None else {"kept": history[best]})}
    figures = {f"{which}_{name}": value for which, record in named.items() for name, value in record.metrics.items()}
    return {
        "episodes": len(history),
        "incarnations": len({record.incarnation for record in history}),
        **figures,
        **times,
        "seconds": sum(times.values()),
    }


def _shards(tensors: Mapping[str, Any], directory: Path) -> dict[str, Path]:
    """Write safetensors files, cut at tensor borders in the order of the names, and return them by name.

    Each is one blob of the store, of at most 64 MiB; a larger tensor has a file of its own. They are written one by
    one: all at once would take the memory of the state a second time.
    """
    from safetensors.torch import save

    from rlhf_core.models.saving import in_shards

    def size_of(name: str) -> int:
        return int(tensors[name].numel() * tensors[name].element_size()) + len(name) + _HEADER_BYTES

    shards = in_shards(sorted(tensors), size_of, most=SHARD_BYTES)
    files = {}
    for index, names in enumerate(shards):
        file = directory / f"training-{index:05d}.safetensors"
        try:
            file.write_bytes(save({name: tensors[name].contiguous() for name in names}))
        except OSError as error:
            raise StoreError(
                f"the training state cannot be written to {directory}: {error.strerror or error}; make room there, and "
                "start the run again: it goes on from its last commit"
            ) from error
        files[file.name] = file
    return files


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
