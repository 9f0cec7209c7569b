"""Sizes that follow the data and each other: splits, the prompts of an episode, chunks and batches.

Some sizes are fixed: the user set them. The others are wanted by a preset or a default. `settle` keeps what is fixed
and changes the others as little as it can, so that all relations hold. Where fixed sizes exclude each other, it finds
the fewest of them that have to change, and values with which everything holds. A split's size is the most that it
takes: it has fewer where fewer rows may serve it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any, NamedTuple

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.ppo import BATCH, BATCHES, CHUNK, MICRO, PROMPTS, batch_complaints

LEAST = {"sft": 1, "preferences": 1, "ppo": 1, "evaluation": 2}
"""The fewest problems with which a stage can do anything, by split."""
PAIRS = "pairs"
_LEAST_PAIRS = 2
_MOST_TRIED = 4096
"""Numbers of prompts that are looked at, from the wanted one downwards: enough for any usual size, and soon over."""


def split_key(split: str) -> str:
    """Return the configuration's key of a split's size."""
    return f"data.splits.{split}"


SPLITS = tuple(map(split_key, LEAST))
KEYS = (*SPLITS, *BATCHES)


class Supply(NamedTuple):
    """Rows that some splits share: what each row may serve, its own hash has decided."""

    name: str
    """What a message calls them."""
    total: int
    rows: Mapping[str, int]
    """How many of them may serve each of the splits; under `pairs` the prompts that a reward model learns from."""
    heldout: float = 0.0
    """Share that the evaluation has of them."""
    noun: str = "prompts"
    grows: bool = False
    """Whether `rows` says how many there can be in time, rather than now."""


@dataclass(frozen=True)
class Sizes:
    """What was asked for."""

    wanted: Mapping[str, int]
    """By key, each of KEYS."""
    fixed: tuple[frozenset[str], ...]
    """Keys that keep their value, but a split's where fewer rows may serve it; where that cannot be, the next set is
    tried."""
    samples_per_prompt: int = 1
    dp: int = 1
    buffer_limit: int = 0
    pairs: int | None = None
    """Most pairs that the reward model takes; None takes all."""
    given: frozenset[str] = frozenset()
    """Of the fixed keys those that nobody can change: sizes of splits that are there already."""

    def with_splits(self, splits: Mapping[str, int]) -> Sizes:
        """Return the same with splits that are there already, by name."""
        given = {split_key(name): size for name, size in splits.items()}
        fixed = tuple(dict.fromkeys(each | frozenset(given) for each in self.fixed))
        return replace(self, wanted={**self.wanted, **given}, fixed=fixed, given=frozenset(given))

    def decide_splits(self) -> dict[str, Any]:
        """Return what decides the splits' sizes besides the rows, as plain values: part of what names a dataset."""
        levels = [
            {
                "fixed": sorted(fixed & set(SPLITS)),
                "least_prompts": _least_prompts(self, fixed),
                "agrees": _attempt(self, fixed, (), tuple(LEAST)) is not None,
            }
            for fixed in self.fixed
        ]
        return {"wanted": {key: self.wanted[key] for key in SPLITS}, "levels": levels, "pairs": self.pairs}

    def relations(self) -> dict[str, int]:
        """Return what the batches have to agree with, by the names that `batch_complaints` takes."""
        return {name: getattr(self, name) for name in ("samples_per_prompt", "dp", "buffer_limit")}


class Settled(NamedTuple):
    """Sizes with which all relations hold."""

    values: dict[str, int]
    """By key, each of KEYS; a split that nothing is left for has 0."""
    fixed: frozenset[str]
    """The keys that kept their value."""
    for_all: bool
    """Whether every stage has something: flows that read other splits come to the same sizes then."""
    given_up: frozenset[str] = frozenset()
    """Fixed sizes that are not kept, since they exclude each other or the data; empty if all is well."""
    complaints: tuple[str, ...] = ()
    """What does not hold with the fixed sizes, a sentence each."""

    @property
    def instead(self) -> dict[str, int]:
        """The overrides with which everything holds, in place of the sizes that are not kept."""
        return {key: self.values[key] for key in KEYS if key in self.given_up}


def as_they_are(config: PipelineConfig) -> Sizes:
    """Return a configuration's sizes, all of them fixed."""
    splits, ppo = config.data.splits.model_dump(), config.ppo
    wanted = {split_key(name): size for name, size in splits.items()}
    wanted |= {key: getattr(ppo, key.removeprefix("ppo.")) for key in BATCHES}
    relations = (ppo.samples_per_prompt, ppo.dp, ppo.buffer_limit, config.reward_model.pairs)
    return Sizes(wanted, (frozenset(KEYS),), *relations)


def with_sizes(config: PipelineConfig, values: Mapping[str, int]) -> PipelineConfig:
    """Return a configuration with other sizes, by key."""
    splits = config.data.splits.model_copy(update={split: values[split_key(split)] for split in LEAST})
    ppo = config.ppo.model_copy(update={key.removeprefix("ppo."): values[key] for key in BATCHES})
    return config.model_copy(update={"data": config.data.model_copy(update={"splits": splits}), "ppo": ppo})


def told_changes(wanted: Mapping[str, int], values: Mapping[str, int], keys: Sequence[str] = KEYS) -> str | None:
    """Return the sentence of sizes that are other than wanted; None if there are none."""
    changed = [f"{key} {values[key]} (not {wanted[key]})" for key in keys if values[key] != wanted[key]]
    if not changed:
        return None
    told = f"sizes follow the data and each other: {', '.join(changed)}"
    if any(values[key] < wanted[key] for key in SPLITS if key in keys):
        told += (
            "; a prompt's hash says what it may serve: data.heldout_fraction of them the evaluation, and the rest the "
            "other splits, in proportion to their sizes"
        )
    return told


def settle(sizes: Sizes, supplies: Sequence[Supply] = (), *, reads: Sequence[str] = tuple(LEAST)) -> Settled | None:
    """Return sizes that agree with each other and with the data.

    A split has at most what may serve it, however much is asked for: a night whose set has shrunk goes on with less.

    Args:
        sizes: what was asked for.
        supplies: the rows that there are; a split of none of them has what it wants.
        reads: splits that have to hold something; the others do where there is room.

    Returns:
        None if no sizes serve these splits: `shortage` says why.
    """
    for fixed in sizes.fixed:
        values = _attempt(sizes, fixed, supplies, tuple(LEAST))
        if values is not None:
            return Settled(values, fixed, for_all=True)
    levels = sizes.fixed
    if "ppo" not in reads:  # no stage reads its batches
        levels = tuple(dict.fromkeys(fixed - set(BATCHES) for fixed in levels))
    for fixed in levels:
        values = _attempt(sizes, fixed, supplies, reads)
        if values is not None:
            return Settled(values, fixed, for_all=False)
    return _reconciled(sizes, levels[-1], supplies, reads)


def shortage(sizes: Sizes, supplies: Sequence[Supply], reads: Sequence[str]) -> str:
    """Return the sentence of rows that suffice for no sizes."""
    least = _least(sizes, sizes.given, reads)
    for supply in supplies:
        if told := lacking(supply, least):
            return told
    return (
        f"data.splits.ppo has {sizes.wanted[split_key('ppo')]} problems, but {_told_relations(sizes)} need an episode "
        f"of at least {least['ppo']} prompts; lower one of them, or give more"
    )


def _reconciled(
    sizes: Sizes, fixed: frozenset[str], supplies: Sequence[Supply], reads: Sequence[str]
) -> Settled | None:
    """Give up the fewest fixed sizes; of equally few, those that change least."""
    free = [key for key in KEYS if key in fixed - sizes.given]
    for count in range(1, len(free) + 1):
        found = [
            (sum(_distance(values[key], sizes.wanted[key]) for key in KEYS), freed, values)
            for freed in combinations(free, count)
            if (values := _attempt(sizes, fixed - set(freed), supplies, reads)) is not None
        ]
        if found:
            _, freed, values = min(found, key=lambda each: each[:2])
            told = _complaints(sizes, fixed, supplies, reads)
            return Settled(values, fixed - set(freed), for_all=False, given_up=frozenset(freed), complaints=told)
    return None


def _complaints(
    sizes: Sizes, fixed: frozenset[str], supplies: Sequence[Supply], reads: Sequence[str]
) -> tuple[str, ...]:
    """Return what does not hold between the fixed sizes, and with the rows."""
    least = _least(sizes, fixed, reads)
    told = []
    for supply in supplies:
        zero = {split: 0 for split in LEAST if split_key(split) in fixed and not sizes.wanted[split_key(split)]}
        if lack := lacking(supply, {**least, **zero}):
            told.append(lack)
        told += [
            f"{split_key(split)} is {sizes.wanted[split_key(split)]}, but this run reads that split and needs at least "
            f"{LEAST[split]}"
            for split in supply.rows
            if split in reads and split_key(split) in fixed and sizes.wanted[split_key(split)] < LEAST[split]
        ]
    if "ppo" in reads:
        batches = {key: sizes.wanted[key] for key in BATCHES if key in fixed}
        told += batch_complaints(batches, **sizes.relations())
        prompts, problems = least["ppo"], sizes.wanted[split_key("ppo")]
        if split_key("ppo") in fixed and 0 < problems < prompts:
            told.append(
                f"{PROMPTS} is {prompts}, but data.splits.ppo has only {problems} problems; lower the first or raise "
                "the second"
                if PROMPTS in fixed
                else f"an episode of these batches has at least {prompts} prompts, but data.splits.ppo has only "
                f"{problems} problems; lower ppo's sizes or raise that one"
            )
    kept = ", ".join(f"{key} {sizes.wanted[key]}" for key in KEYS if key in fixed)
    return tuple(told) or (f"{kept} and {_told_relations(sizes)} exclude each other",)


def _told_relations(sizes: Sizes) -> str:
    return ", ".join(f"ppo.{name} {value}" for name, value in sizes.relations().items())


def _least(sizes: Sizes, fixed: frozenset[str], reads: Sequence[str]) -> dict[str, int]:
    """Return the fewest rows for each split, and for the pairs, with which the stages that read them can work."""
    least = {split: (low if split in reads else 0) for split, low in LEAST.items()}
    if "ppo" in reads:
        least["ppo"] = _least_prompts(sizes, fixed)
    return {**least, PAIRS: min(_LEAST_PAIRS, sizes.pairs or _LEAST_PAIRS) if "preferences" in reads else 0}


def lacking(supply: Supply, least: Mapping[str, int]) -> str | None:
    """Return the sentence of rows that are fewer than a split needs; None if all have enough."""
    short = {name: least[name] for name, rows in supply.rows.items() if rows < least[name]}
    if not short:
        return None
    found = ", ".join(f"{name} may have {supply.rows[name]} (needs {size})" for name, size in short.items())
    ways = [] if supply.grows else ["give more"]
    if supply.grows or supply.total >= sum(least[name] for name in supply.rows):
        if "evaluation" in short:
            ways.append(f"raise data.heldout_fraction ({supply.heldout:g})")
        learnt = [split_key(name) if name in LEAST else "reward_model.pairs" for name in short if name != "evaluation"]
        if learnt:
            ways.append(f"raise {' and '.join(learnt)} against the others, in proportion to which they share")
    return (
        f"{supply.name} has {supply.total} different {supply.noun} that can be used, of which by their hashes {found}; "
        f"{', or '.join(ways)}"
    )


def _attempt(
    sizes: Sizes, fixed: frozenset[str], supplies: Sequence[Supply], needed: Sequence[str]
) -> dict[str, int] | None:
    """Return values with which everything holds and what is fixed is kept; None if there are none.

    A split that is not needed may come to nothing, even if it is fixed: where it is too small for its stage.
    """
    wanted, ppo = dict(sizes.wanted), split_key("ppo")
    least = _least(sizes, fixed, needed)
    if ppo not in fixed:
        wanted[ppo] = max(wanted[ppo], least["ppo"])
    values = dict(wanted)
    for supply in supplies:
        if supply.rows.get(PAIRS, least[PAIRS]) < least[PAIRS]:
            return None
        for split in supply.rows.keys() & LEAST.keys():
            key = split_key(split)
            size = min(wanted[key] if key in fixed else max(wanted[key], least[split]), supply.rows[split])
            values[key] = size if size >= LEAST[split] else 0  # too small for its stage is none
    drawn = {split for supply in supplies for split in supply.rows.keys() & LEAST.keys()}
    if any(values[split_key(split)] < least[split] for split in drawn & set(needed)):
        return None
    batches = _batches(sizes, fixed, most=values[ppo] or None)
    if batches is None and "ppo" not in needed:
        values[ppo] = 0
        batches = _batches(sizes, fixed, most=None)
    return None if batches is None else values | batches


def _least_prompts(sizes: Sizes, fixed: frozenset[str]) -> int:
    return sizes.wanted[PROMPTS] if PROMPTS in fixed else _prompts_step(sizes, fixed)


def _prompts_step(sizes: Sizes, fixed: frozenset[str]) -> int:
    """Return what the number of an episode's prompts must be a multiple of, for the fixed batches' sake."""
    samples = math.lcm(
        sizes.samples_per_prompt,
        sizes.wanted[CHUNK] if CHUNK in fixed else 1,
        sizes.dp * math.lcm(*(sizes.wanted[key] for key in (BATCH, MICRO) if key in fixed), 1),
    )
    return samples // sizes.samples_per_prompt


def _batches(sizes: Sizes, fixed: frozenset[str], *, most: int | None) -> dict[str, int] | None:
    """Return the batches that are nearest to what is wanted, of an episode of at most so many prompts."""
    wanted, step = sizes.wanted[PROMPTS], _prompts_step(sizes, fixed)
    if PROMPTS in fixed:
        candidates: Iterable[int] = [wanted] if most is None or wanted <= most else []
    else:
        highest = max(wanted, step) if most is None else min(max(wanted, step), most)
        candidates = islice(range(highest // step * step, 0, -step), _MOST_TRIED)
    best, least = None, math.inf
    for prompts in candidates:
        if prompts <= wanted and _distance(prompts, wanted) >= least:
            break  # those that follow are further away still
        values = _batches_of(prompts, sizes, fixed)
        # not a micro-batch's distance: it changes no number but by rounding
        sized = [key for key in BATCHES if key != MICRO]
        distance = math.inf if values is None else sum(_distance(values[key], sizes.wanted[key]) for key in sized)
        if distance < least:
            best, least = values, distance
    return best


def _batches_of(prompts: int, sizes: Sizes, fixed: frozenset[str]) -> dict[str, int] | None:
    """Return the batches that are nearest to what is wanted, of an episode of so many prompts."""
    each, models, limit = sizes.samples_per_prompt, sizes.dp, sizes.buffer_limit
    samples, micro = prompts * each, sizes.wanted[MICRO]
    chunk, batch = sizes.wanted[CHUNK], sizes.wanted[BATCH]
    if BATCH not in fixed:
        smallest_chunk = chunk if CHUNK in fixed else each
        room_for_one = math.ceil(smallest_chunk / (limit * models)) if limit else 1
        batch = _divisor(samples // models, max(batch, room_for_one), of=micro if MICRO in fixed else 1)
    if CHUNK not in fixed:
        room = limit * batch * models
        chunk = _divisor(samples, min(chunk, room) if room else chunk, of=each)
    if MICRO not in fixed:
        micro = _divisor(batch, micro, of=1)
    values = {PROMPTS: prompts, CHUNK: chunk, BATCH: batch, MICRO: micro}
    return None if batch_complaints(values, **sizes.relations()) else values


def _divisor(number: int, most: int, *, of: int) -> int:
    """Return the largest divisor of a number that is a multiple of `of` and at most `most`; `of` if there is none."""
    multiples = range(min(most, number) // of * of, 0, -of)
    return next((each for each in multiples if number % each == 0), of)


def _distance(value: int, wanted: int) -> float:
    return abs(math.log2(max(value, 1) / max(wanted, 1)))
