"""What the processes of a cluster have written to their standard output and error, read while the cluster runs.

Ray has a file for each. Those of a cluster that was started here are read where they lie. On a user's own cluster they
may be on other machines: there Ray's log monitors, a process on each node, publish their lines to every driver.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from infra.clusters.record import ClusterRecord

MOST_BYTES = 1 << 18
"""Of a file, read in one look: of more, the last ones are taken."""
MOST_LINES = 3000
"""Of a process, kept from one look to the next: of more, the last ones."""
_FACTS = (":actor_name:", ":job_id:", ":task_name:")
"""Beginnings of lines that Ray writes for its log monitor."""


class Written(NamedTuple):
    """Lines that a process has written since the last look."""

    process: str
    """The same for all that it writes; `PID` or `PID on NODE`."""
    is_error: bool
    """Whether they are of its standard error."""
    lines: list[str]
    bytes_left_out: int = 0
    """Before them: there was too much."""


class Output(Protocol):
    """What a cluster's processes write."""

    def read(self, *, last: bool = False) -> list[Written]:
        """Return what is new since the last look.

        Args:
            last: also a line without its end: there is no further look.
        """

    def close(self) -> None:
        """Read no more."""


def output_of(record: ClusterRecord) -> Output:
    """Return the output of a cluster that this process is connected to."""
    return _Published() if record.kind == "existing" else _Files(record)


class _Files:
    """The files of a cluster on this machine."""

    def __init__(self, record: ClusterRecord) -> None:
        self._at_work = record.ray_dir / "session_latest" / "logs"
        self._kept = record.log_dir / "ray"
        self._done: dict[str, int] = {}
        """Bytes of each that are read."""

    def read(self, *, last: bool = False) -> list[Written]:
        """Return what is new in each file, up to its last whole line; at the last look, all."""
        folder = self._at_work if self._at_work.is_dir() else self._kept  # they are moved when the cluster has ended
        found = [self._new_in(path, last) for path in sorted(folder.glob("worker-*"))]
        return [each for each in found if each.lines or each.bytes_left_out]

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _new_in(self, path: Path, last: bool) -> Written:
        done, process = self._done.get(path.name, 0), path.stem.rpartition("-")[2]
        written = Written(process, path.suffix == ".err", [])
        try:
            left_out = max(0, path.stat().st_size - done - MOST_BYTES)
            if path.stat().st_size == done:
                return written
            with path.open("rb") as file:
                file.seek(done + left_out)
                data = file.read(MOST_BYTES)
        except OSError:  # it is being moved
            return written
        if left_out:
            data = data[(skipped := data.find(b"\n") + 1) :]
            left_out += skipped
        whole = data.rfind(b"\n") + 1 or len(data) // MOST_BYTES * MOST_BYTES  # a line without end is no line yet
        if last:
            whole = len(data)
        self._done[path.name] = done + left_out + whole
        lines = data[:whole].decode(errors="replace").split("\n")
        said = [each for each in lines if each and not each.startswith(_FACTS)]
        return written._replace(lines=said, bytes_left_out=left_out)


class _Published:
    """The lines that the log monitors of a user's own cluster publish, of this driver's job."""

    _NAME = "rlhf"

    def __init__(self) -> None:
        from ray._private.ray_logging import global_worker_stdstream_dispatcher  # noqa: PLC0415 - the others need no Ray

        self._new: dict[tuple[str, bool], Written] = {}
        self._lock = threading.Lock()
        self._told = global_worker_stdstream_dispatcher
        self._told.add_handler(self._NAME, self._take)

    def read(self, *, last: bool = False) -> list[Written]:
        """Return what was published since the last look."""
        del last  # the log monitors publish what they take for lines
        with self._lock:
            found, self._new = self._new, {}
        return list(found.values())

    def close(self) -> None:
        """Take no more."""
        self._told.remove_handler(self._NAME)

    def _take(self, told: Mapping[str, Any]) -> None:
        """Take lines of a process, in Ray's thread; those of no job are of Ray's own processes."""
        if not told["job"]:
            return
        key = (f"{told['pid']} on {told['ip']}", told["is_err"])
        with self._lock:
            before = self._new.get(key, Written(*key, []))
            lines = [*before.lines, *told["lines"]]
            left_out = before.bytes_left_out + sum(len(line) + 1 for line in lines[:-MOST_LINES])
            self._new[key] = Written(*key, lines[-MOST_LINES:], left_out)
