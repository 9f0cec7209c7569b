"""Ending every process of a cluster and removing its files, from any process that is left to do it.

What belongs to a cluster is found by its mark in the environment, which all descendants of `ray start` inherit,
by the recorded ids, and by descent: nothing depends on Ray, or on anyone having kept a list.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from infra.clusters.record import MARK_VARIABLE, ClusterRecord
from infra.errors import ClusterError, ClusterNotReadyError
from infra.process_record import ProcessRecord, describe, is_live, marked_processes

logger = logging.getLogger(__name__)
TEMP_PREFIX = "rf-"
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL: enough for an actor to unlink its shared memory. Ray's own processes take 10 s and
more to end on SIGTERM, and have nothing to save."""
_KEPT_LOGS = 20
"""Clusters whose logs stay in the directory."""


def leftover_processes(mark: str, records: Iterable[ProcessRecord] = ()) -> list[psutil.Process]:
    """Return the live processes of a cluster: marked ones, recorded ones, and all their descendants."""
    roots = marked_processes(MARK_VARIABLE, mark)
    roots += [process for each in records if (process := each.process()) is not None]
    found = {process.pid: process for process in roots}
    for root in roots:
        with suppress(psutil.Error):
            found.update((child.pid, child) for child in root.children(recursive=True))
    found.pop(os.getpid(), None)
    return [process for process in found.values() if is_live(process)]


def end_cluster(path: Path, record: ClusterRecord, *, timeout_s: float = 25.0) -> None:
    """End all processes of a cluster, then remove its temp dir, token and record; keep its logs.

    Two processes may do this at once (the watchdog and the owner): each finds less to do.

    Args:
        path: the record's file.
        record: what it said, or as much as is known.
        timeout_s: longest wait for the processes to end.

    Raises:
        ClusterError: if processes are left; the files then stay, so that the next call can go on.
    """
    with suppress(FileNotFoundError, ClusterError):
        written = ClusterRecord.load(path)
        record = written if written.mark == record.mark else record
    left = _end_processes(record, timeout_s)
    if left:
        names = ", ".join(describe(process) for process in left)
        raise ClusterNotReadyError(
            f"cluster {record.name!r} still has processes after {timeout_s:g} s and SIGKILL: {names}; "
            "they are probably waiting for a device or a file system"
        )
    _keep_logs(record, path.parent)
    if record.temp_dir.name.startswith(TEMP_PREFIX):  # never delete what we did not create
        shutil.rmtree(record.temp_dir, ignore_errors=True)
    with suppress(FileNotFoundError, ClusterError):
        if ClusterRecord.load(path).mark == record.mark:  # else a younger cluster of the same name
            path.unlink()


def _end_processes(record: ClusterRecord, timeout_s: float) -> list[psutil.Process]:
    start = time.monotonic()
    asked: set[int] = set()
    clean_looks = 0
    while time.monotonic() - start < timeout_s:
        left = leftover_processes(record.mark, record.head)
        # One look is not enough: it may miss a process that is forked during it.
        clean_looks = 0 if left else clean_looks + 1
        if clean_looks == 2:  # noqa: PLR2004
            return []
        for process in left:
            with suppress(psutil.Error):
                if time.monotonic() - start > GRACE_S:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
                    asked.add(process.pid)
        time.sleep(0.05)
    return leftover_processes(record.mark, record.head)


def _keep_logs(record: ClusterRecord, directory: Path) -> None:
    """Move Ray's logs out of the temp dir, and forget those of the oldest clusters that have ended."""
    logs = record.ray_dir / "session_latest" / "logs"
    try:
        if logs.is_dir():
            shutil.move(logs.resolve(), record.log_dir / "ray")
        kept = sorted(record.log_dir.parent.iterdir(), key=lambda entry: entry.stat().st_mtime)
        in_use = _named_log_folders(directory)  # a cluster that runs for days is older than many that have ended
        for entry in kept[:-_KEPT_LOGS]:
            if entry.name not in in_use:
                shutil.rmtree(entry, ignore_errors=True)
    except OSError as error:  # another process tidies at the same time, or the disk is full
        logger.warning("the logs of cluster %r were not kept: %s", record.name, error)


def _named_log_folders(directory: Path) -> set[str]:
    """Return the names of the log folders of clusters that still have a record."""
    names = set()
    for path in directory.glob("*.json"):
        with suppress(FileNotFoundError, ClusterError):
            names.add(ClusterRecord.load(path).log_dir.name)
    return names
