"""Preference pairs as token ids, and their split into training and held-out pairs."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rlhf_core.config import RewardModelConfig
from rlhf_core.counting import counted
from rlhf_core.data.preferences import ASSISTANT, PreferencePair
from rlhf_core.data.problems import problem_key
from rlhf_core.data.template import PromptTemplate
from rlhf_core.errors import DataError


class EncodedPair(NamedTuple):
    """A pair as token ids, prompt and response together."""

    chosen: Sequence[int]
    rejected: Sequence[int]
    margin: float = 0.0
    """By how much the chosen one's score should exceed the other's, at least 0."""
    prompt_tokens: int | None = None
    """Tokens at the beginning of both that are the prompt; None if that is not known."""
    both_well_formed: bool | None = None
    """Whether both responses have the form that is wanted; None if nobody has looked."""

    @property
    def longest(self) -> int:
        """Tokens of the longer sequence."""
        return max(len(self.chosen), len(self.rejected))


class PairSplit(NamedTuple):
    """Pairs by use; no prompt is in both."""

    training: list[PreferencePair]
    heldout: list[PreferencePair]


def split_pairs(pairs: Sequence[PreferencePair], config: RewardModelConfig, *, seed: int) -> PairSplit:
    """Return at most `config.pairs` pairs, split by conversation.

    Pairs of one prompt share responses, and a prompt that continues another shares its turns: they go together, or the
    accuracy would be measured on what was learnt.

    Raises:
        DataError: one side is empty.
    """

    def rank(pair: PreferencePair) -> bytes:
        return _digest(seed, pair.prompt, pair.chosen, pair.rejected)

    used = sorted(pairs, key=rank)[: config.pairs]
    beginnings = _beginnings({pair.prompt for pair in used})
    places = {
        prompt: int.from_bytes(_digest(seed, problem_key(first))[:8], "big") / 2**64
        for prompt, first in beginnings.items()
    }
    heldout = [pair for pair in used if places[pair.prompt] < config.heldout_fraction]
    training = [pair for pair in used if places[pair.prompt] >= config.heldout_fraction]
    if not heldout or not training:
        raise DataError(
            f"{counted(len(used), 'preference pair')} of {counted(len(set(beginnings.values())), 'prompt')} cannot be "
            f"split: {len(training)} would be trained on and {len(heldout)} held out; give more pairs or change "
            "reward_model.heldout_fraction"
        )
    return PairSplit(training, heldout)


def _beginnings(prompts: Iterable[str]) -> dict[str, str]:
    """Return, of each prompt, the shortest one that it continues: itself, unless that is a transcript among them."""
    found: dict[str, str] = {}
    first = ""
    for prompt in sorted(prompts):  # what continues a transcript comes right behind it
        if not (first.endswith(ASSISTANT) and prompt.startswith(first)):
            first = prompt
        found[prompt] = first
    return found


def _digest(seed: int, *texts: str) -> bytes:
    return hashlib.sha256("\0".join((str(seed), *texts)).encode("utf-8", "surrogatepass")).digest()


def encode_pairs(pairs: Sequence[PreferencePair], template: PromptTemplate) -> list[EncodedPair]:
    """Return the pairs as token ids, each response with its stop token.

    Raises:
        DataError: if a margin is below 0, or no number.
    """
    encoded = []
    for pair in pairs:
        prompt = template.prompt_ids(pair.prompt)
        # arrays: the lists of a hundred thousand pairs would take gigabytes
        chosen, rejected = (array("i", prompt + template.response_ids(text)) for text in (pair.chosen, pair.rejected))
        if not 0 <= pair.margin < math.inf:
            raise DataError(
                f"the pair of prompt {pair.prompt[:40]!r} has margin {pair.margin}, but it says by how much the chosen "
                "response is better, at least 0; swap the responses, or leave the pair out"
            )
        encoded.append(EncodedPair(chosen, rejected, pair.margin, len(prompt), pair.both_well_formed))
    return encoded


def refuse_shared_prompts(training: Iterable[PreferencePair], heldout: Iterable[PreferencePair]) -> None:
    """See that a reward model is measured on prompts that it was not trained on.

    Raises:
        DataError: if a prompt is in both, however different its responses, its case or its white space.
    """
    learnt = {problem_key(pair.prompt) for pair in training}
    shared = {pair.prompt for pair in heldout if problem_key(pair.prompt) in learnt}
    if shared:
        raise DataError(
            f"the training pairs and the held-out ones share {counted(len(shared), 'prompt')}, first {min(shared)!r}; "
            "a reward model is measured on prompts that it never saw, so leave them out of one of the two"
        )
