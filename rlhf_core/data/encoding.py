"""Demonstrations and preference pairs as token ids: the same for every stage that learns from them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.conversation import EncodedConversation, encode_conversation
from rlhf_core.data.problems import response_to_learn
from rlhf_core.data.transcripts import turns
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate


def encode_demonstrations(problems: Sequence[Problem], template: PromptTemplate) -> list[EncodedConversation]:
    """Return, of each problem, the ids of prompt and response and a mask that is True on what is learnt.

    Ids are those that the model is given when it is asked, then the response with its stop token. Learnt is the
    response; and, where a chat template writes the turns of a conversation, what the assistant said earlier in it.

    Raises:
        DataError: if a problem shows no response, or the chat template cannot write its turns; the message names it.
    """
    encoded = []
    for number, problem in enumerate(problems, start=1):
        try:
            encoded.append(_encode(problem, template))
        except DataError as error:
            raise DataError(f"demonstration {number} of {len(problems)}: {error}") from error
    return encoded


def _encode(problem: Problem, template: PromptTemplate) -> EncodedConversation:
    prompt = template.prompt_ids(problem.prompt)
    response = template.response_ids(response_to_learn(problem, template))
    return EncodedConversation(prompt + response, _said_earlier(problem, template, prompt) + [True] * len(response))


def _said_earlier(problem: Problem, template: PromptTemplate, prompt: Sequence[int]) -> list[bool]:
    """Return a mask of the prompt: True on the assistant's earlier turns, as far as their ids are the prompt's own.

    A token that joins the end of a turn to what follows is of neither; what stands behind it is not learnt. Nor is
    any earlier turn where the template writes one of them differently than it was said, such as without its thoughts.
    """
    messages = (turns(problem.prompt) if template.writes_turns else None) or []
    if not any(message["role"] == "assistant" for message in messages):
        return [False] * len(prompt)
    try:
        earlier = encode_conversation(messages, template)
    except DataError:
        return [False] * len(prompt)
    differs = (place for place, (a, b) in enumerate(zip(earlier.ids, prompt, strict=False)) if a != b)
    same = next(differs, min(len(earlier.ids), len(prompt)))
    return earlier.loss_mask[:same] + [False] * (len(prompt) - same)


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
