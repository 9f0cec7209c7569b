"""What keeps RLHF_HOME small on a machine that nobody looks after: a thread of the worker.

It lets logs of services begin anew each minute, because a service that is in trouble may write gigabytes in a night.
Once a day it has `rlhf tidy` delete the rest, in a process of its own.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from infra.services.processes import begin_log_anew
from infra.settings import Settings, settings

LOOK_S = 60.0
EVERY_S = 24 * 3600.0
LIMIT_S = 3600.0
"""Longest time for `rlhf tidy`; what it has not done then is done the next day."""
STAMP = "tidied"
"""A file in the home directory, as old as the last `rlhf tidy` of the worker."""
_NICE = 10
logger = logging.getLogger(__name__)


def keep_tidy() -> None:
    """Look after the home directory in a thread, as long as this process lives."""
    threading.Thread(target=_keep_tidy, name="tidying", daemon=True).start()


def _keep_tidy() -> None:
    while True:
        try:
            look(settings())
        except Exception as error:  # this thread is the only one that looks
            logger.warning("RLHF_HOME is not kept tidy: %s", error)
        time.sleep(LOOK_S)


def look(known: Settings) -> None:
    """Let long logs begin anew, and delete what nobody needs if that was not done for a day.

    Raises:
        OSError: if the home directory or the program cannot be used.
    """
    if not known.home.is_dir():  # this worker only has containers started
        return
    shorten_logs(known)
    stamp = known.home / STAMP
    if not stamp.exists():  # a stack that has just been made has nothing old
        stamp.touch(mode=0o600)
    if abs(time.time() - stamp.stat().st_mtime) >= EVERY_S:  # also where the clock was set back
        stamp.touch(mode=0o600)
        _tidy(known)


def shorten_logs(known: Settings) -> list[Path]:
    """Let the logs of services that have grown too long begin anew, and return which those were.

    Where there is no room for the end of one, that is logged: what else is deleted makes room.
    """
    limit = int(known.log_limit_mb * 1e6)
    shortened = []
    for log in sorted(known.logs_dir.glob("*.log")):
        try:
            if begin_log_anew(log, limit_bytes=limit):
                shortened.append(log)
        except FileNotFoundError:  # its service starts just now, and has it begin anew
            pass
        except OSError as error:
            logger.warning("%s is long, but cannot begin anew: %s", log, error)
    return shortened


def _tidy(known: Settings) -> None:
    """Have `rlhf tidy` done, and go on with long logs meanwhile."""
    log = known.logs_dir / "tidy.log"
    log.touch(mode=0o600)
    with log.open("ab") as output:
        child = subprocess.Popen(
            [Path(sys.executable).with_name("rlhf"), "tidy"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    psutil.Process(child.pid).nice(_NICE)
    deadline = time.monotonic() + LIMIT_S
    while (status := _wait(child, min(LOOK_S, deadline - time.monotonic()))) is None:
        if time.monotonic() >= deadline:
            child.kill()
            child.wait()
            logger.warning("`rlhf tidy` did not end within %.0f s and was killed; it goes on in a day", LIMIT_S)
            return
        shorten_logs(known)
    if status:
        logger.warning("`rlhf tidy` ended with status %d: see %s", status, log)


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return a child's exit status, or None if it still runs after this time."""
    with suppress(subprocess.TimeoutExpired):
        return child.wait(timeout_s)
    return None
