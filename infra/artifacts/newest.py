"""Finding the newest of many versions in a few requests.

A hint holds a number that the versions of a name have reached: where to begin to list them. Whoever commits leaves one
when the listing has become long. What is listed decides, never the hint: one that is missing, behind or altered by
hand costs requests, and hides nothing.
"""

from __future__ import annotations

import json
from contextlib import suppress

from infra.artifacts.backend import Backend, Stored
from infra.artifacts.layout import hint_key, version_numbers, versions_prefix
from infra.errors import StoreError

FEW = 50
"""So many names are listed without a hint; when the newest hint is as far behind, there will be another."""
_HIGHEST = 99_999_999


def highest_version(backend: Backend, kind: str, name: str, *, leave_hint: bool = False) -> int:
    """Return the highest number of an artifact's versions, or 0 if there is none.

    Args:
        backend: where.
        kind: of the artifact.
        name: of the artifact.
        leave_hint: leave a hint for others if the way was long; for whoever writes anyway.
    """
    prefix = versions_prefix(kind, name)
    first = backend.children(prefix, most=FEW)
    found = version_numbers(first)
    if len(first) == FEW:  # else these are all: fewer, or more from a place that lists all at once
        hint = _read(backend, hint_key(kind, name))
        reached = None if hint is None else hinted_number(hint)
        later = [] if reached is None else version_numbers(backend.children(prefix, after=f"{reached:08d}"))
        later = later or version_numbers(backend.children(prefix, after=first[-1]))
        if leave_hint and len(later) > FEW:
            _leave(backend, hint_key(kind, name), max(later), hint)
        found += later
    return max(found, default=0)


def hinted_number(hint: Stored) -> int | None:
    """Return what a hint says, or None if it was altered."""
    try:
        number = json.loads(hint.data)["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and 0 <= number <= _HIGHEST else None


def _read(backend: Backend, key: str) -> Stored | None:
    """Return a hint, or None if there is none, or it cannot be read: then all is listed."""
    with suppress(StoreError):
        return backend.read(key)
    return None


def _leave(backend: Backend, key: str, number: int, old: Stored | None) -> None:
    """Write a hint, if it can be written; if another was faster, his will do."""
    data = json.dumps({"version": number}).encode()
    with suppress(StoreError):
        if old is None:
            backend.create(key, data)
        else:
            backend.replace(key, data, old.tag)
