"""Chat messages: their roles as anyone writes them, and what of a conversation is prompt or response."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.json_rows import json_value
from rlhf_core.data.reading.rows import RowError, text_fields
from rlhf_core.data.transcripts import Message, continuation, transcript
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "system": "system",
}
UNUSABLE = "unusable messages"
_BEGINS_AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")


def read_messages(value: Any, where: str, name: str = "messages") -> tuple[Message, ...]:
    """Return messages with the roles user, assistant and system.

    Args:
        value: of the field: a list of {"role" or "from", "content" or "value"}, or that list as JSON, as CSV has it.
        where: names the row in an error.
        name: of the field.

    Raises:
        RowError: if it is something else.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json_value(value, f"{where}: {name!r}")
    if not isinstance(value, list) or not value:
        raise RowError(f"{where}: {name!r} must be a list of at least one message", UNUSABLE)
    return tuple(_message(message, where) for message in value)


def messages_in(value: Any, where: str, name: str) -> tuple[Message, ...] | None:
    """Return the messages of a field that may hold a text as well; None if it holds no list.

    A text is messages only if it is a list in JSON whose elements are objects with a role, the first of them with one
    that we know: `[1, 2]` and `["a"]` are texts, and so is whatever goes on behind the list.

    Raises:
        RowError: if it is a list of something else, or a text that begins as messages do and is no JSON.
    """
    if isinstance(value, str) and not _is_told_as_messages(value, f"{where}: {name!r}"):
        return None
    return read_messages(value, where, name) if isinstance(value, str | list) else None


def _is_told_as_messages(text: str, where: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        roles = [_role(message) for message in json_value(text, f"{where}, which begins as messages do,")]
    except RowError as error:
        if _BEGINS_AS_MESSAGES.match(text) and getattr(error.__cause__, "msg", "") != "Extra data":
            raise
        return False
    return bool(roles) and None not in roles and str(roles[0]) in _ROLES


def _role(message: Any) -> Any:
    return message.get("role") or message.get("from") if isinstance(message, dict) else None


def _message(message: Any, where: str) -> Message:
    role = _role(message)
    content = message.get("content", message.get("value")) if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES or not isinstance(content, str):
        raise RowError(
            f"{where}: a message must have 'role' (or 'from': {', '.join(_ROLES)}) and a string 'content', "
            f"but is {message!r:.80}",
            UNUSABLE,
        )
    return {"role": _ROLES[role], "content": content}


def ends_with_assistant(row: Mapping[str, Any]) -> bool:
    """Return whether a row's messages end with a response; True where they cannot be read."""
    try:
        return read_messages(row.get("messages"), "the row")[-1]["role"] == "assistant"
    except RowError:
        return True


def response_text(row: Mapping[str, Any], where: str, name: str) -> str:
    """Return the response that a field holds, as a text or as the assistant's messages.

    Raises:
        RowError: if it is something else.
    """
    messages = messages_in(row.get(name), where, name)
    return text_fields(row, where, (name,))[0] if messages is None else response_of(messages, where)


def prompt_of(messages: Sequence[Message], where: str) -> str:
    """Return messages that await the assistant as a prompt.

    Raises:
        RowError: if they do not, or cannot be told as a transcript.
    """
    try:
        return transcript(messages)
    except DataError as error:
        raise RowError(f"{where}: {error}", UNUSABLE) from error


def response_of(messages: Sequence[Message], where: str) -> str:
    """Return the assistant's message as a response; further turns follow it as a transcript has them.

    Raises:
        RowError: if the messages do not begin and end with the assistant's.
    """
    try:
        return continuation(messages)
    except DataError as error:
        raise RowError(f"{where}: {error}", UNUSABLE) from error
