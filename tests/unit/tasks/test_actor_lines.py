"""What actors have written, as lines of their run's log: order, times, bounds, and what must not be shown."""

from __future__ import annotations

import logging
import math
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.clusters.actor_log import LINES
from infra.clusters.output import Written
from infra.clusters.record import ClusterRecord
from infra.process_record import ProcessRecord
from tasks import actor_lines
from tasks.actor_lines import ACTOR_LINES, RUN_LINES, ActorLines, Line, follow_actors, leave_actors

NOW = 1_795_000_000.0


def _said(at: float, text: str, actor: str = "maker-0", level: str = "INFO") -> str:
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")
    return f"{time} {level} {actor} rlhf_core.any: {text}"


def _texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def _lines(hidden: tuple[str, ...] = ()) -> ActorLines:
    return ActorLines(hidden, "/logs")


def test_lines_are_in_the_order_of_their_times_and_those_of_a_process_in_its_own() -> None:
    written = [
        Written("1", True, [_said(NOW - 3, "a"), "Segmentation fault", _said(NOW - 1, "c")]),
        Written("2", True, [_said(NOW - 2, "b", "trainer", "WARNING"), _said(NOW - 2.5, "late", "trainer")]),
    ]
    lines = _lines().lines(written, NOW)
    assert _texts(lines) == ["maker-0: a", "trainer: b", "trainer: late", "maker-0: Segmentation fault", "maker-0: c"]
    assert [line.level for line in lines] == [20, 30, 20, 30, 20]
    times = [round(line.created * 1e6) for line in lines]
    assert times == sorted(set(times)), "the server keeps microseconds, and sorts by them"


def test_lines_of_the_next_look_stay_behind_those_of_the_one_before_also_by_a_wrong_clock() -> None:
    merged = _lines()
    for clock in (+3600.0, 0.0, -3600.0):
        earlier = merged.lines([Written("1", True, [_said(NOW + clock, "a"), _said(NOW + clock, "b")])], NOW)
        later = merged.lines([Written("1", True, [_said(NOW + clock, "c")])], NOW + 1)
        times = [line.created for line in earlier + later]
        assert times == sorted(times)
        assert NOW - 30 <= times[0] <= times[-1] <= NOW + 1.001


def test_words_of_a_process_have_its_actors_name_once_that_is_known() -> None:
    merged = _lines()
    assert _texts(merged.lines([Written("7", True, ["early"])], NOW)) == ["process 7: early"]
    merged.lines([Written("7", True, [_said(NOW, "I am")])], NOW)
    assert _texts(merged.lines([Written("7", False, ["printed"])], NOW)) == ["maker-0: printed"]


def test_no_secret_is_shown_and_no_colour_and_control_characters_are_written_out() -> None:
    text = _said(NOW, "\x1b[31mred\x1b[0m \x07 user:pass-word and pass-word go")
    [line] = _lines(("pass-word", "user:pass-word")).lines([Written("1", True, [text])], NOW)
    assert line.text == r"maker-0: red \x07 *** and *** go"


def test_a_line_of_progress_that_an_actor_says_is_not_one_of_the_flow() -> None:
    [line] = _lines().lines([Written("1", False, ["▸ ppo  episode 1/2"])], NOW)
    assert not line.text.startswith("▸")


def test_of_what_is_printed_in_a_tight_loop_few_lines_are_shown_and_the_others_counted() -> None:
    merged = _lines()
    flood = Written("1", False, [f"line {number}" for number in range(5 * LINES)], bytes_left_out=10_000)
    shown = merged.lines([flood, Written("2", True, [_said(NOW, "still heard", "trainer")])], NOW)
    assert len(shown) == LINES + 2
    assert "process 1: … 10000 bytes were left out" in _texts(shown)
    assert "trainer: still heard" in _texts(shown)
    assert _texts(merged.lines([], NOW + 11)) == [f"process 1: … {4 * LINES} lines were left out"]


def test_one_actor_has_its_part_of_a_runs_log_at_each_level_and_is_told_of_at_the_end() -> None:
    merged = _lines()
    notes = [_said(NOW, str(number)) for number in range(ACTOR_LINES + 5)]
    shown = merged.lines([Written("1", True, [*notes, _said(NOW, "what matters", level="ERROR")])], NOW)
    assert len(shown) == ACTOR_LINES + 2
    assert "maker-0: no more lines of this level are shown here, for there were many; see /logs" in _texts(shown)
    assert shown[-1].text == "maker-0: what matters"
    assert _texts(merged.lines([Written("1", True, notes)], NOW + 3600)) == []
    assert _texts(merged.rest(NOW)) == [f"maker-0: … {ACTOR_LINES + 10} lines were left out"]


def test_all_actors_together_have_a_bound_in_a_run() -> None:
    merged = _lines()
    actors = math.ceil(RUN_LINES / ACTOR_LINES) + 1
    written = [
        Written(str(each), True, [_said(NOW, "x", f"maker-{each}")] * (ACTOR_LINES - 1)) for each in range(actors)
    ]
    shown = _texts(merged.lines(written, NOW))
    assert len(shown) == RUN_LINES + 1
    assert "the actors: no more lines are shown here, for there were many; see /logs" in shown
    assert _texts(merged.rest(NOW)) == [f"the actors: … {actors * (ACTOR_LINES - 1) - RUN_LINES} lines were left out"]


def test_what_an_actor_wrote_last_is_shown_however_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actor_lines, "flow_logger", lambda: logging.getLogger("a run"))
    owner = ProcessRecord.of(os.getpid())
    record = ClusterRecord(name="night", mark="m", owner=owner, temp_dir=tmp_path / "t", log_dir=tmp_path / "kept")
    written = record.ray_dir / "session_latest" / "logs" / "worker-ab12-01000000-77.err"
    written.parent.mkdir(parents=True)
    caplog.set_level("INFO")
    follow_actors(record)
    written.write_text("one\nkilled in the middle of a li")
    leave_actors("night")
    messages = [record.getMessage() for record in caplog.records if record.name == "a run"]
    assert messages == ["process 77: one", "process 77: killed in the middle of a li"]
