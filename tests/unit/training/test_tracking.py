"""Numbers and texts arrive where they are sent, and a tracker that is not there is told in a sentence."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from rlhf_core.errors import ConfigError
from rlhf_core.training import tracking
from rlhf_core.training.tracking import JsonLines, MeanMeter, Tracker, open_tracker


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tensorboard_and_json_lines_hold_what_was_logged(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path, "ppo")
    tracker.log({"train/reward": 0.5, "train/kl": math.nan}, step=1)
    tracker.log({"train/reward": 0.75}, step=2)
    tracker.text("sample", "2 + 2\n= 4", step=2)
    tracker.close()
    assert tracker.directory is not None
    assert tracker.directory.parent == tmp_path / "ppo"
    assert lines(tracker.directory / "metrics.jsonl") == [
        {"step": 1, "train/reward": 0.5, "train/kl": None},
        {"step": 2, "train/reward": 0.75},
    ]
    assert lines(tracker.directory / "texts.jsonl") == [{"step": 2, "name": "sample", "text": "2 + 2\n= 4"}]
    board = EventAccumulator(str(tracker.directory)).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/reward")] == [(1, 0.5), (2, 0.75)]
    text = board.Tensors("sample/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    2 + 2\n    = 4"


def test_two_runs_of_one_second_have_directories_of_their_own(tmp_path: Path) -> None:
    directories = [open_tracker(tmp_path, "ppo").directory for _ in range(3)]
    assert len(set(directories)) == 3


def test_without_a_log_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = open_tracker(None, "ppo")
    tracker.log({"x": 1.0}, step=1)
    tracker.text("sample", "t", step=1)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("log_dir", "message"), [("logs", "neither is installed"), (None, "needs a log_dir")])
def test_a_hosted_tracker_that_is_not_there_is_one_sentence(
    log_dir: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "HOSTED", ("no_such_tracker",))
    with pytest.raises(ConfigError, match=message):
        open_tracker(log_dir, "ppo", use_wandb=True)


def test_a_hosted_tracker_gets_the_numbers_under_coatis_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    fake: Any = types.ModuleType("trackio")
    fake.__spec__ = types.SimpleNamespace(name="trackio")
    fake.init = lambda **arguments: calls.append(("init", arguments["project"]))
    fake.log = lambda metrics, step: calls.append(("log", (metrics, step)))
    fake.finish = lambda: calls.append(("finish", None))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(tracking, "HOSTED", ("trackio",))
    tracker = open_tracker(tmp_path, "ppo", use_wandb=True)
    tracker.log({"reward": 1.0}, step=3)
    tracker.close()
    assert calls == [("init", "Coati-ppo"), ("log", ({"reward": 1.0}, 3)), ("finish", None)]


def test_a_meter_weighs_means_by_what_they_are_means_of_and_leaves_out_what_is_no_number() -> None:
    meter = MeanMeter()
    meter.add({"loss": 1.0, "ratio": 2.0}, count=3)
    meter.add({"loss": 5.0, "ratio": math.nan}, count=1)
    assert meter.means() == {"loss": 2.0, "ratio": 2.0}  # (3 x 1 + 5) / 4
    meter.reset()
    assert meter.means() == {}


class Broken:
    """A sink that is away."""

    def log(self, *_: object, **__: object) -> None:
        raise ConnectionError("the tracker's server is away")

    text = close = log


def test_a_sink_that_fails_is_dropped_with_one_warning_and_the_others_hear_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker((Broken(), JsonLines(tmp_path)))
    for step in (1, 2):
        tracker.log({"loss": 0.5}, step)
    tracker.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [each.getMessage() for each in caplog.records] == [
        "Broken failed, and training goes on without it: ConnectionError: the tracker's server is away"
    ]
