"""The books of a year: what became of every night that was due, and of the champion's line.

Due times come from the schedules' arithmetic, outcomes from the server, what was made from the store, and who was at
work from the processes' own notes: four witnesses, of whom none knows the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from infra.artifacts import ArtifactStore, Manifest
from infra.artifacts.aliases import Alias
from infra.services.automations import SKIPPED
from tests.night.notes import AFTER, Note
from tests.night.sites import Site

Outcome = Literal["completed", "skipped", "failed", "lost"]
ONCE = ("sft", "policy", "run")
"""Kinds of which a night makes one each."""
_TOLERANCE_S = 0.5
_LEAST_WORDS = 5
"""Fewer are no sentence."""
_PROMOTED = "promoted: "
_BY_ANOTHER, _FOR_A_LATER = "skipped: the run '", "skipped: it was due at "
"""The other run's name is the first word in quotes."""


@dataclass(frozen=True)
class Night:
    """One night that was due."""

    site: str
    due: float
    outcome: Outcome
    says: str
    run: str = ""
    starts: int = 0
    began: float | None = None
    ended: float | None = None

    @property
    def start(self) -> float:
        """When it was due or began: a worker lets a run begin up to a second before its time."""
        return min(self.due, self.began or self.due)

    @property
    def end(self) -> float:
        """When it was over; at once, if it never began."""
        return self.ended or self.began or self.due


@dataclass
class Books:
    """All nights of a year, and what is wrong with it."""

    nights: list[Night] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    promotions: int = 0

    def count(self) -> Counter[str]:
        """Return how many nights had which outcome."""
        return Counter(night.outcome for night in self.nights)

    def struck(self, site: str | None, start: float, end: float) -> list[Night]:
        """Return the nights that were due or at work in a time.

        Args:
            site: of this one alone; None: of all.
            start: of the time.
            end: of the time.
        """
        return [
            night
            for night in self.nights
            if (site is None or night.site == site) and night.start <= end and max(night.end, night.due) >= start
        ]


def balance(
    sites: Sequence[Site],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    store: ArtifactStore,
    aliases: Mapping[str, Alias | None],
    *,
    may_fail: Iterable[str] = (),
) -> Books:
    """Return the books.

    Args:
        sites: whose nights.
        runs: by site, as the server knows them.
        store: what was made.
        aliases: the champion of each site.
        may_fail: beginnings of the sentences with which a night may fail.
    """
    books, allowed = Books(), tuple(may_fail)
    for site in sites:
        own = [night for due in site.due() for night in [_night(site, due, runs[site.name], allowed, books)]]
        books.nights += own
        books.faults += _strangers(site, runs[site.name])
        books.faults += _made(site, store, {night.run: night for night in own})
        books.faults += _hands(site, list(site.desk.notes()))
        books.faults += _line(site, store, aliases[site.name], own)
        books.faults += _skips(own, runs[site.name])
        books.promotions += len(found.history) if (found := aliases[site.name]) else 0
    books.faults += [
        f"{each.site}, {_clock(each.due)}: lost: {each.says}" for each in books.nights if each.outcome == "lost"
    ]
    return books


def _night(site: Site, due: float, runs: Sequence[Mapping[str, Any]], may_fail: tuple[str, ...], books: Books) -> Night:
    found = [run for run in runs if abs(_seconds(run["expected_start_time"]) - due) < _TOLERANCE_S]
    if not found:
        return Night(site.name, due, "lost", "no run was ever made for it")
    if len(found) > 1:
        books.faults.append(f"{site.name}, {_clock(due)}: {len(found)} runs for one night")
    run = found[0]
    kind, name, says = run["state"]["type"], run["state"]["name"], str(run["state"]["message"] or "")
    facts = {
        "run": str(run["id"]),
        "starts": int(run["run_count"]),
        "began": _seconds(run["start_time"]) if run["start_time"] else None,
        "ended": _seconds(run["end_time"]) if run["end_time"] else None,
    }
    told = len(says.split()) >= _LEAST_WORDS
    if kind == "COMPLETED" and name == "Completed":
        return Night(site.name, due, "completed", says, **facts)
    if name == SKIPPED and says.startswith((_BY_ANOTHER, _FOR_A_LATER)):
        return Night(site.name, due, "skipped", says, **facts)
    if told and kind in ("FAILED", "CRASHED") and says.startswith(may_fail):
        return Night(site.name, due, "failed", says, **facts)
    return Night(site.name, due, "lost", f"{name} after {facts['starts']} starts: {says[:200]}", **facts)


def _strangers(site: Site, runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return runs that no night was due for."""
    due = site.due()
    return [
        f"{site.name}: run {run['name']} at {run['expected_start_time']} was never due"
        for run in runs
        if run["auto_scheduled"]
        and site.first_s <= _seconds(run["expected_start_time"]) <= site.last_s
        and not any(abs(_seconds(run["expected_start_time"]) - each) < _TOLERANCE_S for each in due)
    ]


def _made(site: Site, store: ArtifactStore, nights: Mapping[str, Night]) -> list[str]:
    """Return what a night made twice, or did not make though it is completed."""
    made: dict[str, Counter[str]] = defaultdict(Counter)
    for kind in ONCE:
        for manifest in store.list(kind, site.name):
            made[str(manifest.flow_run)][kind] += 1
    for manifest in store.list("dataset", site.name):
        made[str(manifest.flow_run)]["dataset"] += 1
    faults = []
    for run, counts in made.items():
        twice = [f"{number} of {kind}" for kind, number in counts.items() if number > 1]
        if twice:
            faults.append(f"{site.name}, run {run}: one night made {', '.join(twice)}")
        night = nights.get(run)
        if counts["policy"] and night is not None and night.outcome == "skipped":
            faults.append(f"{site.name}, run {run}: a skipped night made a policy")
    for run, night in nights.items():
        missing = [kind for kind in (*ONCE, "dataset") if not made[run][kind]]
        if night.outcome == "completed" and missing:
            faults.append(f"{site.name}, {_clock(night.due)}: completed, but it made no {', '.join(missing)}")
    return faults


def _hands(site: Site, notes: Sequence[Note]) -> list[str]:
    """Return processes that were at work side by side: one came back after another had begun."""
    faults, gone, last = [], set(), None
    for note in notes:
        who = (note.run, note.pid)
        if who == last:
            continue
        if who in gone:
            faults.append(
                f"{site.name}: process {note.pid} of run {note.run} was at work ({note.stage}, {note.what}) after "
                f"another had begun, {last}"
            )
        if last is not None:
            gone.add(last)
        last = who
    return faults


def _line(site: Site, store: ArtifactStore, alias: Alias | None, nights: Sequence[Night]) -> list[str]:
    """Return where the champion's line has a gap or a fork: each came from the one before it, and none is missing.

    A night that failed may have promoted its policy before.
    """
    line = [] if alias is None else alias.history
    told = [night.says.split()[1] for night in nights if night.says.startswith(_PROMOTED)]
    missing = set(told) - {move.uri for move in line}
    faults = [f"{site.name}: a night promoted {uri}, which was never champion" for uri in sorted(missing)]
    if not told:
        faults.append(f"{site.name}: no night has promoted anything")
    before = None
    for move in line:
        parent = _champion_behind(store, store.resolve(move.uri))
        if parent != before:
            faults.append(f"{site.name}: {move.uri} became champion after {before}, but came from {parent}")
        before = move.uri
    return faults


def _champion_behind(store: ArtifactStore, policy: Manifest) -> str | None:
    """Return the policy that a night's SFT model went on from."""
    [model] = [parent for parent in policy.parents if parent.uri.startswith("sft/")]
    return str(store.resolve(model.uri).metrics[AFTER]) or None


def _skips(nights: Sequence[Night], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return nights that were skipped although the run that they name was not at work, or was skipped itself.

    A night may also leave its place to a later one that was due by then.
    """
    faults = []
    for night in nights:
        if night.outcome != "skipped":
            continue
        ended = night.ended or night.due
        other = night.says.split("'")[1]
        if night.says.startswith(_FOR_A_LATER):
            due = [_seconds(run["expected_start_time"]) for run in runs if run["name"] == other]
            if not any(night.due < each <= ended for each in due):
                faults.append(f"{night.site}, {_clock(night.due)}: skipped for a later night that was not due")
            continue
        others = [
            run
            for run in runs
            if run["name"] == other
            and run["state"]["name"] != SKIPPED
            and run["start_time"]
            and _seconds(run["start_time"]) <= ended + _TOLERANCE_S
            and (not run["end_time"] or _seconds(run["end_time"]) >= night.start - _TOLERANCE_S)
        ]
        if not others:
            faults.append(f"{night.site}, {_clock(night.due)}: skipped, though no other was at work: {night.says}")
    return faults


def read_champion(store: ArtifactStore, site: str) -> Alias | None:
    """Return a site's champion with its history."""
    from infra.artifacts.aliases import read_alias

    return read_alias(store._backend, "policy", site, "champion")


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")
