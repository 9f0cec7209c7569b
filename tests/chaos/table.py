"""What `make chaos` prints at its end: a line for each kill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.plan import Aim

HEADER = ("process", "phase", "occurrence", "episode", "recovered from", "seconds", "digest")
ROWS: list[Row] = []
"""Of this session: kills whose states were as they should be."""


@dataclass(frozen=True)
class Row:
    """One kill, and what came after it."""

    aim: Aim
    episode: int
    recovered: str
    seconds: float
    digest: str

    @classmethod
    def of(cls, aim: Aim, *, episode: int, digest: str, events: Sequence[dict[str, Any]], since: float) -> Row:
        """Read from the log, from its beginning, what happened after the first kill at a time or later."""
        killed, before, after = parted(events, since)
        recovered, ready = _recovery(aim, before, after)
        return cls(aim, episode, recovered, (ready or max(event["time"] for event in events)) - killed, digest)

    def cells(self) -> tuple[str, ...]:
        """Return the line's columns."""
        aim = self.aim
        seconds = f"{self.seconds:.1f}"
        return aim.victim, aim.phase, str(aim.occurrence), str(self.episode), self.recovered, seconds, self.digest[:12]


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the table as Markdown."""
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    padded = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]]


def parted(events: Sequence[dict[str, Any]], since: float) -> tuple[float, set[int], list[dict[str, Any]]]:
    """Return when the kill was, the processes that had ever come to a phase by then, and what happened afterwards."""
    killed = next(event["time"] for event in events if "deed" in event and event["time"] >= since)
    before = {event["pid"] for event in events if event["time"] <= killed}
    return killed, before, [event for event in events if event["time"] > killed]


def _recovery(aim: Aim, before: set[int], after: Sequence[dict[str, Any]]) -> tuple[str, float | None]:
    """Return from what the run went on, and when it did: its trainer collects again, or its new maker has weights."""
    restored = [event for event in after if "restored" in event]
    if restored:
        last = restored[-1]
        own = [event for event in after if event["time"] >= last["time"]]
        leases = [event["time"] for event in own if event.get("phase") == "lease"]
        swaps = [event["time"] for event in own if event.get("phase") == "swap"]
        ready = leases[0] if leases else max(swaps, default=None)
        how = {
            "raylet": "cluster started anew",
            "head": "cluster started anew",
            "driver": "next driver process",
            "flow": "next flow process",
        }.get(aim.victim, "group")
        return f"{how}, restored from episode {last['restored']}", ready
    revived = revivals(before, after)
    if aim.victim in ("maker", "all makers") and revived:
        return "maker revived" if len(revived) == 1 else "makers revived", revived[-1]
    return ("store again at work" if aim.victim == "store" else "others went on"), None


def revivals(before: set[int], after: Sequence[dict[str, Any]]) -> list[float]:
    """Return when each maker that is new since a kill had its weights."""
    found: dict[int, float] = {}
    for event in after:
        if event.get("phase") == "swap" and event["pid"] not in before:
            found.setdefault(event["pid"], event["time"])
    return sorted(found.values())
