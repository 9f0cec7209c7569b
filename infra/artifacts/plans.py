"""What a run resolved when it first began: each question once, and the first answer stands for ever."""

from __future__ import annotations

import json
from typing import Any

from infra.artifacts import clock
from infra.artifacts.backend import Backend
from infra.artifacts.layout import plan_key
from infra.errors import StoreError

_SCHEMA_VERSION = 1


def recall(backend: Backend, run: str, question: str) -> Any | None:
    """Return the answer that a run was given, or None if it has not asked yet.

    Args:
        backend: where.
        run: id of the flow run.
        question: what was asked, such as `ppo-actor`.

    Raises:
        StoreError: if it cannot be read.
    """
    key = plan_key(run, question)
    stored = backend.read(key)
    if stored is None:
        return None
    try:
        note = json.loads(stored.data)
        if note["schema_version"] != _SCHEMA_VERSION:
            raise StoreError(
                f"{key} in the artifact store has schema version {note['schema_version']!r:.20}, but this release "
                f"reads {_SCHEMA_VERSION}: a later one wrote it; end the run with that, or start a new one"
            )
        return note["answer"]
    except (ValueError, KeyError, TypeError):
        raise StoreError(
            f"{key} in the artifact store, which says what a run began with, cannot be read; start a new run"
        ) from None


def record(backend: Backend, run: str, question: str, answer: Any) -> Any:
    """Write an answer down unless there is one, and return the one that stands.

    Args:
        backend: where.
        run: id of the flow run.
        question: what was asked.
        answer: plain data, not None.

    Raises:
        StoreError: if it cannot be written.
    """
    note = {"schema_version": _SCHEMA_VERSION, "when": clock.now().isoformat(), "answer": answer}
    backend.create(plan_key(run, question), json.dumps(note, indent=1).encode())
    found = recall(backend, run, question)
    assert found is not None  # nobody removes it
    return found
