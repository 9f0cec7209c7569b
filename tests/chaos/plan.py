"""What is to be done at which moment of a run: a file that the process that comes there takes, once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf_core.phases import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)
MAKER_PHASES = frozenset({"generate", "score", "send", "swap"})
"""A maker comes there; to all others the first trainer rank does, and to these every trainer rank:"""
RANK_PHASES = frozenset({"learn", "between_steps", "snapshot"})

COLLECTING_PHASES = frozenset({"lease", "generate", "score", "send", "buffer"})
"""These may be over when an episode begins: makers go on as soon as they may. In the last one none may be left."""

Victim = Literal["maker", "all makers", "trainer", "second rank", "raylet", "head", "driver", "flow", "store", "disk"]


@dataclass(frozen=True)
class Aim:
    """A kill: of what, and at which moment of an episode."""

    victim: Victim
    phase: Phase
    occurrence: int = 1
    """How often some process must have come to the phase, from 1."""

    def __str__(self) -> str:
        return f"{self.victim} at {self.phase} {self.occurrence}"

    @property
    def witness(self) -> str:
        """Whose coming to the phase is the moment."""
        if self.phase in MAKER_PHASES:
            return "maker"
        return "trainer-1" if self.victim == "second rank" and self.phase in RANK_PHASES else "trainer"


@dataclass(frozen=True)
class Plan:
    """An aim, and who that is by now."""

    number: float
    witness: str
    phase: str
    occurrence: int
    targets: tuple[int, ...] = ()
    """Process ids; none: whoever comes there."""
    signal: int = signal.SIGKILL
    fill: str = ""
    """A file to write until the disk is full, in place of a signal."""


class PlanFolder:
    """A directory with the plan, and a log of what happened; shared by all processes of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._plan, self._log = directory / "plan.json", directory / "events.jsonl"

    def make(self, aim: Aim, **deed: Any) -> None:
        """Have an aim carried out; from now on, occurrences count.

        Args:
            aim: whom, and when.
            deed: further fields of the plan.
        """
        plan = Plan(time.time(), aim.witness, aim.phase, aim.occurrence, **deed)
        draft = self.directory / "draft.json"
        draft.write_text(json.dumps(asdict(plan)))
        draft.rename(self._plan)

    def pending(self) -> Plan | None:
        try:
            facts = json.loads(self._plan.read_text())
        except FileNotFoundError:
            return None
        return Plan(**{**facts, "targets": tuple(facts["targets"])})

    def take(self) -> bool:
        """Whether the plan is this process's to carry out: one alone can rename a file."""
        try:
            self._plan.rename(self.directory / f"taken-{os.getpid()}.json")
        except FileNotFoundError:
            return False
        return True

    def forget(self) -> bool:
        """Remove the plan; whether it was still there: its moment never came."""
        with suppress(FileNotFoundError):
            self._plan.unlink()
            return True
        return False

    def note(self, **facts: Any) -> None:
        """Write down what happens; a line is written at once, or not at all."""
        line = json.dumps({"time": time.time(), "pid": os.getpid(), **facts}) + "\n"
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(log, line.encode())
        finally:
            os.close(log)

    def events(self, since: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yield what was written down at a time or later."""
        with suppress(FileNotFoundError), self._log.open() as lines:
            for line in lines:
                event = json.loads(line)
                if event["time"] >= since:
                    yield event
