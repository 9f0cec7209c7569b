r"""Conversations as one text: "\n\nSystem: ...\n\nHuman: ...\n\nAssistant:", which HH-RLHF's prompts are too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.preferences import ASSISTANT, HUMAN, SYSTEM, stripped
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Message = dict[str, str]
MARKS = {"system": SYSTEM, "user": HUMAN, "assistant": ASSISTANT}


def transcript(messages: Sequence[Mapping[str, str]]) -> str:
    r"""Return a conversation that awaits the assistant as a prompt.

    A single turn of the user's is its own text: only where there is more to tell is it a transcript.

    Args:
        messages: turns, the last one the user's; a system turn may stand first.

    Raises:
        DataError: if they are no such conversation, or a turn's text holds a speaker's mark.

    Example:
        >>> transcript([{"role": "user", "content": "Hi"}])
        'Hi'
        >>> transcript([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        '\n\nSystem: Be brief.\n\nHuman: Hi\n\nAssistant:'
    """
    if not messages or messages[-1]["role"] != "user":
        last = f"its last message is the {messages[-1]['role']}'s" if messages else "there is no message"
        raise DataError(f"a prompt must end with the user's turn, but {last}")
    whole = conversation(messages)
    return messages[0]["content"].strip() if len(messages) == 1 else whole + ASSISTANT


def conversation(messages: Sequence[Mapping[str, str]]) -> str:
    """Return all turns as one text, each with its speaker's mark.

    Raises:
        DataError: if the user does not speak first, but for a system turn, or a turn's text holds a speaker's mark.
    """
    roles = [message["role"] for message in messages]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if spoken[:1] != ["user"] or "system" in spoken:
        raise DataError(
            "a conversation must begin with the user's turn, before which one system turn may stand, but its turns are "
            + ", ".join(roles)
        )
    return _told(messages)


def continuation(messages: Sequence[Mapping[str, str]]) -> str:
    """Return what follows a prompt: the assistant's text, and further turns with their speakers' marks.

    Raises:
        DataError: if the assistant does not speak first and last, or a turn's text holds a speaker's mark.
    """
    roles = [message["role"] for message in messages]
    if roles[:1] != ["assistant"] or roles[-1] != "assistant" or "system" in roles:
        raise DataError(
            "a response must begin and end with the assistant's turn, but its turns are " + ", ".join(roles)
        )
    return stripped(_told(messages).removeprefix(ASSISTANT))


def turns(prompt: str) -> list[Message] | None:
    """Return a transcript's turns; None if the prompt is not a transcript that awaits the assistant."""
    rest = prompt
    messages: list[Message] = []
    if prompt.startswith(SYSTEM):
        said, mark, rest = prompt.removeprefix(SYSTEM).partition(HUMAN)
        messages.append({"role": "system", "content": said.strip()})
        rest = mark + rest
    if not (rest.startswith(HUMAN) and rest.endswith(ASSISTANT)):
        return None
    for part in rest.removesuffix(ASSISTANT).split(HUMAN)[1:]:
        human, *answers = part.split(ASSISTANT)
        messages.append({"role": "user", "content": human.strip()})
        messages += [{"role": "assistant", "content": answer.strip()} for answer in answers]
    return messages


def _told(messages: Sequence[Mapping[str, str]]) -> str:
    for message in messages:
        for mark in MARKS.values():
            if mark in message["content"]:
                raise DataError(f"a message holds the speaker's mark {mark!r}, and would be read as several turns")
    return "".join(f"{MARKS[message['role']]} {message['content'].strip()}" for message in messages)
