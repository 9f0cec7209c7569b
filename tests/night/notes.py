"""What the nights' processes write down, and where they wait to be struck: plain files, shared with the driver.

A line is appended in one write, so that lines of several processes never mix, and nobody holds a lock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefect.context import FlowRunContext

HOLD_TIMEOUT_S = 600.0

AFTER = "after"
"""The figure of an SFT model that names the policy it went on from."""


@dataclass(frozen=True)
class Note:
    """That a process was at work at a stage of its run."""

    time: float
    pid: int
    run: str
    stage: str
    what: str
    """`begins`, `committed`, `held`, `let go` or `failed`."""
    says: dict[str, Any] = field(default_factory=dict)


def is_suspended() -> bool:
    """Whether this process has heard that a person has suspended its run, and will end at its next border."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run_suspension_request.is_requested()


@dataclass(frozen=True)
class Desk:
    """The files of one site: its nights' notes, its data of today, and where its next night is to be held."""

    directory: Path

    def open(self) -> Desk:
        """Make the directory, and return the desk."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def note(self, **facts: Any) -> None:
        """Write a line; `facts` are the fields of a Note but for time and process."""
        line = json.dumps(asdict(Note(time=time.time(), pid=os.getpid(), **facts))) + "\n"
        notes = os.open(self.directory / "notes.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(notes, line.encode())
        finally:
            os.close(notes)

    def notes(self) -> Iterator[Note]:
        """Yield what was written down, in order."""
        with suppress(FileNotFoundError), (self.directory / "notes.jsonl").open() as lines:
            for line in lines:
                yield Note(**json.loads(line))

    def write_data(self, **data: Any) -> None:
        """Put today's data there; a night reads them when it begins."""
        self._put("data.json", json.dumps(data))

    def data(self) -> dict[str, Any]:
        """Return today's data."""
        found: dict[str, Any] = json.loads((self.directory / "data.json").read_text())
        return found

    def hold_at(self, stage: str) -> None:
        """Have the next process that comes to a stage wait there until it is let go, or ended."""
        self._put("hold", stage)

    def is_to_be_held(self) -> bool:
        """Whether nobody has come to the stage yet."""
        return (self.directory / "hold").exists()

    def is_held_at(self, stage: str) -> bool:
        """Whether this process is the one that is to wait here."""
        return self._taken("hold", stage)

    def fail_at(self, stage: str) -> None:
        """Have the next process that comes to a stage meet an error that passes, once."""
        self._put("fail", stage)

    def is_to_fail_at(self, stage: str) -> bool:
        """Whether this process is the one that is to meet it."""
        return self._taken("fail", stage)

    def let_go(self) -> None:
        """End the waiting of all who wait by now, and withdraw an order that nobody has met yet."""
        (self.directory / "hold").unlink(missing_ok=True)
        for waits in self.directory.glob("hold-taken-*"):
            waits.unlink()

    def await_leave(self) -> None:
        """Wait until the driver says so, or suspends the run.

        Raises:
            TimeoutError: if it does not.
        """
        deadline = time.monotonic() + HOLD_TIMEOUT_S
        while (self.directory / f"hold-taken-{os.getpid()}").exists() and not is_suspended():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody let {self.directory.name} go within {HOLD_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def _taken(self, what: str, stage: str) -> bool:
        """Whether something is planned for this stage, and is ours: one alone can rename a file."""
        try:
            if (self.directory / what).read_text() != stage:
                return False
            (self.directory / what).rename(self.directory / f"{what}-taken-{os.getpid()}")
        except FileNotFoundError:
            return False
        return True

    def _put(self, name: str, text: str) -> None:
        draft = self.directory / f"{name}-{os.getpid()}.draft"
        draft.write_text(text)
        draft.rename(self.directory / name)
