"""Leases: a cluster that this process started and holds, and that ends when this process does.

What a process holds on a cluster that it did not start (`infra.clusters.existing`) is kept and released here as well.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from infra.clusters.ray_head import new_temp_dir, start_head
from infra.clusters.reaper import end_cluster
from infra.clusters.record import ClusterRecord, record_path
from infra.clusters.watchdog import CLEAN, Watch, start_watchdog, wait_for_words
from infra.errors import ClusterError, ClusterNotReadyError
from infra.process_record import ProcessRecord

logger = logging.getLogger(__name__)
_HEARTBEAT_S = 5.0


class Lease(Protocol):
    """What this process holds until it releases it."""

    record: ClusterRecord

    def end(self, timeout_s: float) -> None:
        """End what is held, and wait until nothing of it is left."""

    def forget(self) -> None:
        """Forget it without ending anything: this process is a forked child, and the lease is its parent's."""


@dataclass
class _LocalLease:
    record: ClusterRecord
    path: Path
    watch: Watch
    stalled_after_s: float
    closed: threading.Event = field(default_factory=threading.Event)
    guard: threading.RLock = field(default_factory=threading.RLock)

    def update(self, **changes: object) -> None:
        """Change the record, here and on disk."""
        with self.guard:
            self.record = self.record.model_copy(update=changes)
            self.record.save(self.path)

    def beat(self) -> None:
        """Until the lease is closed: tell the watchdog that this process runs, and replace it if it was killed."""
        while not self.closed.wait(min(_HEARTBEAT_S, self.stalled_after_s / 4)):
            try:
                with self.guard, suppress(BlockingIOError):  # stopped: it has beats that it has not read yet
                    if not self.closed.is_set():
                        os.write(self.watch.heartbeats, b".")
            except OSError:  # nobody reads
                with suppress(ClusterError):  # tried again at the next beat
                    self.ensure_watched()

    def ensure_watched(self) -> None:
        """Start another watchdog if this one was killed while the cluster runs.

        Raises:
            ClusterError: if it does not start.
        """
        with self.guard:
            if self.closed.is_set() or self.watch.process.process() is not None:
                return
            if self.record.head and not self.record.is_running:
                return  # it has ended the cluster; what is left is found at the next lease or release
            logger.warning("the watchdog of cluster %r was killed; starting another", self.record.name)
            former = self.watch
            self.watch = _start_watch(self.path, self.record, self.stalled_after_s)
            os.close(former.heartbeats)
            os.close(former.reports)
            self.update(watchdog=self.watch.process)

    def close(self) -> None:
        """Tell the watchdog that the lease has ended."""
        with self.guard:  # first, or a beat could go to the next file with the descriptor's number
            self.closed.set()
            os.close(self.watch.heartbeats)

    def end(self, timeout_s: float) -> None:
        """End the cluster through its watchdog, or without it."""
        try:
            _BEFORE_END.pop(self.record.mark, lambda: None)()
        finally:
            _end(self, timeout_s)

    def forget(self) -> None:
        """Close the pipes: if a forked child kept them, nobody would notice the owner's end."""
        self.closed.set()
        for descriptor in (self.watch.heartbeats, self.watch.reports):
            with suppress(OSError):
                os.close(descriptor)


_LEASES: dict[str, Lease] = {}
_LOCK = threading.RLock()
_BEFORE_END: dict[str, Callable[[], None]] = {}


def lease_cluster(
    name: str,
    *,
    directory: Path,
    num_cpus: int,
    num_gpus: float = 0,
    object_store_mb: int = 1024,
    start_timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    imported: Sequence[str] = (),
    stalled_after_s: float = 120.0,
) -> ClusterRecord:
    """Return this process's cluster of a name; start it unless it runs.

    It ends when `release_cluster` is called, when this process ends in whatever way (at once), when this process is
    stopped for `stalled_after_s`, and when it loses one of Ray's own two processes: its actors then end too, and the
    next lease starts it again.

    Args:
        name: names its record and logs; one per run.
        directory: where records and logs of clusters lie.
        num_cpus: logical CPUs that its actors can ask for.
        num_gpus: logical GPUs.
        object_store_mb: Ray's shared memory.
        start_timeout_s: longest wait for the start.
        environment: further variables of all its processes, such as credentials of the artifact store.
        imported: modules that are imported once, beside the start, for all processes of actors, which are forked from
            there; neither Ray nor Prefect can be among what they import.
        stalled_after_s: silence after which this process counts as stopped.

    Raises:
        ClusterError: if it does not start, or another live process holds the name.
    """
    path = record_path(directory.absolute(), name)
    with _LOCK:
        held = _LEASES.get(name)
        if isinstance(held, _LocalLease):
            if held.record.is_running:
                held.ensure_watched()
                return held.record
            logger.warning("cluster %r has lost its head and is started anew", name)
        release_cluster(name)
        _make_way(path)
        lease = _open(name, path, stalled_after_s)
        try:
            head = start_head(
                lease.record,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                object_store_mb=object_store_mb,
                timeout_s=start_timeout_s,
                environment=environment or {},
                imported=imported,
            )
            lease.update(address=head.address, head=head.processes)
        except BaseException:
            release_cluster(name)
            raise
        return lease.record


def is_lost(name: str) -> bool:
    """Whether this process's cluster of a name has lost one of Ray's own processes, and is ended by its watchdog.

    Then do not call Ray: it asks the control server for a minute, and may end this process after that.
    `release_cluster` and `lease_cluster` leave such a cluster within seconds.
    """
    held = _LEASES.get(name)
    return isinstance(held, _LocalLease) and bool(held.record.head) and not held.record.is_running


def release_cluster(name: str, timeout_s: float = 30.0) -> None:
    """End this process's cluster of a name, if any, and wait until nothing of it is left.

    Of a cluster that this process did not start, only what the run has there is ended.

    Raises:
        ClusterError: if this process cannot leave the cluster as its driver, or if processes are left after
            `timeout_s` (the watchdog or watcher goes on trying).
    """
    with _LOCK:
        lease = _LEASES.pop(name, None)
        if lease is not None:
            lease.end(timeout_s)


@contextmanager
def held_lease(name: str) -> Iterator[Lease | None]:
    """Yield the lease of a name, or None, and let no other thread change it meanwhile."""
    with _LOCK:
        yield _LEASES.get(name)


def hold(lease: Lease) -> None:
    """Keep a lease until it is released."""
    with _LOCK:
        _LEASES[lease.record.name] = lease


def reap_orphans(directory: Path) -> list[str]:
    """End the clusters whose owner is gone (their watchdogs too, then), and return their names.

    Raises:
        ClusterError: if processes of one are left.
    """
    reaped = []
    for path in sorted(directory.absolute().glob("*.json")):
        try:
            record = ClusterRecord.load(path)
        except FileNotFoundError:
            continue  # its watchdog was faster
        except ClusterError as error:
            logger.warning("%s", error)
            continue
        if record.owner.process() is None:
            end_cluster(path, record)
            reaped.append(record.name)
    return reaped


def call_before_end(record: ClusterRecord, goodbye: Callable[[], None]) -> None:
    """Register a call before a cluster of this process is ended: Ray ends a driver that stays connected."""
    _BEFORE_END[record.mark] = goodbye


def _open(name: str, path: Path, stalled_after_s: float) -> _LocalLease:
    """Write the record and start the watchdog: from here on, whatever is started will be ended."""
    mark = secrets.token_hex(16)
    log_dir = path.parent / "logs" / f"{name}-{mark[:8]}"
    log_dir.mkdir(parents=True)
    record = ClusterRecord(
        name=name,
        mark=mark,
        owner=ProcessRecord.of(os.getpid()),
        temp_dir=new_temp_dir(),
        log_dir=log_dir,
    )
    record.save(path)
    try:
        return _hold(record, path, stalled_after_s)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _hold(record: ClusterRecord, path: Path, stalled_after_s: float) -> _LocalLease:
    lease = _LocalLease(record, path, _start_watch(path, record, stalled_after_s), stalled_after_s)
    _LEASES[record.name] = lease
    lease.update(watchdog=lease.watch.process)
    threading.Thread(target=lease.beat, name=f"lease-{record.name}", daemon=True).start()
    return lease


def _start_watch(path: Path, record: ClusterRecord, stalled_after_s: float) -> Watch:
    watch = start_watchdog(path, record, stalled_after_s=stalled_after_s)
    os.set_blocking(watch.heartbeats, False)
    return watch


def _end(lease: _LocalLease, timeout_s: float) -> None:
    lease.close()
    try:
        words = wait_for_words(lease.watch.reports, timeout_s=timeout_s / 2)
    finally:
        os.close(lease.watch.reports)
    if words != CLEAN:  # the watchdog is gone or stuck
        end_cluster(lease.path, lease.record, timeout_s=timeout_s / 2)


def _make_way(path: Path) -> None:
    """End what an earlier process left under this name.

    Raises:
        ClusterError: if that process is alive.
    """
    with suppress(FileNotFoundError):
        record = ClusterRecord.load(path)
        if record.owner.process() is not None:
            raise ClusterNotReadyError(
                f"cluster {record.name!r} is held by process {record.owner.pid} since "
                f"{record.created:%Y-%m-%d %H:%M} UTC; wait until that run ends, or take another name"
            )
        end_cluster(path, record)


def _forget_after_fork() -> None:
    """A forked child owns nothing."""
    global _LOCK  # noqa: PLW0603 - the parent's lock may be held by a thread that the child does not have
    _LOCK = threading.RLock()
    for lease in _LEASES.values():
        lease.forget()
    _LEASES.clear()
    _BEFORE_END.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
