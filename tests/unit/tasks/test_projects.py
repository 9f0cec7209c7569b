"""What a run's artifacts are named after, and which of an earlier release it still finds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flows.presets import draft_of, preset_values
from infra.artifacts import ArtifactRef, Manifest
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from tasks.context import Context
from tasks.evaluate import contestants
from tasks.projects import champion_of, expected_champion, in_project, latest_reference, versions, why_not_comparable
from tasks.promote import gate, promote
from tasks.results import Decision, StageResult

SUMS = {"data.task": "chain_sum", "data.task_parameters": {}, "data.demonstrations": None}
SUMS_PROJECT = "quickstart-chain-sum-64c3eb"
"""The digits: the doctest of `rlhf_core.judged_task.task_of`."""


def config(name: str | None = None, preset: str = "quickstart", **overrides: Any) -> PipelineConfig:
    """Return a run's configuration as its flow has it."""
    values = preset_values(preset)
    found = draft_of(preset, name=name, overrides=overrides, values=values).config
    return in_project(found, values, named=name is not None or "name" in overrides)


def earlier(found: PipelineConfig, name: str = "quickstart") -> dict[str, Any]:
    """Return a configuration as an earlier release stored it."""
    stored = found.model_dump(mode="json")
    del stored["preset"]
    return stored | {"name": name}


def put(context: Context, stored: dict[str, Any], kind: str = "policy") -> Manifest:
    body = {"f": str(len(context.store.list(kind))).encode()}
    made: ArtifactRef = context.store.commit(kind, stored["name"], body, config=stored)
    return context.store.resolve(made)


def crown(context: Context, manifest: Manifest) -> None:
    context.store.set_alias(manifest.uri, "champion", why="better", who="test")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "quickstart"),
        ({"seed": 5, "ppo.lr": 1e-5, "data.splits.sft": 64}, "quickstart"),
        ({"data.demonstrations": "/data/mine.jsonl"}, "quickstart"),
        (SUMS, SUMS_PROJECT),
        (SUMS | {"ppo.episodes": 2}, SUMS_PROJECT),
        (
            {"data.task": None, "data.task_parameters": {}, "data.problems": "/data/my.jsonl"},
            "quickstart-my-[0-9a-f]{6}",
        ),
        (SUMS | {"name": "sums"}, "sums"),
    ],
)
def test_a_project_is_the_presets_only_while_its_own_task_is_learnt(given: dict[str, Any], name: str) -> None:
    found = config(**given)
    assert re.fullmatch(name, found.name)
    assert found.preset == "quickstart"


def test_two_presets_that_learn_the_same_task_are_two_projects() -> None:
    assert config(preset="evidence", **SUMS).name == SUMS_PROJECT.replace("quickstart", "evidence")


def test_a_name_that_the_user_gives_is_the_project_whatever_is_learnt() -> None:
    assert config("mine").name == config("mine", **SUMS).name == "mine"


@pytest.mark.parametrize("name", ["My Project", "", "-x", "a" * 64, "a/b", "ä"])
def test_a_bad_name_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"name must be 1 to 63 lower-case letters, digits and dashes, .* but it is '"
    ):
        config(name)


def test_a_made_name_fits_what_names_may_be_long() -> None:
    values = preset_values("quickstart") | {"name": "p" * 63}
    problems = {"data.task": None, "data.task_parameters": {}, "data.problems": f"/{'q' * 90}.jsonl"}
    found = in_project(draft_of("quickstart", overrides=problems).config, values, named=False)
    assert len(found.name) == 63
    assert PipelineConfig.model_validate(found.model_dump()) == found


class TestChampions:
    """Who must be beaten."""

    def test_it_is_the_projects_own(self, context: Context) -> None:
        sorting, sums = (put(context, config(**each).model_dump(mode="json")) for each in ({}, SUMS))
        for each in (sorting, sums):
            crown(context, each)
        assert champion_of(context, config(), "quickstart") == sorting
        assert champion_of(context, config(**SUMS), SUMS_PROJECT) == sums

    def test_until_then_it_is_that_of_an_earlier_release_under_the_presets_name_for_the_same_task(
        self, context: Context
    ) -> None:
        before = put(context, earlier(config(**SUMS)))
        crown(context, before)
        assert champion_of(context, config(**SUMS), SUMS_PROJECT) == before
        assert champion_of(context, config("mine", **SUMS), "mine") == before
        assert champion_of(context, config(**SUMS | {"data.verifier": "exact"}), "other") is None
        own = put(context, config(**SUMS).model_dump(mode="json"))
        crown(context, own)
        assert champion_of(context, config(**SUMS), SUMS_PROJECT) == own
        assert context.store.alias("policy", "quickstart", "champion") == before.uri, "it was read, not moved"

    def test_one_of_an_earlier_release_for_another_task_is_nobodys(self, context: Context) -> None:
        crown(context, put(context, earlier(config())))
        assert champion_of(context, config(**SUMS), SUMS_PROJECT) is None

    def test_the_presets_of_this_release_is_no_champion_of_a_project_with_a_name(self, context: Context) -> None:
        crown(context, put(context, config().model_dump(mode="json")))
        assert champion_of(context, config("mine"), "mine") is None

    def test_a_policy_that_beats_an_earlier_releases_champion_begins_the_projects_own_line(
        self, context: Context
    ) -> None:
        before = put(context, earlier(config(**SUMS)))
        crown(context, before)
        new = put(context, config(**SUMS).model_dump(mode="json"))
        assert new.name == SUMS_PROJECT
        decided = Decision(
            promote=True, reason="better", policy=new.uri, incumbent=before.uri, champion=before.uri,
            difference=0.5, low=0.4, high=0.6,
        )  # fmt: skip
        assert promote.fn(decided) == new.uri
        assert context.store.alias("policy", "quickstart", "champion") == before.uri
        assert [move.uri for move in context.store.aliases("policy", SUMS_PROJECT)["champion"].history] == [new.uri]

    def test_the_alias_must_still_point_at_a_champion_of_the_same_name(self) -> None:
        assert expected_champion("policy/a@2", "policy/a@1") == "policy/a@1"
        assert expected_champion("policy/a@2", "policy/b@1") is None
        assert expected_champion("policy/a@2", None) is None


class TestVersions:
    """Which models the stages of a project find without being told."""

    def test_they_are_the_projects_own(self, context: Context) -> None:
        put(context, config().model_dump(mode="json"), "sft")
        sums = put(context, config(**SUMS).model_dump(mode="json"), "sft")
        assert versions(context, config(**SUMS), "sft") == [sums]

    def test_stages_of_one_named_project_may_learn_from_different_sets(self, context: Context) -> None:
        sums = put(context, config("mine", **SUMS).model_dump(mode="json"), "sft")
        assert versions(context, config("mine"), "sft") == [sums]

    def test_what_an_earlier_release_stored_under_the_presets_name_counts_for_its_own_task(
        self, context: Context
    ) -> None:
        sorting, sums = (put(context, earlier(config(**each)), "sft") for each in ({}, SUMS))
        assert versions(context, config(), "sft") == [sorting]
        assert versions(context, config(**SUMS), "sft") == [sums]
        assert latest_reference(context, config(**SUMS), "sft") == "sft/quickstart@2"
        assert latest_reference(context, config("new"), "policy") == "policy/new@latest"


class TestGate:
    """An incumbent that was made for another task."""

    @staticmethod
    def evaluated(policy: Manifest) -> StageResult:
        metrics = {"policy": policy.uri, "policy_digest": policy.digest, "judge": "exact"}
        return StageResult(stage="evaluate", uri="evaluation/x@1", digest="", reused=False, seconds=0, metrics=metrics)

    def test_nothing_is_promoted_over_it_and_the_sentence_says_what_to_do(self, context: Context) -> None:
        champion = put(context, earlier(config(**SUMS)))
        new = put(context, config().model_dump(mode="json"))
        decision = gate.fn(config(), {"champion": self.evaluated(champion), "ppo": self.evaluated(new)})
        assert not decision.promote
        assert decision.reason.startswith(
            "policy/quickstart@2 is not compared with policy/quickstart@1, which was made for another task: chain_sum, "
            "judged by reasoning_gym:chain_sum; this run's is number_sorting ("
        )
        assert decision.reason.endswith(
            "give the run a project of its own (`-p name=...`), or promote by hand (rlhf artifacts promote "
            "policy/quickstart@2 --why ...)"
        )

    def test_one_of_the_same_task_or_of_an_unknown_one_is_compared(self, context: Context) -> None:
        for stored in (config().model_dump(mode="json"), {"name": "quickstart"}):
            assert why_not_comparable(context, config(), "policy/quickstart@9", put(context, stored).uri) is None
        assert why_not_comparable(context, config(), "policy/quickstart@9", "policy/quickstart@99") is None


def test_an_earlier_releases_champion_is_evaluated_and_said_to_stand_in(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tasks import evaluate
    from tasks.results import Parent

    monkeypatch.setattr(evaluate, "base_model", lambda *_: Parent(uri="model/x", digest="0" * 64, path="/x"))
    before = put(context, earlier(config(**SUMS)))
    crown(context, before)
    new = put(context, config(**SUMS).model_dump(mode="json"))
    roles = contestants(config(**SUMS), None)
    assert {role: each.uri for role, each in roles.items()} == {"ppo": new.uri, "champion": before.uri}
    assert "policy/quickstart@1 was promoted by an earlier release, for the same task" in caplog.text
