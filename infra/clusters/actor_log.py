"""What an actor's process logs: lines on its standard error, bounded, which `read_records` reads back.

Ray keeps that in a file, where it outlives the process, however that ends. A record is one write of whole lines: the
first with `: ` before its text, the others with `| `.

    2026-11-28T13:40:01.123456+00:00 WARNING maker-0 rlhf_core.rewards.process: reward function length: no number
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

logger = logging.getLogger(__name__)
OURS = ("infra", "rlhf", "rlhf_core", "tasks")
"""Loggers whose notes are logged; of all others, warnings and errors are."""
LINES, EVERY_S = 100, 10.0
"""So many records of one process and level are taken in so many seconds; the others are counted."""
LONGEST = 4000
"""Characters of a record; of a longer one, the middle is left out."""
_BEGINNING = 1000
_TELL_S = 2.0
"""From the first record that is not taken until it is said how many were not: a killed process says no more."""
_STDERR = 2
_HEAD = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00) (\S+) (\S*) (\S+)([:|]) ?(.*)")


class Bound:
    """Takes so many in each stretch of time, and counts what it does not take.

    Args:
        most: taken in a stretch.
        every_s: its length; infinite: what is not taken stays so.
    """

    def __init__(self, most: int, every_s: float = math.inf) -> None:
        self._most, self._every_s = most, every_s
        self._since, self._left = -math.inf, most
        self._left_out = 0

    @property
    def is_full(self) -> bool:
        """Whether it took all that it takes in the stretch that goes on, or went on last."""
        return not self._left

    def takes(self, now: float) -> bool:
        """Take one, or count it."""
        if self._is_over(now):
            self._since, self._left = now, self._most
        if self._left:
            self._left -= 1
            return True
        self._left_out += 1
        return False

    def left_out(self, now: float) -> int:
        """Return how many were not taken, each once; 0 while the stretch goes on."""
        if not self._is_over(now):
            return 0
        found, self._left_out = self._left_out, 0
        return found

    def _is_over(self, now: float) -> bool:
        return not 0 <= now - self._since < self._every_s  # also where the clock was set back


class Record(NamedTuple):
    """What a process has said."""

    actor: str
    """Empty where the process has not said whose it is."""
    level: int
    created: float
    """By the process's clock; 0 where it has not said when."""
    text: str
    is_bounded: bool
    """By the process itself."""


class ActorLog(logging.Handler):
    """Writes each record to a file descriptor at once, as many as are taken.

    Args:
        descriptor: of the file.
        name: returns the actor's name, empty before the process has one.
    """

    def __init__(self, descriptor: int, name: Callable[[], str]) -> None:
        super().__init__()
        self._descriptor, self._find_name, self._name = descriptor, name, ""
        self._bounds: dict[int, Bound] = {}
        self._waits: set[int] = set()
        """Levels of which what was left out is still to be told."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        bound = self._bounds.setdefault(record.levelno, Bound(LINES, EVERY_S))
        if bound.takes(record.created):
            try:
                self._write(record, self.format(record))
            except Exception:  # arguments that do not fit the message, say
                self.handleError(record)
        elif record.levelno not in self._waits:
            self._waits.add(record.levelno)
            timer = threading.Timer(_TELL_S, self._tell_of, [record])
            timer.daemon = True
            with suppress(RuntimeError):  # Python ends, and begins no thread
                timer.start()

    def _tell_of(self, record: logging.LogRecord) -> None:
        """Say how many records of a level were left out, of which this was the first."""
        assert self.lock is not None
        with self.lock:
            self._waits.discard(record.levelno)
            if count := self._bounds[record.levelno].left_out(math.inf):
                now = logging.makeLogRecord({"name": record.name, "levelname": record.levelname})
                self._write(now, told_of(count))

    def _write(self, record: logging.LogRecord, text: str) -> None:
        self._name = self._name or self._find_name()
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        head = f"{at} {record.levelname.replace(' ', '-')} {self._name} {record.name.replace(' ', '-')}"
        first, *others = shortened(text).splitlines() or [""]
        lines = "".join([f"{head}: {first}\n", *(f"{head}| {other}\n" for other in others)])
        with suppress(OSError):  # a full disk
            os.write(self._descriptor, lines.encode(errors="backslashreplace"))


def log_to_stderr() -> None:
    """Have this process, an actor's, log to its standard error, with Python's warnings and what ends its threads."""
    root = logging.getLogger()
    if any(isinstance(each, ActorLog) for each in root.handlers):
        return
    root.addHandler(ActorLog(_STDERR, _own_name))
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread


def read_records(lines: Iterable[str], *, is_error: bool) -> Iterator[Record]:
    """Return what lines of a process's output say.

    Args:
        lines: in their order; what is no record of `ActorLog` is one of its own: a library wrote it, or `print`.
        is_error: whether they are of its standard error.
    """
    levels = logging.getLevelNamesMapping()
    last: Record | None = None
    head: tuple[str, ...] = ()
    for line in lines:
        found = _HEAD.search(line)
        words = line[: found.start()] if found else line  # such as a bar of progress, which is on its line yet
        if last is not None and (words or found is None):
            yield last
            last = None
        if words.strip() and "\r" not in words:  # which would be such a bar
            yield Record("", logging.WARNING if is_error else logging.INFO, 0.0, shortened(words), False)
        if found is None:
            continue
        *facts, mark, text = found.groups()
        if mark == "|" and last is not None and tuple(facts) == head:
            last = last._replace(text=f"{last.text}\n{text}")
            continue
        if last is not None:
            yield last
        head = tuple(facts)
        at, level, actor, _ = facts
        created = datetime.fromisoformat(at).timestamp()
        last = Record(actor, levels.get(level, logging.INFO), created, text, True)
    if last is not None:
        yield last


def told_of(count: int, what: str = "line") -> str:
    """Return the line that stands for those that were left out."""
    return f"… {count} {what}{'s were' if count > 1 else ' was'} left out"


def shortened(text: str) -> str:
    """Return a text without its middle, if it is too long: what went wrong often stands at the end."""
    if len(text) <= LONGEST:
        return text
    end = LONGEST - _BEGINNING
    return f"{text[:_BEGINNING]} {told_of(len(text) - LONGEST, 'character')} … {text[-end:]}"


def _own_name() -> str:
    import ray  # noqa: PLC0415 - whoever reads, and the server that processes are forked from, has no use for it

    return (ray.get_runtime_context().get_actor_name() or "").replace(" ", "-")


def _log_end_of_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit:
        thread = f"thread {failed.thread.name}" if failed.thread else "a thread"
        logger.error("%s has ended:", thread, exc_info=failed.exc_value)
