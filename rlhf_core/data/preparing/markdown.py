"""The report of a dataset as a page that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.preparing.token_counts import TokenCounts, bin_names, spark

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.data.preparing.report import DataReport, RowsReport, Sample, SetReport

NAMES = {
    "sft": "SFT",
    "preferences": "prompts to sample pairs for",
    "ppo": "PPO",
    "evaluation": "held out",
    "pairs": "preference pairs",
}
SHOWN = 300


def report_to_markdown(report: DataReport) -> str:
    """Return the report: what was read, what became of it, how long it is, and what it looks like."""
    parts = [f"# Data of {report.name}", _summary(report)]
    if report.task is not None:
        parts.append(f"Problems are drawn from the task `{report.task}` of reasoning-gym with seed {report.seed}.")
    if report.sets:
        parts += ["## What was read", _sources(report.sets)]
    parts += _rejections(report.sets)
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
    if report.agreement is not None:
        lines.append(f"Verifier: {report.agreement} ({report.agreement.accepted / report.agreement.asked:.0%}).")
    majority = report.splits["evaluation"].majority
    if majority is not None:
        lines.append(
            f"Whoever always says {code(majority.answer)} is right on {majority.share:.1%} of the "
            f"{majority.problems} held-out problems."
        )
    return " ".join(lines)


def _sources(sets: Iterable[SetReport]) -> str:
    rows = [
        [
            each.role,
            code(source.path),
            source.form,
            f"{source.rows:,}",
            f"{source.kept:,}",
            "" if source.weight is None else f"{source.weight:g}",
        ]
        for each in sets
        for source in each.sources
    ]
    return table(["role", "source", "form", "rows", "kept", "weight"], rows)


def _rejections(sets: Iterable[SetReport]) -> list[str]:
    parts = []
    for each in sets:
        if each.duplicates:
            parts.append(f"Repetitions of an earlier row of `{each.role}` that were left out: {each.duplicates:,}.")
        if each.rejected:
            parts.append(f"Rows of `{each.role}` that cannot be used, and were left out: {each.rejected:,}.")
            rows = [[reason, f"{count:,}", _cell(each.examples[reason])] for reason, count in each.reasons.items()]
            parts.append(table(["reason", "rows", "the first"], rows))
        if each.not_shown:
            parts.append(f"Keys of messages in `{each.role}` that are left out, for the model is not shown them:")
            rows = [[code(key), f"{messages:,}", _cell(why)] for key, messages, why in each.not_shown]
            parts.append(table(["key", "messages", "why"], rows))
    return parts


def _splits(splits: dict[str, RowsReport]) -> str:
    rows = [
        [NAMES[name], f"{each.rows:,}", f"{each.with_answer:,}" if name != "pairs" else "", _cell(each.drawn_from)]
        for name, each in splits.items()
        if each.rows
    ]
    return table(["for", "rows", "with an answer", "from"], rows)


def _too_long(report: DataReport) -> list[str]:
    if not report.too_long:
        return []
    rows = [
        [
            each.what,
            f"{each.longer:,} of {each.of:,}",
            f"{each.longest:,}",
            _cell(code(each.example)),
            f"`{each.key}` = {each.limit:,}",
            "left out" if each.dropped else "**still there: a run that reads them is refused**",
        ]
        for each in report.too_long
    ]
    return ["## Too long", table(["what", "too long", "longest, tokens", "its prompt", "limit", ""], rows)]


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
            ["", "texts", "shortest", "median", "90 % up to", "99 % up to", "longest"],
            [[name, *(f"{each:,}" for each in percentiles(found))] for name, found in counts],
        ),
        "How many texts have how many tokens:",
        table(
            ["", "", *names],
            [[name, f"`{spark(found.bins[used])}`", *(f"{n:,}" for n in found.bins[used])] for name, found in counts],
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
    lines = [f"* prompt: {code(sample.prompt)}"]
    if sample.rejected is not None:
        lines += [f"    * chosen: {code(sample.response or '')}", f"    * rejected: {code(sample.rejected)}"]
        return "\n".join(lines)
    if sample.response is not None:
        lines.append(f"    * response: {code(sample.response)}")
    if sample.answer is not None:
        lines.append(f"    * answer: {code(sample.answer)}")
    return "\n".join(lines)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def code(text: str) -> str:
    """Return both ends of a text as it is, on one line: tags are not taken for HTML."""
    flat = " ⏎ ".join(line for line in text.strip().replace("`", "'").splitlines() if line.strip())
    if len(flat) > SHOWN:
        flat = f"{flat[: SHOWN // 2]} … {flat[-SHOWN // 2 :]}"
    return f"`{flat}`" if flat else "(empty)"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
