"""What keeps RLHF_HOME small on a machine that nobody looks after: a thread of the local stack's worker.

It lets logs of services begin anew each minute, because a service that is in trouble may write gigabytes in a night.
Once a day it has `rlhf tidy` delete the rest, in a process of its own.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from infra.errors import InfraError
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
        except (OSError, InfraError, psutil.Error) as error:
            logger.warning("RLHF_HOME is not kept tidy: %s", error)
        time.sleep(LOOK_S)


def look(known: Settings) -> None:
    """Let long logs begin anew, and delete what nobody needs if that was not done for a day.

    Raises:
        OSError: if a log or the program cannot be used.
    """
    shorten_logs(known)
    stamp = known.home / STAMP
    if not stamp.exists():  # a stack that has just been made has nothing old
        stamp.touch()
    if abs(time.time() - stamp.stat().st_mtime) >= EVERY_S:  # also where the clock was set back
        stamp.touch()
        _tidy(known.logs_dir / "tidy.log")


def shorten_logs(known: Settings) -> list[Path]:
    """Let the logs of services that have grown too long begin anew, and return which those were.

    Raises:
        OSError: if there is no room for the end of one.
    """
    limit = int(known.log_limit_mb * 1e6)
    return [log for log in sorted(known.logs_dir.glob("*.log")) if begin_log_anew(log, limit_bytes=limit)]


def _tidy(log: Path) -> None:
    with log.open("ab") as output:
        child = subprocess.Popen(
            [Path(sys.executable).with_name("rlhf"), "tidy"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    psutil.Process(child.pid).nice(_NICE)
    try:
        if status := child.wait(LIMIT_S):
            logger.warning("`rlhf tidy` ended with status %d: see %s", status, log)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        logger.warning("`rlhf tidy` did not end within %.0f s and was killed; it goes on in a day", LIMIT_S)
