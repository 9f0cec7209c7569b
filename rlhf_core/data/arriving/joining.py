"""What a night learns: rows that have arrived or wait, with old ones beside them; and what it leaves to the next.

Held-out rows of all nights stay candidates of every evaluation, and are learnt in none.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rlhf_core.data.arriving.ledger import rows_to_jsonl
from rlhf_core.data.arriving.reading import ARRIVING
from rlhf_core.data.preferences import PreferencePair, used_pairs
from rlhf_core.data.preparing.lengths import PAIRS
from rlhf_core.data.preparing.prepare import sides_of
from rlhf_core.data.preparing.splits import is_held_out
from rlhf_core.data.problems import problem_key
from rlhf_core.data.reading import ReadSet, SourceFacts

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from rlhf_core.config import ArrivalsConfig, DataConfig, PipelineConfig
    from rlhf_core.config.sizes import Sizes
    from rlhf_core.data.arriving.ledger import Ledger, PastNight
    from rlhf_core.data.arriving.reading import Arrived, NewRows
    from rlhf_core.data.preparing import Prepared
    from rlhf_core.data.preparing.splits import Sides

Rows = dict[str, list[Any]]
"""By role."""
Learnt = Callable[["PastNight", str], "list[Any] | None"]
"""Returns what a night was the first to learn of a role; None where its dataset is no longer in the store."""
LEARNING = ("sft", "preferences", "ppo")
"""Splits that are learnt from; a reward model learns from `preferences`, given pairs too."""
ARRIVED = "what has arrived"


@dataclass
class Tonight:
    """The rows that a night may learn, and where they come from."""

    fresh: Rows
    """By role, rows that no night has learnt: new ones, those that waited, and held-out ones."""
    old: Rows
    """By role, rows that a night before has learnt."""
    last: frozenset[str]
    """Keys of the prompts of a window: they take the places that new rows leave."""
    clashing: int = 0
    """New rows that were left out for good, because another set has their prompt."""
    gone: tuple[str, ...] = ()
    """Datasets of earlier nights that are no longer in the store."""
    instead: tuple[str, ...] = ()
    """Roles of which nothing has arrived, so that old rows serve."""
    to_learn: int = 0
    """Fresh rows that a stage of this run may learn."""
    for_others: dict[str, int] = field(default_factory=dict)
    """Fresh rows that only a stage may learn which this run does not train, by split."""
    compared: dict[str, Rows] = field(default_factory=dict)
    """By role, and by where they are, rows of earlier nights with which new ones are compared."""
    unnamed: Rows = field(default_factory=dict)
    """By role, what waits or is held out of roles that the configuration does not name tonight."""

    def sets(self, arrived: Arrived, given: Mapping[str, ReadSet[Any]]) -> dict[str, ReadSet[Any]]:
        """Return the sets as a run without arrivals reads them: fresh rows first, each in its place.

        Args:
            arrived: tonight's.
            given: sets that do not grow.
        """
        rows = {role: [*self.fresh[role], *self.old[role]] for role in arrived.roles}
        return {role: as_set(role, new, rows[role]) for role, new in arrived.roles.items()} | dict(given)


def as_set(role: str, new: NewRows, rows: Sequence[Any]) -> ReadSet[Any]:
    """Return rows as a run without arrivals reads them.

    Args:
        role: what they are for.
        new: what has arrived for it.
        rows: all of them, those of earlier nights too.
    """
    digest = hashlib.sha256(role.encode() + b"\n" + rows_to_jsonl(role, rows)).hexdigest()
    arrived = {id(row) for row in new.rows}  # equal problems may differ in their demonstrations
    order = tuple(int(id(row) not in arrived) for row in rows)
    before = sum(order)
    facts = [SourceFacts(ARRIVED, tuple(new.files), "; ".join(new.forms), new.read, len(rows) - before, None)]
    if before:
        facts.append(SourceFacts("earlier nights", (), "rows that they stored", before, before, None))
    return ReadSet(
        tuple(rows),
        tuple(new.rejected),
        new.repeated + new.known,
        tuple(facts),
        digest,
        new.not_shown,
        order=order,
    )


def join(
    config: PipelineConfig,
    ledger: Ledger,
    arrived: Arrived,
    pending: Rows,
    learnt: Learnt,
    given: Mapping[str, ReadSet[Any]],
    *,
    sizes: Sizes,
    reads: Collection[str],
    as_of: datetime,
) -> Tonight:
    """Return the rows of a night.

    Args:
        config: the preset.
        ledger: of the last night, with that night among its own (`Ledger.goes_on_as`).
        arrived: what is new.
        pending: by role, what the last night held out or had no place for.
        learnt: returns what a night was the first to learn.
        given: sets that do not grow, such as one for evaluation: their prompts are learnt in no other.
        sizes: what is asked for, in proportion to which the stages share a set.
        reads: splits that the run reads.
        as_of: up to when tonight looks.
    """
    data, arrivals = config.data, config.data.arrivals
    assert arrivals is not None
    waits = {role: _still_said(role, pending.get(role, []), new.rows) for role, new in arrived.roles.items()}
    fresh = {role: [*waits[role], *new.rows] for role, new in arrived.roles.items()}
    clashing = _one_set_for_a_prompt(fresh, given)
    stages = _Stages(sides_of(config, (*fresh, *given), sizes), reads)
    to_learn = {role: [row for row in rows if stages.of(role, row) in reads] for role, rows in fresh.items()}
    past = _Past(ledger.nights, learnt, data)
    window = _window(ledger.nights, arrivals, as_of)
    begins = len(ledger.nights) - len(window)
    old: Rows = {role: past.rows(role, window) for role in fresh}
    last = frozenset(key_of(row) for rows in old.values() for row in rows)
    last -= {key_of(row) for rows in fresh.values() for row in rows}
    for role, rows in old.items():
        now = len(to_learn[role]) + len(rows)
        wanted = round(arrivals.replay / (1 - arrivals.replay) * now)
        rows.extend(past.drawn(role, ledger.nights[:begins], wanted, seed=config.seed))
    instead = [role for role in stages.roles(to_learn) if not to_learn[role] and not old[role]]
    instead = instead if any(to_learn.values()) else []
    enough = sum(data.splits.model_dump().values())
    for role in instead:
        old[role] = past.newest(role, enough)
    _one_set_for_a_prompt(old, given, besides=fresh)
    gone = tuple(sorted(past.gone))  # before more is read, only to compare with
    return Tonight(
        fresh,
        old,
        last,
        clashing,
        gone,
        tuple(role for role in instead if old[role]),
        sum(map(len, to_learn.values())),
        stages.others(fresh),
        _compared(data, arrivals, arrived, past, waits, old),
        {role: rows for role, rows in pending.items() if rows and role not in fresh},
    )


def _still_said(role: str, pending: Sequence[Any], new: Sequence[Any]) -> Sequence[Any]:
    """Return the rows that wait or are held out, less those that a new row of the same prompt corrects."""
    if role == "preferences":  # a prompt may have several pairs
        return pending
    anew = {key_of(row) for row in new}
    return [row for row in pending if key_of(row) not in anew]


def _compared(
    data: DataConfig,
    arrivals: ArrivalsConfig,
    arrived: Arrived,
    past: _Past,
    waits: Mapping[str, Sequence[Any]],
    old: Rows,
) -> dict[str, Rows]:
    """Return the rows with which new ones are compared, and which are not judged again themselves.

    They are those that were learnt last, that tonight learns again, and that wait or are held out.
    """
    if data.lint.action("repeated") == "off":
        return {}
    return {
        role: (past.last(role, arrivals.compared_rows) if new.rows else {})
        | {"what is learnt again": old[role], "what waits or is held out": [*waits[role]]}
        for role, new in arrived.roles.items()
    }


def count_waiting(rows: Iterable[Any], config: DataConfig) -> int:
    """Return how many of the rows that a night left to the next are not held out."""
    return sum(not _is_held_out(row, config) for row in rows)


class _Stages:
    """Which stage may learn a row, and whether this run trains it."""

    def __init__(self, sides: Sides, reads: Collection[str]) -> None:
        self._sides, self._reads = sides, reads

    def of(self, role: str, row: Any) -> str | None:
        """Return the split that a row may serve; None if it is held out, or serves nothing."""
        return self._split(self._sides.of_prompt(role, key_of(row)))

    def roles(self, roles: Iterable[str]) -> list[str]:
        """Return the roles from which a stage of this run learns."""
        shares = self._sides.shares
        return [
            role
            for role in roles
            if any(share and self._split(side) in self._reads for side, share in shares[role].items())
        ]

    def others(self, rows: Rows) -> dict[str, int]:
        """Return how many rows only stages may learn that this run does not train."""
        counts = Counter(self.of(role, row) for role, each in rows.items() for row in each)
        return {split: counts[split] for split in LEARNING if split not in self._reads and counts[split]}

    @staticmethod
    def _split(side: str | None) -> str | None:
        found = "preferences" if side == PAIRS else side
        return found if found in LEARNING else None


def _window(nights: Sequence[PastNight], config: ArrivalsConfig, as_of: datetime) -> Sequence[PastNight]:
    if config.window_nights is not None:
        return nights[max(0, len(nights) - config.window_nights + 1) :]
    if config.window_days is not None:
        since = as_of - timedelta(days=config.window_days)
        first = next((place for place, night in enumerate(nights) if night.as_of > since), len(nights))
        return nights[first:]
    return ()


class _Past:
    """Rows of earlier nights, less those that are held out now."""

    def __init__(self, nights: Sequence[PastNight], learnt: Learnt, config: DataConfig) -> None:
        self._nights, self._learnt, self._config = nights, learnt, config
        self.gone: set[str] = set()

    def rows(self, role: str, nights: Iterable[PastNight]) -> list[Any]:
        return [row for night in nights for row in self._of(night, role)]

    def newest(self, role: str, enough: int) -> list[Any]:
        """Return rows of the last nights, until there are enough."""
        found: list[Any] = []
        for night in reversed(self._nights):
            if len(found) >= enough:
                break
            found = self._of(night, role) + found
        return found

    def last(self, role: str, most: int) -> Rows:
        """Return the rows that were learnt last, by dataset; none from before a dataset that is gone."""
        found: Rows = {}
        for night in reversed(self._nights):
            if most <= 0:
                break
            rows = self._stored(night, role)
            if night.dataset in self.gone:
                break
            if rows:
                found[night.dataset] = rows[-most:]
            most -= len(rows)
        return found

    def drawn(self, role: str, nights: Sequence[PastNight], wanted: int, *, seed: int) -> list[Any]:
        """Return some rows of nights, each as likely as the others; another night draws others."""
        ends = list(accumulate(night.learnt.get(role, 0) for night in nights))
        total = ends[-1] if ends else 0
        draw = random.Random(f"{seed} {len(self._nights)} {role}")
        places: dict[int, list[int]] = {}
        for place in sorted(draw.sample(range(total), min(wanted, total))):
            night = bisect_right(ends, place)
            places.setdefault(night, []).append(place - (ends[night - 1] if night else 0))
        rows: list[Any] = []
        for night, chosen in places.items():  # only nights of which a row was drawn are read
            stored = self._stored(nights[night], role)
            rows += [stored[place] for place in chosen if place < len(stored)]
        return [row for row in rows if not _is_held_out(row, self._config)]

    def _of(self, night: PastNight, role: str) -> list[Any]:
        return [row for row in self._stored(night, role) if not _is_held_out(row, self._config)]

    def _stored(self, night: PastNight, role: str) -> list[Any]:
        if not night.learnt.get(role):
            return []
        found = self._learnt(night, role)
        if found is None:
            self.gone.add(night.dataset)
            return []
        return found


def key_of(row: Any) -> str:
    """Return the key of a row's prompt."""
    return problem_key(row.prompt)


def _is_held_out(row: Any, config: DataConfig) -> bool:
    return not config.evaluation and is_held_out(key_of(row), config.heldout_fraction)


def _one_set_for_a_prompt(rows: Rows, given: Mapping[str, ReadSet[Any]], besides: Rows | None = None) -> int:
    """Leave out rows whose prompt stands in a set before; return how many. A night is not stopped by a row that moved.

    Args:
        rows: by role, changed in place.
        given: sets that stand before all of them.
        besides: by role, rows that keep their prompts for their own role.
    """
    owner = {key_of(row): "" for read in given.values() for row in read.rows}
    for role in ARRIVING:
        for row in (besides or {}).get(role, ()):
            owner.setdefault(key_of(row), role)
    before = sum(map(len, rows.values()))
    for role in [each for each in ARRIVING if each in rows]:
        rows[role] = [row for row in rows[role] if owner.setdefault(key_of(row), role) == role]
    return before - sum(map(len, rows.values()))


@dataclass(frozen=True)
class Settled:
    """What became of a night's fresh rows."""

    learnt: Rows
    pending: Rows
    """Held out, or without a place tonight: no room, or no stage that learns them."""
    waiting: int
    """Of these, the rows without a place."""
    left_out: int
    """Rows that no stage can use, such as those that are too long or that the linter dropped."""


def settle_rows(config: PipelineConfig, tonight: Tonight, made: Prepared, *, reads: Collection[str]) -> Settled:
    """Return what became of each fresh row once the splits were filled.

    Args:
        config: the preset.
        tonight: the rows.
        made: what `prepare` made of them.
        reads: splits that the run reads; what stands in others waits for a run that reads them.
    """
    taken = {row.key for split in LEARNING if split in reads for row in made.splits[split]}
    waiting = made.waiting | {row.key for split in LEARNING if split not in reads for row in made.splits[split]}
    pairs = used_pairs(made.pairs or (), config.reward_model, seed=config.seed) if "preferences" in reads else ()
    used, fitting = {_said(each) for each in pairs}, {_said(each) for each in made.pairs or ()}
    learnt: Rows = {role: [] for role in tonight.fresh}
    pending: Rows = {role: [] for role in tonight.fresh} | tonight.unnamed
    counts: Counter[str] = Counter()
    counts["waiting"] = sum(count_waiting(rows, config.data) for rows in tonight.unnamed.values())
    for role, rows in tonight.fresh.items():
        for place, row in enumerate(rows):
            key = key_of(row)
            if place in made.dropped.get(role, ()):
                counts["left out"] += 1
            elif _is_held_out(row, config.data):
                pending[role].append(row)
            elif key in taken or (isinstance(row, PreferencePair) and _said(row) in used):
                learnt[role].append(row)
            elif key in waiting or (isinstance(row, PreferencePair) and _said(row) in fitting):
                pending[role].append(row)
                counts["waiting"] += 1
            else:
                counts["left out"] += 1
    return Settled(learnt, pending, counts["waiting"], counts["left out"])


def _said(pair: PreferencePair) -> tuple[str, str, str]:
    return pair.prompt, pair.chosen, pair.rejected
