"""Finding the newest of many versions in a few requests.

A hint holds a number that the versions of a name have reached: where to begin to list them. Whoever commits leaves one
when the listing has become long. What is listed decides, never the hint: one that is missing, behind or altered by
hand costs requests, and hides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from infra.artifacts.backend import Backend, Stored
from infra.artifacts.layout import HINTS, VERSIONS, hint_key, version_numbers, versions_prefix
from infra.artifacts.parallel import in_parallel
from infra.artifacts.ref import KINDS

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
        hint = backend.read(hint_key(kind, name))
        reached = None if hint is None else _number(hint)
        later = [] if reached is None else version_numbers(backend.children(prefix, after=f"{reached:08d}"))
        later = later or version_numbers(backend.children(prefix, after=first[-1]))
        if leave_hint and len(later) > FEW:
            _leave(backend, hint_key(kind, name), max(later), hint)
        found += later
    return max(found, default=0)


def check_hints(backend: Backend) -> Iterator[str]:
    """Yield which hints were altered: they mislead nobody, but save nothing either."""
    keys = [f"{HINTS}{kind}/{file}" for kind in KINDS for file in backend.children(f"{HINTS}{kind}/")]
    yield from filter(None, in_parallel(lambda key: _complaint(backend, key), keys))


def _complaint(backend: Backend, key: str) -> str | None:
    hint = backend.read(key)
    if hint is None:
        return None
    reached = _number(hint)
    if reached is None:
        return f"{key} in the artifact store cannot be read; remove it, it only tells where to begin to look"
    prefix = key.replace(HINTS, VERSIONS, 1).removesuffix(".json") + "/"
    if not version_numbers(backend.children(prefix, after=f"{reached:08d}")):
        return f"{key} says {reached}, but there is no such version nor a later one; remove it"
    return None


def _number(hint: Stored) -> int | None:
    """Return what a hint says, or None if it was altered."""
    try:
        number = json.loads(hint.data)["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and 0 <= number <= _HIGHEST else None


def _leave(backend: Backend, key: str, number: int, old: Stored | None) -> None:
    """Write a hint; if another was faster, his will do."""
    data = json.dumps({"version": number}).encode()
    if old is None:
        backend.create(key, data)
    else:
        backend.replace(key, data, old.tag)
