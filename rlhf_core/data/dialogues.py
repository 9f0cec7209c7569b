"""Users' prompts and demonstrations for `train_ppo`: JSON lines of ours or coati's form, or datasets on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.data.files import PROBLEM_FIELDS, stated_answer
from rlhf_core.data.jsonl import existing_file, read_rows, text_fields
from rlhf_core.data.labels import IGNORED
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Message = dict[str, str]
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "system": "system",
}
_FILES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_ON_DISK = ("state.json", "dataset_dict.json")


class Dialogue(NamedTuple):
    """One row: messages that a template will encode, or token ids that were encoded before."""

    messages: tuple[Message, ...] | None
    answer: str | None
    """What a reward function compares a response with."""
    ids: tuple[int, ...] | None
    loss_mask: tuple[bool, ...] | None
    """With token ids only: which of them are a demonstration's; None where the row does not say."""
    where: str
    """Names the row in an error."""
    entry: str | None = None
    """The task's own record of the problem, as our data files keep it: JSON in a text."""


def read_dialogues(paths: Sequence[str | Path]) -> list[Dialogue]:
    """Return the rows of files and directories, in order.

    Args:
        paths: JSON lines (also as gzip) of {"question", "answer"} or {"messages", "gt_answer"}; directories of such
            files; directories that `datasets` saved, with messages or token ids, or directories of those.

    Returns:
        At least one row.

    Raises:
        DataError: as `read_rows`; or a row has none of the forms.
    """
    rows = (named for path in paths for named in _rows(Path(path).expanduser()))
    return [_dialogue(row, where)._replace(entry=_entry(row, where)) for where, row in rows]


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_dir():
        yield from read_rows(existing_file(path))
    elif any((path / name).is_file() for name in _ON_DISK):
        yield from _rows_on_disk(path)
    else:
        parts = sorted(part for part in path.iterdir() if part.is_dir() or part.name.endswith(_FILES))
        if not parts:
            raise DataError(f"{path} holds neither JSON lines ({', '.join(_FILES)}) nor a dataset saved to disk")
        for part in parts:
            yield from _rows(part)


def _rows_on_disk(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from datasets import DatasetDict, load_from_disk  # noqa: PLC0415  # slow to import, and seldom needed

    try:
        found = load_from_disk(str(path))
    except Exception as error:  # whatever Arrow, JSON or the file system raise on damaged files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"dataset {path} cannot be loaded: {reason}") from error
    if isinstance(found, DatasetDict):
        if "train" not in found:
            raise DataError(f"dataset {path} has the splits {', '.join(found)}; give the directory of one of them")
        found = found["train"]
    if not len(found):
        raise DataError(f"dataset {path} is empty")
    for number, row in enumerate(found, start=1):
        yield f"row {number} of {path}", row


def _dialogue(row: Mapping[str, Any], where: str) -> Dialogue:
    answer = row.get("gt_answer")
    told = None if answer is None else str(answer)
    if row.get("input_ids") is not None:
        return Dialogue(None, told, _ids(row["input_ids"], where), _loss_mask(row, where), where)
    if row.get("messages") is not None:
        return Dialogue(_messages(row["messages"], where), told, None, None, where)
    if "question" in row:
        question, text = text_fields(row, where, PROBLEM_FIELDS)
        messages = ({"role": "user", "content": question.strip()}, {"role": "assistant", "content": text.strip()})
        return Dialogue(messages, told if told is not None else stated_answer(text, where), None, None, where)
    raise DataError(
        f"{where} has none of 'messages', 'question' with 'answer', and 'input_ids'; "
        f"it has {', '.join(map(repr, row)) or 'no fields'}"
    )


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: 'messages' must be a list of at least one message")
    messages = []
    for message in value:
        role = message.get("role") or message.get("from") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(message.get("content"), str):
            raise DataError(
                f"{where}: a message must have 'role' (or 'from': {', '.join(_ROLES)}) and a string 'content', "
                f"but is {message!r:.80}"
            )
        messages.append({"role": _ROLES[role], "content": message["content"]})
    return tuple(messages)


def _entry(row: Mapping[str, Any], where: str) -> str | None:
    entry = row.get("entry")
    if not isinstance(entry, str | None):
        raise DataError(f"{where}: 'entry' must be a text, as our own data files have it")
    return entry


def _ids(value: Any, where: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)
    if not whole:
        raise DataError(f"{where}: 'input_ids' must be a list of at least one token id, which is 0 or more")
    return tuple(value)


def _loss_mask(row: Mapping[str, Any], where: str) -> tuple[bool, ...] | None:
    given: Iterable[bool] | None = None
    if row.get("loss_mask") is not None:
        given = (bool(counts) for counts in row["loss_mask"])
    elif row.get("labels") is not None:
        given = (label != IGNORED for label in row["labels"])
    if given is None:
        return None
    mask = tuple(given)
    if len(mask) != len(row["input_ids"]):
        raise DataError(f"{where} has {len(row['input_ids'])} tokens in 'input_ids', but {len(mask)} in its loss mask")
    return mask
