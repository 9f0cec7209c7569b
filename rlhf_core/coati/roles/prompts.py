"""Prompts of a CSV file, and in which order they come: every row before one comes again."""

from __future__ import annotations

import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from rlhf_core.data.problems import problem_key
from rlhf_core.data.reading.formats import csv_rows
from rlhf_core.data.reading.places import missing
from rlhf_core.data.reading.rows import RejectedRow
from rlhf_core.errors import DataError
from rlhf_core.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

COLUMN = "prompt"
FETCH_S = 60.0
_SCHEMES = ("http", "https", "file")


def read_prompts(place: str) -> list[str]:
    """Return the prompts of a CSV file, in its order.

    Args:
        place: path, or an http://, https:// or file:// address; plain or gzip.

    Raises:
        DataError: if it cannot be read, has no column `prompt`, no row, or a row without a prompt.
    """
    if "://" not in place:
        file = Path(place).expanduser()
        if not file.is_file():
            raise DataError(missing(file))
        return _prompts(file, str(file))
    scheme = urlsplit(place).scheme
    if scheme not in _SCHEMES:
        raise DataError(f"{place} is of a kind that is not read; give a path, or an address of {', '.join(_SCHEMES)}")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "prompts.csv"
        try:
            with urllib.request.urlopen(place, timeout=FETCH_S) as answer:
                file.write_bytes(answer.read())
        except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise DataError(f"{place} cannot be fetched: {why}; check the address, or give a file's path") from error
        return _prompts(file, place)


def _prompts(file: Path, name: str) -> list[str]:
    found = []
    for row in csv_rows(file, name):
        if isinstance(row, RejectedRow):
            raise DataError(row.detail)
        if COLUMN not in row.fields:
            raise DataError(
                f"{name} has no column {COLUMN!r}, but {', '.join(map(repr, row.fields))}; write {COLUMN!r} in "
                "the first line above the prompts"
            )
        if not row.fields[COLUMN].strip():
            raise DataError(f"{row.where} has an empty {COLUMN}; write one, or take the line out")
        found.append(row.fields[COLUMN])
    return found


class Encoded(NamedTuple):
    """Prompts as the actor takes them."""

    prompts: list[Prompt]
    cut: int
    """How many were longer than the limit, and lost their end."""


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> Encoded:
    """Return the prompts' tokens: those of the text as it stands, without a template.

    Args:
        texts: the prompts.
        tokenizer: of the actor.
        max_tokens: what is beyond is cut off.

    Raises:
        DataError: if a prompt has no token.
    """
    prompts, cut = [], 0
    for text in texts:
        ids = tokenizer(text, verbose=False).input_ids
        if not ids:
            raise DataError(f"the prompt {text[:40]!r} has no token of the model's; take it out")
        cut += len(ids) > max_tokens
        prompts.append(Prompt(tuple(ids[:max_tokens]), text, None, problem_key(text)))
    return Encoded(prompts, cut)


def next_rows(number: int, count: int, *, rows: int, seed: int) -> list[int]:
    """Return the rows that come from a place on: passes over all of them, each pass in its own seeded order.

    Args:
        number: of rows that came before.
        count: rows to return.
        rows: how many there are.
        seed: of the orders.
    """
    found: list[int] = []
    orders: dict[int, np.ndarray] = {}
    for position in range(number, number + count):
        epoch, place = divmod(position, rows)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(rows)
        found.append(int(orders[epoch][place]))
    return found
