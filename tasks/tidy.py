"""What nobody needs any longer is deleted: under RLHF_HOME, and in the artifact store by its own rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from infra.artifacts import Retention, open_default_store
from infra.errors import ServiceError
from infra.services import seaweed
from infra.services.state import StackState
from infra.services.tidying import shorten_logs
from infra.settings import Settings
from rlhf_core.counting import counted
from tasks.scratch import FAILED_BATCHES, remove_left, removed

_DAY_S = 24 * 3600.0


def tidy(known: Settings, report: Callable[[str], None]) -> None:
    """Delete what is old or was left by processes that were killed; nothing of a live run.

    The artifact store comes last: whatever is wrong with it, the rest is done.

    Args:
        known: the settings, which say how long things are kept.
        report: takes a line for each kind of thing.

    Raises:
        OSError: if the home directory cannot be read.
        StoreError: if the artifact store does not answer, or something in it cannot be read; also if RLHF_RETENTION
            is no rule.
    """
    for log in shorten_logs(known):
        report(f"{log} was long, and begins anew; its end is in {log.name}.1")
    if left := remove_left(known.home):
        report(f"deleted {counted(len(left), 'directory', 'directories')} of killed processes in scratch")
    if old := remove_old_batches(known):
        batches = counted(len(old), "batch", "batches")
        report(f"deleted {batches} older than {known.batches_kept_days:g} days in {FAILED_BATCHES}")
    try:
        _purge_log(known)
    except (OSError, ServiceError) as error:
        report(f"SeaweedFS's notes of changes stay for today: {error}")
    if known.wants_local_store or known.retention:
        _collect(known, report)


def _purge_log(known: Settings) -> None:
    stack = StackState.load(known.home)
    if "store" in stack.services and stack.services["store"].process():
        seaweed.purge_log(known.home, stack.ports)


def _collect(known: Settings, report: Callable[[str], None]) -> None:
    found = open_default_store().collect(Retention.parse(known.retention), delete=True)
    report(
        f"the store gave back {found.blob_bytes / 1e6:,.1f} MB: {counted(len(found.versions), 'version')} and "
        f"{counted(found.blobs, 'blob')}; what was found unneeded today follows in a day"
    )


def remove_old_batches(known: Settings) -> list[Path]:
    """Delete batches that PPO could not learn from, kept for a person long enough, and return those that are gone."""
    last_s = time.time() - known.batches_kept_days * _DAY_S
    old = []
    for each in (known.home / FAILED_BATCHES).glob("*"):
        with suppress(FileNotFoundError):  # another deletes it just now
            if each.lstat().st_mtime < last_s:
                old.append(each)
    return removed(old)
