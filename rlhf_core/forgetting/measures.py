"""What is measured of a policy beside its task, item by item, so that two policies can be compared on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean

from rlhf_core.data.jsonl import from_jsonl, to_jsonl

TEXT = "text"
"""The suite of the packaged passages."""


@dataclass(frozen=True)
class Measure:
    """One suite, asked of one policy."""

    suite: str
    values: Mapping[str, float]
    """By item. Of TEXT: cross-entropy in nats per token, less being better; of any other suite more is better."""

    @property
    def mean(self) -> float:
        """Over the items, each counting the same."""
        return fmean(self.values.values())


def measures_to_jsonl(measures: Iterable[Measure]) -> bytes:
    """Return the measures as JSON lines."""
    return to_jsonl(asdict(each) for each in measures)


def measures_from_jsonl(data: bytes) -> dict[str, Measure]:
    """Return what `measures_to_jsonl` wrote, by suite."""
    return {row["suite"]: Measure(row["suite"], row["values"]) for row in from_jsonl(data)}
