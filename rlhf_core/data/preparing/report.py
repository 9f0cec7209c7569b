"""What is told of a dataset: where it came from, what was left out, how long it is, and a sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.data.preferences import PreferencePair
from rlhf_core.data.preparing.token_counts import EDGES, TokenCounts, token_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.data.preparing.agreement import Agreement
    from rlhf_core.data.preparing.limits import TooLong
    from rlhf_core.data.preparing.metering import Lengths, PairLengths, TokenMeter
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading import NotShown, ReadSet, SourceFacts

SAMPLED = 3
MOST_REJECTED = 1000
"""Rejected rows that are kept word for word; the others are counted."""


class Sample(NamedTuple):
    """A row, as it was read."""

    prompt: str
    answer: str | None = None
    response: str | None = None
    rejected: str | None = None


class Majority(NamedTuple):
    """The most common answer: what a policy scores that always says it."""

    answer: str
    share: float
    problems: int


@dataclass(frozen=True)
class RowsReport:
    """Rows of a split, of the pairs, or of a whole set."""

    rows: int
    with_answer: int
    drawn_from: str
    prompt_tokens: TokenCounts | None
    """None where no tokenizer was at hand, or there are no rows."""
    response_tokens: TokenCounts | None
    majority: Majority | None
    sample: tuple[Sample, ...]


@dataclass(frozen=True)
class SetReport:
    """What was read for one key of the configuration."""

    role: str
    sources: tuple[SourceFacts, ...]
    kept: int
    rejected: int
    reasons: dict[str, int]
    """Rejected rows by reason, the most frequent first."""
    examples: dict[str, str]
    """The first sentence of each reason."""
    duplicates: int
    not_shown: tuple[NotShown, ...] = ()
    """Keys of chat messages that the model is not shown."""


@dataclass(frozen=True)
class DataReport:
    """Everything that is told of a dataset."""

    name: str
    seed: int
    task: str | None
    sets: tuple[SetReport, ...]
    splits: dict[str, RowsReport]
    """By split; the pairs of the reward model under `pairs`."""
    too_long: tuple[TooLong, ...]
    agreement: Agreement | None
    rejected_rows: tuple[dict[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, less the rejected rows, which have a file of their own."""
        facts = {
            "name": self.name,
            "seed": self.seed,
            "task": self.task,
            "bin_edges": list(EDGES),
            "sets": [set_as_dict(each) for each in self.sets],
            "splits": {name: rows_as_dict(each) for name, each in self.splits.items()},
            "too_long": [each._asdict() for each in self.too_long],
            "verifier": None,
        }
        if self.agreement is not None:
            facts["verifier"] = self.agreement._asdict() | {"share": self.agreement.accepted / self.agreement.asked}
        return facts


def set_as_dict(report: SetReport) -> dict[str, Any]:
    """Return a set's facts as plain values."""
    facts = asdict(report) | {"sources": [source._asdict() for source in report.sources]}
    facts["not_shown"] = [each._asdict() for each in report.not_shown]
    return {name: value for name, value in facts.items() if name != "not_shown" or value}  # as it was without such keys


def rows_as_dict(report: RowsReport) -> dict[str, Any]:
    """Return rows' facts as plain values."""
    return asdict(report) | {
        "majority": report.majority and report.majority._asdict(),
        "sample": [sample._asdict() for sample in report.sample],
    }


def describe_set(role: str, read: ReadSet[Any]) -> SetReport:
    """Return what was read for a key of the configuration, and what was left out."""
    reasons = Counter(row.reason for row in read.rejected)
    examples: dict[str, str] = {}
    for row in read.rejected:
        examples.setdefault(row.reason, row.detail)
    return SetReport(
        role,
        read.sources,
        len(read.rows),
        len(read.rejected),
        dict(reasons.most_common()),
        {reason: examples[reason] for reason, _ in reasons.most_common()},
        read.duplicates,
        read.not_shown,
    )


def describe_problems(problems: Sequence[Problem], drawn_from: str, lengths: Sequence[Lengths]) -> RowsReport:
    """Return what is told of problems, whose lengths may not be known."""
    answers = Counter(problem.answer for problem in problems if problem.answer is not None)
    majority = None
    if answers:
        [(answer, count)] = answers.most_common(1)
        majority = Majority(answer, count / answers.total(), answers.total())
    return RowsReport(
        len(problems),
        answers.total(),
        drawn_from,
        token_counts(each.prompt for each in lengths),
        token_counts(each.response for each in lengths if each.response is not None),
        majority,
        tuple(Sample(each.prompt, each.answer, each.demonstration) for each in problems[:SAMPLED]),
    )


def describe_pairs(pairs: Sequence[PreferencePair], drawn_from: str, lengths: Sequence[PairLengths]) -> RowsReport:
    """Return what is told of preference pairs, whose lengths may not be known."""
    return RowsReport(
        len(pairs),
        0,
        drawn_from,
        token_counts(each.prompt for each in lengths),
        token_counts(tokens for each in lengths for tokens in (each.chosen, each.rejected)),
        None,
        tuple(Sample(each.prompt, None, each.chosen, each.rejected) for each in pairs[:SAMPLED]),
    )


def describe_rows(rows: Sequence[Any], drawn_from: str, meter: TokenMeter | None) -> RowsReport:
    """Return what is told of a whole set's rows, whichever they are."""
    if rows and isinstance(rows[0], PreferencePair):
        return describe_pairs(rows, drawn_from, meter.pairs(rows) if meter is not None else [])
    return describe_problems(rows, drawn_from, meter.problems(rows) if meter is not None else [])
