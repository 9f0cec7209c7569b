"""What a run was told, in a directory; and records that are damaged, altered or of a later release."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore, open_store
from infra.errors import StoreError, StoreNotReadyError
from tests.unit.artifacts.plan_contract import PlanContract


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


@pytest.fixture
def file(store: ArtifactStore, tmp_path: Path) -> Path:
    """The record of one answer, beside an artifact: an empty store is as one that has gone away."""
    store.commit("policy", "p", {"f": b"1"})
    store.record("run", "actor", "what is the actor?", {"uri": "sft/a@1"})
    return tmp_path / "store" / "plans" / "run" / "actor.json"


class TestPlansInADirectory(PlanContract):
    pass


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


def test_what_a_later_minor_version_has_added_is_passed_over(store: ArtifactStore, file: Path) -> None:
    change(file, schema_version="1.7", more={"than": "this release knows"})
    found = store.recall("run", "actor")
    assert found is not None
    assert found.answer == {"uri": "sft/a@1"}
    assert store.verify().problems == ()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_text('{"answer'), r"cannot be read \(Invalid JSON"),
        (lambda file: file.write_text("[]"), "cannot be read"),
        (lambda file: change(file, schema_version="2.0"), "has schema 2.0, this release reads 1.0; upgrade rlhf-flows"),
        (lambda file: change(file, when="yesterday"), r"cannot be read \(when: "),
        (lambda file: change(file, flow_run="another"), "says what the run another began with: it has been altered"),
    ],
)
def test_a_record_of_no_use_is_refused_and_told_by_a_verification(
    store: ArtifactStore, file: Path, damage: Any, said: str
) -> None:
    damage(file)
    for ask in (lambda: store.recall("run", "actor"), lambda: store.record("run", "actor", "", 1)):
        with pytest.raises(StoreError, match=f"plans/run/actor.json in the artifact store.* {said}.*start a new run"):
            ask()
    [problem] = store.verify().problems
    assert problem.startswith("plans/run/actor.json in the artifact store")


def test_an_answer_that_is_removed_while_it_is_written_may_stand_the_next_time(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._backend, "create", lambda *_: False)
    with pytest.raises(StoreNotReadyError, match="was removed from the artifact store while it was written; try again"):
        store.record("run", "actor", "what is the actor?", 1)


def test_a_collection_leaves_what_runs_were_told(store: ArtifactStore, file: Path) -> None:
    before = file.read_bytes()
    for _ in range(2):
        store.collect(delete=True, grace=timedelta(0), least_grace=timedelta(0))
    assert file.read_bytes() == before
