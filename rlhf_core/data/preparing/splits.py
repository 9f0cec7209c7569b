"""Which stage gets which rows: a prompt's own hash says what it may serve, whatever other rows there are.

A set that grows, rolls or shrinks from night to night moves no prompt from one split to another: what a champion has
learnt is never held out later.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from rlhf_core.counting import counted
from rlhf_core.data.preferences import PreferencePair
from rlhf_core.data.preparing.lengths import PAIRS
from rlhf_core.data.problems import Problem, has_response_to_learn
from rlhf_core.data.transcripts import first_turn
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from rlhf_core.config import DataConfig, SplitsConfig
    from rlhf_core.data.reading import ReadSet

SPLITS = ("sft", "preferences", "ppo", "evaluation")
TASK = "task"
EVALUATION, DEVELOPMENT = "evaluation", "development"
# the order in which the sides lie in the hash's range, evaluation first
SIDES = (EVALUATION, PAIRS, "preferences", "sft", "ppo")
SHOWN_PROMPT = 60


@dataclass(frozen=True)
class Pool:
    """Problems of different keys that some splits are drawn from."""

    name: str
    """The configuration's key: `task`, `problems`, `prompts`, `demonstrations`, `preferences` or `evaluation`."""
    rows: Sequence[Problem]
    paths: str = ""
    """Where they came from, for messages."""

    def __str__(self) -> str:
        """Return the key, and where the rows came from."""
        return f"data.{self.name}" + (f" ({self.paths})" if self.paths else "")


def choose_pools(config: DataConfig, sets: Mapping[str, ReadSet[Any]]) -> dict[str, str]:
    """Return, by split, the pool that it is drawn from; a split without one is not among them.

    PPO and evaluation take the first that there is of task, problems, prompts, preferences and demonstrations;
    evaluation takes sources of its own where it has them. Supervised fine-tuning learns demonstrations, else what
    problems' answers or the preferred responses demonstrate; prompts alone demonstrate nothing. Prompts to sample
    pairs for are drawn where no pairs are given and a verifier could rank the samples.
    """
    main = _main(config, sets)
    ranked = main == TASK or all(getattr(row, "answer", None) is not None for row in sets[main].rows)
    return _pools_of(config, sets, ranked=ranked)


def _main(config: DataConfig, given: Collection[str]) -> str:
    """Return the pool that PPO's prompts are drawn from."""
    if config.task is not None:
        return TASK
    return next(role for role in ("problems", "prompts", "preferences", "demonstrations") if role in given)


def _pools_of(config: DataConfig, given: Collection[str], *, ranked: bool) -> dict[str, str]:
    main = _main(config, given)
    pool_of = {"ppo": main, EVALUATION: EVALUATION if EVALUATION in given else main}
    there = (*given, *([TASK] if config.task is not None else []))
    learnt = [name for name in ("demonstrations", main, "preferences") if name in there and name != "prompts"]
    if learnt:
        pool_of["sft"] = learnt[0]
    if "preferences" not in given and main != "prompts" and ranked:
        pool_of["preferences"] = main
    return pool_of


def file_pool(name: str, read: ReadSet[Any]) -> Pool:
    """Return a set's rows as problems, each prompt once; of pairs, the preferred response is the demonstration."""
    paths = ", ".join(source.path for source in read.sources)
    found: dict[str, Problem] = {}
    for problem in _as_problems(read.rows):
        found.setdefault(problem.key, problem)
    return Pool(name, list(found.values()), paths)


def _as_problems(rows: Iterable[Problem | PreferencePair]) -> Iterable[Problem]:
    for row in rows:
        if isinstance(row, Problem):
            yield row
            continue
        # an empty response demonstrates nothing
        yield Problem(row.prompt, demonstration=first_turn(row.chosen) or None)


def splits_from(pool: str, pool_of: Mapping[str, str]) -> tuple[str, ...]:
    """Return the splits that are drawn from a pool."""
    return tuple(split for split in SIDES if pool_of.get(split) == pool)


@dataclass(frozen=True)
class Sides:
    """What a prompt may serve, by pool: the configuration and the prompt's key decide, and nothing else.

    No seed does: a run with another one must not hold out what this one learnt.
    """

    heldout: float
    """Share of the evaluation; in no pool is such a prompt learnt from. 0 where evaluation has a set of its own."""
    shares: Mapping[str, Mapping[str, float]]
    """By pool, in what proportion the splits that learn, and the reward model's pairs, have the others."""

    @classmethod
    def of(cls, config: DataConfig, given: Collection[str], wishes: Mapping[str, int], *, pairs: int | None) -> Sides:
        """Return the sides of a configuration.

        Args:
            config: says which pools there are, and the share that is held out.
            given: the keys of the sets that it names.
            wishes: sizes by split, in proportion to which those that learn share a pool; not what follows the data.
            pairs: the wish of a reward model that learns given pairs; None has as many as the splits beside it.
        """
        # whether rows can be ranked or have something to learn is seen in the rows, which may be others tomorrow
        pool_of = _pools_of(config, given, ranked=True)
        own = pool_of.pop(EVALUATION) == EVALUATION
        shares: dict[str, dict[str, float]] = {
            pool: {split: wishes[split] for split in splits_from(pool, pool_of)} for pool in (*given, TASK)
        }
        if "preferences" in given:
            beside = shares["preferences"]
            shares["preferences"] = {PAIRS: pairs or sum(beside.values()) or 1, **beside}
        return cls(0.0 if own else config.heldout_fraction, shares)

    def of_prompt(self, pool: str, key: str) -> str | None:
        """Return what a prompt of a pool may serve: a split, or the reward model's pairs; None if it serves nothing.

        Args:
            pool: its name.
            key: the prompt's.
        """
        if pool == EVALUATION:
            return EVALUATION
        if is_held_out(key, self.heldout):
            return EVALUATION
        place = _place("side", key)
        found, shares = None, self.shares[pool]
        left = (place - self.heldout) / (1 - self.heldout) * sum(shares.values())
        for name, share in shares.items():
            if share and left >= 0:
                found = name
            left -= share
        return found

    def part_of(self, pool: str, split: str) -> float:
        """Return the part of a pool's prompts that may serve a split, on average."""
        if split == EVALUATION:
            return self.heldout
        shares = self.shares[pool]
        return (1 - self.heldout) * shares[split] / (sum(shares.values()) or 1)

    def parted(self, pool: Pool) -> dict[str, list[Problem]]:
        """Return a pool's problems by what they may serve; of those for SFT, what has something to learn."""
        parts: dict[str, list[Problem]] = {name: [] for name in SIDES}
        for problem in pool.rows:
            name = self.of_prompt(pool.name, problem.key)
            if name is not None and (name != "sft" or has_response_to_learn(problem)):
                parts[name].append(problem)
        return parts


def is_held_out(key: str, share: float) -> bool:
    """Return whether a prompt is one of those that are held out for the evaluation.

    Args:
        key: the prompt's.
        share: that is held out, from 0 to 1.
    """
    return _place("side", key) < share


def for_development(problems: Sequence[Problem], sizes: SplitsConfig) -> tuple[list[Problem], list[Problem]]:
    """Return the problems on the side of the evaluation in two parts: the development split's, and the others.

    A prompt's own hash decides, in proportion to the two sizes, so that none of them moves as long as those stay.

    Args:
        problems: in the order in which they are drawn.
        sizes: of both splits.
    """
    if not sizes.development:
        return [], list(problems)
    share = sizes.development / (sizes.development + sizes.evaluation)
    chosen = {each.key for each in problems if _place(DEVELOPMENT, each.key) < share}
    parts = [[each for each in problems if (each.key in chosen) is is_chosen] for is_chosen in (True, False)]
    return parts[0][: sizes.development], parts[1]


def in_hash_order(problems: Iterable[Problem], seed: int) -> list[Problem]:
    """Return the problems in the order of a hash of their keys.

    A beginning of this order is a random sample of all sources of a mixture, so that every split has the mixture's
    proportions on average; and it changes little when rows come and go.
    """
    return sorted(problems, key=lambda problem: _hash("splits", str(seed), problem.key))


def next_window(problems: Iterable[Problem], size: int, after: str) -> list[Problem]:
    """Return the problems of tonight's evaluation: the next in an order of their hashes, beginning anew at its end.

    The order is the same every night, whatever the seed and the other rows: nights use no problem twice before all have
    been used, as long as the pool stays.

    Args:
        problems: all that are held out.
        size: how many are wanted.
        after: where the last night ended, as `place_of` tells; empty at the beginning.
    """
    ordered = sorted(problems, key=place_of)
    later = [problem for problem in ordered if place_of(problem) > after]
    return [*later, *ordered[: len(ordered) - len(later)]][:size]


def place_of(problem: Problem) -> str:
    """Return where a problem stands in the order of `next_window`."""
    return _hash("rotation", problem.key).hex()


def _place(*words: str) -> float:
    """Return where in [0, 1) a hash lies."""
    return int.from_bytes(_hash(*words)[:8], "big") / 2**64


def _hash(*words: str) -> bytes:
    # the first word makes an order or a side independent of others by the same key, such as the one that holds pairs
    # out from the reward model: rows that are late in this order must not be late in those, too
    return hashlib.sha256("\0".join(words).encode()).digest()


def refuse_overlap(pools: Sequence[Pool], uses: Mapping[str, Sequence[str]]) -> None:
    """Refuse sets that were given separately and share a prompt.

    Args:
        pools: with different names.
        uses: the splits that are drawn from each pool, by its name.

    Raises:
        DataError: naming the sets, their splits, the number of prompts that they share, and one of them.
    """
    prompts = {pool.name: {problem.key: problem.prompt for problem in pool.rows} for pool in pools}
    for one, other in combinations(pools, 2):
        shared = [key for key in prompts[one.name] if key in prompts[other.name]]
        if shared:
            raise DataError(
                f"{one} for {_listed(uses[one.name])} and {other} for {_listed(uses[other.name])} share "
                f"{counted(len(shared), 'prompt')}, such as {prompts[one.name][shared[0]][:SHOWN_PROMPT]!r}; what is "
                "trained on must not be evaluated on, nor one prompt serve two stages: leave them out of one of the two"
            )


def _listed(splits: Sequence[str]) -> str:
    return " and ".join(splits)
