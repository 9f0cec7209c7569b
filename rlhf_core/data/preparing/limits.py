"""What is longer than the stage that reads it takes: counted, named, and left out or refused."""

from __future__ import annotations

from operator import itemgetter
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.preparing.metering import Lengths, PairLengths

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlhf_core.config import PipelineConfig

PAIRS = "pairs"
SHOWN = 60
ROOM = 2
"""Tokens that a greedy answer may have beyond the longest reference: one that is cut off would count as wrong."""


class Limit(NamedTuple):
    """What a split must keep to."""

    what: str
    """Of what, in words."""
    key: str
    """The configuration's key."""
    tokens: int


class TooLong(NamedTuple):
    """How much of a split, or of the rows that it is drawn from, exceeds its limit."""

    split: str
    what: str
    key: str
    limit: int
    longer: int
    of: int
    longest: int
    example: str
    """How the longest one's prompt begins."""
    dropped: bool

    @property
    def sentence(self) -> str:
        """What is wrong, and what to do about it."""
        return (
            f"{self.longer} of {self.of} {self.what} are longer than {self.key} = {self.limit} tokens, the longest "
            f"{self.longest} (its prompt begins {self.example!r}); raise {self.key}, or leave them out with "
            "data.too_long=drop"
        )


def limit_of(split: str, config: PipelineConfig) -> Limit | None:
    """Return what a split must keep to; None for one without a limit of its own."""
    limits = {
        "sft": Limit("demonstrations (prompt and response)", "sft.max_length", config.sft.max_length),
        "ppo": Limit("PPO prompts", "ppo.max_prompt_tokens", config.ppo.max_prompt_tokens),
        "evaluation": Limit(
            f"held-out answers (with {ROOM} tokens of room)",
            "evaluation.max_new_tokens",
            config.evaluation.max_new_tokens,
        ),
        PAIRS: Limit(
            "preference pairs (prompt and longer response)", "reward_model.max_length", config.reward_model.max_length
        ),
    }
    return limits.get(split)


def counted(split: str, lengths: Lengths | PairLengths) -> int:
    """Return the tokens that a split's limit counts of a row."""
    if isinstance(lengths, PairLengths):
        return lengths.prompt + max(lengths.chosen, lengths.rejected)
    response = lengths.response or 0
    if split == "sft":
        return lengths.prompt + response
    if split == "ppo":
        return lengths.prompt
    return response + ROOM if lengths.has_answer else 0


def too_long(
    split: str, lengths: Iterable[Lengths | PairLengths], config: PipelineConfig, *, dropped: bool
) -> TooLong | None:
    """Return what of a split exceeds its limit; None if nothing does."""
    limit = limit_of(split, config)
    if limit is None:
        return None
    counts = [(counted(split, each), each.text) for each in lengths]
    longer = [count for count, _ in counts if count > limit.tokens]
    if not longer:
        return None
    longest, prompt = max(counts, key=itemgetter(0))
    example = shorten(prompt, SHOWN, placeholder="...")
    return TooLong(split, limit.what, limit.key, limit.tokens, len(longer), len(counts), longest, example, dropped)


def fits(split: str, lengths: Lengths | PairLengths, config: PipelineConfig) -> bool:
    """Return whether a row keeps to a split's limit."""
    limit = limit_of(split, config)
    return limit is None or counted(split, lengths) <= limit.tokens
