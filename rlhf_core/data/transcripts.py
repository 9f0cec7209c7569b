r"""Conversations as one text: "\n\nSystem: ...\n\nHuman: ...\n\nAssistant:", which HH-RLHF's prompts are too.

Further keys of a turn, besides role and content, stand between its speaker's mark and its content:
"\n\nAssistant:[keys {"thinking": "..."}] Hello". A tool's result is a turn of the user's with the key role.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SYSTEM = "\n\nSystem:"
HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
TOOL = "tool"
MARKS = {"system": SYSTEM, "user": HUMAN, "assistant": ASSISTANT, TOOL: HUMAN}
_KEYS, _KEYS_END = "[keys ", "]"
Message = dict[str, Any]
"""A turn: its role (system, user, assistant or tool), its content, a text, and whatever further keys it has."""


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    r"""Return a conversation that awaits the assistant as a prompt.

    A single turn of the user's is returned as its text, without marks.

    Args:
        messages: turns, the last one the user's or a tool's; a system turn may stand first.

    Raises:
        DataError: if they are no such conversation, or a turn's text holds a speaker's mark.

    Example:
        >>> transcript([{"role": "user", "content": "Hi"}])
        'Hi'
        >>> transcript([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        '\n\nSystem: Be brief.\n\nHuman: Hi\n\nAssistant:'
    """
    if not messages or messages[-1]["role"] not in {"user", TOOL}:
        last = f"its last message is the {messages[-1]['role']}'s" if messages else "there is no message"
        raise DataError(f"a prompt must end with the user's turn, but {last}")
    whole = conversation(messages)
    alone = len(messages) == 1 and is_plain(messages)
    return str(messages[0]["content"]).strip() if alone else whole + ASSISTANT


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
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
    return _marked(messages)


def continuation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what follows a prompt: the assistant's text, and further turns with their speakers' marks.

    Raises:
        DataError: if the assistant does not speak first and last, or a turn's text holds a speaker's mark.
    """
    roles = [message["role"] for message in messages]
    if roles[:1] != ["assistant"] or roles[-1] != "assistant" or "system" in roles:
        raise DataError(
            "a response must begin and end with the assistant's turn, but its turns are " + ", ".join(roles)
        )
    if TOOL in roles:
        raise DataError(
            "a response of several turns cannot hold a tool's, which nothing would tell from the user's; let the "
            "prompt end with the tool's turn, so that the response is what the assistant says to it"
        )
    return stripped(_marked(messages).removeprefix(ASSISTANT))


def turns(prompt: str) -> list[Message] | None:
    """Return a transcript's turns; None if the prompt is not a transcript that awaits the assistant."""
    rest = prompt
    messages: list[Message] = []
    if prompt.startswith(SYSTEM):
        said, mark, rest = prompt.removeprefix(SYSTEM).partition(HUMAN)
        messages.append(_turn("system", said))
        rest = mark + rest
    if not (rest.startswith(HUMAN) and rest.endswith(ASSISTANT)):
        return None
    for part in rest.removesuffix(ASSISTANT).split(HUMAN)[1:]:
        human, *answers = part.split(ASSISTANT)
        messages.append(_turn("user", human))
        messages += [_turn("assistant", answer) for answer in answers]
    return messages


def turns_of(prompt: str) -> list[Message]:
    """Return a transcript's turns; of any other prompt the user's turn that it is."""
    return turns(prompt) or [{"role": "user", "content": prompt}]


def first_turn(response: str) -> str:
    """Return the first turn of a response: where two transcripts part early, further turns follow."""
    return response.partition(HUMAN)[0].strip()


def stripped(response: str) -> str:
    """Return a response without the space around it; a mark behind a turn that says nothing stays a mark."""
    said, mark, further = response.partition(HUMAN)
    return (said.lstrip() + mark + further).rstrip()


def further_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a turn has besides its role and its content, in the order of the keys' names."""
    if len(message) == len(("role", "content")):  # most turns: this is asked of millions
        return {}
    return {key: message[key] for key in sorted(message) if key not in {"role", "content"}}


def is_plain(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether all turns have a role and a content alone, and none is a tool's."""
    return not any(message["role"] == TOOL or further_keys(message) for message in messages)


def marked_keys(message: Mapping[str, Any]) -> str:
    """Return what stands behind a turn's speaker's mark: nothing, or its further keys as one line of JSON."""
    keys = further_keys(message)
    if message["role"] == TOOL:
        keys = {"role": TOOL, **keys}
    return f"{_KEYS}{json.dumps(keys, ensure_ascii=False)}{_KEYS_END}" if keys else ""


def _marked(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in messages:
        for mark in MARKS.values():
            if mark in message["content"]:
                raise DataError(f"a message holds the speaker's mark {mark!r}, and would be read as several turns")
    # a content follows a space, and keys do not; JSON has no bare line ends, so keys hold no speaker's mark
    return "".join(
        f"{MARKS[message['role']]}{marked_keys(message)} {message['content'].strip()}" for message in messages
    )


def _turn(role: str, text: str) -> Message:
    """Return the turn that `_marked` wrote, from what follows its speaker's mark."""
    if text.startswith(_KEYS):
        try:
            keys, end = json.JSONDecoder().raw_decode(text, len(_KEYS))
        except (ValueError, RecursionError):
            keys, end = None, 0
        if text.startswith(_KEYS_END, end) and _are_keys(keys, role):
            return {"role": role, "content": text[end + len(_KEYS_END) :].strip(), **keys}
    return {"role": role, "content": text.strip()}


def _are_keys(found: Any, role: str) -> bool:
    return (
        isinstance(found, dict)
        and "content" not in found
        and ("role" not in found or (role == "user" and found["role"] == TOOL))
    )
