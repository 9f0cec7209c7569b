"""From the sets that a configuration names to splits, pairs and a report; or one sentence on why that cannot be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config import DataConfig
from rlhf_core.config.data import SplitsConfig
from rlhf_core.config.sizes import Supply, as_they_are, settle, shortage, split_key
from rlhf_core.counting import counted
from rlhf_core.data.gym import draw_problems
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
    SPLITS,
    TASK,
    Pool,
    choose_pools,
    file_pool,
    fill_splits,
    in_hash_order,
    needed,
    refuse_overlap,
)
from rlhf_core.data.problems import has_response_to_learn, problem_key
from rlhf_core.data.reading import detect_role, possible_roles, read_set
from rlhf_core.errors import DataError, Fault, refuse_together

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rlhf_core.config import PipelineConfig, SourceConfig
    from rlhf_core.config.sizes import Sizes
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.preparing.lengths import Fitting, TokenMeter
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading import Access, ReadSet, Role
    from rlhf_core.data.template import PromptTemplate

ROLES: tuple[Role, ...] = ("problems", "prompts", "demonstrations", "preferences")
SOURCES = (*ROLES, "evaluation")
"""The keys of the configuration that name sets."""
_OF_A_TASK = "reasoning_gym:"
MOST_DRAWN = 8
"""At most so many times the problems that are needed are drawn, to replace those that cannot be taken."""


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


def role_of(source: SourceConfig, config: DataConfig, access: Access) -> Role:
    """Return the role of a source that replaces a configuration's own sources.

    Where the configuration has sets of one role alone and the rows have that role's form, it is that role: GSM8K's rows
    are demonstrations to a run that learns from demonstrations. Else it is the first of the possible roles.

    Raises:
        DataError: if it cannot be read, or its rows are of no form of any role.
    """
    roles = possible_roles(source, access)
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
    """Under "sft", "preferences", "ppo" and "evaluation"; no prompt is in two of them."""
    pairs: tuple[PreferencePair, ...] | None
    """Preference pairs, none of a prompt that is in a split; None where none were given."""
    report: DataReport
    sizes: SplitsConfig
    """The sizes of the splits; a split without a pool keeps the size that was asked for."""
    faults: tuple[Fault, ...]
    """Sizes that the user set and that exclude each other; the splits are as the overrides in here make them."""
    for_all: bool
    """Whether every stage has something: flows that read other splits prepare the same."""


def prepare(
    config: PipelineConfig,
    sets: Mapping[str, ReadSet[Any]],
    *,
    meter: TokenMeter | None,
    allowed_modules: Sequence[str] = (),
    sizes: Sizes | None = None,
    reads: Sequence[str] = SPLITS,
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

    Raises:
        DataError: if sets share prompts, there is too little, or the verifier accepts nothing.
        ConfigError: if nothing says how a prompt is put to the model.
    """
    pool_of, fitting = choose_pools(config.data, sets), Fitting(config, meter)
    pools = {name: file_pool(name, read) for name, read in sets.items()}
    wanted = {name: needed(name, pool_of, config.data.splits) for name in (*pools, TASK)}
    if wanted[TASK]:
        given = {problem.key for pool in pools.values() for problem in pool.rows}
        pools[TASK] = draw_task(config, Fitting(config, meter), wanted=wanted[TASK], given=given)
    if "sft" in pool_of and not any(map(has_response_to_learn, pools[pool_of["sft"]].rows)):
        wanted[pool_of.pop("sft")].pop("sft")
    refuse_overlap(list(pools.values()), {name: _uses(name, list(wanted[name])) for name in pools})
    usable = {name: _usable(pool, wanted[name], fitting, config.seed) for name, pool in pools.items() if wanted[name]}
    supplies = [_supply(pool, tuple(wanted[name]), feeds_pairs="preferences" in sets) for name, pool in usable.items()]
    asked = sizes or as_they_are(config)
    settled = settle(asked, supplies, reads=reads)
    if settled is None:
        left_out = "; ".join(f"{each.longer} are left out by {each.key} = {each.limit}" for each in fitting.left_out)
        raise DataError(shortage(asked, supplies, reads) + (f" ({left_out})" if left_out else ""))
    wished = SplitsConfig(**{split: settled.values[split_key(split)] for split in SPLITS})
    splits = fill_splits(usable, pool_of, wished)
    faults = [Fault(each, settled.instead) for each in settled.complaints]
    if split_key("sft") in settled.fixed and "sft" in pool_of:
        faults += _too_few_demonstrations(pools[pool_of["sft"]], len(splits["sft"]), wished.sft)
    if sizes is None:
        refuse_together(faults, DataError)
    filled = wished.model_copy(update={split: len(splits[split]) for split in pool_of})
    pairs = None
    if "preferences" in sets:
        drawn = {problem.key for problems in splits.values() for problem in problems}
        left = [pair for pair in sets["preferences"].rows if problem_key(pair.prompt) not in drawn]
        pairs = tuple(fitting.pairs(left))
    verifier_check = None
    if meter is not None:
        verifier_check = ask_verifier(splits, config, meter.template, allowed_modules=allowed_modules)
    origins = {split: str(pools[name]) for split, name in pool_of.items()}
    described, exceeding = _describe(config, splits, pairs, origins, meter)
    too_long = (*fitting.left_out, *exceeding)
    report = _report(config, sets, described, too_long, verifier_check)
    return Prepared(splits, pairs, report, filled, tuple(faults), settled.for_all)


def draw_task(config: PipelineConfig, fitting: Fitting, *, wanted: Mapping[str, int], given: Collection[str]) -> Pool:
    """Return problems of the configuration's task, more than are wanted where some are too long.

    Problems that a given set has are left out. The order is the one in which problems are drawn, so that the first ones
    stay the same where more are wanted.

    Args:
        config: the task, its parameters, and the seed.
        fitting: leaves out problems that are too long; its notes are not used.
        wanted: problems by split.
        given: keys of the prompts that the sets have.

    Raises:
        DataError: if the task or a parameter is unknown or refused.
    """
    data, total = config.data, sum(wanted.values())
    count = total
    while True:
        drawn = draw_problems(str(data.task), data.task_parameters, seed=config.seed, count=count)
        rows = [problem for problem in drawn if problem.key not in given]
        usable = fitting.problems(rows, wanted)
        if len(usable) >= total or len(drawn) < count or count >= MOST_DRAWN * total:
            parameters = f" with parameters {data.task_parameters}" if data.task_parameters else ""
            around = len(drawn) - len(rows)
            less = f", less {around} that a given set has" if around else ""
            return Pool(TASK, rows, f"{data.task!r}{parameters}{less}")
        count *= 2


def _supply(pool: Pool, splits: tuple[str, ...], *, feeds_pairs: bool) -> Supply:
    noun = "problems" if pool.name == TASK else "prompts"
    return Supply(str(pool), len(pool.rows), splits, feeds_pairs=feeds_pairs and pool.name == "preferences", noun=noun)


def _too_few_demonstrations(pool: Pool, found: int, wanted: int) -> list[Fault]:
    if found == wanted:
        return []
    sentence = (
        f"{pool} has only {counted(found, 'prompt')} left with a response or an answer to learn, but data.splits.sft "
        f"is {wanted}; lower it or give more"
    )
    return [Fault(sentence, {split_key("sft"): found} if found else {})]


def _uses(pool: str, splits: list[str]) -> list[str]:
    """Return what is drawn from a pool, in words that a user knows."""
    return splits + (["the reward model"] if pool == "preferences" else [])


def _usable(pool: Pool, splits: Mapping[str, int], fitting: Fitting, seed: int) -> Pool:
    """Return the rows that a pool's splits may get, in the order in which they are drawn."""
    rows = fitting.problems(pool.rows, splits)
    return Pool(pool.name, rows if pool.name == TASK else in_hash_order(rows, seed), pool.paths)


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
        described[PAIRS] = describe_pairs(pairs, "data.preferences", measured)
        found.append(too_long(PAIRS, measured, config, dropped=False))
    return described, [each for each in found if each is not None]


def _report(
    config: PipelineConfig,
    sets: Mapping[str, ReadSet[Any]],
    described: dict[str, RowsReport],
    too_long: tuple[TooLong, ...],
    verifier_check: VerifierCheck | None,
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
    )
