"""Demonstrations as token ids, with what of them is learnt: the same for supervised fine-tuning and beside PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.conversation import EncodedConversation, encode_conversation
from rlhf_core.data.problems import response_to_learn
from rlhf_core.data.transcripts import turns
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def shows_a_response(problem: Problem) -> bool:
    """Return whether there is something to learn: a response of its own, or an answer."""
    return problem.demonstration is not None or problem.answer is not None


def refuse_nothing_to_learn(problems: Iterable[Problem], *, where: str) -> None:
    """See that there is something to learn.

    Args:
        problems: of the split for supervised fine-tuning.
        where: names the dataset.

    Raises:
        DataError: if no problem shows a response.
    """
    if not any(map(shows_a_response, problems)):
        raise DataError(
            f"{where} has no demonstrations to learn: none of its rows for SFT has a response or an answer; give "
            "data.demonstrations, or problems with answers, or go on without SFT (the parameter `actor`)"
        )


def of_the_same_kind(problems: Iterable[Problem], shown: Iterable[Problem]) -> list[Problem]:
    """Return those problems that show a response as others do: one of their own, or the answer in its tags.

    The loss of bare answers says little of a model that learns whole responses.

    Args:
        problems: to choose from, such as the held-out ones.
        shown: those that are learnt.
    """
    kinds = {problem.demonstration is None for problem in shown}
    return [each for each in problems if shows_a_response(each) and (each.demonstration is None) in kinds]


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
