"""Lengths in tokens: measured, shown as histograms, and held to each stage's limit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.problems import has_response_to_learn, response_to_learn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate

BATCH = 1024
"""Texts that go to the tokenizer at once, which works on them in parallel; all of them would not fit in memory."""


class Lengths(NamedTuple):
    """Tokens of a problem."""

    text: str
    """The prompt, which names the row."""
    prompt: int
    response: int | None
    """Of the demonstration, or of the answer in its tags, the stop token included; None for an open prompt."""
    has_answer: bool


class PairLengths(NamedTuple):
    """Tokens of a preference pair, each response with its stop token."""

    text: str
    """The prompt, which names the row."""
    prompt: int
    chosen: int
    rejected: int


class TokenMeter:
    """Measures rows with a template, and keeps the counts: rows are measured before and after splits are filled."""

    def __init__(self, template: PromptTemplate) -> None:
        self.template = template
        self._prompts: dict[str, int] = {}
        self._responses: dict[str, int] = {}

    def problems(self, problems: Sequence[Problem]) -> list[Lengths]:
        """Return the tokens of each problem's prompt and response."""
        prompts = self._of_prompts([problem.prompt for problem in problems])
        known = [has_response_to_learn(problem) for problem in problems]
        learnt = [
            response_to_learn(problem, self.template) for problem, there in zip(problems, known, strict=True) if there
        ]
        counts = iter(self._of_responses(learnt))
        return [
            Lengths(problem.prompt, prompt, next(counts) if there else None, problem.answer is not None)
            for problem, prompt, there in zip(problems, prompts, known, strict=True)
        ]

    def pairs(self, pairs: Sequence[PreferencePair]) -> list[PairLengths]:
        """Return the tokens of each pair's prompt and responses."""
        prompts = self._of_prompts([pair.prompt for pair in pairs])
        chosen = self._of_responses([pair.chosen for pair in pairs])
        rejected = self._of_responses([pair.rejected for pair in pairs])
        return [PairLengths(pair.prompt, *each) for pair, *each in zip(pairs, prompts, chosen, rejected, strict=True)]

    def _of_prompts(self, prompts: Sequence[str]) -> list[int]:
        return self._counted(prompts, self._prompts, self.template.prompt_text)

    def _of_responses(self, responses: Sequence[str]) -> list[int]:
        return [count + 1 for count in self._counted(responses, self._responses, str)]

    def _counted(self, texts: Sequence[str], known: dict[str, int], put: Callable[[str], str]) -> list[int]:
        fresh = list(dict.fromkeys(text for text in texts if text not in known))
        for start in range(0, len(fresh), BATCH):
            batch = fresh[start : start + BATCH]
            known.update(zip(batch, self.template.count_tokens([put(text) for text in batch]), strict=True))
        return [known[text] for text in texts]


EDGES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Longest text of each bin; the last bin has no end. The same for every set, so that two can be compared."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class TokenCounts:
    """The lengths of a set's texts."""

    texts: int
    bins: tuple[int, ...]
    """Texts up to each of `EDGES`, and those beyond."""
    shortest: int
    median: int
    ninety: int
    """Nine of ten texts are no longer than this."""
    ninety_nine: int
    longest: int


def token_counts(lengths: Iterable[int]) -> TokenCounts | None:
    """Return the histogram and percentiles of lengths (nearest rank); None if there are none.

    Example:
        >>> token_counts([8, 9, 5000])
        TokenCounts(texts=3, bins=(1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1), shortest=8, median=9, ninety=5000, \
ninety_nine=5000, longest=5000)
    """
    ordered = sorted(lengths)
    if not ordered:
        return None
    bins = [0] * (len(EDGES) + 1)
    for length in ordered:
        bins[bisect_left(EDGES, length)] += 1

    def rank(percent: int) -> int:
        return ordered[-(-percent * len(ordered) // 100) - 1]

    return TokenCounts(len(ordered), tuple(bins), ordered[0], rank(50), rank(90), rank(99), ordered[-1])


def bin_names() -> list[str]:
    """Return what each bin holds, in tokens.

    Example:
        >>> bin_names()[:2], bin_names()[-1]
        (['1-8', '9-16'], '4097+')
    """
    starts = [1, *(edge + 1 for edge in EDGES)]
    return [f"{start}-{end}" for start, end in zip(starts, EDGES, strict=False)] + [f"{starts[-1]}+"]


def spark(bins: Iterable[int]) -> str:
    """Return a histogram as one bar a bin, the highest one full, an empty bin blank.

    Example:
        >>> spark([0, 1, 4, 8])
        ' ▁▄█'
    """
    counts = list(bins)
    most = max(counts, default=0)
    return "".join(BARS[-(-count * len(BARS) // most) - 1] if count else " " for count in counts)


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
    return limits.get("evaluation" if split == "development" else split)


def counted_tokens(split: str, lengths: Lengths | PairLengths) -> int:
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
    counts = [(counted_tokens(split, each), each.text) for each in lengths]
    longer = [count for count, _ in counts if count > limit.tokens]
    if not longer:
        return None
    longest, prompt = max(counts, key=itemgetter(0))
    example = shorten(prompt, SHOWN, placeholder="...")
    return TooLong(split, limit.what, limit.key, limit.tokens, len(longer), len(counts), longest, example, dropped)


def fits(split: str, lengths: Lengths | PairLengths, config: PipelineConfig) -> bool:
    """Return whether a row keeps to a split's limit."""
    limit = limit_of(split, config)
    return limit is None or counted_tokens(split, lengths) <= limit.tokens


class Fitting:
    """Leaves out what is too long, where the configuration says so and lengths can be measured."""

    def __init__(self, config: PipelineConfig, meter: TokenMeter | None) -> None:
        self._config = config
        self._meter = meter if config.data.too_long == "drop" else None
        self.left_out: list[TooLong] = []

    def problems(self, problems: Sequence[Problem], splits: Iterable[str]) -> list[Problem]:
        """Return the problems within the limits of all splits that they may go to, so that the splits stay alike."""
        if self._meter is None:
            return list(problems)
        kept = list(zip(problems, self._meter.problems(problems), strict=True))
        for split in splits:
            self._note(too_long(split, [lengths for _, lengths in kept], self._config, dropped=True))
            kept = [(problem, lengths) for problem, lengths in kept if fits(split, lengths, self._config)]
        return [problem for problem, _ in kept]

    def pairs(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """Return the pairs that the reward model takes."""
        if self._meter is None:
            return list(pairs)
        lengths = self._meter.pairs(pairs)
        self._note(too_long(PAIRS, lengths, self._config, dropped=True))
        return [pair for pair, each in zip(pairs, lengths, strict=True) if fits(PAIRS, each, self._config)]

    def _note(self, found: TooLong | None) -> None:
        if found is not None:
            self.left_out.append(found)
