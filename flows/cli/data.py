"""`rlhf data`: look at data before a run does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.cli import output
from flows.cli.output import Flag, Json, write_json
from flows.cli.run import Given
from rlhf_core.counting import counted
from rlhf_core.escaping import one_line, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from flows.presets import Draft
    from rlhf_core.config import PipelineConfig
    from rlhf_core.data import PromptTemplate
    from rlhf_core.data.linting import Finding
    from rlhf_core.data.preparing import Checked, DataReport, SetReport
    from rlhf_core.data.preparing.lengths import TokenCounts
    from rlhf_core.data.preparing.report import RowsReport, Sample
    from tasks.arrivals import Foreseen

app = App(name="data", help="Look at data before a run does.")
Columns = Annotated[tuple[str, ...], Parameter(name="--column", negative="")]
DEFAULT = "quickstart"
_BAR = 18
"""Characters of the longest bar."""
_SHOWN = 240
"""Characters of a text that are shown."""
Role = Literal["problems", "prompts", "demonstrations", "preferences"]
Overlap = tuple[str, str, list[str]]
"""The paths of two sets, and the prompts that they share."""


@app.command
def check(
    *paths: str,
    preset: str | None = None,
    param: Given = (),
    column: Columns = (),
    role: Role | None = None,
    subset: str | None = None,
    split: str = "train",
    strict: Flag = False,
    as_json: Json = False,
) -> int:
    """Show what sets hold, and what of them cannot be used, or with a preset what its run would refuse; needs no stack.

    The exit status is 1 where something would be refused. Several sets are also checked for prompts that they share.
    A linter tells faults of rows that can be used. Where the preset's or the parameters' data arrive (`data.arrivals`),
    it shows what a night would take in now, by the ledger in the artifact store, and stores nothing.

    Args:
        paths: files, directories, globs, `s3://` addresses or hub names; where data arrive, none takes the preset's.
        preset: judge as a run of this preset would, by its limits, splits and verifier; without one, a set is judged by
            itself, and what the limits of the quickstart would leave out is only told.
        param: a parameter of that run as NAME=VALUE, such as `name` or `overrides`; may be repeated.
        column: OURS=THEIRS, which column holds which of our fields; may be repeated.
        role: what the sets are for; found out when left out.
        subset: of a hub dataset that has several.
        split: of a hub dataset, and of a directory whose files are named for splits.
        strict: fail where the linter finds anything, too.
        as_json: print JSON.

    Raises:
        ConfigError: no set is named, there is no such preset or parameter, or a column is not given as OURS=THEIRS.
        StoreError: data arrive, and the artifact store cannot be used.
    """
    from flows.presets import draft_of
    from infra.settings import settings
    from rlhf_core.config import SourceConfig
    from rlhf_core.data.preparing import Standard, check_source
    from rlhf_core.errors import ConfigError
    from tasks.context import data_access

    preset = preset or (DEFAULT if param else None)
    parameters = _parameters(paths, param)
    draft, columns, known = draft_of(preset or DEFAULT, **parameters), _columns(column), settings()
    config = draft.config
    if config.data.arrivals is not None:
        if len(paths) > 1 or role or subset or columns or split != "train":
            raise ConfigError(
                "where data arrive, one path is checked, as the run's parameter `data`, or the preset's own sources; "
                "say in the preset or in overrides what else there is to say of a source"
            )
        return _check_arrivals(draft, str(preset), parameters, strict=strict, as_json=as_json)
    if not paths:
        raise ConfigError("name at least one set to check, such as `rlhf data check train.jsonl`")
    standard = Standard(config, preset is not None, _template(config), known.reward_modules, draft.sizes)
    checked = []
    for path in paths:
        source = SourceConfig(path=path, columns=columns, subset=subset, split=split)
        checked.append(check_source(standard, source, role, access=data_access(known), alone=len(paths) == 1))
    overlaps = _overlaps(checked)
    if as_json:
        _write_json(checked, overlaps, preset)
    else:
        _show(checked, overlaps, preset, model=config.model.path if standard.template is not None else None)
    found = strict and any(each.findings for each in checked)
    return int(found or bool(overlaps) or any(each.refusals for each in checked))


def _parameters(paths: Sequence[str], param: Given) -> dict[str, Any]:
    """Return the parameters of the run by which the sets are judged."""
    from flows.cli.parameters import read_parameters
    from rlhf_core.errors import ConfigError

    given = read_parameters(param)
    names = ("name", "model", "episodes", "seed", "overrides")
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"a check takes the parameters {', '.join(names)}, and {unknown[0]!r} came")
    return given | ({"data": paths[0]} if paths else {})


def _check_arrivals(draft: Draft, preset: str, parameters: dict[str, Any], *, strict: bool, as_json: bool) -> int:
    """Show what a night would take in now, and what the new rows hold."""
    from flows.begin import with_data_and_project
    from flows.cli.parameters import placed
    from flows.presets import preset_values
    from infra.settings import settings
    from rlhf_core.data.arriving import ARRIVED, ARRIVING
    from rlhf_core.data.preparing import Standard, check_rows
    from tasks.arrivals import foresee
    from tasks.context import open_context

    given = placed(parameters, here=True)
    config = with_data_and_project(draft.config, given.get("data"), preset_values(preset), given)
    template = _template(config)
    found = foresee(open_context(), config, template)
    standard = Standard(config, True, template, settings().reward_modules, draft.sizes)
    new = [(role, found.sets[role]) for role in ARRIVING if role in found.sets]
    checked = [check_rows(standard, ARRIVED, role, read) for role, read in new if read.rows]
    if as_json:
        _write_json(checked, [], preset, found)
    else:
        console = output.console()
        _show_arrivals(console, found)
        for each in checked:
            _show_set(console, each, preset=preset, model=config.model.path if template is not None else None)
        refusals = [*([found.refused] if found.refused else []), *(told for each in checked for told in each.refusals)]
        _show_verdict(console, refusals, False, preset)
    doubts = strict and (found.arrived.bad or any(each.findings for each in checked))
    return int(bool(doubts) or found.refused is not None or any(each.refusals for each in checked))


def _overlaps(checked: Sequence[Checked]) -> list[Overlap]:
    from rlhf_core.data.preparing import shared_prompts

    return [
        (one.path, other.path, shared)
        for place, one in enumerate(checked)
        for other in checked[place + 1 :]
        if (shared := shared_prompts(one, other))
    ]


def _columns(given: Sequence[str]) -> dict[str, str]:
    from rlhf_core.errors import ConfigError

    wrong = next((each for each in given if not all(each.partition("="))), None)
    if wrong is not None:
        raise ConfigError(f"--column {wrong!r} must be OURS=THEIRS, such as question=problem")
    return {ours: theirs for ours, _, theirs in (each.partition("=") for each in given)}


def _template(config: PipelineConfig) -> PromptTemplate | None:
    """Return the preset's template with its tokenizer, where the model is on this machine or comes with us."""
    from infra.settings import settings
    from rlhf_core.data import PromptTemplate
    from rlhf_core.errors import ModelError
    from rlhf_core.models.loading import find_local, load_tokenizer, locate_model
    from rlhf_core.models.locating import PACKAGED

    known = settings()
    try:
        packaged = config.model.path in PACKAGED
        locate = locate_model if packaged else find_local
        directory = locate(config.model.path, models_dir=known.models_dir)
        return PromptTemplate(load_tokenizer(directory), config.template) if directory is not None else None
    except ModelError:
        return None


def _write_json(
    checked: Sequence[Checked], overlaps: Sequence[Overlap], preset: str | None, arrivals: Foreseen | None = None
) -> None:
    refused = bool(overlaps) or any(each.refusals for each in checked)
    facts: dict[str, Any] = {
        "preset": preset,
        "sets": [each.as_dict() for each in checked],
        "overlaps": [
            {"sets": [one, other], "prompts": len(shared), "example": shared[0]} for one, other, shared in overlaps
        ],
        "refused": refused or (arrivals is not None and arrivals.refused is not None),
    }
    if arrivals is not None:
        facts["arrivals"] = {
            "project": arrivals.project,
            "ledger": arrivals.night.before and arrivals.night.before.uri,
            "since": arrivals.since and arrivals.since.isoformat(),
            "roles": arrivals.roles,
            "bad_files": [each.told for each in arrivals.arrived.bad],
            "left_to_later": arrivals.arrived.later,
            "refused": arrivals.refused,
        }
    write_json(facts)


def _show(checked: Sequence[Checked], overlaps: Sequence[Overlap], preset: str | None, *, model: str | None) -> None:
    console = output.console()
    for each in checked:
        _show_set(console, each, preset=preset or DEFAULT, model=model)
    for one, other, shared in overlaps:
        _show_overlap(console, one, other, shared)
    _show_verdict(console, [sentence for each in checked for sentence in each.refusals], bool(overlaps), preset)


def _show_set(console: Console, checked: Checked, *, preset: str, model: str | None) -> None:
    """Show one set: what it is, what is wrong with it, how long its texts are, and a few of them.

    Args:
        console: where to.
        checked: the set.
        preset: whose run was tried, or whose limits are only told.
        model: which counted tokens; None if it is not on this machine.
    """
    console.print()
    console.print(Text(visible(checked.path), "bold"), Text(f"  {checked.role or ''}", "cyan"))
    if checked.facts is None or checked.rows is None:
        return
    _show_facts(console, checked.facts, checked.rows)
    if checked.facts.rejected:
        _show_rejected(console, checked.facts)
    if checked.findings:
        _show_findings(console, checked.findings)
    if model is None:
        _title(console, f"Lengths are not known: the model of preset {preset} is not on this machine")
    else:
        _show_lengths(console, checked.rows, model)
    _show_sample(console, checked.rows.sample)
    if checked.report is not None:
        _show_splits(console, checked.report, preset)
    if checked.sizes is not None:
        console.print(Padding(checked.sizes, (0, 0, 0, 2), expand=False))
    if checked.notes:
        _title(console, f"Under the limits of preset {preset}, for information")
        for sentence in checked.notes:
            console.print(Padding(sentence, (0, 0, 0, 2), expand=False))


def _show_arrivals(console: Console, found: Foreseen) -> None:
    """Show, by role, what a night would take in, and which files it would leave out."""
    since = "no ledger yet: no night of the project has ended, so that all is new"
    if found.night.before is not None and found.since is not None:
        since = f"since {output.when(found.since)}, by the ledger of {found.night.before.uri}"
    _title(console, f"What a night of {found.project} would take in now, {since}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("for")
    for name in ("new files", "in quarantine", "new rows", "known rows", "rows that wait"):
        table.add_column(name, justify="right")
    for role, figures in found.roles.items():
        named = ("new_files", "bad_files", "new_rows", "known_rows", "waiting_rows")
        table.add_row(role, *(f"{figures[name]:,}" for name in named))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for each in found.arrived.bad:
        console.print(Padding(Text.assemble(("left out: ", "red"), visible(each.told)), (0, 0, 0, 2), expand=False))
    told = "The linter compares the new rows with each other; a night also compares them with rows of earlier nights."
    console.print(Padding(told, (0, 0, 0, 2), expand=False))
    for name in found.arrived.later:
        told = f"{visible(name)} may still be written to, and is left to the next night"
        console.print(Padding(told, (0, 0, 0, 2), expand=False))


def _show_overlap(console: Console, one: str, other: str, shared: list[str]) -> None:
    """Show that two sets share prompts."""
    text = f"{one} and {other} share {counted(len(shared), 'prompt')}, such as {_short(shared[0], 80)}"
    console.print(Text.assemble(("\nrefused: ", "bold red"), f"{visible(text)}; leave them out of one of the two"))


def _show_verdict(console: Console, refusals: list[str], overlap: bool, preset: str | None) -> None:
    """Show what would be refused, by a preset's run or any."""
    console.print()
    if not refusals and not overlap:
        good = f"Nothing of this would be refused by preset {preset}."
        console.print(
            Text(good if preset else "All of it can be used; --preset NAME says what a run would do.", "green")
        )
    for sentence in refusals:
        console.print(Text.assemble(("refused: ", "bold red"), visible(sentence)))


def _show_facts(console: Console, facts: SetReport, rows: RowsReport) -> None:
    table = _plain()
    for source in facts.sources:
        table.add_row("form", source.form)
        files = ", ".join(source.files)
        if files != source.path:
            table.add_row("files", one_line(files, _SHOWN))
    table.add_row("rows", f"{sum(source.rows for source in facts.sources):,}, of which {facts.kept:,} can be used")
    table.add_row("duplicates", f"{facts.duplicates:,}")
    table.add_row("rejected", Text(f"{facts.rejected:,}", "red" if facts.rejected else ""))
    for each in facts.not_shown:
        table.add_row("not shown", Text(visible(str(each)), "yellow"))
    if rows.majority is not None:
        answer, share, problems = rows.majority
        table.add_row("answers", f"{problems:,}, the most common {_short(answer, 40)} ({share:.1%})")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_rejected(console: Console, facts: SetReport) -> None:
    _title(console, "Rejected")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rows", justify="right")
    table.add_column("reason", overflow="fold", max_width=30)
    table.add_column("the first", overflow="fold")
    for reason, count in facts.reasons.items():
        table.add_row(f"{count:,}", reason, facts.examples[reason])
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Show what the linter found: how much, the first of it, and what to do."""
    _title(console, "Lint")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rule", style="yellow", no_wrap=True)
    table.add_column("rows", justify="right")
    table.add_column("what is seen, and first where", overflow="fold")
    table.add_column("what to do", overflow="fold", max_width=_BAR * 2)
    for each in findings:
        seen = f"{each.says}; {each.example}" if each.accused else each.says
        table.add_row(each.rule, f"{len(each.accused):,}" if each.accused else "", Text(visible(seen)), each.advice)
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_lengths(console: Console, rows: RowsReport, model: str) -> None:
    from rlhf_core.data.preparing.lengths import bin_names
    from rlhf_core.data.preparing.report import percentiles

    found = [
        (name, each) for name, each in (("prompts", rows.prompt_tokens), ("responses", rows.response_tokens)) if each
    ]
    if not found:
        return
    _title(console, f"Lengths, in tokens of {model}")
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
        bars.add_column("", min_width=_BAR)
    filled = [place for _, each in found for place, count in enumerate(each.bins) if count]
    for place in range(min(filled), max(filled) + 1):
        cells = [cell for _, each in found for cell in (f"{each.bins[place]:,}", _bar(each, place))]
        bars.add_row(bin_names()[place], *cells)
    console.print(Padding(bars, (1, 0, 0, 2), expand=False))


def _bar(counts: TokenCounts, place: int) -> Text:
    share = counts.bins[place] / max(counts.bins)
    width = max(1, round(share * _BAR)) if counts.bins[place] else 0
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
                table.add_row(name, one_line(text.strip(), _SHOWN) or "(empty)")
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
        table.add_row(name, f"{rows.rows:,}", note)
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    if report.verifier_check is not None:
        console.print(f"  verifier: {report.verifier_check}")


def _plain() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _short(text: str, most: int) -> str:
    return f"'{one_line(text.strip(), most)}'"
