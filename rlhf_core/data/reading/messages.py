"""Chat messages: their roles, which of them are prompt and response, and which of their keys the model is shown."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.data.reading.formats import json_value
from rlhf_core.data.reading.rows import Row, RowError, kind
from rlhf_core.data.template import Said
from rlhf_core.data.transcripts import Message, continuation, conversation, further_keys, transcript, turns_of
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from rlhf_core.data.template import PromptTemplate

_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
}
_EMPTY: tuple[Any, ...] = ("", [], {})
"""Values that can be left out without losing anything."""
UNUSABLE = "unusable messages"
_BEGINS_AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
_UNKNOWN = "whether the model is shown it is not known: its chat template is not on this machine"
_PLAIN = "template.prompt shows the contents of messages alone"
_UNSHOWN = "the chat template does not show it"
_IN_PROMPT, _IN_RESPONSE = f"{_UNSHOWN} in a prompt", f"{_UNSHOWN} in a response"
_BETWEEN = "in a response of several turns, only the assistant's turns show keys"


def read_messages(value: Any, where: str, name: str = "messages") -> tuple[Message, ...]:
    """Return messages with the roles user, assistant, system and tool, and whatever further keys they have.

    A further key that is null is none. A content of several texts is those texts, each in its own line; a call of a
    tool needs no content.

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
    return tuple(_message(message, number, where, name) for number, message in enumerate(value, start=1))


def _message(message: Any, number: int, where: str, name: str) -> Message:
    given = message if isinstance(message, dict) else {}
    wrong: list[str] = [] if given is message else [f"is {kind(message)}"]
    role = _role(given)
    if given is message and not (isinstance(role, str) and role in _ROLES):
        wrong.append("has no role" if role is None else f"has the role {role!r:.40}")
    content = _content(given, wrong) if given is message else ""
    if wrong:
        raise RowError(
            f"{where}: a message must have 'role' (or 'from': {', '.join(_ROLES)}) and a string 'content', but message "
            f"{number} of {name!r} {' and '.join(wrong)}: {message!r:.80}",
            UNUSABLE,
        )
    used = {"role" if given.get("role") else "from", "value" if given.get("content") is None else "content"}
    keys = {key: value for key, value in given.items() if key not in used and value is not None}
    said = {"role": _ROLES[role], "content": content}
    if not keys:
        return said
    try:
        # what JSON cannot hold, such as a date of Parquet's, becomes a text
        return {**said, **_without_nulls(json.loads(json.dumps(keys, default=str)))}
    except RecursionError as error:
        raise RowError(f"{where}: message {number} of {name!r} has a key nested too deeply", UNUSABLE) from error


def _without_nulls(value: Any) -> Any:
    """Leave out nulls at any depth: Arrow gives every call of a tool the arguments of all other calls, as nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _content(message: Mapping[str, Any], wrong: list[str]) -> str:
    """Return a message's content as a text; if it is something else, add that to `wrong`."""
    content = message.get("content")
    content = message.get("value") if content is None else content
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        if len(texts) == len(content):
            return "\n".join(texts)
        other = next(part for part in content if not _is_text(part))
        what = other.get("type", other) if isinstance(other, dict) else other
        wrong.append(f"has a content with the part {what!r:.40}, but only parts of type 'text' can be learnt from")
    elif content is None:
        wrong.append("has a content that is null" if {"content", "value"} & set(message) else "has no content")
    else:
        wrong.append(f"has a content that is {kind(content)}")
    return ""


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


class NotShown(NamedTuple):
    """A further key of messages, such as `thinking`, that the model is not shown."""

    key: str
    messages: int
    """Messages that have it and are shown without it."""
    why: str

    def __str__(self) -> str:
        """Return it as one clause."""
        return f"{self.key!r} of {self.messages:,} {'message' if self.messages == 1 else 'messages'} ({self.why})"


class MessageView:
    """Which further keys of messages a model is shown; the others are left out, and counted.

    Args:
        template: of the model; None keeps all keys as they are written, as nobody knows which of them are shown.
    """

    def __init__(self, template: PromptTemplate | None) -> None:
        self._template = template
        self._counts: Counter[tuple[str, str]] = Counter()

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return turns with the keys that the model is shown of them; nothing is counted.

        Raises:
            DataError: as `PromptTemplate.shown`.
        """
        return list(messages) if self._template is None else self._template.shown(messages)

    def prompt(self, messages: Sequence[Message]) -> list[Message]:
        """Return a prompt's turns, or those of a whole conversation, with the keys that the model is shown of them.

        Raises:
            DataError: as `PromptTemplate.shown`.
        """
        shown = self.shown(messages)
        why = _UNSHOWN if messages and messages[-1]["role"] == "assistant" else _IN_PROMPT
        for message, kept in zip(messages, shown, strict=True):
            self._count(message, kept if self._template is not None else (), why)
        return shown

    def response(self, messages: Sequence[Message], before: Sequence[Message]) -> list[Message]:
        """Return a response's turns, with the keys that the model is shown written out in their contents.

        Args:
            messages: the assistant's turn, and further ones.
            before: the prompt's turns.

        Raises:
            DataError: as `PromptTemplate.said`.
        """
        written = []
        for place, message in enumerate(messages):
            if self._template is None:
                self._count(message, (), _IN_RESPONSE)
                written.append(message)
                continue
            said, why = Said(message["content"], ()), _BETWEEN
            if message["role"] == "assistant" and further_keys(message):
                said, why = self._template.said([*before, *messages[:place]], message), _IN_RESPONSE
            self._count(message, said.keys, why)
            written.append({"role": message["role"], "content": said.text})
        return written

    def not_shown(self) -> tuple[NotShown, ...]:
        """Return which keys the model is not shown, the most frequent first."""
        return tuple(NotShown(key, messages, why) for (key, why), messages in self._counts.most_common())

    def _count(self, message: Message, kept: Collection[str], why: str) -> None:
        if len(message) == len(("role", "content")):
            return
        if self._template is None:
            why = _UNKNOWN
        elif not self._template.writes_turns:
            why = _PLAIN
        left_out = [key for key, value in further_keys(message).items() if key not in kept and value not in _EMPTY]
        self._counts.update((key, why) for key in left_out)


class ViewedRow(NamedTuple):
    """A row, with what the model is shown of its messages."""

    where: str
    """Names the row in an error."""
    fields: dict[str, Any]
    view: MessageView


def ends_with_assistant(row: Mapping[str, Any]) -> bool:
    """Return whether a row's messages end with a response; True where they cannot be read."""
    try:
        return bool(read_messages(row.get("messages"), "the row")[-1]["role"] == "assistant")
    except RowError:
        return True


def prompt_of(messages: Sequence[Message], row: ViewedRow) -> str:
    """Return messages that await the assistant as a prompt.

    Raises:
        RowError: if they do not, or cannot be written as a transcript, or the chat template refuses them.
    """
    try:
        return transcript(row.view.prompt(messages))
    except DataError as error:
        raise RowError(f"{row.where}: {error}", UNUSABLE) from error


def response_of(messages: Sequence[Message], row: ViewedRow, prompt: str) -> str:
    """Return the assistant's message as a response; further turns follow it as a transcript has them.

    Raises:
        RowError: if the messages do not begin and end with the assistant's, or nothing of them is shown.
    """
    try:
        continuation(messages)
        response = continuation(row.view.response(messages, turns_of(prompt)))
    except DataError as error:
        raise RowError(f"{row.where}: {error}", UNUSABLE) from error
    keys = [key for message in messages for key in further_keys(message)]
    if keys and not response:
        raise RowError(
            f"{row.where}: its response says nothing but {', '.join(keys)}, which the model is not shown; take a chat "
            "template that shows it, or leave the row out",
            "blank response",
        )
    return response


def common_turns(chosen: Sequence[Message], rejected: Sequence[Message], row: ViewedRow) -> int | None:
    """Return how many turns are the prompt of two conversations: all that are equal before an answer in both.

    Returns:
        None if they part before the assistant speaks, as the model is shown them.

    Raises:
        RowError: if the chat template refuses the turns.
    """
    places = range(min(len(chosen), len(rejected)) - 1, -1, -1)
    answers = [place for place in places if chosen[place]["role"] == rejected[place]["role"] == "assistant"]
    try:
        return next((end for end in answers if _as_text(chosen[:end], row) == _as_text(rejected[:end], row)), None)
    except DataError as error:
        raise RowError(f"{row.where}: {error}", UNUSABLE) from error


def _as_text(messages: Sequence[Message], row: ViewedRow) -> str:
    return conversation(row.view.shown(messages))


def with_messages(row: Row, names: Iterable[str]) -> Row:
    """Return a row with lists of messages where texts are such lists in JSON, as CSV has them.

    A text is such a list if its elements are objects with a role, and the first role is known or every element has a
    content too. `[1, 2]` and `["a"]` stay texts, and so does a list with something behind it.

    Args:
        row: as the file has it.
        names: of the fields that may hold messages.

    Raises:
        RowError: if a text begins as messages do, and is not JSON, or is a message without its list.
    """
    lists = {name: _listed(row.fields.get(name), f"{row.where}: {name!r}") for name in names}
    return row._replace(fields=row.fields | {name: found for name, found in lists.items() if found is not None})


def _listed(text: Any, where: str) -> list[Any] | None:
    if not isinstance(text, str) or not text.lstrip().startswith(("[", "{")):
        return None
    try:
        found = json_value(text, f"{where}, which begins as messages do,")
    except RowError as error:
        if _BEGINS_AS_MESSAGES.match(text) and getattr(error.__cause__, "msg", "") != "Extra data":
            raise
        return None
    if isinstance(found, dict):
        if _has_role(found) and _has_content(found):
            raise RowError(f"{where} is a single message; put it into a list: [{text.strip():.40}...]", UNUSABLE)
        return None
    if not found or not all(map(_has_role, found)):
        return None
    return found if _role(found[0]) in _ROLES or all(map(_has_content, found)) else None


def _role(message: Mapping[str, Any]) -> Any:
    return message.get("role") or message.get("from")


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(_role(message), str)


def _has_content(message: Mapping[str, Any]) -> bool:
    return not {"content", "value", "tool_calls"}.isdisjoint(message)
