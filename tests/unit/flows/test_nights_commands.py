"""`rlhf nights` and `rlhf backfill`: what the store says of nights, and which days have none."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.cli import backfill as backfill_command
from flows.cli import main
from flows.cli.backfill import days_between, missing_days
from flows.cli.nights import nights_of
from infra.artifacts import ArtifactStore, open_default_store
from rlhf_core.errors import ConfigError

RUN = "0f0f"
DATA = {"new_files": 3, "bad_files": 1, "new_rows": 120, "old_rows": 40, "waiting_rows": 7, "problems_ppo": 100}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setenv("RLHF_STORE_URL", f"file://{tmp_path}/store")
    return open_default_store()


def commit(store: ArtifactStore, kind: str, *parents: Any, **metrics: Any) -> Any:
    body = {"body": json.dumps([kind, metrics]).encode()}
    return store.commit(kind, "team", body, parents=list(parents), metrics=metrics, flow_run=RUN)


@pytest.fixture
def year(store: ArtifactStore) -> ArtifactStore:
    """Four nights: one that was promoted, one of an earlier release, one without news, one that failed."""
    dataset = commit(store, "dataset", **DATA)
    figures = {"night": "2026-11-20", "reason": "+0.1 right", "champion": "policy/team@1", "wall_s": 700.0}
    commit(store, "run", dataset, promoted=True, **figures, seconds={"data": 4.0, "ppo": 600.0})
    policy = commit(store, "policy", seconds=90)
    commit(store, "run", commit(store, "dataset", problems_ppo=64, problems_sft=6), policy, promoted=False)
    nothing = {"nothing_new": True, "night": "2026-11-22", "reason": "nothing new since then"}
    commit(store, "run", promoted=False, **nothing, new_files=0, bad_files=0, new_rows=0, known_rows=0)
    commit(store, "dataset", **DATA | {"new_files": 9})
    return store


def test_nights_are_told_with_data_cost_and_decision(year: ArtifactStore) -> None:
    first, second, third, fourth = nights_of(year, "team")
    assert (first["night"], first["decision"], first["champion"]) == ("2026-11-20", "promoted", "policy/team@1")
    assert (first["data"]["new_rows"], first["data"]["bad_files"]) == (120, 1)
    assert first["seconds"] == {"data": 4.0, "ppo": 600.0}
    assert (second["decision"], second["problems"], second["seconds"]) == ("not promoted", 70, {"policy": 90})
    assert (third["decision"], third["seconds"], third["reason"]) == ("nothing new", {}, "nothing new since then")
    assert (fourth["decision"], fourth["report"], fourth["data"]["new_files"]) == ("not ended", None, 9)
    assert nights_of(year, "others") == []


def test_a_stage_that_was_run_by_hand_is_no_night(store: ArtifactStore) -> None:
    commit(store, "dataset", **DATA, of_night=False)
    assert nights_of(store, "team") == []
    commit(store, "dataset", **DATA, of_night=True)
    assert [night["dataset"] for night in nights_of(store, "team")] == ["dataset/team@2"]


def test_a_night_is_told_with_what_all_its_starts_took_and_cost_and_whether_it_goes_on(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"night": "2026-11-20", "wall_s": 60.0, "hours": 0.5, "gpu_hours": 2.0, "cost": 7.5, "unfinished": True}
    commit(store, "run", commit(store, "dataset", **DATA), promoted=True, reason="+0.1 right", **figures)
    spent = {"promoted": False, "budget_spent": True, "unfinished": True, "reason": "spent before PPO"}
    commit(store, "run", commit(store, "dataset", **DATA | {"new_files": 4}), **spent, hours=0.1, gpu_hours=0, cost=0)
    first, second = nights_of(store, "team")
    assert (first["spent"], first["unfinished"]) == ({"hours": 0.5, "gpu_hours": 2.0, "cost": 7.5}, True)
    assert (second["decision"], second["reason"]) == ("budget spent", "spent before PPO")
    assert main(["nights", "team"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2026-11-20  run/team@1  promoted, and goes on  30:00 min  2.00 GPU hours  cost 7.50"
    assert lines[3].endswith("run/team@2  budget spent, and goes on  6:00 min")
    assert lines[4].strip().startswith("4 new files")


def test_the_lines_and_the_json_say_the_same(year: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nights", "team"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2026-11-20  run/team@1  promoted  11:40 min  (data 4 s, ppo 10:00 min)"
    assert lines[1].strip() == "3 new files, 120 new rows, 1 in quarantine, 40 old beside them, 7 wait"
    assert lines[2].strip() == "+0.1 right"
    assert any("dataset/team@3  not ended" in line for line in lines)
    assert main(["nights", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == nights_of(year, None)


def test_a_name_without_nights_is_an_error(year: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nights", "teem"]) == 1
    assert f"{year.url} holds no night of teem; it has those of team" in " ".join(capsys.readouterr().err.split())


def test_only_days_without_a_night_are_missing(year: ArtifactStore) -> None:
    days = days_between("2026-11-19", "2026-11-23", date(2026, 11, 28))
    assert [day.day for day in missing_days(year, "team", days)] == [19, 21, 23]
    assert missing_days(year, "others", days) == days


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        ("2026-11-23", "2026-11-20", "lies before"),
        ("2026-11-23", "2026-12-01", "still to come"),
        ("last week", "2026-11-20", "a day is written as"),
    ],
)
def test_days_that_make_no_range_are_refused(first: str, last: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        days_between(first, last, date(2026, 11, 28))


def test_missing_nights_are_made_in_order_until_one_fails(
    year: ArtifactStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del year
    made: list[tuple[str, bool]] = []

    def run(deployment: str, param: tuple[str, ...], *, wait: bool) -> int:
        assert deployment == "nightly"
        made.append((param[-1], wait))
        return int(param[-1] == 'as_of="2026-11-21"')

    monkeypatch.setattr(backfill_command, "run_deployment", run)
    monkeypatch.setattr(backfill_command, "_name", lambda *_: "team")
    assert main(["backfill", "2026-11-19", "2026-11-23", "--dry-run"]) == 0
    assert made == []
    assert main(["backfill", "2026-11-19", "2026-11-23"]) == 1
    assert made == [('as_of="2026-11-19"', True), ('as_of="2026-11-21"', True)]
    told = capsys.readouterr().out
    assert "of 5 days, 3 without a night: 2026-11-19, 2026-11-21, 2026-11-23" in told
    assert "1 night from 2026-11-23 on not begun" in told
    made.clear()
    assert main(["backfill", "2026-11-19", "2026-11-23", "--no-wait"]) == 0
    assert made == [('as_of="2026-11-19"', False)]
    assert main(["backfill", "2026-11-20", "2026-11-20"]) == 0
    assert "has its night" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "name"),
    [({}, "quickstart-arrived-"), ({"name": "team"}, "team"), ({"overrides": {"name": "crew"}}, "crew")],
    ids=["by its data", "by the parameter", "by an override"],
)
def test_backfill_looks_for_the_nights_of_the_runs_project(
    year: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], name: str
) -> None:
    del year
    (tmp_path / "arrived").mkdir()
    (tmp_path / "arrived" / "day.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    overrides = {"data.arrivals": {}, **given.get("overrides", {})}
    parameters = {"preset": "quickstart", "data": str(tmp_path / "arrived"), **given, "overrides": overrides}
    schema = {"properties": {"as_of": {}}}
    deployment = SimpleNamespace(parameters=parameters, parameter_openapi_schema=schema)
    monkeypatch.setattr("flows.cli.run.find_deployment", lambda _: deployment)
    assert backfill_command._name("pipeline/nightly", ()).startswith(name)
