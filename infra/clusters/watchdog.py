"""The process that ends a cluster when its owner is gone: `python -m infra.clusters.watchdog`.

It holds the read end of a pipe that only the owner can write to. End of file means that the owner is gone or has
released the lease; silence means that the owner is stopped. The watchdog asks no server and no store, and imports
neither Ray nor torch. It is nobody's child, so it survives when the owner's group, session or descendants are ended.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from infra.clusters.reaper import end_cluster
from infra.clusters.record import ClusterRecord
from infra.errors import ClusterError, ClusterNotReadyError
from infra.process_record import ProcessRecord

logger = logging.getLogger(__name__)
CLEAN = b"clean\n"
"""The watchdog's last words when nothing of the cluster is left."""
_START_TIMEOUT_S = 30.0
_LOOK_S = 1.0


class Watch(NamedTuple):
    """The owner's side of a running watchdog: two file descriptors and the process."""

    heartbeats: int
    """Write end: a byte means that the owner runs; closing it ends the cluster."""
    reports: int
    """Read end: the watchdog's words."""
    process: ProcessRecord


def start_watchdog(path: Path, record: ClusterRecord, *, stalled_after_s: float) -> Watch:
    """Start a watchdog over the cluster of a record.

    Args:
        path: the record's file, already written.
        record: what it says.
        stalled_after_s: silence after which the owner counts as stopped.

    Raises:
        ClusterError: if it does not start.
    """
    heard, heartbeats = os.pipe()
    reports, told = os.pipe()
    arguments = [str(path), str(heard), str(told), str(stalled_after_s)]
    log = record.log_dir / "watchdog.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        with log.open("ab") as output:
            # -P: a folder named `infra` in the flow's working directory must not be imported.
            subprocess.run(
                [sys.executable, "-P", "-m", __name__, *arguments],
                pass_fds=(heard, told),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=_START_TIMEOUT_S,
                check=True,
            )
        os.close(told)
        told = -1
        first_words = wait_for_words(reports, timeout_s=_START_TIMEOUT_S)
        return Watch(heartbeats, reports, ProcessRecord.of(int(first_words)))
    except BaseException as error:
        os.close(heartbeats)
        os.close(reports)
        if not isinstance(error, (subprocess.SubprocessError, OSError, ValueError, psutil.Error)):
            raise
        raise ClusterNotReadyError(
            f"the watchdog of cluster {record.name!r} did not start within {_START_TIMEOUT_S:g} s; see {log}"
        ) from error
    finally:
        os.close(heard)
        if told >= 0:
            os.close(told)


def wait_for_words(reports: int, *, timeout_s: float) -> bytes:
    """Return the next words on a pipe; nothing if it is closed or stays silent."""
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        return os.read(reports, 4096) if selector.select(timeout_s) else b""


def watch(heartbeats: int, path: Path, record: ClusterRecord, *, stalled_after_s: float) -> str:
    """Return why the cluster must end, once it must."""
    last = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(heartbeats, selectors.EVENT_READ)
        while True:
            # What came while this process was stopped itself is read before silence is judged.
            if selector.select(_LOOK_S):
                if not os.read(heartbeats, 4096):
                    return "its owner is gone or gave it back"
                last = time.monotonic()
            elif record.owner.process() is None:  # a child that the owner forked may still hold the pipe
                return "its owner is gone"
            elif time.monotonic() - last > stalled_after_s:
                return f"its owner has been silent for {stalled_after_s:g} s"
            if not record.head:
                record = _reread(path, record)
            elif not record.is_running:  # drivers would wait for it, and actors linger
                return "it lost one of Ray's own processes"


def _reread(path: Path, record: ClusterRecord) -> ClusterRecord:
    """Return the record as it is now: the owner adds the head's processes once they run."""
    with suppress(FileNotFoundError, ClusterError):
        return ClusterRecord.load(path)
    return record


def main(arguments: list[str]) -> int:
    """Watch, then end the cluster; the exit status is 0 if nothing is left."""
    path, heartbeats, reports, stalled_after_s = arguments
    if os.fork():
        return 0  # the caller waits for this process; the watchdog itself is an orphan
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after the owner does, by itself
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.chdir("/")  # the owner's folder may be unmounted before the owner ends
    record = ClusterRecord.load(Path(path))
    os.write(int(reports), b"%d\n" % os.getpid())
    reason = watch(int(heartbeats), Path(path), record, stalled_after_s=float(stalled_after_s))
    logger.info("ending cluster %r: %s", record.name, reason)
    while True:
        try:
            end_cluster(Path(path), record)
        except ClusterError as error:
            logger.error("%s; trying again", error)  # noqa: TRY400 - one sentence says it
        else:
            break
    logger.info("nothing of cluster %r is left", record.name)
    with suppress(BrokenPipeError):  # nobody waits
        os.write(int(reports), CLEAN)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
