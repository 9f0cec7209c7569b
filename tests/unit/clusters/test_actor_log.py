"""What an actor's process logs: it is read back as it was said, and however much it is, little of it is written."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.clusters.actor_log import EVERY_S, LINES, LONGEST, ActorLog, Bound, Record, read_records, shortened

IN_A_PROCESS = """
import logging, os, sys, threading, warnings
from infra.clusters import actor_log
actor_log._own_name = lambda: "maker-0"
actor_log.log_to_stderr()
actor_log.log_to_stderr()
logging.getLogger("rlhf_core.any").info("a note of ours")
logging.getLogger("library").info("a note of another")
logging.getLogger("library").warning("a warning of another")
warnings.warn("careful")
thread = threading.Thread(target=lambda: {}["key"], name="helper")
thread.start()
thread.join()
os.write(2, b"words of a library in C\\n")
"""


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """Where the logger `talker` writes to, as an actor does."""
    logger, path = logging.getLogger("talker"), tmp_path / "worker.err"
    with path.open("ab", buffering=0) as file:
        handler = ActorLog(file.fileno(), lambda: "maker-0")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        yield path
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
        logger.removeHandler(handler)
        logger.propagate = True


def _records(text: str, *, is_error: bool = True) -> list[Record]:
    return list(read_records(text.split("\n"), is_error=is_error))


def test_records_are_read_back_with_their_levels_times_and_all_of_their_lines(written: Path) -> None:
    logger, before = logging.getLogger("talker"), time.time()
    logger.info("two\nlines of %s", "one")
    logger.error("failed", exc_info=ValueError("| as: it may be"))
    logger.warning("")
    first, second, third = _records(written.read_text())
    assert first[:2] == ("maker-0", logging.INFO)
    assert first.text == "two\nlines of one"
    assert second.level == logging.ERROR
    assert second.text.splitlines()[0] == "failed"
    assert second.text.splitlines()[-1] == "ValueError: | as: it may be"
    assert third.text == ""
    assert before - 1e-6 <= first.created < second.created < third.created <= time.time()


def test_of_a_tight_loop_few_records_are_written_and_it_is_said_how_many_are_left_out(written: Path) -> None:
    logger = logging.getLogger("talker")
    for number in range(5 * LINES):
        logger.info("number %d", number)
    logger.error("what matters")
    deadline = time.monotonic() + 60
    while "left out" not in written.read_text():
        assert time.monotonic() < deadline, "nothing was said of what was left out"
        time.sleep(0.05)
    records = _records(written.read_text())
    assert [each.text for each in records[:LINES]] == [f"number {number}" for number in range(LINES)]
    assert [(each.level, each.text) for each in records[LINES:]] == [
        (logging.ERROR, "what matters"),
        (logging.INFO, f"… {4 * LINES} lines were left out"),
    ]


def test_a_bound_takes_again_after_its_time_and_after_the_clock_was_set_back() -> None:
    bound = Bound(2, EVERY_S)
    assert [bound.takes(now) for now in (0.0, 1.0, 2.0)] == [True, True, False]
    assert bound.left_out(2.0) == 0, "more may follow"
    assert bound.takes(EVERY_S)
    assert bound.left_out(2 * EVERY_S) == 1
    assert bound.left_out(2 * EVERY_S) == 0
    assert [bound.takes(-3600.0) for _ in range(3)] == [True, True, False]


def test_of_a_long_record_beginning_and_end_are_kept() -> None:
    text = shortened("b" * LONGEST + "e" * LONGEST)
    assert len(text) < LONGEST + 100
    assert text.startswith("bbb")
    assert text.endswith("eee")
    assert f"{LONGEST} characters were left out" in text


def test_what_is_no_record_is_a_line_by_itself_and_a_bar_of_progress_is_none() -> None:
    text = "terminate called\n\n\rLoading: 10%\rLoading: 20%\n2026-11-28 WARNING of: another form\n"
    assert _records(text, is_error=False) == [
        Record("", logging.INFO, 0.0, "terminate called", False),
        Record("", logging.INFO, 0.0, "2026-11-28 WARNING of: another form", False),
    ]
    assert [each.level for each in _records(text)] == [logging.WARNING] * 2


def test_a_record_is_found_behind_words_that_did_not_end_their_line(written: Path) -> None:
    with written.open("ab", buffering=0) as file:
        file.write(b"\rLoading: 10%")
        logging.getLogger("talker").info("one")
        file.write(b"words")
        logging.getLogger("talker").info("two\nlines")
    assert [each.text for each in _records(written.read_bytes().decode())] == ["one", "words", "two\nlines"]


def test_a_process_logs_its_notes_others_warnings_and_what_ends_its_threads(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    note, other, warning, thread, words = _records(ended.stderr)
    assert (note.level, note.text) == (logging.INFO, "a note of ours")
    assert (other.level, other.text) == (logging.WARNING, "a warning of another")
    assert warning.level == logging.WARNING
    assert "UserWarning: careful" in warning.text
    assert thread.level == logging.ERROR
    assert thread.text.startswith("thread helper has ended:\nTraceback")
    assert thread.text.endswith("KeyError: 'key'")
    assert (words.actor, words.text) == ("", "words of a library in C")
