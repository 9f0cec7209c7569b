"""Runs in the trackers that RLHF_TRACKERS names, written after each commit from what the store holds.

A tracker's run is named after what the store names: a PPO run, an artifact. So a run that is started again, or goes on
the next night, goes on in the same one. Each tracker has a thread and a process of its own (`tasks.tracker_process`);
what one did not take is given to it again with what is committed next.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import wraps
from threading import Condition, Thread, Timer
from typing import Any, ParamSpec, TypeVar

from infra import trackers
from infra.artifacts import Manifest
from infra.settings import CHECKOUT, secrets, settings, without_secrets
from rlhf_core.ppo.former_names import current_names
from tasks.context import Context, is_alone, open_context, page_of
from tasks.report.facts import METRICS, rows_of
from tasks.report.write import FACTS
from tasks.results import PLANNED, PPORun, StageResult
from tasks.run_log import run_logger
from tasks.showing import DEADLINE_S, only_shows
from tasks.tracker_process import CLOSE, WRITTEN, Row, TrackedRun, as_line

P = ParamSpec("P")
R = TypeVar("R")

WRITE_S = 180.0
"""Longest time for one write, the import of the tracker's package with it; nobody waits for that."""
END_S = 60.0
"""How long a run waits at its end for what is still being written."""
_LONGEST = 1000
"""Characters of a parameter or tag."""
_STRANGE = re.compile(r"[^\w./: -]")
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")
_CREDENTIALS = re.compile(r"://[^/\s@]*@")
_PLACES = ("episode", "step", "policy_version")
"""What tells rows apart, and is no figure."""


def with_trackers(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse a flow whose trackers cannot be had, and have it end when they have what there is for them.

    Raises:
        SettingsError: RLHF_TRACKERS names one that is not known or not installed.
    """

    @wraps(function)
    def tracked(*args: P.args, **kwargs: P.kwargs) -> R:
        trackers.chosen(settings())
        patience_s = 0.0  # of a run that is cancelled
        try:
            result = function(*args, **kwargs)
            patience_s = END_S
        except Exception:
            patience_s = END_S
            raise
        finally:
            if _WRITERS and is_alone():
                _end_writers(patience_s)
        return result

    return tracked


def _to_trackers(gather: Callable[P, Iterable[TrackedRun]]) -> Callable[P, None]:
    """Return a function that has what is gathered written; without trackers, and where it fails, nothing happens."""

    @only_shows("a run in trackers", deadline_s=DEADLINE_S)
    def put(*args: P.args, **kwargs: P.kwargs) -> None:
        for run in gather(*args, **kwargs):
            for name in trackers.chosen(settings()):
                if name not in _WRITERS:
                    _WRITERS[name] = _Writer(name)
                _WRITERS[name].put(run)

    @wraps(gather)
    def track(*args: P.args, **kwargs: P.kwargs) -> None:
        if settings().trackers:
            put(*args, **kwargs)

    return track


@_to_trackers
def track(*results: StageResult) -> Iterator[TrackedRun]:
    """Have stages written, each as a run: its steps if it has any, and its figures with the last of them.

    Args:
        results: of SFT, of the reward model, or of evaluations.
    """
    context = open_context()
    for result in results:
        artifact = context.store.resolve(result.uri)
        rows = [(int(row["step"]), row) for row in rows_of(context, result, METRICS)] or [(0, {})]
        rows[-1] = (rows[-1][0], {**artifact.metrics, **rows[-1][1]})
        kind = result.uri.partition("/")[0]
        yield _run_of(context, artifact, _name(artifact), kind, rows, is_over=True)


@_to_trackers
def track_ppo(run: PPORun, policy: StageResult | None = None) -> Iterator[TrackedRun]:
    """Have the episodes of a PPO run written, as far as they are committed.

    Args:
        run: of PPO.
        policy: what it made, if it has; its states may be gone.
    """
    from tasks.ppo_keeper import STATE, last_state

    context = open_context()
    artifact = last_state(context.store, run) if policy is None else context.store.resolve(policy.uri)
    if artifact is None:
        return
    if policy is None:
        records = context.store.read_json(artifact, STATE)["history"]
        rows = [current_names(_as_row(record)) for record in records]
    else:
        rows = rows_of(context, policy, METRICS)
    name = _NO_NAME.sub("-", f"ppo-{run.continues or run.name}")
    steps = [(int(row["episode"]) + 1, row) for row in rows]
    is_over = policy is not None and PLANNED not in policy.metrics
    yield _run_of(context, artifact, name, "ppo", steps, is_over=is_over)


def _as_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode of a state's history as `EpisodeRecord.as_row` does, which is not imported: it brings torch."""
    times = {f"seconds_{phase}": value for phase, value in record["seconds"].items()}
    return {"episode": record["episode"], **record["metrics"], **record.get("rollouts", {}), **times}


@_to_trackers
def track_report(reference: str) -> Iterator[TrackedRun]:
    """Have a night written as a run of one step: the gate's verdict, and the figures of all policies by role.

    Args:
        reference: of its report.
    """
    context = open_context()
    report = context.store.resolve(reference)
    facts = context.store.read_json(report, FACTS)
    decision = facts.get("decision") or {}
    found = {f"evaluation/{role}": each["metrics"] for role, each in facts.get("evaluations", {}).items()}
    figures = {**report.metrics, **{f"gate/{name}": value for name, value in decision.items()}}
    figures |= {f"{role}/{name}": value for role, metrics in found.items() for name, value in metrics.items()}
    yield _run_of(context, report, _name(report), "night", [(0, figures)], is_over=True)


def _run_of(
    context: Context, artifact: Manifest, name: str, prefix: str, rows: list[tuple[int, Any]], *, is_over: bool
) -> TrackedRun:
    """Return a run of the project's, with the configuration and references of an artifact, and nothing secret."""
    seconds, found = 0.0, []
    for step, row in rows:
        seconds += sum(value for key, value in row.items() if key.startswith("seconds_"))
        figures = {f"{prefix}/{key}": value for key, value in _figures(row) if key not in _PLACES}
        found.append(Row(step, seconds, figures))
    parents = {f"from/{each.uri.partition('/')[0]}": each.uri for each in artifact.parents}
    known: dict[str, str | None] = {"artifact": artifact.uri, "digest": artifact.digest, **parents}
    known |= {
        "source": artifact.source_digest,
        "flow_run": artifact.flow_run,
        "page": page_of(context.settings, context.flow_run),
    }
    known |= {key: value for key, value in _leaves(rows[-1][1]) if isinstance(value, str)} if rows else {}
    hidden = secrets()
    project = artifact.config.get("name", artifact.name)
    return TrackedRun(
        project=str(project),
        name=name,
        rows=tuple(found),
        parameters={key: _shown(value, hidden) for key, value in _leaves(artifact.config)},
        tags={_STRANGE.sub("_", key): _shown(value, hidden) for key, value in known.items() if value},
        is_over=is_over,
    )


def _name(artifact: Manifest) -> str:
    """Return the name of an artifact's run: another store has other artifacts under the same reference."""
    return _NO_NAME.sub("-", f"{artifact.uri}-{artifact.digest[:8]}")


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield what is a finite number, by a name that every tracker takes."""
    for key, value in _leaves(row):
        if isinstance(value, int | float) and math.isfinite(value):
            yield _STRANGE.sub("_", key), float(value)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a tree of dictionaries holds, by dotted key."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value


def _shown(value: Any, hidden: Collection[str]) -> str:
    """Return a value as text without secrets: neither these nor a password in an address."""
    text = value if isinstance(value, str) else json.dumps(value)
    return _CREDENTIALS.sub("://***@", without_secrets(text, hidden))[:_LONGEST]


class _Writer:
    """Gives one tracker what it is to hold, from a thread of its own; says once that the tracker does not take it.

    Args:
        name: of the tracker.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        self._lacking: dict[str, TrackedRun] = {}
        """By name, what it may not have."""
        self._variables = copy_context()
        self._is_due = self._is_ending = self._has_ended = self._is_told = False
        self._process: subprocess.Popen[str] | None = None
        Thread(target=self._work, name=f"writes to {name}", daemon=True).start()

    def put(self, run: TrackedRun) -> None:
        """Have a run written, and what the tracker did not take before."""
        with self._changed:
            self._lacking[run.name] = run
            self._variables, self._is_due = copy_context(), True
            self._changed.notify_all()

    def end(self, until: float) -> None:
        """Wait until all is written and closed, but not longer than until a time of the monotonic clock."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._has_ended, max(0.0, until - time.monotonic())):
                self._variables.run(self._tell, "the run ended before it was done")
        self._kill()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._is_ending)
                is_due, self._is_due = self._is_due, False
                runs, variables = dict(self._lacking), self._variables
            fault = self._exchange(as_line(list(runs.values())) if is_due else f"{CLOSE}\n")
            with self._changed:
                if fault:
                    variables.run(self._tell, fault)
                elif is_due:
                    self._is_told = False
                    for name, run in runs.items():
                        if self._lacking[name] is run:
                            del self._lacking[name]
                if not is_due or (fault and self._is_ending):
                    self._has_ended = True
                    self._changed.notify_all()
                    return

    def _tell(self, fault: str) -> None:
        if not self._is_told:
            self._is_told = True
            run_logger().warning(
                "the tracker %s: not written, and the run goes on without; what it lacks is written with the next "
                "commit (%s)",
                self._name,
                fault,
            )

    def _exchange(self, line: str) -> str | None:
        """Have a line carried out; return what went wrong."""
        if self._process is None and line.strip() == CLOSE:
            return None
        timer = Timer(WRITE_S, self._kill)
        timer.daemon = True
        started = time.monotonic()
        answer = ""
        try:
            process = self._process = self._process or self._start()
            timer.start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline().strip()
        except (OSError, ValueError) as error:
            answer = f"{type(error).__name__}: {error}"
        finally:
            timer.cancel()
        if answer == WRITTEN:
            return None
        self._kill()
        self._process = None
        is_late = time.monotonic() - started >= WRITE_S
        return f"it took more than {WRITE_S:.0f} s" if is_late else answer or "its process ended"

    def _start(self) -> subprocess.Popen[str]:
        known = settings()
        directory = trackers.directory_of(known)
        directory.mkdir(parents=True, exist_ok=True)
        ours = {"RLHF_TENSORBOARD": str(directory / "tensorboard"), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.tracker_process", self._name, str(directory / f"{self._name}.lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=CHECKOUT,
            env=trackers.environment(known) | ours,
            start_new_session=True,
        )

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_WRITERS: dict[str, _Writer] = {}
"""By tracker, of the run that goes on in this process."""


def _end_writers(patience_s: float) -> None:
    until = time.monotonic() + patience_s
    for writer in _WRITERS.values():
        writer.end(until)
    _WRITERS.clear()
