"""From the sets that a configuration names to splits, pairs and a report; or one sentence on why that cannot be."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.config import DataConfig
from rlhf_core.config.data import SplitsConfig
from rlhf_core.config.sizes import Supply, as_they_are, settle, shortage, split_key
from rlhf_core.data.gym import draw_problems
from rlhf_core.data.linting import lint_sets
from rlhf_core.data.preparing.lengths import PAIRS, Fitting, TooLong, too_long
from rlhf_core.data.preparing.report import (
    MOST_REJECTED,
    DataReport,
    RowsReport,
    describe_pairs,
    describe_problems,
    describe_set,
)
from rlhf_core.data.preparing.requirements import VerifierCheck, ask_verifier
from rlhf_core.data.preparing.splits import (
    DEVELOPMENT,
    EVALUATION,
    SPLITS,
    TASK,
    Pool,
    Sides,
    choose_pools,
    file_pool,
    for_development,
    in_hash_order,
    next_window,
    place_of,
    refuse_overlap,
    splits_from,
)
from rlhf_core.data.problems import has_response_to_learn, problem_key
from rlhf_core.data.reading import detect_role, possible_roles, read_set
from rlhf_core.errors import DataError, Fault, TooFewRowsError, refuse_together

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rlhf_core.config import PipelineConfig, SourceConfig
    from rlhf_core.config.sizes import Sizes
    from rlhf_core.data.linting import Finding
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.preparing.lengths import TokenMeter
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading import Access, ReadSet, Role
    from rlhf_core.data.reading.formats import Part
    from rlhf_core.data.template import PromptTemplate

ROLES: tuple[Role, ...] = ("problems", "prompts", "demonstrations", "preferences")
SOURCES = (*ROLES, "evaluation")
"""The keys of the configuration that name sets."""
_OF_A_TASK = "reasoning_gym:"
TASK_NIGHTS = 10
"""So many nights' problems of a generated task are held out where they rotate."""
IN_TIME = 1 << 40
"""Rows that a set that grows may have some day: more than any split wants."""
MARGIN, MOST = 1.1, 8
"""So many times the problems that fill every split on average are drawn: at first, and at most (some do not fit)."""


def read_sets(config: DataConfig, access: Access, template: PromptTemplate | None) -> dict[str, ReadSet[Any]]:
    """Return the sets by the configuration's key; those that it does not name are not among them.

    Args:
        config: names them.
        access: how they are reached.
        template: of the model that learns from them, as `read_set` takes it.

    Raises:
        DataError: as `read_set`.
    """
    sets: dict[str, ReadSet[Any]] = {}
    for role in ROLES:
        sources = getattr(config, role)
        if sources:
            sets[role] = read_set(sources, role, access=access, bad_rows=config.bad_rows, template=template)
    if config.evaluation:
        role = detect_role(config.evaluation[0], access)
        sets["evaluation"] = read_set(
            config.evaluation, role, access=access, bad_rows=config.bad_rows, template=template
        )
    return sets


def set_digests(sets: Mapping[str, ReadSet[Any]]) -> dict[str, str]:
    """Return what names the content of each set."""
    return {role: read.digest for role, read in sets.items()}


def role_of(source: SourceConfig, config: DataConfig, access: Access, part: Part | None = None) -> Role:
    """Return the role of a source that replaces a configuration's own sources.

    Where the configuration has sets of one role alone and the rows have that role's form, it is that role: GSM8K's rows
    are demonstrations to a run that learns from demonstrations. Else it is the first of the possible roles.

    Args:
        source: the set.
        config: says which roles there are.
        access: how the set is reached.
        part: which of its files is looked at; None takes the first.

    Raises:
        DataError: if it cannot be read, or its rows are of no form of any role.
    """
    roles = possible_roles(source, access, part)
    used = [role for role in ROLES if getattr(config, role)]
    alone = used[0] if len(used) == 1 and config.task is None else None
    return alone if alone in roles else roles[0]


def with_source(config: DataConfig, source: SourceConfig, role: Role) -> DataConfig:
    """Return the configuration with one source in place of the task and of all sources."""
    fields = config.model_dump() | dict.fromkeys(SOURCES, ()) | {"task": None, "task_parameters": {}, role: (source,)}
    if (config.verifier or "").startswith(_OF_A_TASK):
        fields["verifier"] = None  # it scores by the records of a task that is no longer there
    return DataConfig.model_validate(fields)


@dataclass(frozen=True)
class Prepared:
    """What the stages learn from and are measured on."""

    splits: dict[str, list[Problem]]
    """Under "sft", "preferences", "ppo" and "evaluation", and "development" where one is asked for; no prompt is in two
    of them."""
    pairs: tuple[PreferencePair, ...] | None
    """Preference pairs, none of a prompt that is in a split; None where none were given."""
    report: DataReport
    sizes: SplitsConfig
    """The sizes of the splits; a split without a pool keeps the size that was asked for."""
    faults: tuple[Fault, ...]
    """Sizes that the user set and that exclude each other; the splits are as the overrides in here make them."""
    for_all: bool
    """Whether every stage has something: flows that read other splits prepare the same."""
    heldout: int
    """How many problems the evaluation is drawn from."""
    until: str | None
    """Where the held-out problems of tonight end, if they rotate."""
    waiting: frozenset[str] = frozenset()
    """Keys of prompts that a split could have and has no place for."""
    dropped: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """By set, places of the rows that the linter dropped."""


def prepare(
    config: PipelineConfig,
    sets: Mapping[str, ReadSet[Any]],
    *,
    meter: TokenMeter | None,
    allowed_modules: Sequence[str] = (),
    sizes: Sizes | None = None,
    reads: Sequence[str] = SPLITS,
    last: Collection[str] = (),
    after: str | None = None,
    grows: Collection[str] = (),
    earlier: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
) -> Prepared:
    """Return every stage's rows.

    What is too long for its stage is left out before the splits are filled, where data.too_long says so; where it
    does not, `refuse_unfit` refuses what a run would read.

    Args:
        config: sources, sizes, limits and seed; with the sets, all that the result depends on.
        sets: what `read_sets` returned.
        meter: counts tokens as the model that will read them does; None measures no lengths and asks no verifier.
        allowed_modules: from which a verifier may be taken by path.
        sizes: which sizes may follow the data; None keeps all as they are, and refuses too few rows at once.
        reads: splits that the run reads; the others may come to nothing where there is no room.
        last: keys of prompts that take only the places which all others leave.
        after: where the last night's held-out problems ended; None: they do not rotate.
        grows: keys of the sets that have more rows some other night; where there are any, faults are refused at once.
        earlier: by key of a set, and by where they are, rows that were linted before: the linter compares with them.

    Raises:
        TooFewRowsError: if there is too little, and more rows would help.
        DataError: if no number of rows would help, sets share prompts, the verifier accepts nothing, or the linter
            finds what data.lint refuses.
        ConfigError: if nothing says how a prompt is put to the model.
    """
    asked = sizes or as_they_are(config)
    sides = sides_of(config, sets, asked)
    sets, findings, dropped = lint_sets(
        sets, config, meter, is_held_out=lambda name, key: sides.of_prompt(name, key) == EVALUATION, earlier=earlier
    )
    pool_of, fitting = choose_pools(config.data, sets), Fitting(config, meter)
    pools = {name: file_pool(name, read) for name, read in sets.items()}
    if TASK in pool_of.values():
        given = {problem.key for pool in pools.values() for problem in pool.rows}
        pools[TASK] = draw_task(config, Fitting(config, meter), pool_of, sides, given=given)
    if "sft" in pool_of and not any(map(has_response_to_learn, pools[pool_of["sft"]].rows)):
        del pool_of["sft"]
    uses = {name: splits_from(name, pool_of) for name in pools}
    refuse_overlap(list(pools.values()), {name: _uses(name, splits) for name, splits in uses.items()})
    usable = {name: _usable(pool, uses[name], fitting, config.seed, last) for name, pool in pools.items() if uses[name]}
    parts = {name: sides.parted(pool) for name, pool in usable.items()}
    heldout = parts[pool_of[EVALUATION]]
    development, heldout[EVALUATION] = for_development(heldout[EVALUATION], config.data.splits)
    supplies = {
        name: _supply(pool, uses[name], parts[name], sides, "preferences" in sets) for name, pool in usable.items()
    }
    settled = settle(asked, [*supplies.values()], reads=reads)
    if grows and (settled is None or settled.complaints):
        in_time = [_in_time(each, name, sides) if name in grows else each for name, each in supplies.items()]
        _refuse_what_no_rows_help(asked, in_time, reads)
    if settled is None:
        left_out = "; ".join(f"{each.longer} are left out by {each.key} = {each.limit}" for each in fitting.left_out)
        raise TooFewRowsError(shortage(asked, [*supplies.values()], reads) + (f" ({left_out})" if left_out else ""))
    filled = SplitsConfig(
        **{split: settled.values[split_key(split)] for split in SPLITS}, development=config.data.splits.development
    )
    splits = {
        split: parts[pool_of[split]][split][: getattr(filled, split)] if split in pool_of else [] for split in SPLITS
    }
    waiting = frozenset(
        row.key
        for name, sided in parts.items()
        for split in SPLITS  # one that has no pool tonight, as its rows cannot be ranked, keeps its rows for later
        for row in sided[split][getattr(filled, split) if pool_of.get(split) == name else 0 :]
    )
    if config.data.splits.development:
        splits[DEVELOPMENT] = development
    splits[EVALUATION], until = _asked_tonight(heldout[EVALUATION], filled.evaluation, after)
    faults = [Fault(each, settled.instead) for each in settled.complaints]
    if sizes is None or grows:
        refuse_together(faults, TooFewRowsError)
    pairs = None
    if "preferences" in sets:
        served = [sides.of_prompt("preferences", problem_key(pair.prompt)) for pair in sets["preferences"].rows]
        learnt = [pair for pair, side in zip(sets["preferences"].rows, served, strict=True) if side == PAIRS]
        pairs = tuple(fitting.pairs(learnt))
    verifier_check = None
    if meter is not None:
        verifier_check = ask_verifier(splits, config, meter.template, allowed_modules=allowed_modules)
    pool_of |= {DEVELOPMENT: pool_of[EVALUATION]} if development else {}
    origins = {split: f"{pools[name]}{_held_out(parts[name], uses[name])}" for split, name in pool_of.items()}
    if "preferences" in sets:
        out = _held_out({EVALUATION: [side for side in served if side == EVALUATION]}, uses["preferences"])
        origins[PAIRS] = f"data.preferences{out}"
    described, exceeding = _describe(config, splits, pairs, origins, meter)
    too_long = (*fitting.left_out, *exceeding)
    report = _report(config, sets, described, too_long, verifier_check, findings)
    return Prepared(
        splits,
        pairs,
        report,
        filled,
        tuple(faults),
        settled.for_all,
        len(heldout[EVALUATION]),
        until,
        waiting,
        dropped,
    )


def sides_of(config: PipelineConfig, given: Collection[str], sizes: Sizes) -> Sides:
    """Return what each prompt of a run may serve.

    Args:
        config: the preset.
        given: keys of the sets that the run has.
        sizes: what is asked for, in proportion to which the stages share a set.
    """
    wishes = {split: sizes.wanted[split_key(split)] for split in SPLITS}
    return Sides.of(config.data, given, wishes, pairs=config.reward_model.pairs)


def _asked_tonight(heldout: Sequence[Problem], size: int, after: str | None) -> tuple[list[Problem], str | None]:
    """Return the problems of the evaluation, and where they end if they rotate."""
    if after is None or size == 0:
        return list(heldout[:size]), after
    window = next_window(heldout, size, after)
    return window, place_of(window[-1])


def draw_task(
    config: PipelineConfig, fitting: Fitting, pool_of: Mapping[str, str], sides: Sides, *, given: Collection[str]
) -> Pool:
    """Return problems of the configuration's task: so many that each split has what it wants on its side.

    Problems that a given set has are left out. The order is the one in which problems are drawn, so that the first ones
    of a side stay the same where more are wanted.

    Args:
        config: the task, its parameters, the sizes, and the seed.
        fitting: leaves out problems that are too long; its notes are not used.
        pool_of: which splits take of the task's problems.
        sides: which of them each problem may serve.
        given: keys of the prompts that the sets have.

    Raises:
        DataError: if the task or a parameter is unknown or refused.
    """
    data, splits = config.data, splits_from(TASK, pool_of)
    wanted = {split: getattr(data.splits, split) for split in splits if sides.part_of(TASK, split)}
    if data.rotate_evaluation and EVALUATION in wanted:
        wanted[EVALUATION] *= TASK_NIGHTS
    if EVALUATION in wanted:
        wanted[EVALUATION] += data.splits.development
    expected = max((size / sides.part_of(TASK, split) for split, size in wanted.items()), default=0)
    count, most = math.ceil(MARGIN * expected), MOST * expected
    while True:
        drawn = draw_problems(str(data.task), data.task_parameters, seed=config.seed, count=count)
        rows = [problem for problem in drawn if problem.key not in given]
        parts = sides.parted(Pool(TASK, fitting.problems(rows, splits)))
        is_filled = all(len(parts[split]) >= size for split, size in wanted.items())
        if is_filled or len(drawn) < count or count >= most:
            parameters = f" with parameters {data.task_parameters}" if data.task_parameters else ""
            around = len(drawn) - len(rows)
            less = f", less {around} that a given set has" if around else ""
            return Pool(TASK, rows, f"{data.task!r}{parameters}{less}")
        count *= 2


def _supply(
    pool: Pool, splits: tuple[str, ...], parts: Mapping[str, Sequence[Problem]], sides: Sides, feeds_pairs: bool
) -> Supply:
    names = (*splits, PAIRS) if feeds_pairs and pool.name == "preferences" else splits
    rows = {name: len(parts[name]) for name in names}
    noun = "problems" if pool.name == TASK else "prompts"
    return Supply(str(pool), len(pool.rows), rows, sides.heldout if EVALUATION in splits else 0.0, noun)


def _in_time(supply: Supply, pool: str, sides: Sides) -> Supply:
    """Return what a set has when enough has arrived: all that its splits want, where they have a share of it."""
    rows = {name: IN_TIME if sides.part_of(pool, name) else now for name, now in supply.rows.items()}
    return supply._replace(rows=rows, grows=True)


def _refuse_what_no_rows_help(asked: Sizes, in_time: Sequence[Supply], reads: Sequence[str]) -> None:
    """Refuse sizes that exclude each other, or what does not grow, however many rows there are of what does.

    Raises:
        DataError: they do.
    """
    found, told = settle(asked, in_time, reads=reads), "; to wait for more rows does not help"
    if found is None:
        raise DataError(shortage(asked, in_time, reads) + told)
    refuse_together([Fault(f"{each}{told}", found.instead) for each in found.complaints], DataError)


def _held_out(parts: Mapping[str, Sequence[Any]], splits: Sequence[str]) -> str:
    """Return what is left out of a pool that the evaluation is not drawn from, since its prompts may be held out."""
    held = 0 if EVALUATION in splits else len(parts[EVALUATION])
    return f", less {held:,} on the side of the evaluation" if held else ""


def _uses(pool: str, splits: Sequence[str]) -> list[str]:
    """Return what is drawn from a pool, in words that a user knows."""
    return [*splits, *(["the reward model"] if pool == "preferences" else [])]


def _usable(pool: Pool, splits: Sequence[str], fitting: Fitting, seed: int, last: Collection[str]) -> Pool:
    """Return the rows that a pool's splits may get, in the order in which they are drawn."""
    rows = fitting.problems(pool.rows, splits)
    ordered = rows if pool.name == TASK else sorted(in_hash_order(rows, seed), key=lambda row: row.key in last)
    return Pool(pool.name, ordered, pool.paths)


def _describe(
    config: PipelineConfig,
    splits: Mapping[str, Sequence[Problem]],
    pairs: Sequence[PreferencePair] | None,
    origins: Mapping[str, str],
    meter: TokenMeter | None,
) -> tuple[dict[str, RowsReport], list[TooLong]]:
    """Return the reports of the splits and the pairs, and what of them exceeds its limit."""
    described: dict[str, RowsReport] = {}
    found: list[TooLong | None] = []
    for name, problems in splits.items():
        lengths = meter.problems(problems) if meter is not None else []
        described[name] = describe_problems(problems, origins.get(name, ""), lengths)
        found.append(too_long(name, lengths, config, dropped=False))
    if pairs is not None:
        measured = meter.pairs(pairs) if meter is not None else []
        described[PAIRS] = describe_pairs(pairs, origins[PAIRS], measured)
        found.append(too_long(PAIRS, measured, config, dropped=False))
    return described, [each for each in found if each is not None]


def _report(
    config: PipelineConfig,
    sets: Mapping[str, ReadSet[Any]],
    described: dict[str, RowsReport],
    too_long: tuple[TooLong, ...],
    verifier_check: VerifierCheck | None,
    findings: tuple[Finding, ...],
) -> DataReport:
    rejected = [asdict(row) for read in sets.values() for row in read.rejected]
    return DataReport(
        config.name,
        config.seed,
        config.data.task,
        tuple(describe_set(role, read) for role, read in sets.items()),
        described,
        too_long,
        verifier_check,
        tuple(rejected[:MOST_REJECTED]),
        findings,
    )
