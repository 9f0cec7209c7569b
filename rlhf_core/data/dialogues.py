"""Users' prompts and demonstrations for `train_ppo`: JSON lines of ours or coati's form, or datasets on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.data.labels import IGNORED
from rlhf_core.data.reading.answers import answer_text, stated_answer
from rlhf_core.data.reading.formats import read_rows
from rlhf_core.data.reading.local import existing_file
from rlhf_core.data.reading.messages import read_messages
from rlhf_core.data.reading.places import is_saved, saved_rows
from rlhf_core.data.reading.results import RejectedRow
from rlhf_core.data.reading.rows import text_fields
from rlhf_core.data.transcripts import Message
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_FILES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


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

    def before_answer(self) -> tuple[Message, ...]:
        """Return all messages but a last one of the assistant's, which is what the policy is to say."""
        messages = self.messages or ()
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


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
    elif is_saved(path):
        yield from ((row.where, row.fields) for row in saved_rows(path) if not isinstance(row, RejectedRow))
    else:
        parts = sorted(part for part in path.iterdir() if part.is_dir() or part.name.endswith(_FILES))
        if not parts:
            raise DataError(f"{path} holds neither JSON lines ({', '.join(_FILES)}) nor a dataset saved to disk")
        for part in parts:
            yield from _rows(part)


def _dialogue(row: Mapping[str, Any], where: str) -> Dialogue:
    told = None if row.get("gt_answer") is None else answer_text(row, where, "gt_answer")
    if row.get("input_ids") is not None:
        return Dialogue(None, told, _ids(row["input_ids"], where), _loss_mask(row, where), where)
    if row.get("messages") is not None:
        return Dialogue(read_messages(row["messages"], where), told, None, None, where)
    if "question" in row:
        question, text = text_fields(row, where, ("question", "answer"))
        messages = ({"role": "user", "content": question.strip()}, {"role": "assistant", "content": text.strip()})
        return Dialogue(messages, told if told is not None else stated_answer(text, where), None, None, where)
    raise DataError(
        f"{where} has none of 'messages', 'question' with 'answer', and 'input_ids'; "
        f"it has {', '.join(map(repr, row)) or 'no fields'}"
    )


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
