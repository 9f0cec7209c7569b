"""Check a set without a run: what it holds, and what a run would refuse of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config.sizes import as_they_are, settle, told_changes
from rlhf_core.counting import counted
from rlhf_core.data.linting import LintSet, lint_set
from rlhf_core.data.preparing.lengths import PAIRS, TokenMeter, too_long
from rlhf_core.data.preparing.prepare import prepare, read_sets, role_of, with_source
from rlhf_core.data.preparing.report import (
    DataReport,
    RowsReport,
    SetReport,
    describe_rows,
    describe_set,
    rows_as_dict,
    set_as_dict,
)
from rlhf_core.data.preparing.requirements import refuse_unfit
from rlhf_core.data.preparing.splits import SPLITS, file_pool
from rlhf_core.data.reading import at_fault, detect_role
from rlhf_core.errors import ConfigError, DataError, refuse_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import PipelineConfig, SourceConfig
    from rlhf_core.config.sizes import Sizes
    from rlhf_core.data.linting import Finding
    from rlhf_core.data.reading import Access, ReadSet, RejectedRow, Role
    from rlhf_core.data.template import PromptTemplate


class Standard(NamedTuple):
    """What sets are judged by."""

    config: PipelineConfig
    """Of a preset."""
    asked_for: bool
    """Whether to judge as a run of this preset would; else a set is judged by itself, and limits are only shown."""
    template: PromptTemplate | None
    """None where the model is not on this machine: then no lengths are counted and no verifier is asked."""
    allowed_modules: Sequence[str] = ()
    """From which a verifier may be taken by path."""
    sizes: Sizes | None = None
    """Which sizes may follow the data; None keeps all as they are."""


@dataclass(frozen=True)
class Checked:
    """One set."""

    path: str
    role: str | None
    """None if it could not be found out."""
    read: ReadSet[Any] | None
    facts: SetReport | None
    rows: RowsReport | None
    report: DataReport | None
    """What a run with this set alone would make of it; None where there would be no such run."""
    refusals: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What would be refused or left out under limits that nobody has asked for."""
    sizes: str | None = None
    """Which sizes would follow the set, in a sentence; None where none would."""
    findings: tuple[Finding, ...] = ()
    """Of the linter."""

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "path": self.path,
            "role": self.role,
            "set": self.facts and set_as_dict(self.facts),
            "rows": self.rows and rows_as_dict(self.rows),
            "report": self.report and self.report.as_dict(),
            "refused": list(self.refusals),
            "notes": list(self.notes),
            "sizes": self.sizes,
            "lint": [each.as_dict() for each in self.findings],
        }


def check_source(
    standard: Standard,
    source: SourceConfig,
    role: Role | None,
    *,
    access: Access,
    alone: bool,
) -> Checked:
    """Return what a set holds, and what of it would be refused.

    Args:
        standard: what it is judged by.
        source: the set.
        role: what it is for; None finds out.
        access: how it is reached.
        alone: whether the run would have no other set: then its splits are drawn, too.
    """
    config = standard.config
    try:
        role = role or (role_of(source, config.data, access) if standard.asked_for else detect_role(source, access))
        data = with_source(config.data, source, role)
        meter, refused = _meter(standard)
        template = None if meter is None else meter.template
        read = read_sets(data.model_copy(update={"bad_rows": "drop"}), access, template)[role]
    except DataError as error:
        return Checked(source.path, role, None, None, None, None, (str(error),))
    refusals: list[str] = []
    bad = at_fault(read.rejected)
    if bad and data.bad_rows == "refuse":
        refusals.append(_rejected(bad, read))
    refusals += refused
    report: DataReport | None = None
    notes: list[str] = []
    sizes: str | None = None
    if standard.asked_for and alone:
        run = config.model_copy(update={"data": data})
        report, refused, sizes = _dry_run(standard, run, {role: read}, meter)
        refusals += refused
    elif meter is not None:
        notes = _beyond_limits(config, role, read, meter)
    found = _checked(config, source.path, role, read, meter, report)
    return replace(found, refusals=tuple(dict.fromkeys(refusals)), notes=tuple(notes), sizes=sizes)


def check_rows(standard: Standard, name: str, role: Role, read: ReadSet[Any]) -> Checked:
    """Return what rows hold that were read before, such as those that have arrived.

    Args:
        standard: what they are judged by.
        name: what they are called.
        role: what they are for.
        read: the rows.
    """
    meter, refused = _meter(standard)
    notes = [] if meter is None else _beyond_limits(standard.config, role, read, meter)
    return replace(_checked(standard.config, name, role, read, meter), refusals=tuple(refused), notes=tuple(notes))


def _checked(
    config: PipelineConfig,
    name: str,
    role: Role,
    read: ReadSet[Any],
    meter: TokenMeter | None,
    report: DataReport | None = None,
) -> Checked:
    rows, facts = describe_rows(read.rows, f"data.{role}", meter), describe_set(role, read)
    if report is not None:
        findings = report.findings
    else:
        given = LintSet.of(role, read, meter, config.reward_model.max_length)
        findings = tuple(lint_set(given, config.data.lint))
    return Checked(name, role, read, facts, rows, report, (), findings=findings)


def shared_prompts(one: Checked, other: Checked) -> list[str]:
    """Return the prompts that are in both of two sets."""
    if one.read is None or other.read is None:
        return []
    known = {problem.key for problem in file_pool("", one.read).rows}
    return [problem.prompt for problem in file_pool("", other.read).rows if problem.key in known]


def _rejected(bad: Sequence[RejectedRow], read: ReadSet[Any]) -> str:
    total = sum(source.rows for source in read.sources)
    return (
        f"{len(bad)} of {counted(total, 'row')} cannot be used, the first because {bad[0].detail}; correct them, or "
        "leave them out with data.bad_rows=drop"
    )


def _meter(standard: Standard) -> tuple[TokenMeter | None, list[str]]:
    """Return what counts tokens, if anything can, and why a template cannot."""
    if standard.template is None:
        return None, []
    try:
        standard.template.prompt_text("a")
    except ConfigError as error:
        return None, [str(error)]
    return TokenMeter(standard.template), []


def _beyond_limits(config: PipelineConfig, role: Role, read: ReadSet[Any], meter: TokenMeter) -> list[str]:
    """Return what of a set is longer than the stages that may read it take."""
    stages = ("ppo",) if role == "prompts" else ("sft", "ppo", "evaluation")
    lengths = meter.problems(file_pool(role, read).rows)
    found = [too_long(stage, lengths, config, dropped=False) for stage in stages]
    if role == "preferences":
        found.append(too_long(PAIRS, meter.pairs(read.rows), config, dropped=False))
    return [each.sentence for each in found if each is not None]


def _dry_run(
    standard: Standard, config: PipelineConfig, sets: dict[str, ReadSet[Any]], meter: TokenMeter | None
) -> tuple[DataReport | None, list[str], str | None]:
    """Return the report that a pipeline run would store, why it would be refused, and which sizes would change."""
    sizes = standard.sizes or as_they_are(config)
    try:
        made = prepare(config, sets, meter=meter, allowed_modules=standard.allowed_modules, sizes=sizes)
    except (ConfigError, DataError) as error:
        return None, [str(error)], None
    refusals = [each.sentence for each in made.report.too_long if not each.dropped]
    try:
        if meter is None:
            refuse_together(made.faults, DataError)
        else:
            refuse_unfit(made.splits, made.pairs, config, meter, reads=SPLITS, besides=made.faults)
    except (ConfigError, DataError) as error:
        refusals = [str(error)]
    found = settle(sizes.with_splits(made.sizes.model_dump()))
    return made.report, refusals, told_changes(sizes.wanted, found.values) if found is not None else None
