"""JSON lines as we store them: the same bytes for the same rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one line of JSON per row, the same bytes for the same rows."""
    return b"".join(
        json.dumps(row, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n" for row in rows
    )


def from_jsonl(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of what `to_jsonl` wrote."""
    return [json.loads(line.decode("utf-8", "surrogatepass")) for line in data.split(b"\n") if line.strip()]
