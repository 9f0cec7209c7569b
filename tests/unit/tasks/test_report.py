"""The tasks that keep a run's report and show what was made on its page, pictures included."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from infra.artifacts import ArtifactStore
from infra.settings import settings
from rlhf_core.config import DataConfig, GateConfig, PipelineConfig
from tasks import showing
from tasks.challenger import CHALLENGER
from tasks.context import Context
from tasks.pictures import style
from tasks.promote import gate, promote
from tasks.report import facts, page, write
from tasks.report.write import show_episodes, show_evaluations, show_training, write_budget_spent, write_report
from tasks.results import Decision, StageResult
from tasks.stages import stage_result
from tests.unit.tasks.episodes import WIDTH, episode, size


@pytest.fixture
def made(store: ArtifactStore) -> Callable[..., StageResult]:
    def make(
        stage: str, kind: str, files: dict[str, list[dict[str, Any]]], parents: Sequence[str] = (), **metrics: Any
    ) -> StageResult:
        bodies = {name: "".join(json.dumps(row) + "\n" for row in rows).encode() for name, rows in files.items()}
        reference = store.commit(kind, "test", bodies, parents=parents, metrics=metrics)
        return stage_result(stage, store.resolve(reference.uri), reused=False)

    return make


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, str]]:
    """What was put on the run's page: body and description by key."""
    found: dict[str, tuple[Any, str]] = {}
    monkeypatch.setattr(page, "root_flow_run", lambda: "a run")
    monkeypatch.setattr(
        page,
        "create_markdown_artifact",
        lambda key, markdown, description: found.update({key: (markdown, description)}),
    )
    return found


def test_a_pages_key_is_its_presets_own_and_the_same_every_night() -> None:
    assert page.page_key("report", "run/quickstart@1") == page.page_key("report", "run/quickstart@12")
    assert page.page_key("report", "run/gsm8k@1") == "gsm8k-report"
    assert page.page_key("data", "dataset/my_own.v2@3") == "my-own-v2-data"  # Prefect takes letters, digits and dashes


SAMPLE = {"prompt": "p", "answer": "1", "response": "<b>", "score": 0.5, "kl": 0.5, "length": 3}
OUTCOME = {"key": "k", "prompt": "p", "answer": "1", "response": "<b>", "correct": True, "score": 1.0}
HELD = "data:image/png;base64,"


def reported(made: Callable[..., StageResult]) -> str:
    """Write the report of a small night, and return its reference."""
    sft = made("sft", "sft", {"metrics.jsonl": [{"step": 1, "loss": 1.0, "lr": 0.1}]}, first_loss=1.0)
    files = {"metrics.jsonl": [episode(0)], "samples.jsonl": [SAMPLE]}
    policy = made("ppo", "policy", files, parents=[sft.uri], episodes=1)
    scorer = made("reward-model", "reward-model", {"weights": []}, accuracy=0.5, low=0.4, high=0.6)  # older: no steps
    figures = {"accuracy": 1.0, "low": 0.2, "high": 1.0, "judge": "exact", "problems": 1}
    outcomes = {"outcomes.jsonl": [OUTCOME]}
    evaluations = {role: made("evaluate", "evaluation", outcomes, policy=role, **figures) for role in ("sft", "ppo")}
    decision = Decision(
        promote=False, reason="equal", policy=policy.uri, incumbent=sft.uri, champion=None,
        difference=0.0, low=0.0, high=0.0,
    )  # fmt: skip
    config = PipelineConfig(name="test", data=DataConfig(task="chain_sum"))
    return str(write_report.fn(config, [sft, scorer, policy], evaluations, decision, None, wall_s=9.0))  # type: ignore[attr-defined]


def test_a_run_keeps_its_report_samples_and_pictures_and_shows_them(
    store: ArtifactStore, made: Callable[..., StageResult], shown: dict[str, tuple[Any, str]]
) -> None:
    manifest = store.resolve(reported(made))
    kept = "config.json evaluation.png lineage.png metrics.jsonl ppo.png "
    kept += "report.html report.json report.md samples.md sft.png"
    assert " ".join(sorted(entry.path for entry in manifest.files)) == kept
    assert size(store.read_bytes(manifest, "ppo.png"))[0] == WIDTH
    assert store.read_json(manifest, "report.json")["changes"]["counts"]["both right"] == 1
    text = store.read_bytes(manifest, "report.md").decode()
    assert "![PPO by episode](ppo.png)" in text
    assert "reward-model.png" not in text
    assert "└── sft/test@1  " in text  # the policy's lineage
    assert store.read_json(manifest, "report.json")["lineage"][0].startswith("policy/test@1")
    assert set(shown) == {"test-report", "test-ppo-curves", "test-samples"}
    assert all(HELD in shown[key][1] for key in ("test-report", "test-ppo-curves"))  # seen without a click
    assert shown["test-report"][0].count(HELD) == 2  # lineage.png, sft.png; the two others are seen already
    assert f"`rlhf page {manifest.uri}`" in shown["test-report"][0]
    page = store.read_bytes(manifest, "report.html").decode()
    assert '<section id="lineage">' in page
    assert '<section id="cost">' in page
    assert "rows" not in store.read_json(manifest, "report.json")["moved"]


def broken(*_: object, **__: object) -> None:
    raise ValueError("a fault of ours")


@pytest.mark.parametrize(
    ("module", "name", "told"),
    [
        (facts, "chosen_samples", "samples of the last episode"),
        (facts, "changes", "answers before and after PPO"),
        (facts, "draw", "what the policy came from"),
        (facts, "ancestry", "the picture of what the policy came from"),
        (facts, "findings", "findings"),
        (facts, "moved", "what moved against the champion"),
        (facts, "costs_of", "what the run cost"),
        (facts, "paid_by_source", "rewards by source"),
        (write, "report_text", "the report's text"),
        (write, "page_of_facts", "the report as one page"),
        (write, "samples_document", "the report's samples"),
        (style, "png", "a picture"),
        (page, "create_markdown_artifact", "a page in Prefect"),
    ],
)
def test_what_is_only_read_of_a_report_may_be_missing_with_a_warning_and_its_figures_are_kept(
    store: ArtifactStore,
    made: Callable[..., StageResult],
    shown: dict[str, tuple[Any, str]],
    module: Any,
    name: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    del shown  # stands for Prefect
    monkeypatch.setattr(showing, "_told", set())
    monkeypatch.setattr(style, "png", lambda figure: bool(figure) * b"a picture")  # the test above draws them
    monkeypatch.setattr(module, name, broken)
    manifest = store.resolve(reported(made))
    kept = store.read_json(manifest, "report.json")
    assert (kept["decision"]["reason"], kept["evaluations"]["ppo"]["metrics"]["accuracy"]) == ("equal", 1.0)
    pictures = {entry.path for entry in manifest.files if entry.path.endswith(".png")}
    assert (kept["samples"] is None, kept["changes"] is None, kept["lineage"] == [], pictures == set()) == tuple(
        name == each for each in ("chosen_samples", "changes", "draw", "png")
    )
    whole = {"report.md": "# ", "samples.md": "# "}
    assert (b"could not be chosen" in store.read_bytes(manifest, "samples.md")) == (name == "chosen_samples")
    whole |= {"report_text": {"report.md": "The text"}, "samples_document": {"samples.md": "The samples"}}.get(name, {})
    for file, begins in whole.items():
        assert store.read_bytes(manifest, file).decode().startswith(begins)
    assert [f"{told}: not shown, and the run goes on without (ValueError: a fault of ours)"] == [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    ]


def test_a_night_whose_budget_was_spent_before_ppo_has_a_report_with_what_it_made_and_spent(
    store: ArtifactStore, made: Callable[..., StageResult], shown: dict[str, tuple[Any, str]]
) -> None:
    config = PipelineConfig(name="test", data=DataConfig(task="chain_sum"))
    sft, found = (
        made("sft", "sft", {"metrics.jsonl": []}, first_loss=2.0, last_loss=1.0),
        made("data", "dataset", {"problems.jsonl": []}),
    )
    told = "the budget was spent before *it*"
    stages = [found.model_copy(update={"reused": True}), sft]
    store.set_alias(made("ppo", "policy", {"metrics.jsonl": []}).uri, "champion", why="better", who="a person")
    manifest = store.resolve(write_budget_spent.fn(config, stages, told, wall_s=9.0))  # type: ignore[attr-defined]
    figures = manifest.metrics
    assert (figures["promoted"], figures["budget_spent"], figures["unfinished"]) == (False, True, True)
    assert (figures["reason"], figures["champion"], figures["wall_s"]) == (told, "policy/test@1", 9.0)
    assert figures["seconds"] == {"sft": sft.seconds}
    assert {"hours", "gpu_hours", "cost", "night"} <= figures.keys()
    assert [parent.uri for parent in manifest.parents] == ["dataset/test@1", "sft/test@1"]
    body, description = shown["test-report"]
    assert body == store.read_bytes(manifest, "report.md").decode()
    assert "before \\*it\\*" in body
    assert "* **sft**: loss 2.000 to 1.000 (sft/test@1, made now)" in body
    assert description.endswith("stored as run/test@1")


def test_a_run_that_only_a_reward_model_judged_is_compared_promoted_and_reported(
    store: ArtifactStore, made: Callable[..., StageResult], shown: dict[str, tuple[Any, str]]
) -> None:
    row = {"episode": 0, "reward": 0.25, "reward_std": 1.0, "samples": 4.0, "verifier": 0.0, "well_formed": 0.0}
    row |= {"kl": 0.0, "raw/reward_model": 0.25, "reward_share_reward_model": 1.0}
    policy = made("ppo", "policy", {"metrics.jsonl": [row], "samples.jsonl": [SAMPLE]}, episodes=1, last_kl=0.0)
    figures: dict[str, Any] = {"judge": "reward_model", "low": 0.0, "high": 1.0, "problems": 2}

    def evaluated(policy: str, *scores: float) -> StageResult:
        kept = {"well_formed": True, "truncated": False, "correct": False, "answer": ""}
        rows = [{**OUTCOME, **kept, "key": str(at), "score": score} for at, score in enumerate(scores)]
        facts = {"policy": policy, "policy_digest": policy, "score": sum(scores) / 2}
        return made("evaluate", "evaluation", {"outcomes.jsonl": rows}, **figures, **facts)

    evaluations = {"sft": evaluated("sft/test@1", 0.0, 0.5), "ppo": evaluated(policy.uri, 1.0, 1.5)}
    rules = GateConfig(year_error=0.8, nights_a_year=1)  # two problems pass it: p is 1 / 4, and 0.4 is needed
    config = PipelineConfig(name="test", data=DataConfig.model_validate({"preferences": "x.jsonl"}), gate=rules)
    decision = gate.fn(config, evaluations)  # type: ignore[attr-defined]
    champion = promote.fn(decision)  # type: ignore[attr-defined]
    assert (decision.difference, champion) == (1.0, policy.uri)
    reference = write_report.fn(config, [policy], evaluations, decision, champion, wall_s=1.0)  # type: ignore[attr-defined]
    text = store.read_bytes(store.resolve(reference), "report.md").decode()
    assert "+1.000 \\[+1.000, +1.000\\] standard deviations of the reward model's score" in text
    assert "**2** score rose" in text
    assert "right" not in text
    assert set(shown) == {"test-report", "test-ppo-curves", "test-samples"}


def test_the_page_of_a_night_that_promotes_its_challenger_is_about_the_challenger(
    store: ArtifactStore, made: Callable[..., StageResult], shown: dict[str, tuple[Any, str]]
) -> None:
    del shown  # stands for Prefect
    sft = made("sft", "sft", {"metrics.jsonl": []})
    names = ("champion", CHALLENGER, "ppo")
    policies = {
        name: made("ppo", "policy", {"metrics.jsonl": [episode(0)], "w": [{"of": name}]}, parents=[sft.uri])
        for name in names
    }
    evaluations = {
        name: made(
            "evaluate", "evaluation", {"outcomes.jsonl": [{**OUTCOME, "correct": is_right}]},
            policy=policies[name].uri, judge="exact", accuracy=float(is_right), low=0.0, high=1.0,
        )
        for name, is_right in zip(names, (False, True, False), strict=True)
    }  # fmt: skip
    champion, challenger = policies["champion"].uri, policies[CHALLENGER].uri
    decision = Decision(
        promote=True, reason="better", policy=challenger, incumbent=champion, champion=champion,
        difference=1.0, low=0.5, high=1.5,
    )  # fmt: skip
    stages, config = [sft, policies["ppo"]], PipelineConfig(name="test", data=DataConfig(task="chain_sum"))
    reference = write_report.fn(config, stages, evaluations, decision, challenger, wall_s=9.0)  # type: ignore[attr-defined]
    manifest = store.resolve(reference)
    kept, page = store.read_json(manifest, "report.json"), store.read_bytes(manifest, "report.html").decode()
    assert (kept["moved"]["role"], kept["moved"]["counts"]["wrong → right"]) == ("champion", 1)
    assert kept["lineage"][0].startswith(challenger)
    assert kept["differs"]["against"] == champion
    assert "<b>1.000</b><span>right, challenger</span>" in page
    assert '"sides":["champion","challenger"]' in page


def test_a_night_that_was_killed_and_started_again_tells_the_time_of_all_its_starts(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "worked_s", lambda: 7200.0)
    monkeypatch.setattr(write, "open_context", lambda: Context(store, settings(), "tonight"))

    def found(stage: str, name: str, key: str, flow_run: str) -> StageResult:
        reference = store.commit(
            stage, name, {"w": key.encode()}, key=key * 64, metrics={"seconds": 5.0}, flow_run=flow_run
        )
        return stage_result(stage, store.resolve(reference.uri), reused=True)

    found("reward-model", "another", "c", "another run")
    stages = [
        found("dataset", "test", "a", "another night"),
        found("sft", "test", "b", "tonight"),
        found("reward-model", "test", "c", "tonight"),  # the copy of what another project made
    ]
    config = PipelineConfig(name="test", data=DataConfig(task="chain_sum"))
    manifest = store.resolve(write_budget_spent.fn(config, stages, "spent", wall_s=9.0))  # type: ignore[attr-defined]
    assert (manifest.metrics["wall_s"], manifest.metrics["seconds"]) == (7200.0, {"sft": 5.0})
    text = store.read_bytes(manifest, "report.md").decode()
    assert text.count("from the store") == 2
    assert text.count("made now") == 1


def test_a_ppo_run_of_its_own_shows_its_curves_over_its_table(
    made: Callable[..., StageResult], shown: dict[str, tuple[Any, str]]
) -> None:
    older = made("ppo", "policy", {"metrics.jsonl": [episode(0), episode(1, reward=0.123456)]})  # no samples kept
    show_episodes.fn(older, 0)  # type: ignore[attr-defined]
    body, description = shown["test-ppo-episodes"]
    assert "| 1 | 0.500 |" in body
    assert "| 2 | 0.123 |" in body
    assert "| 0 |" not in body
    assert HELD in description
    assert "No samples were kept." in shown["test-ppo-samples"][0]


def test_a_supervised_stage_shows_its_curve_and_an_older_one_nothing(
    made: Callable[..., StageResult], shown: dict[str, tuple[Any, str]]
) -> None:
    show_training.fn(made("sft", "sft", {"weights": []}))  # type: ignore[attr-defined]
    assert shown == {}
    sft = made("sft", "sft", {"metrics.jsonl": [{"step": 1, "loss": 1.0}]}, first_loss=1.0, last_loss=0.5, steps=1)
    show_training.fn(sft)  # type: ignore[attr-defined]
    body, description = shown["test-sft-training"]
    assert "loss 1.000 to 0.500 in 1 step" in body
    assert HELD in description


def test_an_evaluation_of_its_own_shows_scores_and_what_became_of_answers(
    made: Callable[..., StageResult], shown: dict[str, tuple[Any, str]]
) -> None:
    figures = {"accuracy": 0.5, "score": 0.5, "low": 0.25, "high": 0.75, "judge": "exact", "problems": 1}

    def evaluated(role: str, *, correct: bool) -> StageResult:
        rows = {"outcomes.jsonl": [{**OUTCOME, "correct": correct}]}
        return made("evaluate", "evaluation", rows, policy=f"policy/{role}@1", **figures)

    alone = {"ppo": evaluated("new", correct=True)}
    show_evaluations.fn(alone, 0)  # type: ignore[attr-defined]
    body, description = shown["test-evaluation"]
    assert "| ppo | 0.500 [0.250, 0.750] |" in body
    assert "ppo is policy/new@1." in body
    assert "before and after" not in body
    assert description.startswith("Held-out answers of policy/new@1 ![")
    assert HELD in description
    show_evaluations.fn({"start": evaluated("old", correct=False), **alone}, 0)  # type: ignore[attr-defined]
    assert "**1** wrong → right" in shown["test-evaluation"][0]
