"""What a run was told: what holds on every backend; each backend's tests inherit these."""

from __future__ import annotations

from math import inf

import pytest

from infra.artifacts import ArtifactStore
from infra.errors import StoreError
from tests.unit.artifacts.store_contract import WRITERS, at_once


class PlanContract:
    """Inherited by the tests of each backend, which give the fixture `store`."""

    def test_of_many_who_answer_at_once_one_answer_stands_for_all(self, store: ArtifactStore) -> None:
        told = at_once(lambda n: store.record("run", "actor", "actor", n))
        found = store.recall("run", "actor")
        assert found is not None
        assert told == [found] * WRITERS
        assert found.answer in range(WRITERS)

    def test_each_run_and_question_has_an_answer_of_its_own(self, store: ArtifactStore) -> None:
        asked = [("one", "actor"), ("one", "ppo-1.actor"), ("two", "actor")]
        for number, (run, name) in enumerate(asked):
            store.record(run, name, "what?", {"is": [number, None, inf, "ü"]})
        for number, (run, name) in enumerate(asked):
            found = store.recall(run, name)
            assert found is not None
            assert found.answer == {"is": [number, None, inf, "ü"]}
        assert store.recall("two", "ppo-1.actor") is None
        assert [answer.flow_run for answer in store.plan("one")] == ["one", "one"]
        assert store.plan("three") == []

    @pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a" * 121, "line\n", "ü"])
    def test_no_name_leads_elsewhere(self, store: ArtifactStore, name: str) -> None:
        for run, question in ((name, "actor"), ("run", name)):
            with pytest.raises(StoreError, match="is no name of a run or question"):
                store.record(run, question, "what?", 1)
