"""Data that arrive: what a night takes in, the ledger that it stores with its dataset, and when that ledger counts.

The ledger is a part of the dataset, so it is there whole or not at all. It counts when the alias `learnt` of the
datasets points at it, which a night moves once it has decided on its policy: what a failed night had taken in is new to
the next (docs/adr/0051-data-that-arrive.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.artifacts import ArtifactRef
from infra.errors import StoreError
from rlhf_core.config import PipelineConfig
from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, DataError, TooFewRowsError
from rlhf_core.escaping import prose, table
from tasks.context import Context, data_access, open_context
from tasks.plan import recalled, settled_once
from tasks.progress import say
from tasks.report.page import show_markdown
from tasks.results import Parent, Plain, StageResult
from tasks.showing import DEADLINE_S, only_shows
from tasks.taken_over import leave_if_taken_over
from tasks.task_errors import stage_task

if TYPE_CHECKING:
    from infra.artifacts import Manifest
    from rlhf_core.config import SourceConfig
    from rlhf_core.config.sizes import Sizes
    from rlhf_core.data import PromptTemplate
    from rlhf_core.data.arriving import Arrived, Ledger, PastNight, RowMarks, Tonight
    from rlhf_core.data.preparing import Prepared
    from rlhf_core.data.reading import ReadSet, Role

FOLDER = "arrivals"
LEDGER, MARKS = f"{FOLDER}/ledger.json", f"{FOLDER}/rows.bin"
LEARNT = "learnt"
"""Alias of the dataset whose ledger counts."""
DAY = "%Y-%m-%d"
_LEARNS = {"sft": "SFT", "preferences": "the reward model", "ppo": "PPO"}
"""What learns from a split."""
OF_NIGHT = "of_night"
"""The figure of a dataset that says whether a night made it; False of a stage that was run by hand."""
_NIGHT = "night"
_SHOWN = 5


class Night(Plain):
    """What a run with data that arrive settles when it first begins."""

    as_of: datetime
    """Up to when it takes what has arrived."""
    before: Parent | None
    """The dataset whose ledger it goes on from; None for the first night."""


class NothingNew(Plain):
    """Why a night ends before it has begun."""

    told: str
    day: str
    """Of the night, year-month-day."""
    figures: dict[str, int]
    bad: list[str]
    """Which new files could not be read, and why."""


class NothingNewError(DataError):
    """There is nothing to learn tonight: a flow ends with it as completed."""

    def __init__(self, config: PipelineConfig, found: NothingNew) -> None:
        super().__init__(found.told)
        self.config, self.found = config, found


def is_night(reads: Collection[str]) -> bool:
    """Return whether a run that reads these splits is a night: it alone learns by PPO and evaluates what it learnt."""
    return {"ppo", "evaluation"} <= set(reads)


def moment(as_of: str) -> datetime:
    """Return the end of a day, or of today the present; a time with its day is that time.

    Args:
        as_of: such as 2026-11-27, in this machine's time zone, or a time as ISO 8601 writes it.

    Raises:
        ConfigError: if it is neither, or still to come.
    """
    now = datetime.now(UTC)
    try:
        found = datetime.fromisoformat(as_of)
    except ValueError:
        raise ConfigError(
            f"as_of must be a day such as 2026-11-27, or a time with its day, but it is {as_of!r}"
        ) from None
    is_day = "T" not in as_of and ":" not in as_of
    found = found.astimezone()
    if found > now:
        raise ConfigError(f"as_of is {as_of}, which is still to come; give a day up to {now.astimezone():{DAY}}")
    end = found + timedelta(days=1, microseconds=-1) if is_day else found
    return min(end.astimezone(UTC), now)


def settle_night(context: Context, config: PipelineConfig, as_of: str | None) -> Night:
    """Return up to when a run takes what has arrived, and the ledger that it goes on from, as when it first began."""

    def find() -> Night:
        return _night(context, config, datetime.now(UTC) if as_of is None else moment(as_of))

    night: Night = settled_once(context, _NIGHT, Night, find)
    return night


def _night(context: Context, config: PipelineConfig, as_of: datetime) -> Night:
    before = context.store.alias("dataset", config.name, LEARNT)
    found = None if before is None else context.store.resolve(before)
    return Night(as_of=as_of, before=found and Parent(uri=found.uri, digest=found.digest))


def day_of_night(context: Context, config: PipelineConfig) -> str:
    """Return the day that a run's night stands for: the last from which it took data, else today."""
    arrives = config.data.arrivals is not None
    night: Night | None = recalled(context, _NIGHT, Night) if arrives else None  # None of a run on a stored dataset
    return f"{(night.as_of if night else datetime.now(UTC)).astimezone():{DAY}}"


def look_for_arrivals(context: Context, config: PipelineConfig, as_of: str | None, *, learns: bool = True) -> None:
    """End a night at once where no file is new and no row waits, by names, sizes and times alone.

    Args:
        context: the open context.
        config: the preset with the run's parameters.
        as_of: the parameter of this name.
        learns: whether the run trains anything; if not, it needs nothing new.

    Raises:
        NothingNewError: there is nothing to learn.
        ConfigError: `as_of` is no day, or the data do not arrive.
        DataError: a source is missing or cannot be reached.
    """
    from rlhf_core.data.arriving import is_anything_new

    if config.data.arrivals is None:
        if as_of is not None:
            raise ConfigError("as_of is for data that arrive; set data.arrivals, or leave as_of out")
        return
    _refuse_without_sources(config)
    night = settle_night(context, config, as_of)
    ledger = _ledger(context, night)
    access = data_access(context.settings)
    if learns and not ledger.waiting and not is_anything_new(config.data, ledger, access, night.as_of):
        raise NothingNewError(config, nothing_new(context, night, ledger))


def _refuse_without_sources(config: PipelineConfig) -> None:
    from rlhf_core.data.arriving import ARRIVING

    if not any(getattr(config.data, role) for role in ARRIVING):
        raise ConfigError(
            "data.arrivals needs sources that grow: give `data`, or one of data." + ", data.".join(ARRIVING)
        )


def arriving_role(
    context: Context, config: PipelineConfig, source: SourceConfig, project: Callable[[PipelineConfig], str]
) -> Role:
    """Return the role of the parameter `data` where data arrive: by its first good file, else that of earlier nights.

    Args:
        context: the open context.
        config: the preset with the run's parameters, without the source.
        source: the parameter.
        project: returns the name of a configuration's project.

    Raises:
        DataError: there are files, and none of them can be read.
    """
    from rlhf_core.data.arriving import ARRIVING, role_of_arrivals
    from rlhf_core.data.preparing import with_source

    role = role_of_arrivals(source, config.data, data_access(context.settings), datetime.now(UTC))
    if role is not None:
        return role
    last: dict[Role, datetime] = {}
    for each in ARRIVING:  # the project's name follows from the role
        name = project(config.model_copy(update={"data": with_source(config.data, source, each)}))
        before = context.store.alias("dataset", name, LEARNT)
        files = () if before is None else _ledger_of(context, context.store.resolve(before)).files
        if seen := [file.seen for file in files if file.role == each]:
            last[each] = max(seen)
    return max(last, key=last.__getitem__) if last else "prompts"  # nothing has arrived: no row has a role


def nothing_new(
    context: Context,
    night: Night,
    ledger: Ledger,
    why: str = "",
    arrived: Arrived | None = None,
) -> NothingNew:
    """Return why a night ends early.

    Args:
        context: the open context.
        night: of the run.
        ledger: that it goes on from.
        why: what was found instead; empty where no file is new.
        arrived: what was read; None where nothing was.
    """
    since = "nothing has arrived yet"
    if night.before is not None:
        run = context.store.resolve(night.before.uri).flow_run
        made = f"run {run}, {night.before.uri}" if run else night.before.uri
        since = f"nothing new since {ledger.as_of:%Y-%m-%d %H:%M} UTC ({made})"
    told = f"{since}: {why}" if why and night.before is not None else why or since
    bad = [] if arrived is None else [each.told for each in arrived.bad]
    if bad:
        told += f"; {_told_bad(bad)}"
    if arrived is not None and arrived.later:
        told += f"; {counted(len(arrived.later), 'file')} may still be written to and are left to the next night"
    return NothingNew(told=told, day=f"{night.as_of.astimezone():{DAY}}", figures=_figures(arrived), bad=bad)


def _figures(arrived: Arrived | None) -> dict[str, int]:
    figures = Counter(dict.fromkeys(("new_files", "bad_files", "new_rows", "known_rows"), 0))
    if arrived is not None:
        for role in arrived.roles:
            figures.update(_figures_of(arrived, role))
    return dict(figures)


def _figures_of(arrived: Arrived, role: str) -> dict[str, int]:
    return {
        "new_files": sum(each.role == role for each in arrived.new),
        "bad_files": sum(each.role == role for each in arrived.bad),
        "new_rows": len(arrived.roles[role].rows),
        "known_rows": arrived.roles[role].known,
    }


def _told_bad(bad: Sequence[str]) -> str:
    shown = "; ".join(bad[:_SHOWN])
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"in quarantine {'is' if len(bad) == 1 else 'are'} {counted(len(bad), 'file')}: {shown}{more}"


class Intake:
    """What a night takes in."""

    def __init__(
        self,
        context: Context,
        config: PipelineConfig,
        template: PromptTemplate,
        given: Mapping[str, ReadSet[Any]],
        as_of: str | None,
        *,
        sizes: Sizes,
        reads: Sequence[str],
    ) -> None:
        """Read what has arrived.

        Args:
            context: the open context.
            config: the preset with the run's parameters.
            template: of the model that learns from it.
            given: sets that do not grow.
            as_of: the parameter of this name.
            sizes: what is asked for.
            reads: splits that the run reads.

        Raises:
            DataError: a source cannot be reached, or too many files are bad.
        """
        from rlhf_core.data.arriving import join, read_new, refuse_too_many_bad

        assert config.data.arrivals is not None
        self._context, self._config, self._reads = context, config, reads
        self.night = settle_night(context, config, as_of)
        self.ledger = _ledger(context, self.night)
        self._marks, pending = _left(context, self.night)
        access = data_access(context.settings)
        self.arrived = read_new(config.data, self.ledger, self._marks, access, template, as_of=self.night.as_of)
        refuse_too_many_bad(self.arrived, config.data.arrivals)
        past = self.ledger.model_copy(update={"nights": self._nights})
        self.tonight: Tonight = join(
            config,
            past,
            self.arrived,
            pending,
            self._learnt,
            given,
            sizes=sizes,
            reads=reads,
            as_of=self.night.as_of,
        )
        self.sets = self.tonight.sets(self.arrived, given)

    @cached_property
    def _nights(self) -> tuple[PastNight, ...]:
        before = self.night.before
        return () if before is None else self.ledger.goes_on_as(before.uri, before.digest)

    def _learnt(self, night: PastNight, role: str) -> list[Any] | None:
        from rlhf_core.data.arriving import rows_from_jsonl

        reference = ArtifactRef(night.dataset, night.digest)
        if not self._context.store.holds(reference):
            return None
        return rows_from_jsonl(role, _body(self._context, self._context.store.resolve(reference), _learnt(role)))

    @property
    def inputs(self) -> list[str]:
        """What names tonight's dataset besides its rows: the ledger before it, the files, and what is not learnt."""
        from rlhf_core.data.arriving import LEARNING

        before = self.night.before
        files = sorted(f"{each.role} {each.digest} {each.fault or ''}" for each in self.arrived.files)
        left = [f"not learnt: {split}" for split in LEARNING if split not in self._reads]
        return [f"ledger {before.digest if before else ''}", *files, *left]

    @property
    def learns(self) -> bool:
        """Whether the run learns anything, so that it may wait for more rows."""
        from rlhf_core.data.arriving import LEARNING

        return bool(set(LEARNING) & set(self._reads))

    def nothing(self) -> NothingNew | None:
        """Return why there is too little to begin with; None if there is enough, or nothing is to be learnt."""
        arrivals, count = self._config.data.arrivals, self.tonight.to_learn
        assert arrivals is not None
        if count >= arrivals.min_rows or not self.learns:
            return None
        figures = _figures(self.arrived)
        if count:
            why = f"{counted(count, 'row')} to learn, fewer than data.arrivals.min_rows = {arrivals.min_rows}"
        elif self.tonight.for_others:
            why = f"nothing to learn tonight: {_for_others(self.tonight)}"
        elif figures["new_rows"]:
            why = f"{counted(figures['new_rows'], 'new row')}, held out for the evaluation"
        elif figures["known_rows"]:
            rows = f"{counted(figures['known_rows'], 'row')}, which earlier nights had"
            why = f"{counted(figures['new_files'], 'new file')} with {rows}"
        else:
            why = ""
        return nothing_new(self._context, self.night, self.ledger, why, self.arrived)

    def too_few(self, error: TooFewRowsError) -> NothingNew:
        """Return why a night ends whose new rows are too few for its stages."""
        why = f"{counted(self.tonight.to_learn, 'row')} to learn, which wait for more: {error}"
        return nothing_new(self._context, self.night, self.ledger, why, self.arrived)

    def files(self, made: Prepared) -> tuple[dict[str, Path | bytes], dict[str, int]]:
        """Return what the dataset holds of the arrivals, and its figures of them."""
        from rlhf_core.data.arriving import Ledger, rows_to_jsonl, settle_rows

        settled = settle_rows(self._config, self.tonight, made, reads=self._reads)
        learnt = {role: len(rows) for role, rows in settled.learnt.items()}
        figures = _figures(self.arrived) | {
            "learnt_rows": sum(learnt.values()),
            "old_rows": sum(map(len, self.tonight.old.values())),
            "waiting_rows": settled.waiting,
            OF_NIGHT: is_night(self._reads),
        }
        ledger = Ledger(
            as_of=self.night.as_of,
            files=(*self.ledger.files, *self.arrived.files),
            nights=self._nights,
            learnt=learnt,
            waiting=settled.waiting,
            before=self.night.before and self.night.before.uri,
        )
        files: dict[str, Path | bytes] = {
            LEDGER: ledger.model_dump_json(indent=1).encode("utf-8", "surrogatepass"),
            MARKS: self._marks.with_new(self.arrived.marks),
        }
        files |= {_learnt(role): rows_to_jsonl(role, rows) for role, rows in settled.learnt.items()}
        files |= {_pending(role): rows_to_jsonl(role, rows) for role, rows in settled.pending.items()}
        return files, figures

    def say(self, figures: Mapping[str, int]) -> None:
        """Tell people who follow the run what has arrived."""
        since = "first night" if self.night.before is None else f"since {self.ledger.as_of:%Y-%m-%d %H:%M} UTC"
        parts = [
            f"{since}: {counted(figures['new_files'], 'new file')}, {counted(figures['new_rows'], 'new row')}",
            f"{counted(self.ledger.waiting, 'row')} that waited" if self.ledger.waiting else "",
            f"{figures['known_rows']} known to earlier nights" if figures["known_rows"] else "",
            f"{figures['old_rows']} of earlier nights beside them" if figures["old_rows"] else "",
            f"{figures['waiting_rows']} wait for a later night" if figures["waiting_rows"] else "",
        ]
        say("data", ", ".join(filter(None, parts)))
        for told in self.remarks():
            say("data", told)

    def remarks(self) -> list[str]:
        """Return what a person should know of what was not taken in."""
        found, tonight = self.arrived, self.tonight
        told = [_told_bad([each.told for each in found.bad])] if found.bad else []
        if found.later:
            told.append(
                f"left to the next night, since they may still be written to: {', '.join(found.later[:_SHOWN])}"
            )
        if tonight.clashing:
            told.append(f"left out {counted(tonight.clashing, 'row')} whose prompt stands in another set")
        if tonight.for_others:
            told.append(_for_others(tonight))
        if tonight.unnamed:
            rows = (f"{len(rows)} of data.{role}" for role, rows in tonight.unnamed.items())
            told.append(f"kept for a night whose configuration names them again: {', '.join(rows)}")
        if tonight.instead:
            told.append(f"nothing has arrived for {', '.join(tonight.instead)}: rows of earlier nights serve")
        if tonight.gone:
            told.append(f"no longer in the store, so that nothing of them is learnt again: {', '.join(tonight.gone)}")
        return told

    def report(self, figures: Mapping[str, int]) -> str:
        """Return the part of the dataset's report that tells of what has arrived."""
        words = {
            "new_files": "new files",
            "bad_files": "of them in quarantine",
            "new_rows": "new rows",
            "known_rows": "rows that earlier nights had",
            "learnt_rows": "rows learnt for the first time",
            "old_rows": "rows of earlier nights beside them",
            "waiting_rows": "rows that wait for a later night",
        }
        rows = [[told, f"{figures[name]:,}"] for name, told in words.items()]
        before = self.night.before.uri if self.night.before else "none"
        parts = ["## What has arrived", f"Up to {self.night.as_of:%Y-%m-%d %H:%M} UTC; the night before: {before}."]
        parts.append(table(["", "count"], rows))
        parts += ["\n".join(f"* {prose(each.told)}" for each in self.arrived.bad)]
        parts += [prose(told) for told in self.remarks() if not told.startswith("in quarantine")]
        return "\n".join(f"\n{part}" for part in parts if part) + "\n"


def _for_others(tonight: Tonight) -> str:
    rows = (f"{counted(count, 'row')} for {_LEARNS[split]}" for split, count in tonight.for_others.items())
    return f"what this run does not train has {', '.join(rows)}, which wait for a night that does"


def _pending(role: str) -> str:
    return f"{FOLDER}/pending-{role}.jsonl"


def _learnt(role: str) -> str:
    return f"{FOLDER}/learnt-{role}.jsonl"


def _ledger(context: Context, night: Night) -> Ledger:
    from rlhf_core.data.arriving import Ledger

    if night.before is None:
        return Ledger(as_of=night.as_of)
    return _ledger_of(context, context.store.resolve(ArtifactRef(night.before.uri, night.before.digest)))


def _ledger_of(context: Context, dataset: Manifest) -> Ledger:
    from pydantic import ValidationError

    from rlhf_core.data.arriving import Ledger

    try:
        return Ledger.model_validate(context.store.read_json(dataset, LEDGER))
    except ValidationError as error:
        where = f"{LEDGER} of {dataset.uri}"
        raise StoreError(
            f"{where}, which the alias {LEARNT!r} names, cannot be read: {error.errors()[0]['msg']}"
        ) from None


def _body(context: Context, dataset: Manifest | None, path: str) -> bytes:
    if dataset is None or path not in {entry.path for entry in dataset.files}:
        return b""
    return context.store.read_bytes(dataset, path)


def _left(context: Context, night: Night) -> tuple[RowMarks, dict[str, list[Any]]]:
    """Return the marks of all rows that earlier nights had, and by role the rows that the last one left."""
    from rlhf_core.data.arriving import ARRIVING, RowMarks, rows_from_jsonl

    before = None if night.before is None else context.store.resolve(night.before.uri)
    marks = RowMarks(b"" if before is None else context.store.read_bytes(before, MARKS))
    return marks, {role: rows_from_jsonl(role, _body(context, before, _pending(role))) for role in ARRIVING}


@dataclass(frozen=True)
class Foreseen:
    """What a night would take in now."""

    project: str
    night: Night
    since: datetime | None
    """Up to when the last night took what had arrived; None: no night of the project has ended."""
    arrived: Arrived
    waiting: dict[str, int]
    """By role, rows that the last night left to this one."""
    sets: dict[str, ReadSet[Any]]
    """The new rows by role."""
    refused: str | None
    """Why the night would stop at once; None if it would not."""

    @property
    def roles(self) -> dict[str, dict[str, int]]:
        """Figures by role."""
        return {role: _figures_of(self.arrived, role) | {"waiting_rows": self.waiting[role]} for role in self.sets}


def foresee(context: Context, config: PipelineConfig, template: PromptTemplate | None) -> Foreseen:
    """Return what a night that began now would take in. Nothing is stored.

    Args:
        context: the open context.
        config: of a run whose data arrive.
        template: as `read_set` takes it.

    Raises:
        ConfigError: no source grows.
        DataError: one cannot be reached.
    """
    from rlhf_core.data.arriving import as_set, count_waiting, read_new, refuse_too_many_bad

    assert config.data.arrivals is not None
    _refuse_without_sources(config)
    night = _night(context, config, datetime.now(UTC))
    ledger, (marks, left), refused = _ledger(context, night), _left(context, night), None
    arrived = read_new(config.data, ledger, marks, data_access(context.settings), template, as_of=night.as_of)
    try:
        refuse_too_many_bad(arrived, config.data.arrivals)
    except DataError as error:
        refused = str(error)
    return Foreseen(
        config.name,
        night,
        ledger.as_of if night.before is not None else None,
        arrived,
        {role: count_waiting(rows, config.data) for role, rows in left.items()},
        {role: as_set(role, new, new.rows) for role, new in arrived.roles.items()},
        refused,
    )


def count_as_learnt(config: PipelineConfig, dataset: StageResult) -> None:
    """Have the next night go on from this one's ledger, where data arrive: its policy is made and decided on."""
    if config.data.arrivals is not None:
        _count_as_learnt(dataset)


@stage_task(name="count-as-learnt")
def _count_as_learnt(dataset: StageResult) -> None:
    """Move the alias `learnt`, once for a run, unless another night has moved it since this one began."""
    context = open_context()
    manifest = context.store.resolve(ArtifactRef(dataset.uri, dataset.digest))
    if LEDGER not in {entry.path for entry in manifest.files}:
        return
    before, who = _ledger_of(context, manifest).before, f"run {context.flow_run}"
    alias = context.store.aliases("dataset", manifest.name).get(LEARNT)
    moves = [] if alias is None else [(move.who, move.uri) for move in alias.history]
    if alias is not None and alias.uri == manifest.uri:
        return
    if context.flow_run and (who, manifest.uri) in moves:  # a person has taken the night back since
        return
    leave_if_taken_over()
    try:
        context.store.set_alias(manifest.uri, LEARNT, why="a night learnt it", who=who, expected=before)
    except StoreError:
        now = context.store.alias("dataset", manifest.name, LEARNT)
        if now == before:
            raise
        say("data", f"{now} was learnt meanwhile: the rows of {manifest.uri} are new to the next night once more")


@stage_task(name="report")
def write_nothing_new(config: PipelineConfig, found: NothingNew) -> str:
    """Store that a night had nothing to learn, and put that on its page; return the reference of the `run` artifact."""
    context = open_context()
    bad = "\n".join(f"* {prose(told)}" for told in found.bad)
    text = f"# {config.name}: nothing to learn on {found.day}\n\n{prose(found.told, 1500)}\n\n{bad}".rstrip() + "\n"
    leave_if_taken_over()
    reference = context.store.commit(
        "run",
        config.name,
        {"report.md": text.encode("utf-8", "replace"), "report.json": json.dumps(found.model_dump()).encode()},
        key=context.flow_run,
        config=config.model_dump(mode="json"),
        metrics={"promoted": False, "night": found.day, "reason": found.told, "nothing_new": True, **found.figures},
        flow_run=context.flow_run,
    )
    _show(reference.uri, text)
    return reference.uri


@only_shows("a page in Prefect", deadline_s=DEADLINE_S)
def _show(reference: str, text: str) -> None:
    show_markdown("report", reference, text, seen_at_once=f"Nothing to learn, stored as {reference}")
