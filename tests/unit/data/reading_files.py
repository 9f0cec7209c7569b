"""Files of rows for the tests of reading, and the reading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import SourceConfig
from rlhf_core.data.reading import Access, ReadSet, Role, read_set
from rlhf_core.errors import DataError

HI = "\n\nHuman: Hi\n\nAssistant:"


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines(*rows))
    return path


def written(tmp_path: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def read(
    path: Path | str, role: Role = "problems", *, bad_rows: Any = "refuse", template: Any = None, **source: Any
) -> ReadSet[Any]:
    access = Access(Path(path).parent / ".cache")
    sources = [SourceConfig(path=str(path), **source)]
    return read_set(sources, role, access=access, bad_rows=bad_rows, template=template)


def rows(path: Path | str, role: Role = "problems", **source: Any) -> list[Any]:
    return list(read(path, role, **source).rows)


def refusal(path: Path | str, role: Role = "problems", **source: Any) -> str:
    """Return the one sentence, which names the path."""
    with pytest.raises(DataError) as caught:
        read(path, role, **source)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message
