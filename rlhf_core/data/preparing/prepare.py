"""From read sets to splits, pairs and a report, or to one sentence on why not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config.data import SplitsConfig
from rlhf_core.config.sizes import Supply, as_they_are, settle, shortage, split_key
from rlhf_core.counting import counted
from rlhf_core.data.preparing.agreement import Agreement, ask_verifier
from rlhf_core.data.preparing.dealing import deal, demonstrates, hashed, needed, refuse_overlap
from rlhf_core.data.preparing.fitting import Fitting
from rlhf_core.data.preparing.limits import PAIRS, TooLong, too_long
from rlhf_core.data.preparing.pools import SPLITS, TASK, Pool, file_pool, serving
from rlhf_core.data.preparing.report import (
    MOST_REJECTED,
    DataReport,
    RowsReport,
    describe_pairs,
    describe_problems,
    describe_set,
)
from rlhf_core.data.preparing.task_problems import draw_task
from rlhf_core.data.problems import problem_key
from rlhf_core.errors import DataError, Fault, refuse_together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.config.sizes import Sizes
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.preparing.metering import TokenMeter
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading import ReadSet


@dataclass(frozen=True)
class Prepared:
    """What the stages learn from and are measured on."""

    splits: dict[str, list[Problem]]
    """Under "sft", "preferences", "ppo" and "evaluation"; no prompt is in two of them."""
    pairs: tuple[PreferencePair, ...] | None
    """Preference pairs, none of a prompt that is in a split; None where none were given."""
    report: DataReport
    sizes: SplitsConfig
    """What the splits came to; one that nothing serves keeps what was asked for."""
    faults: tuple[Fault, ...]
    """Sizes that the user set and that cannot be had together; the splits are as the overrides in here make them."""
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
    served, fitting = serving(config.data, sets), Fitting(config, meter)
    pools = {name: file_pool(name, read) for name, read in sets.items()}
    wanted = {name: needed(name, served, config.data.splits) for name in (*pools, TASK)}
    if wanted[TASK]:
        given = {problem.key for pool in pools.values() for problem in pool.rows}
        pools[TASK] = draw_task(config, Fitting(config, meter), wanted=wanted[TASK], given=given)
    if "sft" in served and not any(map(demonstrates, pools[served["sft"]].rows)):
        wanted[served.pop("sft")].pop("sft")
    refuse_overlap(list(pools.values()), {name: _uses(name, list(wanted[name])) for name in pools})
    usable = {name: _usable(pool, wanted[name], fitting, config.seed) for name, pool in pools.items() if wanted[name]}
    supplies = [_supply(pool, tuple(wanted[name]), feeds_pairs="preferences" in sets) for name, pool in usable.items()]
    asked = sizes or as_they_are(config)
    settled = settle(asked, supplies, reads=reads)
    if settled is None:
        left_out = "; ".join(f"{each.longer} are left out by {each.key} = {each.limit}" for each in fitting.left_out)
        raise DataError(shortage(asked, supplies, reads) + (f" ({left_out})" if left_out else ""))
    wished = SplitsConfig(**{split: settled.values[split_key(split)] for split in SPLITS})
    splits = deal(usable, served, wished)
    faults = [Fault(each, settled.instead) for each in settled.complaints]
    if split_key("sft") in settled.fixed and "sft" in served:
        faults += _too_few_demonstrations(pools[served["sft"]], len(splits["sft"]), wished.sft)
    if sizes is None:
        refuse_together(faults, DataError)
    dealt = wished.model_copy(update={split: len(splits[split]) for split in served})
    pairs = None
    if "preferences" in sets:
        drawn = {problem.key for problems in splits.values() for problem in problems}
        left = [pair for pair in sets["preferences"].rows if problem_key(pair.prompt) not in drawn]
        pairs = tuple(fitting.pairs(left))
    agreement = None
    if meter is not None:
        agreement = ask_verifier(splits, config, meter.template, allowed_modules=allowed_modules)
    origins = {split: str(pools[name]) for split, name in served.items()}
    described, exceeding = _describe(config, splits, pairs, origins, meter)
    too_long = (*fitting.left_out, *exceeding)
    report = _report(config, sets, described, too_long, agreement)
    return Prepared(splits, pairs, report, dealt, tuple(faults), settled.for_all)


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
    """Return what a pool serves, in words that a user knows."""
    return splits + (["the reward model"] if pool == "preferences" else [])


def _usable(pool: Pool, splits: Mapping[str, int], fitting: Fitting, seed: int) -> Pool:
    """Return the rows that any of a pool's splits may get, in the order in which they are drawn."""
    rows = fitting.problems(pool.rows, splits)
    return Pool(pool.name, rows if pool.name == TASK else hashed(rows, seed), pool.paths)


def _describe(
    config: PipelineConfig,
    splits: Mapping[str, Sequence[Problem]],
    pairs: Sequence[PreferencePair] | None,
    origins: Mapping[str, str],
    meter: TokenMeter | None,
) -> tuple[dict[str, RowsReport], list[TooLong]]:
    """Return what is told of the splits and the pairs, and what of them exceeds its limit."""
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
    agreement: Agreement | None,
) -> DataReport:
    rejected = [asdict(row) for read in sets.values() for row in read.rejected]
    return DataReport(
        config.name,
        config.seed,
        config.data.task,
        tuple(describe_set(role, read) for role, read in sets.items()),
        described,
        too_long,
        agreement,
        tuple(rejected[:MOST_REJECTED]),
    )
