"""A reasoning-gym problem's whole record as one line of JSON, tuples and sets included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DRAWN = "drawn"
"""Where our records say which task drew them, and with which parameters: some scorers depend on those."""
_KIND, _ITEMS = "__kind__", "items"
_KINDS: dict[str, type] = {"tuple": tuple, "set": set, "dict": dict}


def entry_to_json(item: Mapping[str, Any]) -> str | None:
    """Return the record; None if it holds what JSON has no way to tell.

    Lists and tuples are not one to the tasks' scorers, nor are 1 and "1" as keys: what JSON would
    blur is written down with its kind.
    """
    try:
        return json.dumps(_plain(item), sort_keys=True)
    except TypeError:
        return None


def entry_from_json(text: str) -> Any:
    """Return the record that `entry_to_json` wrote."""
    return _rich(json.loads(text))


def _plain(value: Any) -> Any:
    match value:
        case dict() if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: _plain(each) for key, each in value.items()}
        case dict():
            return {_KIND: "dict", _ITEMS: [[_plain(key), _plain(each)] for key, each in value.items()]}
        case tuple():
            return {_KIND: "tuple", _ITEMS: [_plain(each) for each in value]}
        case set() | frozenset():
            return {_KIND: "set", _ITEMS: sorted((_plain(each) for each in value), key=repr)}
        case list():
            return [_plain(each) for each in value]
        case _:
            return value.item() if hasattr(value, "item") else value


def _rich(value: Any) -> Any:
    match value:
        case {"__kind__": kind, "items": items}:
            return _KINDS[kind](tuple(_rich(each)) if kind == "dict" else _rich(each) for each in items)
        case dict():
            return {key: _rich(each) for key, each in value.items()}
        case list():
            return [_rich(each) for each in value]
        case _:
            return value
