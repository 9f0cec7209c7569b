"""Preference pairs: from two transcripts, from a model's own samples; and which pairs are held out."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.counting import counted
from rlhf_core.data.jsonl import from_jsonl, to_jsonl
from rlhf_core.data.problems import problem_key
from rlhf_core.data.transcripts import ASSISTANT, HUMAN, stripped
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.config import RewardModelConfig


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to a prompt."""

    prompt: str
    """A plain prompt, or a transcript that ends in `ASSISTANT`; `PromptTemplate` knows one from the other."""
    chosen: str
    rejected: str
    margin: float = 0.0
    """By how much the chosen response's score should exceed the other's, at least 0: how sure the judge was."""
    both_well_formed: bool | None = None
    """Whether both responses have the form that is wanted, so that they differ in more; None if nobody has looked."""


def split_transcripts(chosen: str, rejected: str, where: str) -> PreferencePair | None:
    """Return the pair behind two transcripts: their common beginning up to its last assistant's turn is the prompt.

    The responses are what follows; where the transcripts part before their last turn, they hold further
    turns.

    Args:
        chosen: the preferred transcript.
        rejected: the other one.
        where: names the row in an error.

    Returns:
        None if the transcripts part before the first assistant's turn of either.

    Raises:
        DataError: if one of them has no assistant's turn at all.
    """
    for name, transcript in (("chosen", chosen), ("rejected", rejected)):
        if ASSISTANT not in transcript:
            raise DataError(
                f"{where}: field {name!r} has no {ASSISTANT!r} turn; expected a transcript like "
                f"{HUMAN + ' ...' + ASSISTANT + ' ...'!r}, or a separate field 'prompt'"
            )
    end = chosen[: _common_length(chosen, rejected)].rfind(ASSISTANT)
    if end < 0:
        return None
    end += len(ASSISTANT)
    return PreferencePair(chosen[:end], stripped(chosen[end:]), stripped(rejected[end:]))


def _common_length(one: str, other: str) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


@dataclass(frozen=True)
class VerifiedSample:
    """A model's response, and what the verifier said."""

    prompt: str
    response: str
    score: float
    well_formed: bool

    @property
    def rank(self) -> float:
        """Right above wrong, well formed above ill formed."""
        return self.score + (0.5 if self.well_formed else 0.0)


def pairs_from_samples(samples: Iterable[VerifiedSample], *, most: int | None, seed: int) -> list[PreferencePair]:
    """Return pairs of samples of one prompt: right before wrong, or well formed before ill formed.

    Prompts are visited in an order drawn by the seed, in rounds of one pair each, so that a limit spares no
    prompt that has one; no response is in two pairs of a prompt as long as fresh ones are left, and no pair
    comes twice.

    Args:
        samples: several responses per prompt, in any order.
        most: largest number of pairs; None returns all.
        seed: with the samples' texts, all that the result depends on.

    Returns:
        At most `most` pairs; none at all if every prompt's samples are equally good.
    """
    by_prompt: defaultdict[str, dict[tuple[str, float], VerifiedSample]] = defaultdict(dict)
    for sample in samples:
        by_prompt[sample.prompt][sample.response, sample.rank] = sample
    queues = [
        _pairs_of_one_prompt(sorted(by_prompt[prompt].values(), key=lambda s: _order(seed, s.response)))
        for prompt in sorted(by_prompt, key=lambda prompt: _order(seed, prompt))
    ]
    rounds = range(max(map(len, queues), default=0))
    return [queue[turn] for turn in rounds for queue in queues if turn < len(queue)][:most]


def _pairs_of_one_prompt(samples: Sequence[VerifiedSample]) -> list[PreferencePair]:
    candidates = [(a, b) for a in samples for b in samples if a.rank > b.rank and a.response != b.response]
    uses: defaultdict[str, int] = defaultdict(int)
    pairs = []
    while candidates:
        chosen, rejected = min(candidates, key=lambda pair: uses[pair[0].response] + uses[pair[1].response])
        candidates.remove((chosen, rejected))
        uses[chosen.response] += 1
        uses[rejected.response] += 1
        both = chosen.well_formed and rejected.well_formed
        pairs.append(PreferencePair(chosen.prompt, chosen.response, rejected.response, both_well_formed=both))
    return pairs


def _order(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()


class PairSplit(NamedTuple):
    """Pairs by use; no prompt is in both."""

    training: list[PreferencePair]
    heldout: list[PreferencePair]


def used_pairs(pairs: Sequence[PreferencePair], config: RewardModelConfig, *, seed: int) -> list[PreferencePair]:
    """Return the pairs that a reward model uses, to learn from or to be measured on: at most `config.pairs`."""

    def rank(pair: PreferencePair) -> bytes:
        return _digest(str(seed), pair.prompt, pair.chosen, pair.rejected)

    return sorted(pairs, key=rank)[: config.pairs]


def split_pairs(pairs: Sequence[PreferencePair], config: RewardModelConfig, *, seed: int) -> PairSplit:
    """Return at most `config.pairs` pairs, split by conversation.

    Pairs of one prompt have responses in common, and a prompt that continues another has its turns in common. They stay
    together, or the accuracy would be measured on what was learnt. The hash of the first of them decides their side;
    the seed only chooses among too many. A window that loses the first may move the others: each reward model is
    trained anew, and measured on pairs of its own night.

    Raises:
        DataError: one side is empty.
    """
    used = used_pairs(pairs, config, seed=seed)
    beginnings = _beginnings({pair.prompt for pair in used})
    places = {
        prompt: int.from_bytes(_digest("reward model", problem_key(first))[:8], "big") / 2**64
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


def _digest(*texts: str) -> bytes:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).digest()


def refuse_shared_prompts(training: Iterable[PreferencePair], heldout: Iterable[PreferencePair]) -> None:
    """Refuse held-out pairs of prompts that the reward model was trained on.

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


def pairs_to_jsonl(pairs: Iterable[PreferencePair]) -> bytes:
    """Return the pairs as JSON lines."""
    return to_jsonl(asdict(pair) for pair in pairs)


def pairs_from_jsonl(data: bytes) -> list[PreferencePair]:
    """Return the pairs that `pairs_to_jsonl` wrote."""
    return [PreferencePair(**row) for row in from_jsonl(data)]
