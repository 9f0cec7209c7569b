"""What a row is, how calls are timed in turns, and the line that a row prints."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

from rlhf_core.freed_memory import give_back
from rlhf_core.models.loading import default_device

DEVICE = default_device()
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Of processors, the best first: they decide how fast matrices are multiplied."""

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """How rows are measured."""

    tiny: bool
    """With a model and sizes for which every row takes seconds: it shows that rows work, not how fast anything is."""
    rounds: int
    """Turns of each call; the least counts."""
    large: bool = False
    """With a model for GPUs."""


class Goal(NamedTuple):
    """A bound on a row's value, or on its ratio."""

    of: Literal["ratio", "value"]
    relation: Literal[">=", "<="]
    bound: float

    def __str__(self) -> str:
        """Return the goal as a line has it."""
        return f"{self.of} {self.relation} {self.bound:g}"

    def is_met(self, reached: float | None) -> bool:
        """Return whether what was reached is within the bound."""
        if reached is None:
            return False
        return reached >= self.bound if self.relation == ">=" else reached <= self.bound


@dataclass(frozen=True)
class Found:
    """What a row has measured, in its unit."""

    value: float
    peer_value: float | None = None
    limit: float | None = None
    """A floor that no implementation can pass; None where the settings say why."""
    settings: Mapping[str, Any] = field(default_factory=dict)


class NotHereError(Exception):
    """What a row needs is not on this machine: it is skipped, and its line says why."""


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    unit: str
    goal: Goal | None
    measure: Callable[[Run], Found]
    peer: str | None = None
    """Who else does the same; None by design, where nobody does."""


def line_of(row: Row, run: Run) -> dict[str, Any]:
    """Return a row's line; a row that raises has its error in it."""
    line: dict[str, Any] = {"name": row.name, "value": None, "unit": row.unit, "peer": row.peer, "peer_value": None}
    line |= {"limit": None, "ratio": None, "goal": row.goal and str(row.goal), "met": None}
    found = Found(0.0)
    try:
        with redirect_stdout(sys.stderr):  # which is for lines alone
            found = row.measure(run)
    except NotHereError as missing:
        line["skipped"] = str(missing)
    except Exception as error:
        log.exception("the row %s failed", row.name)
        line["error"] = f"{type(error).__name__}: {error}"
    else:
        line |= {name: _short(getattr(found, name)) for name in ("value", "peer_value", "limit")}
        ratio = None if found.peer_value is None else found.peer_value / found.value
        line["ratio"] = _short(ratio)
        line["met"] = row.goal and row.goal.is_met(ratio if row.goal.of == "ratio" else found.value)
    gc.collect()
    give_back()  # a peer's trainers leave gigabytes, which later rows' peers would not find
    return line | {"settings": {**machine(run), **found.settings}}


def is_complete(line: Mapping[str, Any]) -> bool:
    """Return whether a line says all that its row is for, or why it cannot: a goal that is missed is no failure."""
    if line["goal"] is None or "error" in line:
        return False
    return "skipped" in line or line["peer"] is None or line["peer_value"] is not None


def machine(run: Run) -> dict[str, Any]:
    """Return what every row is measured on."""
    return {
        "processor": _processor(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else DEVICE.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "rounds": run.rounds,
        "tiny": run.tiny,
        "large": run.large,
    }


def in_turns(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Return the least seconds of each call, all of them called in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, times, strict=True):
            seconds.append(seconds_of(call))
    return [min(seconds) for seconds in times]


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = now()
    call()
    return now() - started


def now() -> float:
    """Return the time in seconds, when a GPU has done all that it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_mb(call: Callable[[], object]) -> float:
    """Return the most megabytes of tensors that a call holds at a time, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = highest = 0
    for _, change in changes:
        held += change
        highest = max(highest, held)
    return highest / 1e6


def _processor() -> str:
    said = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in said.items()}
    known = set(facts.get("flags", "").split())
    return f"{facts.get('model name', 'unknown')}, {next((each for each in _INSTRUCTIONS if each in known), 'none')}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
