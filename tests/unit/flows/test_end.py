"""What a flow's end says."""

from __future__ import annotations

from prefect.states import StateType

from flows.end import finished, made
from tasks.results import StageResult


def stage(uri: str, *, reused: bool = False) -> StageResult:
    return StageResult(stage="sft", uri=uri, digest="", reused=reused, seconds=1.0, metrics={})


def test_what_was_made_and_what_was_found_are_told_apart() -> None:
    assert made(stage("sft/a@2")) == "made sft/a@2"
    assert made(stage("sft/a@1", reused=True)) == "sft/a@1 was in the store already"
    both = made(stage("dataset/a@1", reused=True), stage("reward-model/a@3"), stage("dataset/b@1", reused=True))
    assert both == "made reward-model/a@3; dataset/a@1, dataset/b@1 were in the store already"


def test_one_artifact_of_two_roles_is_told_once() -> None:
    assert made(stage("evaluation/a@1"), stage("evaluation/a@1")) == "made evaluation/a@1"


def test_a_flow_ends_in_a_state_with_the_sentence_and_the_result() -> None:
    result = stage("sft/a@2")
    state = finished(result, "made sft/a@2", see="sft/a@2")
    assert (state.type, state.data) == (StateType.COMPLETED, result)  # type: ignore[attr-defined]
    assert state.message == "made sft/a@2 (rlhf artifacts show sft/a@2)"  # type: ignore[attr-defined]
