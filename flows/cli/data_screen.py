"""What `rlhf data check` shows in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhf_core.counting import counted

if TYPE_CHECKING:
    from rich.console import Console

    from rlhf_core.data.preparing import Checked, DataReport, SetReport
    from rlhf_core.data.preparing.lengths import TokenCounts
    from rlhf_core.data.preparing.report import RowsReport, Sample

BAR = 18
SHOWN = 240


def show_set(console: Console, checked: Checked, *, preset: str, counted: str | None) -> None:
    """Show one set: what it is, what is wrong with it, how long its texts are, and a few of them.

    Args:
        console: where to.
        checked: the set.
        preset: whose run was tried, or whose limits are only told.
        counted: the model that counted tokens; None if it is not on this machine.
    """
    console.print()
    console.print(Text(checked.path, "bold"), Text(f"  {checked.role or ''}", "cyan"))
    if checked.facts is None or checked.rows is None:
        return
    _show_facts(console, checked.facts, checked.rows)
    if checked.facts.rejected:
        _show_rejected(console, checked.facts)
    if counted is None:
        _title(console, f"Lengths are not known: the model of preset {preset} is not on this machine")
    else:
        _show_lengths(console, checked.rows, counted)
    _show_sample(console, checked.rows.sample)
    if checked.report is not None:
        _show_splits(console, checked.report, preset)
    if checked.sizes is not None:
        console.print(Padding(Text(checked.sizes), (0, 0, 0, 2), expand=False))
    if checked.notes:
        _title(console, f"Under the limits of preset {preset}, for information")
        for sentence in checked.notes:
            console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))


def show_overlap(console: Console, one: str, other: str, shared: list[str]) -> None:
    """Show that two sets share prompts."""
    text = f"{one} and {other} share {counted(len(shared), 'prompt')}, such as {_flat(shared[0], 80)!r}"
    console.print(Text.assemble(("\nrefused: ", "bold red"), f"{text}; leave them out of one of the two"))


def show_verdict(console: Console, refusals: list[str], overlap: bool, preset: str | None) -> None:
    """Show what would be refused, by a preset's run or any."""
    console.print()
    if not refusals and not overlap:
        good = f"Nothing of this would be refused by preset {preset}."
        console.print(
            Text(good if preset else "All of it can be used; --preset NAME says what a run would do.", "green")
        )
    for sentence in refusals:
        console.print(Text.assemble(("refused: ", "bold red"), sentence))


def _show_facts(console: Console, facts: SetReport, rows: RowsReport) -> None:
    table = _plain()
    for source in facts.sources:
        table.add_row("form", Text(source.form))
        files = ", ".join(source.files)
        if files != source.path:
            table.add_row("files", Text(_flat(files, SHOWN)))
    table.add_row("rows", f"{sum(source.rows for source in facts.sources):,}, of which {facts.kept:,} can be used")
    table.add_row("duplicates", f"{facts.duplicates:,}")
    table.add_row("rejected", Text(f"{facts.rejected:,}", "red" if facts.rejected else ""))
    for each in facts.not_shown:
        table.add_row("not shown", Text(str(each), "yellow"))
    if rows.majority is not None:
        answer, share, problems = rows.majority
        table.add_row("answers", f"{problems:,}, the most common {_flat(answer, 40)!r} ({share:.1%})")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_rejected(console: Console, facts: SetReport) -> None:
    _title(console, "Rejected")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rows", justify="right")
    table.add_column("reason", overflow="fold", max_width=30)
    table.add_column("the first", overflow="fold")
    for reason, count in facts.reasons.items():
        table.add_row(f"{count:,}", Text(reason), Text(facts.examples[reason]))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_lengths(console: Console, rows: RowsReport, counted: str) -> None:
    from rlhf_core.data.preparing.lengths import bin_names
    from rlhf_core.data.preparing.report import percentiles

    found = [
        (name, each) for name, each in (("prompts", rows.prompt_tokens), ("responses", rows.response_tokens)) if each
    ]
    if not found:
        return
    _title(console, f"Lengths, in tokens of {counted}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("texts", "shortest", "median", "90 %", "99 %", "longest"):
        table.add_column(name, justify="right")
    for name, each in found:
        table.add_row(name, *(f"{number:,}" for number in percentiles(each)))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    bars = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    bars.add_column("tokens", justify="right")
    for name, _ in found:
        bars.add_column(name, justify="right")
        bars.add_column("", min_width=BAR)
    filled = [place for _, each in found for place, count in enumerate(each.bins) if count]
    for place in range(min(filled), max(filled) + 1):
        cells = [cell for _, each in found for cell in (f"{each.bins[place]:,}", _bar(each, place))]
        bars.add_row(bin_names()[place], *cells)
    console.print(Padding(bars, (1, 0, 0, 2), expand=False))


def _bar(counts: TokenCounts, place: int) -> Text:
    share = counts.bins[place] / max(counts.bins)
    width = max(1, round(share * BAR)) if counts.bins[place] else 0
    return Text("█" * width, "cyan")


def _show_sample(console: Console, sample: tuple[Sample, ...]) -> None:
    if not sample:
        return
    _title(console, "The first rows")
    table = _plain()
    for number, row in enumerate(sample):
        said = "chosen" if row.rejected is not None else "response"
        parts = [("prompt", row.prompt), (said, row.response), ("rejected", row.rejected), ("answer", row.answer)]
        if number:
            table.add_row("", "")
        for name, text in parts:
            if text is not None:
                table.add_row(name, Text(_flat(text, SHOWN) or "(empty)"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_splits(console: Console, report: DataReport, preset: str) -> None:
    _title(console, f"What a run of preset {preset} would make of it")
    longer = {each.split: each for each in report.too_long}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("for")
    table.add_column("rows", justify="right")
    table.add_column("too long", overflow="fold")
    for name, rows in report.splits.items():
        if not rows.rows:
            continue
        found = longer.get(name)
        note = ""
        if found is not None:
            where = "left out" if found.dropped else "still there"
            note = f"{found.longer:,} of {found.of:,} {where} ({found.key} = {found.limit:,})"
        table.add_row(name, f"{rows.rows:,}", Text(note))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    if report.verifier_check is not None:
        console.print(Text(f"  verifier: {report.verifier_check}"))


def _plain() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _flat(text: str, most: int) -> str:
    """Return both ends of a text on one line: a transcript's last turn is what is answered."""
    flat = " ⏎ ".join(line for line in text.strip().splitlines() if line.strip())
    return flat if len(flat) <= most else f"{flat[: most // 2]} … {flat[-most // 2 :]}"
