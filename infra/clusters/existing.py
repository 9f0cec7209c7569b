"""Leases on a user's own cluster: the run's actors and placement groups are ours, and nothing else is ever touched.

What is ours is in a Ray namespace that no other lease has had. A watcher on the cluster's head ends it when this
process is gone or stopped, which may happen on any node at any moment; the head is there as long as the cluster is. The
watcher has the run's name: the process that holds the watcher holds the run, on whichever node.

All nodes must have the code that this process has, because Ray compares only its own version and Python's. A trainer of
another commit would at best fail to load, and at worst train on other numbers than its run's key says.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.clusters.control_server import ControlServer
from infra.clusters.driver import connect, credentials, disconnect
from infra.clusters.lease import held_lease, hold, release_cluster
from infra.clusters.record import ClusterRecord, checked_name
from infra.errors import ClusterError, ClusterNotReadyError
from infra.process_record import ProcessRecord

WATCHERS = "rlhf-watchers"
"""The namespace of all watchers; each has the name of its run, so that a cluster has one run of a name."""
HEAD = {"node:__internal_head__": 0.001}
"""Ray gives its head a resource of this name, and no other node."""
_CHECK_S = 1.0
_END_S = 30.0
logger = logging.getLogger(__name__)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}")
_HEARTBEAT_S = 5.0
_LOOK_S = 0.2
_GRACE_S = 5.0
"""How long a driver that was just killed may still count as alive."""


def lease_existing(
    name: str,
    *,
    address: str,
    environment: Mapping[str, str] | None = None,
    packages: Iterable[str] = (),
    start_timeout_s: float = 120.0,
    stalled_after_s: float = 120.0,
) -> ClusterRecord:
    """Return this process's lease of a run on a cluster that somebody else started, and connect to it.

    What the run has there ends when `release_cluster` is called, when this process ends in whatever way (within
    seconds), and when it is stopped for `stalled_after_s`. The cluster, and all that others run on it, stay.

    Args:
        name: of the run; one process at a time can hold it on a cluster.
        address: host and port of the control server.
        environment: variables of the run's actors, such as credentials of the artifact store; who has the cluster's
            token can read them from its head.
        packages: must be on every node, with the code that they have here; `infra` must be there in any case.
        start_timeout_s: longest wait for each step.
        stalled_after_s: silence after which this process counts as stopped.

    Raises:
        ClusterError: if the cluster does not answer or fit, or another live process holds the name.
    """
    _check_address(address)
    checked_name(name)
    with held_lease(name) as held:
        if isinstance(held, _ExistingLease) and held.is_good(address):
            return held.record
        release_cluster(name)
        record = _record(name, address)
        connect(record, environment=environment)
        try:
            check_same_code({"infra", *packages}, timeout_s=start_timeout_s)
            charge = Charge(record.namespace, ray.get_runtime_context().get_job_id(), stalled_after_s)
            lease = _ExistingLease(record, charge, start_timeout_s)
        except BaseException:
            disconnect()
            raise
        try:
            lease.take()
        except BaseException:
            lease.end(start_timeout_s)
            raise
        hold(lease)
        return record


def existing_resources(address: str) -> dict[str, float]:
    """Return what the nodes of a cluster have together, free or not; this process need not be connected to it.

    Raises:
        ClusterError: if the cluster does not answer.
    """
    _check_address(address)
    with credentials(None), closing(ControlServer(address)) as server:
        return server.resources()


def _check_address(address: str) -> None:
    """Check that an address is that of a control server.

    Raises:
        ClusterError: if it is not.
    """
    if not _ADDRESS.fullmatch(address):
        raise ClusterError(
            f"{address!r} is no address of a Ray cluster: host and port of its control server are wanted, as "
            "`ray start --head` prints them, such as 10.0.0.5:6379"
        )


def _record(name: str, address: str) -> ClusterRecord:
    mark = secrets.token_hex(8)
    return ClusterRecord(
        kind="existing",
        name=name,
        mark=mark,
        owner=ProcessRecord.of(os.getpid()),
        address=address,
        namespace=_namespace(name, mark),
    )


def _namespace(name: str, mark: str) -> str:
    """Return the namespace of a lease: names have no colon, so no two are taken for each other."""
    return f"rlhf:{name}:{mark}"


class _ExistingLease:
    """What this process holds on somebody else's cluster."""

    def __init__(self, record: ClusterRecord, charge: Charge, start_timeout_s: float) -> None:
        self.record = record
        self._charge, self._start_timeout_s = charge, start_timeout_s
        self._server = ControlServer(record.address)
        self._closed = threading.Event()
        self._beats_every_s = min(_HEARTBEAT_S, charge.stalled_after_s / 4)
        self._beats = threading.Thread(target=self._beat, name=f"lease-{record.name}", daemon=True)
        self._watcher: Any = None

    def take(self) -> None:
        """Take the run's name, end what earlier holders left, and have the run watched from here on.

        Raises:
            ClusterError: if another process holds the name, or something does not answer or end in time.
        """
        name, started = self.record.name, time.monotonic()
        while self._watcher is None:
            with suppress(ray.exceptions.ActorAlreadyExistsError):
                self._watcher = self._start_watcher()
                continue
            self._make_way(time.monotonic() - started)
            time.sleep(_LOOK_S)
        try:
            self._await_beat()
        except ray.exceptions.ActorDiedError as error:
            raise self._unanswered(error) from error
        former = re.compile(re.escape(_namespace(name, "")) + "[0-9a-f]+")
        self._server.end_runs(
            lambda space: space != self.record.namespace and bool(former.fullmatch(space)), self._start_timeout_s
        )
        self._beats.start()

    def is_good(self, address: str) -> bool:
        """Whether it still stands, and this process is connected through it.

        Raises:
            ClusterError: if the cluster or the watcher does not answer.
        """
        if self._closed.is_set() or not ray.is_initialized() or self.record.address != address:
            return False
        self._server.nodes()
        if ray.get_runtime_context().get_job_id() != self._charge.job:
            return False
        try:
            self._await_beat()
        except ray.exceptions.ActorDiedError:  # this process was stopped for long: the run has ended, or is another's
            return False
        return True

    def end(self, timeout_s: float) -> None:
        """End the run's actors and placement groups, then the watcher, and leave the cluster."""
        self._closed.set()
        if self._beats.is_alive():
            self._beats.join(self._beats_every_s + 1)
        try:
            if self._watcher is not None:
                self._server.end_runs(self._charge.namespace.__eq__, timeout_s)
                watcher = self._watcher._actor_id.binary()
                self._server.kill(self._server.actors(lambda actor: actor.actor_id == watcher))
        finally:
            self._server.close()
            disconnect()

    def forget(self) -> None:
        """Leave the beats to the parent."""
        self._closed.set()

    def _await_beat(self) -> None:
        """Wait for the watcher's answer; raises what Ray says of a watcher that has died, else a `ClusterError`."""
        try:
            self._watcher.beat.remote().future().result(self._start_timeout_s)  # `ray.get` would lose a signal
        except ray.exceptions.ActorDiedError:
            raise
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self._unanswered(error) from error

    def _unanswered(self, error: Exception) -> ClusterError:
        reason = f": {_in_a_line(error)}" if str(error).strip() else ""  # a future's own says nothing
        return ClusterError(
            f"the watcher of run {self.record.name!r} did not answer within {self._start_timeout_s:g} s on the head "
            f"of the Ray cluster at {self.record.address}{reason}"
        )

    def _start_watcher(self) -> Any:
        actor: Any = ray.remote(Watcher)  # so decorated it has .options, which its type does not show
        return actor.options(
            name=self.record.name,
            namespace=WATCHERS,
            lifetime="detached",
            num_cpus=0,
            resources=HEAD,
            max_restarts=-1,
        ).remote(self._charge)

    def _make_way(self, waited_s: float) -> None:
        """End the watcher of a driver that is gone, because the watcher itself may take longer to end.

        Raises:
            ClusterError: if the driver is alive, or the name is not free in time.
        """
        name = self.record.name
        for watcher in self._server.actors(lambda actor: actor.ray_namespace == WATCHERS and actor.name == name):
            holder = self._server.job(watcher.job_id.hex())
            if holder.is_over:
                self._server.kill([watcher])
            elif waited_s > _GRACE_S:
                raise ClusterNotReadyError(
                    f"run {name!r} is held on the Ray cluster at {self.record.address} by {holder.description}; wait "
                    "until that run ends, or take another name"
                )
        if waited_s > self._start_timeout_s:
            raise ClusterNotReadyError(
                f"waited {self._start_timeout_s:g} s for the watcher of an earlier run {name!r} to end, and it did not"
            )

    def _beat(self) -> None:
        """Until the lease is closed: tell the watcher that this process runs, and replace it if it was ended."""
        while not self._closed.wait(self._beats_every_s):
            try:
                ray.get(self._watcher.beat.remote(), timeout=self._beats_every_s)
            except ray.exceptions.ActorDiedError:
                self._replace_watcher()
            except Exception as error:  # late, restarting, or the cluster is away: the next beat follows
                logger.debug("the watcher of run %r: %s", self.record.name, error)

    def _replace_watcher(self) -> None:
        """Start another watcher; if this process was stopped until another took the name, the lease is lost."""
        if self._closed.is_set():
            return
        logger.warning("the watcher of run %r was ended; starting another", self.record.name)
        try:
            self._watcher = self._start_watcher()
        except ray.exceptions.ActorAlreadyExistsError:
            logger.warning("another process took run %r meanwhile: this one holds it no longer", self.record.name)
            self._closed.set()
        except Exception as error:  # tried again at the next beat
            logger.debug("the watcher of run %r: %s", self.record.name, error)


class Charge(NamedTuple):
    """What is watched."""

    namespace: str
    """Of the run's actors and placement groups."""
    job: str
    """The driver's."""
    stalled_after_s: float
    """Silence after which the driver counts as stopped."""


class Watcher:
    """Ends a run's actors and placement groups, then itself, when the run's driver is gone or silent."""

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._silent_looks = 0
        # Its worker process was given the cluster's token: nothing is to be loaded.
        self._server = ControlServer(ray.get_runtime_context().gcs_address)
        self._me = bytes.fromhex(ray.get_runtime_context().get_actor_id())
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def beat(self) -> None:
        """Hear that the driver runs."""
        self._silent_looks = 0

    def _watch(self) -> None:
        reason = self._reason()
        logger.warning("ending what the run in %s left: %s", self._charge.namespace, reason)
        while True:
            try:
                self._server.end_runs(self._charge.namespace.__eq__, _END_S)
                self._server.kill(self._server.actors(lambda actor: bool(actor.actor_id == self._me)))
            except Exception as error:  # whatever it is, go on: nobody else would end the run
                logger.error("%r; trying again", error)  # noqa: TRY400 - one sentence says it
            time.sleep(_CHECK_S)

    def _reason(self) -> str:
        """Return why the run must end, once it must."""
        while True:
            time.sleep(_CHECK_S)
            # Looks are counted, not seconds: after a stop, this process has beats that it has not read yet.
            self._silent_looks += 1
            if self._silent_looks * _CHECK_S > self._charge.stalled_after_s:
                return f"its driver has been silent for {self._charge.stalled_after_s:g} s"
            try:
                if self._server.job(self._charge.job).is_over:
                    return "its driver is gone"
            except Exception as error:  # a control server may be away for a while: the watch goes on
                logger.warning("%r; looking again", error)


def check_same_code(packages: Iterable[str], *, timeout_s: float) -> None:
    """Check that every node of the connected cluster has some packages, with this process's code.

    Raises:
        ClusterError: if a node lacks one, has other code, or does not answer in time; the message names it.
    """
    packages = list(packages)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    calls = {_asked(node["NodeID"], packages).future(): node["NodeManagerAddress"] for node in nodes}
    ours, deadline = code_digests(packages), time.monotonic() + timeout_s
    for call, node in calls.items():
        try:
            theirs = call.result(max(0.0, deadline - time.monotonic()))  # `ray.get` would lose a signal
        except ray.exceptions.RayError as error:
            raise ClusterNotReadyError(
                f"node {node} of the Ray cluster cannot run anything for this process: {_in_a_line(error)}"
            ) from error
        except TimeoutError as error:
            raise ClusterNotReadyError(
                f"waited {timeout_s:g} s for node {node} of the Ray cluster to say what code it has, and it did not; "
                "raise ppo.cluster.start_timeout_s, or see the logs of that cluster"
            ) from error
        for package in packages:
            if theirs[package] != ours[package]:
                fault = "other code of" if theirs[package] else "no"
                raise ClusterError(
                    f"node {node} of the Ray cluster has {fault} package {package}; install this commit there (the "
                    "same checkout, `pip install -e .`) and start its Ray anew"
                )


def _in_a_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _asked(node: str, packages: list[str]) -> Any:
    """Ask a node, with a function that is sent by value: our packages may not be there."""
    here = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(here)
    try:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(code_digests).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        return task.remote(packages)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(here)


def code_digests(packages: Iterable[str]) -> dict[str, str]:
    """Return a digest of the Python files of each package; an empty one if there is no such package."""
    found = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        digest = hashlib.sha256()
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
        found[package] = digest.hexdigest() if spec else ""
    return found
