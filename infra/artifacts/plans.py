"""What a run resolved when it first began: it asks each question once, and the first answer stays."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from infra.artifacts.backend import Backend, clock, in_parallel
from infra.artifacts.manifest import SCHEMA_VERSION, SchemaVersion, first_complaint
from infra.artifacts.ref import PLANS, plan_key, plan_prefix
from infra.errors import StoreError, StoreNotReadyError


class Answer(BaseModel):
    """What a run was told when it first asked; fields that a later minor version adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants", use_attribute_docstrings=True)

    schema_version: SchemaVersion = SCHEMA_VERSION
    """As of manifests."""
    flow_run: str
    """Of the run that asked: an answer that was copied from another run does not count."""
    question: str
    """In words."""
    when: datetime
    answer: JsonValue


def recall(backend: Backend, run: str, name: str) -> Answer | None:
    """Return what a run was told, or None if it has not asked yet.

    Args:
        backend: where.
        run: id of the flow run.
        name: of the question, such as `ppo.actor`.

    Raises:
        StoreError: if the record cannot be read, is of a later form, or is another run's.
    """
    key = plan_key(run, name)
    stored = backend.read(key)
    if stored is None:
        return None
    try:
        found = Answer.model_validate_json(stored.data)
    except ValidationError as error:
        raise StoreError(
            f"{key} in the artifact store, which says what a run began with, cannot be read "
            f"({first_complaint(error)}); start a new run with the same parameters"
        ) from None
    if found.flow_run != run:
        raise StoreError(
            f"{key} in the artifact store says what the run {found.flow_run:.40} began with: it has been altered by "
            "hand; start a new run with the same parameters"
        )
    return found


def record(backend: Backend, run: str, name: str, question: str, answer: JsonValue) -> Answer:
    """Write an answer down unless there is one, and return the one that stands.

    Args:
        backend: where.
        run: id of the flow run.
        name: of the question, as of `recall`.
        question: in words, for people.
        answer: plain data.

    Raises:
        StoreError: if it cannot be written; StoreNotReadyError, if it was removed meanwhile.
    """
    note = Answer(flow_run=run, question=question, when=clock.now(), answer=answer)
    if backend.create(plan_key(run, name), note.model_dump_json(indent=1).encode()):
        return note
    # another process of the run was quicker, or our own first attempt was, whose answer was lost on the way
    found = recall(backend, run, name)
    if found is None:
        raise StoreNotReadyError(
            f"{plan_key(run, name)} was removed from the artifact store while it was written; try again"
        )
    return found


def recall_all(backend: Backend, run: str) -> list[Answer]:
    """Return all that a run was told, in the order in which it asked.

    Raises:
        StoreError: as `recall`.
    """
    names = [each.removesuffix(".json") for each in backend.children(plan_prefix(run))]
    found = in_parallel(lambda name: recall(backend, run, name), names)
    return sorted((each for each in found if each is not None), key=lambda each: each.when)


def forget(backend: Backend, run: str) -> None:
    """Delete what a run was told: for one that ended long ago, and that nobody starts again.

    Args:
        backend: where.
        run: id of the flow run.
    """
    prefix = plan_prefix(run)
    in_parallel(lambda name: backend.delete(prefix + name), backend.children(prefix))


def check_plans(backend: Backend, told: Callable[[StoreError], str]) -> list[str]:
    """Return which records cannot be read, a sentence each.

    Args:
        backend: where.
        told: the sentence of an error.
    """

    def check(asked: tuple[str, str]) -> str | None:
        try:
            recall(backend, *asked)
        except StoreError as error:
            return told(error)
        return None

    runs = backend.children(PLANS)
    listed = in_parallel(lambda run: backend.children(f"{PLANS}{run}/"), runs)
    asked = [(run, name.removesuffix(".json")) for run, names in zip(runs, listed, strict=True) for name in names]
    return [problem for problem in in_parallel(check, asked) if problem]
