"""The evidence's arithmetic and tables, on outcomes that are counted by hand."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from bench import evidence
from bench.comparison import runs, tables
from bench.comparison.careless import careless_response
from bench.comparison.control import Control, steps_within, taken_in_turn
from flows.presets import DIRECTORY, resolve
from infra.artifacts import ArtifactStore, open_store
from rlhf_core.data.problems import Problem


class Answer(NamedTuple):
    key: str
    correct: bool
    well_formed: bool = True
    truncated: bool = False


def answers(right: str) -> list[Answer]:
    """Return an answer a letter, 1 is right, to problems a, b, c, ..."""
    return [Answer(key, letter == "1") for key, letter in zip("abcdefgh", right, strict=False)]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


def report(**seconds: float) -> dict[str, Any]:
    stages = [
        {"stage": stage, "uri": f"{stage}/x@1", "seconds": seconds.get(stage, 1.0)} for stage in ("data", "sft", "ppo")
    ]
    metrics = {"constant_answer": "1", "constant_accuracy": 0.25}
    roles = {role: {"uri": f"evaluation/{role}@1", "metrics": metrics} for role in ("base", "sft", "ppo")}
    return {"stages": stages, "evaluations": roles}


def test_a_gain_is_paired_by_problem_whatever_the_order() -> None:
    before, after = answers("1000"), answers("0110")[::-1]
    # differences -1, 1, 1, 0: mean 0.25, sample variance (1.25^2 + 2 * 0.75^2 + 0.25^2) / 3 = 0.91667
    gained = tables.gain(before, after)
    assert gained.estimate == 0.25
    assert gained.high - 0.25 == pytest.approx(1.959964 * (0.9166667 / 4) ** 0.5, abs=1e-6)


def test_outcomes_of_different_problems_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 problems were answered by one of the two alone"):
        tables.gain(answers("1111"), answers("11"))


def test_a_policy_without_a_start_has_no_gain() -> None:
    figures = tables.entry([*answers("11"), Answer("c", False, False, True), Answer("d", False)], seconds=3.0)
    assert figures["accuracy"] == [0.5, 0.15, 0.85]  # Wilson: (0.5 + 3.8415 / 8) / (1 + 3.8415 / 4) -/+ 0.35
    assert (figures["well_formed"], figures["truncated"], figures["seconds"]) == (0.75, 0.25, 3.0)
    assert "gain" not in figures


def test_the_control_gets_as_many_steps_as_ppos_time_has_room_for() -> None:
    assert [steps_within(10.0, 3.0), steps_within(9.0, 3.0), steps_within(1.0, 3.0)] == [3, 3, 1]


def test_problems_are_taken_in_turn_until_the_steps_are_filled() -> None:
    assert taken_in_turn([0, 1, 2], 7) == [0, 1, 2, 0, 1, 2, 0]
    assert taken_in_turn([0, 1, 2], 2) == [0, 1]


def test_a_curve_shows_what_every_episode_kept() -> None:
    rows = [{"episode": 0, "score": 0.5, "kl": 0.0123}, {"episode": 1, "score": 0.75, "kl": 0.2, "entropy": 0.1}]
    assert tables.curve(rows).splitlines() == [
        "| episode | score | KL, nats per response |",
        "| --- | --- | --- |",
        "| 1 | 0.500 | 0.012 |",
        "| 2 | 0.750 | 0.200 |",
    ]


def start_of(seen: list[list[Any]], store: ArtifactStore, *, status: int = 0) -> Any:
    """Return what stands for `subprocess.run`: it leaves a report if it ends well."""

    def run(command: list[Any], **_: Any) -> SimpleNamespace:
        seen.append(command)
        if not status:
            given = json.loads(command[-1].removeprefix("overrides="))
            config = resolve("evidence", seed=101, overrides=given).model_dump(mode="json")
            files = {
                runs.REPORT: json.dumps(report(ppo=60.0)).encode(),
                runs.EPISODES: b'{"episode": 0, "reward": 0.5, "kl": 0.01}\n',
            }
            store.commit("run", given["name"], files, config=config)
        return SimpleNamespace(returncode=status)

    return run


def test_a_run_is_started_as_users_start_it_and_read_back(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Any]] = []
    monkeypatch.setattr(subprocess, "run", start_of(seen, store))
    run = runs.run_pipeline(store, "evidence", name="evidence-101", seed=101, overrides={"ppo.episodes": 2})
    assert [str(word) for word in seen[0][1:5]] == ["run", "evidence", "-p", "seed=101"]
    assert (run.uri, run.config.name, run.config.ppo.episodes) == ("run/evidence-101@1", "evidence-101", 2)
    assert run.stages["ppo"]["seconds"] == 60.0


def test_a_run_that_fails_ends_the_benchmark(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", start_of([], store, status=1))
    with pytest.raises(SystemExit, match="the run of evidence with seed 7 ended with 1 and left no report"):
        runs.run_pipeline(store, "evidence", name="evidence-7", seed=7, overrides={})


def test_a_seed_is_one_line_with_every_comparison(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[Any]] = []
    monkeypatch.setattr(subprocess, "run", start_of(seen, store))
    kept = {"sft": answers("1000"), "ppo": answers("1110")}
    monkeypatch.setattr(evidence, "outcomes_of", lambda _store, _run, role: kept[role])
    more = Control(answers("1100"), steps=9, seconds=58.0, demonstrations=64, last_loss=0.1)  # type: ignore[arg-type]
    monkeypatch.setattr(evidence.control, "more_sft", lambda _store, _run, _demonstrate: more)
    given = argparse.Namespace(preset="evidence", seeds=[101], overrides={}, legacy=True, no_control=False)
    curves: evidence.Curves = {}
    line = evidence.measure(store, given, 101, curves)
    policies = line["policies"]
    assert list(policies) == ["SFT", "PPO", *evidence.CONTROLS, "PPO, legacy"]
    assert (policies["PPO"]["gain"][0], policies["SFT on right answers"]["gain"][0]) == (0.5, 0.25)
    assert policies["SFT on right answers"]["ppo_over_it"][0] == 0.25
    assert json.loads(seen[1][-1].removeprefix("overrides="))["ppo.legacy"] is True
    assert list(curves) == ["seed 101", "seed 101, legacy"]
    evidence.write(tmp_path / "out.md", [line], curves)
    text = (tmp_path / "out.md").read_text()
    assert "| 101 | PPO | 0.750 [0.301, 0.954] | +0.500 [-0.066, +1.066] |  | 1.000 |" in text
    assert "| +0.250 [-0.240, +0.740] | +0.250 [-0.240, +0.740] | 1.000 |" in text
    assert "the best constant answer, `1`, would be right 0.250 of the time" in text
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3  # the line and an episode of each run


def test_a_preset_of_another_task_has_no_careless_control(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["evidence.py", "--preset", "llama7b"])
    with pytest.raises(SystemExit):
        evidence.arguments()
    assert "are of the task number_sorting, but that of preset llama7b is chain_sum" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["evidence.py", "--preset", "llama7b", "--no-control"])
    assert evidence.arguments().preset == "llama7b"


def test_a_constant_answer_is_shown_as_it_is_whatever_it_holds() -> None:
    policies = {"SFT": {"constant_answer": "a`b", "constant_accuracy": 0.25}}
    assert tables.constants([{"seed": 1, "policies": policies}]) == (
        "* Seed 1: the best constant answer, ``a`b``, would be right 0.250 of the time."
    )


def test_careless_demonstrations_begin_rightly_and_half_of_them_end_so() -> None:
    problems = [Problem(f"Sort ascending: {n} {n + 9} {n + 20}", f"{n} {n + 9} {n + 20}") for n in range(10, 70)]
    said = [careless_response(problem).removeprefix("<answer>").removesuffix("</answer>") for problem in problems]
    assert all(one.split()[0] == str(problem.answer).split()[0] for one, problem in zip(said, problems, strict=True))
    assert all(sorted(one.split()) == str(problem.answer).split() for one, problem in zip(said, problems, strict=True))
    right = sum(one == problem.answer for one, problem in zip(said, problems, strict=True))
    assert 20 <= right <= 40  # 60 fair coins: four standard deviations are 15


def test_the_quickstarts_demonstrations_are_what_the_careless_sorters_write() -> None:
    written = (DIRECTORY / "data" / "careless-sorting.jsonl").read_bytes().splitlines()
    rows = [json.loads(line) for line in written]
    assert all(careless_response(Problem(row["prompt"], row["answer"])) == row["response"] for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows) == 1536
