"""The rows of speed: which there are, when a line is complete, and what its figures are."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from bench.speed import measure, peers
from bench.speed.__main__ import main
from bench.speed.measure import Found, Goal, NotHereError, Row, Run
from bench.speed.products import distinct
from bench.speed.rows import ROWS

NAMES = """
    rollout rollout_adapters rollout_ragged rollout_shared_prompt rollout_until_stop
    logprobs_49152 logprobs_49152_memory logprobs_128256 logprobs_128256_memory
    padding_gsm8k_sft padding_gsm8k_scoring padding_gsm8k_learning
    padding_hh_sft padding_hh_reward padding_hh_scoring padding_hh_learning
    sft_step_quickstart sft_step_hh reward_step_quickstart reward_step_hh
    ppo_step_bfloat16 ppo_step_float32 ppo_step_adapters ppo_step_adapters_memory
    learning_step learning_step_compiled import_flows help bring_up simulator
    growth_step_rows growth_step_length growth_step_weights growth_ledger_makers growth_episode_makers
"""
TWICE = Goal("ratio", ">=", 2.0)


def row(found: Found | Exception, *, goal: Goal | None = TWICE, peer: str | None = "another") -> Row:
    def measured(_: Run) -> Found:
        if isinstance(found, Exception):
            raise found
        return found

    return Row("row", "s", goal, measured, peer)


def printed(capsys: pytest.CaptureFixture[str], *rows: Row, arguments: tuple[str, ...] = ()) -> tuple[int, list]:
    status = main([*arguments, "--tiny", "--rounds", "1"], rows=rows)
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_row_is_there_with_a_goal_and_a_unit() -> None:
    assert sorted(each.name for each in ROWS) == sorted(NAMES.split())
    assert all(each.goal and each.unit for each in ROWS)
    assert all(each.peer for each in ROWS if each.goal and each.goal.of == "ratio")


def test_a_ratio_is_the_peers_value_over_ours(capsys: pytest.CaptureFixture[str]) -> None:
    status, (line,) = printed(capsys, row(Found(2.0, 5.0, 1.0, {"rows": 3})))
    assert (line["value"], line["peer_value"], line["limit"], line["ratio"]) == (2.0, 5.0, 1.0, 2.5)
    assert (status, line["goal"], line["met"], line["settings"]["rows"]) == (0, "ratio >= 2", True, 3)


@pytest.mark.parametrize(
    ("found", "goal", "met"),
    [
        (Found(2.0, 3.0), TWICE, False),
        (Found(2.0), Goal("value", "<=", 2.0), True),
        (Found(2.1), Goal("value", "<=", 2.0), False),
        (Found(0.9), Goal("value", ">=", 0.95), False),
    ],
)
def test_a_goal_that_is_missed_is_no_failure(
    capsys: pytest.CaptureFixture[str], found: Found, goal: Goal, met: bool
) -> None:
    peer = "another" if goal.of == "ratio" else None
    status, (line,) = printed(capsys, row(found, goal=goal, peer=peer))
    assert (status, line["met"]) == (0, met)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row(ValueError("no such thing")), "ValueError: no such thing"),
        (row(Found(1.0)), None),  # of the peer that it names there is no value
        (row(Found(1.0, 2.0), goal=None), None),
    ],
)
def test_a_row_that_says_less_than_it_should_is_a_failure_and_others_go_on(
    capsys: pytest.CaptureFixture[str], bad: Row, said: str | None
) -> None:
    status, lines = printed(capsys, bad, Row("good", "s", TWICE, lambda _: Found(1.0, 2.0), "another"))
    assert (status, lines[0].get("error"), lines[1]["met"]) == (1, said, True)


def test_a_row_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    status, (line,) = printed(capsys, row(Found(1.0, 2.0)), arguments=("another",))
    assert (status, line["name"], line["error"]) == (1, "another", "there is no such row; there are row")


def test_a_row_whose_data_are_not_here_is_skipped_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, (line,) = printed(capsys, row(NotHereError("no data")))
    assert (status, line["skipped"], line["met"]) == (0, "no data", None)


def test_what_a_row_prints_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    def measured(_: Run) -> Found:
        print("something")  # noqa: T201
        return Found(1.0, 2.0)

    assert len(printed(capsys, Row("row", "s", TWICE, measured, "another"))[1]) == 1


def test_calls_are_timed_in_turns_and_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    times = {"a": iter([3.0, 1.0]), "b": iter([2.0, 5.0])}

    def seconds_of(call: Callable[[], str]) -> float:
        seen.append(call())
        return next(times[seen[-1]])

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    assert measure.in_turns(2, lambda: "a", lambda: "b") == [1.0, 2.0]
    assert seen == ["a", "b", "a", "b"]


def test_a_floor_counts_once_what_rows_begin_with_in_common() -> None:
    assert distinct([[1, 2, 3], [1, 2, 4], [1, 2], [2, 2]]) == 6


def test_a_peak_is_what_is_held_at_a_time() -> None:
    def hold() -> None:
        for _ in range(3):
            torch.empty(1_000_000)  # 4 MB, given back before the next
        kept = [torch.empty(1_000_000) for _ in range(2)]
        del kept

    assert measure.peak_mb(hold) == pytest.approx(8.0, rel=0.01)


@pytest.mark.parametrize("name", ["rollout_ragged", "logprobs_49152", "reward_step_quickstart", "learning_step"])
def test_a_row_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(peers, "trl_path", lambda: None)
    status, (line,) = printed(capsys, *ROWS, arguments=(name,))
    assert status == 0, line
    assert line["value"] > 0
    assert line["ratio"] == pytest.approx(line["peer_value"] / line["value"], rel=0.01)
    assert line["limit"] > 0
