"""The report of a dataset, as facts and as a page: its sources, rows left out, lengths, and a sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.counting import counted
from rlhf_core.data.preferences import PreferencePair
from rlhf_core.data.preparing.lengths import EDGES, TokenCounts, bin_names, spark, token_counts
from rlhf_core.escaping import code, prose, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.data.linting import Finding
    from rlhf_core.data.preparing.lengths import Lengths, PairLengths, TokenMeter, TooLong
    from rlhf_core.data.preparing.requirements import VerifierCheck
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading import NotShown, ReadSet, SourceFacts

NAMES = {
    "sft": "SFT",
    "preferences": "prompts to sample pairs for",
    "ppo": "PPO",
    "evaluation": "held out",
    "development": "held out for development",
    "pairs": "preference pairs",
}
SAMPLED = 3
MOST_REJECTED = 1000
"""Rejected rows that are kept word for word; the others are counted."""


@dataclass(frozen=True)
class DataReport:
    """Everything that a report says of a dataset."""

    name: str
    seed: int
    task: str | None
    sets: tuple[SetReport, ...]
    splits: dict[str, RowsReport]
    """By split; the pairs of the reward model under `pairs`."""
    too_long: tuple[TooLong, ...]
    verifier_check: VerifierCheck | None
    rejected_rows: tuple[dict[str, str], ...]
    findings: tuple[Finding, ...] = ()
    """Of the linter."""

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
            "lint": [each.as_dict() for each in self.findings],
        }
        if self.verifier_check is not None:
            facts["verifier"] = self.verifier_check._asdict() | {"share": self.verifier_check.fraction}
        return facts


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


class Majority(NamedTuple):
    """The most common answer: what a policy scores that always says it."""

    answer: str
    share: float
    problems: int


class Sample(NamedTuple):
    """A row, as it was read."""

    prompt: str
    answer: str | None = None
    response: str | None = None
    rejected: str | None = None


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


def describe_rows(rows: Sequence[Any], drawn_from: str, meter: TokenMeter | None) -> RowsReport:
    """Return the report of a whole set's rows, of either kind."""
    if rows and isinstance(rows[0], PreferencePair):
        return describe_pairs(rows, drawn_from, meter.pairs(rows) if meter is not None else [])
    return describe_problems(rows, drawn_from, meter.problems(rows) if meter is not None else [])


def describe_problems(problems: Sequence[Problem], drawn_from: str, lengths: Sequence[Lengths]) -> RowsReport:
    """Return the report of problems; without lengths if these are not known."""
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
    """Return the report of preference pairs; without lengths if these are not known."""
    return RowsReport(
        len(pairs),
        0,
        drawn_from,
        token_counts(each.prompt for each in lengths),
        token_counts(tokens for each in lengths for tokens in (each.chosen, each.rejected)),
        None,
        tuple(Sample(each.prompt, None, each.chosen, each.rejected) for each in pairs[:SAMPLED]),
    )


def report_to_markdown(report: DataReport) -> str:
    """Return the report: what was read, what became of it, how long it is, and what it looks like."""
    parts = [f"# Data of {report.name}", _summary(report)]
    if report.task is not None:
        parts.append(f"Problems are drawn from the task {code(report.task)} of reasoning-gym with seed {report.seed}.")
    if report.sets:
        parts += ["## What was read", _sources(report.sets)]
    parts += _rejections(report.sets)
    parts += _lint(report.findings)
    parts += ["## What it became", _splits(report.splits), "No prompt is in two splits."]
    parts += _too_long(report)
    parts += _lengths(report.splits)
    parts += ["## Samples"]
    for name, rows in report.splits.items():
        if rows.sample:
            parts += [f"### {NAMES[name]}", "\n\n".join(map(_sample, rows.sample))]
    return "\n\n".join(parts) + "\n"


def _summary(report: DataReport) -> str:
    lines = [", ".join(f"**{rows.rows:,}** {NAMES[name]}" for name, rows in report.splits.items() if rows.rows) + "."]
    if report.verifier_check is not None:
        lines.append(f"Verifier: {prose(str(report.verifier_check))} ({report.verifier_check.fraction:.0%}).")
    majority = report.splits["evaluation"].majority
    if majority is not None:
        lines.append(
            f"Whoever always says {code(majority.answer)} is right on {majority.share:.1%} of the "
            f"{counted(majority.problems, 'held-out problem')}."
        )
    return " ".join(lines)


def _sources(sets: Iterable[SetReport]) -> str:
    return "\n".join(
        f"* {each.role}: {code(source.path)}, {prose(source.form)}, {source.kept:,} of {source.rows:,} rows kept"
        + ("" if source.weight is None else f", weight {source.weight:g}")
        for each in sets
        for source in each.sources
    )


def _rejections(sets: Iterable[SetReport]) -> list[str]:
    parts = []
    for each in sets:
        if each.duplicates:
            parts.append(f"Repetitions of an earlier row of `{each.role}` that were left out: {each.duplicates:,}.")
        if each.rejected:
            parts.append(f"Rows of `{each.role}` that cannot be used, and were left out: {each.rejected:,}.")
            firsts = {reason: code(each.examples[reason]) for reason in each.reasons}
            parts.append(
                "\n".join(f"* {prose(why)}: {count:,}; the first: {firsts[why]}" for why, count in each.reasons.items())
            )
        if each.not_shown:
            parts.append(f"Keys of messages in `{each.role}` that are left out, because the model is not shown them:")
            parts.append(
                "\n".join(f"* {code(key)}: {messages:,}; {prose(why)}" for key, messages, why in each.not_shown)
            )
    return parts


_EXAMPLES = 3
_DONE = {"warn": "", "drop": ", left out", "refuse": ", refused"}


def _lint(findings: Sequence[Finding]) -> list[str]:
    """Return the findings of the linter, the first rows of each, and what to do."""
    if not findings:
        return []
    parts = ["## Lint"]
    for each in findings:
        told = each.says
        if each.accused:
            told = f"{len(each.accused):,} of {each.of:,} rows of data.{each.role} {each.says}{_DONE[each.action]}"
        shown = list(zip(each.named, each.accused, strict=True))[:_EXAMPLES]
        lines = [f"* `{each.rule}`: {prose(told)}. {prose(each.advice[:1].upper() + each.advice[1:])}."]
        parts.append("\n".join([*lines, *(f"    * {code(f'{where}: {accused.detail}')}" for where, accused in shown)]))
    return parts


def _splits(splits: dict[str, RowsReport]) -> str:
    filled = {name: each for name, each in splits.items() if each.rows}
    rows = [
        [NAMES[name], f"{each.rows:,}", f"{each.with_answer:,}" if name != "pairs" else ""]
        for name, each in filled.items()
    ]
    drawn: dict[str, list[str]] = {}
    for name, each in filled.items():
        drawn.setdefault(each.drawn_from, []).append(NAMES[name])
    sources = [f"* {', '.join(names)}: from {code(source)}" for source, names in drawn.items()]
    return table(["for", "rows", "with an answer"], rows) + "\n\n" + "\n".join(sources)


def _too_long(report: DataReport) -> list[str]:
    if not report.too_long:
        return []
    lines = (
        f"* {each.what}: {each.longer:,} of {each.of:,} are longer than `{each.key}` = {each.limit:,}, the longest "
        f"{each.longest:,} tokens, "
        + ("left out" if each.dropped else "**still there: a run that reads them is refused**")
        + f"; its prompt: {code(each.example)}"
        for each in report.too_long
    )
    return ["## Too long", "\n".join(lines)]


def _lengths(splits: dict[str, RowsReport]) -> list[str]:
    counts = [
        (f"{NAMES[name]}, {what}", found)
        for name, each in splits.items()
        for what, found in (("prompts", each.prompt_tokens), ("responses", each.response_tokens))
        if found is not None
    ]
    if not counts:
        return []
    used = _used_bins([found for _, found in counts])
    names = bin_names()[used]
    return [
        "## Lengths in tokens",
        table(
            ["", "texts", "shortest", "median", "90 %", "99 %", "longest"],
            [[name, *(f"{each:,}" for each in percentiles(found))] for name, found in counts],
        ),
        "How many texts have so many tokens:",
        "\n".join(
            f"* {name} `{spark(found.bins[used])}`: "
            + ", ".join(f"{count:,} of {span}" for span, count in zip(names, found.bins[used], strict=True) if count)
            + " tokens"
            for name, found in counts
        ),
    ]


def percentiles(counts: TokenCounts) -> tuple[int, ...]:
    """Return what a table of lengths shows of a histogram, the number of texts first."""
    return (counts.texts, counts.shortest, counts.median, counts.ninety, counts.ninety_nine, counts.longest)


def _used_bins(counts: Sequence[TokenCounts]) -> slice:
    """Return the bins from the first that holds a text to the last."""
    filled = [place for each in counts for place, count in enumerate(each.bins) if count]
    return slice(min(filled), max(filled) + 1)


def _sample(sample: Sample) -> str:
    said = "response" if sample.rejected is None else "chosen"
    texts = {"prompt": sample.prompt, said: sample.response, "rejected": sample.rejected, "answer": sample.answer}
    lines = [f"* {name}: {code(text.strip())}" for name, text in texts.items() if text is not None]
    return "\n    ".join(lines)
