"""Prompts and demonstrations for `train_ppo`: rows of files, datasets of token ids, collators, a rank's sampler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from rlhf_core.counting import counted
from rlhf_core.data.problems import problem_key
from rlhf_core.data.reading.formats import json_lines
from rlhf_core.data.reading.messages import read_messages
from rlhf_core.data.reading.places import existing_file, is_saved, saved_rows
from rlhf_core.data.reading.rows import RejectedRow, answer_text, stated_answer, text_fields
from rlhf_core.data.transcripts import Message, marked_keys
from rlhf_core.errors import DataError
from rlhf_core.functional.losses import IGNORED
from rlhf_core.strategy.ranks import Ranks, current_ranks

EncodePrompt = Callable[[Sequence[Message]], list[int]]
EncodeDialogue = Callable[[Sequence[Message]], tuple[list[int], list[bool]]]
Row = dict[str, Any]
T = TypeVar("T")
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
        DataError: if a file is missing, unreadable, damaged or empty; or a row has none of the forms.
    """
    rows = (named for path in paths for named in _rows(Path(path).expanduser()))
    return [_dialogue(row, where)._replace(entry=_entry(row, where)) for where, row in rows]


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows under a path, each with the words that name it in an error."""
    if path.is_dir() and not is_saved(path):
        parts = sorted(part for part in path.iterdir() if part.is_dir() or part.name.endswith(_FILES))
        if not parts:
            raise DataError(f"{path} holds neither JSON lines ({', '.join(_FILES)}) nor a dataset saved to disk")
        for part in parts:
            yield from _rows(part)
        return
    for row in saved_rows(path) if path.is_dir() else json_lines(existing_file(path), str(path)):
        if isinstance(row, RejectedRow):
            raise DataError(row.detail)
        yield row.where, row.fields


def _dialogue(row: Mapping[str, Any], where: str) -> Dialogue:
    answer = None if row.get("gt_answer") is None else answer_text(row, where, "gt_answer")
    if row.get("input_ids") is not None:
        return Dialogue(None, answer, _ids(row["input_ids"], where), _loss_mask(row, where), where)
    if row.get("messages") is not None:
        return Dialogue(read_messages(row["messages"], where), answer, None, None, where)
    if "question" in row:
        question, text = text_fields(row, where, ("question", "answer"))
        messages = ({"role": "user", "content": question.strip()}, {"role": "assistant", "content": text.strip()})
        return Dialogue(messages, answer if answer is not None else stated_answer(text, where), None, None, where)
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


class PromptDataset(Dataset[Row]):
    """Rows of token ids with what belongs to them, as coati's collators take them.

    Args:
        rows: of prompts {"input_ids", "gt_answer", "key", "entry"}, or of demonstrations {"input_ids", "loss_mask"}.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Return one row."""
        return self._rows[index]

    def digest(self) -> str:
        """Return what names the rows' tokens and answers, in their order."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(np.asarray(row["input_ids"], dtype=np.int64).tobytes())
            digest.update(repr((row.get("gt_answer"), row.get("loss_mask"))).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


class Fitted(NamedTuple):
    """A dataset, and how many rows were too long for it."""

    dataset: PromptDataset
    dropped: int


class Limits(NamedTuple):
    """What every row has to keep to."""

    max_tokens: int
    """Longer rows are left out and counted."""
    vocabulary: int | None = None
    """Token ids are below this; None does not look."""
    setting: str = "max_tokens"
    """What the user would raise to have longer rows, for messages."""


def prompt_dataset(dialogues: Sequence[Dialogue], encode: EncodePrompt, *, limits: Limits) -> Fitted:
    """Return the prompts: all messages but a last one of the assistant's, which is what the policy is to say.

    Args:
        dialogues: rows; those of token ids are prompts as they are.
        encode: puts messages to the policy and awaits its turn.
        limits: of prompts.

    Raises:
        DataError: if a row has no prompt, or a token id that there is not, or every prompt is too long.
    """
    rows = []
    for dialogue in dialogues:
        messages = dialogue.before_answer()
        if dialogue.ids is None and not messages:
            raise DataError(f"{dialogue.where} has an assistant's message only; a prompt is what comes before it")
        ids = _known(dialogue, limits) or _named(dialogue, encode, messages)
        text = "\n".join(marked_keys(message) + message["content"] for message in messages) or str(ids)
        row = {"input_ids": ids, "gt_answer": dialogue.answer, "key": problem_key(text), "entry": dialogue.entry}
        rows.append(row)
    return _fitted(rows, "prompts", limits)


def demonstration_dataset(dialogues: Sequence[Dialogue], encode: EncodeDialogue, *, limits: Limits) -> Fitted:
    """Return the demonstrations, whose loss is taken of the assistant's tokens only.

    Args:
        dialogues: rows; those of token ids without a mask are learnt whole.
        encode: returns the ids of a dialogue, and which of them are the assistant's.
        limits: of demonstrations.

    Raises:
        DataError: if a row has nothing to learn, or a token id that there is not, or every one is too long.
    """
    rows = []
    for dialogue in dialogues:
        ids = _known(dialogue, limits)
        if ids:
            mask = list(dialogue.loss_mask if dialogue.loss_mask is not None else (True,) * len(ids))
        else:
            ids, mask = _named(dialogue, encode, dialogue.messages or ())
        if not any(mask[1:]):  # nothing predicts the first token
            raise DataError(f"{dialogue.where} has no token of the assistant's to learn")
        rows.append({"input_ids": ids, "loss_mask": mask})
    return _fitted(rows, "demonstrations", limits)


def _known(dialogue: Dialogue, limits: Limits) -> list[int]:
    """Return the row's own token ids; none if it has messages."""
    ids = list(dialogue.ids or ())
    if limits.vocabulary is not None and ids and max(ids) >= limits.vocabulary:
        raise DataError(
            f"{dialogue.where}: 'input_ids' names token {max(ids)}, but the tokenizer has {limits.vocabulary} tokens; "
            "encode the rows with the policy's tokenizer"
        )
    return ids


def _named(dialogue: Dialogue, encode: Callable[[Sequence[Message]], T], messages: Sequence[Message]) -> T:
    try:
        return encode(messages)
    except DataError as error:
        raise DataError(f"{dialogue.where}: {error}") from error


def _fitted(rows: list[Row], what: str, limits: Limits) -> Fitted:
    kept = [row for row in rows if len(row["input_ids"]) <= limits.max_tokens]
    if not kept:
        shortest = min(len(row["input_ids"]) for row in rows)
        raise DataError(
            f"all {len(rows)} {what} are longer than fits, {counted(limits.max_tokens, 'token')}; the shortest has "
            f"{shortest}; raise {limits.setting}"
        )
    return Fitted(PromptDataset(kept), len(rows) - len(kept))


class StatefulDistributedSampler(Sampler[int]):
    """Gives each rank its own rows of an epoch, in an order that seed and epoch decide.

    Rows that are left over, where the ranks do not divide them evenly, are not used in this epoch.

    Args:
        dataset: anything with a length.
        num_replicas: ranks; None asks torch.distributed.
        rank: of this process; None asks torch.distributed.
        shuffle: permute the rows, differently in each epoch.
        seed: of the permutations, at least 0.
        drop_last: has no effect: all ranks always get the same number of rows.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,  # noqa: ARG002 - coati's
    ) -> None:
        ranks = current_ranks()
        self.num_replicas = ranks.world_size if num_replicas is None else num_replicas
        self.rank = ranks.rank if rank is None else rank
        self.num_samples = len(dataset) // self.num_replicas
        self.epoch = 0
        self.start_index = 0
        self._size = len(dataset)
        self._shuffle = shuffle
        self._seed = seed

    def __len__(self) -> int:
        """Return how many rows are left for this rank in this epoch."""
        return self.num_samples - self.start_index

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's rows from `start_index` on."""
        order = np.arange(self._size)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(order)
        mine = order[self.rank : self.num_samples * self.num_replicas : self.num_replicas]
        yield from (int(row) for row in mine[self.start_index :])

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch."""
        self.epoch = epoch

    def set_start_index(self, start_index: int) -> None:
        """Leave out this rank's first rows, which were seen before the run was resumed."""
        self.start_index = start_index


@dataclass
class DataCollatorForSupervisedDataset:
    """Pads demonstrations on the right: input_ids, attention_mask, and labels that are -100 outside the loss."""

    tokenizer: Any
    max_length: int = 4096
    """Longer rows are cut at their end."""
    ignore_index: int = IGNORED

    def __call__(self, instances: Sequence[Row]) -> dict[str, Any]:
        """Return one batch."""
        rows = [list(row["input_ids"])[: self.max_length] for row in instances]
        masks = [list(row["loss_mask"])[: self.max_length] for row in instances]
        labels = [
            [token if counts else self.ignore_index for token, counts in zip(row, mask, strict=True)]
            for row, mask in zip(rows, masks, strict=True)
        ]
        width = max(len(row) for row in rows)
        return {
            "input_ids": _padded_right(rows, width, _pad_id(self.tokenizer)),
            "attention_mask": _padded_right([[1] * len(row) for row in rows], width, 0).bool(),
            "labels": _padded_right(labels, width, self.ignore_index),
            "loss_mask": _padded_right(masks, width, 0).bool(),
        }


@dataclass
class DataCollatorForPromptDataset(DataCollatorForSupervisedDataset):
    """Pads prompts on the left: input_ids, attention_mask, gt_answer, key and entry."""

    def __call__(self, instances: Sequence[Row]) -> dict[str, Any]:
        """Return one batch; a prompt longer than `max_length` loses its beginning."""
        rows = [list(row["input_ids"])[-self.max_length :] for row in instances]
        width = max(len(row) for row in rows)
        pad = _pad_id(self.tokenizer)
        return {
            "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
            "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]).bool(),
            "gt_answer": [row.get("gt_answer") for row in instances],
            "key": [row["key"] for row in instances],
            "entry": [row.get("entry") for row in instances],
        }


def make_loader(
    dataset: PromptDataset,
    collate: DataCollatorForSupervisedDataset,
    *,
    batch_size: int,
    seed: int,
    what: str,
    ranks: Ranks | None = None,
) -> DataLoader[Row]:
    """Return whole batches of this rank's rows, shuffled in each epoch.

    Args:
        dataset: the rows of all ranks.
        collate: makes a batch.
        batch_size: rows of a batch of one rank.
        seed: of the order.
        what: names the rows in an error, with the flag to change.
        ranks: who shares the rows; None takes torch.distributed's default group.

    Raises:
        DataError: if there are not enough rows for one batch on each rank.
    """
    ranks = current_ranks() if ranks is None else ranks
    sampler = StatefulDistributedSampler(dataset, ranks.world_size, ranks.rank, seed=seed)
    if len(sampler) < batch_size:
        each = f" on each of {sampler.num_replicas} ranks" if sampler.num_replicas > 1 else ""
        raise DataError(f"{len(dataset)} {what} do not fill one batch of {batch_size}{each}; lower it, or give more")
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate, drop_last=True)


def _padded_right(rows: Sequence[Sequence[int]], width: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def _pad_id(tokenizer: Any) -> int:
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in candidates if token is not None))
