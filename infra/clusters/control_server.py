"""Questions and orders to a cluster's control server: each with a deadline, and without a driver.

Ray's own functions need a connected driver and may wait for ever. They also show no actor of another driver, and end
none without its handle. But what a run left on a cluster must be found and ended by any process that is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import grpc
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

from infra.errors import ClusterError, ClusterNotReadyError

ANSWER_S = 10.0
_PAUSE_S = 0.1
_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    }
)
"""Answers, and silences, after which the same question may succeed later."""


class Job(NamedTuple):
    """A driver, running or not."""

    is_over: bool
    description: str


class Leftover(NamedTuple):
    """What of a run is still there."""

    actors: list[Any]
    groups: list[Any]

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.actors or self.groups)

    def __str__(self) -> str:
        """Name it for a person."""
        names = [f"actor {actor.name or actor.class_name} (process {actor.pid})" for actor in self.actors]
        return ", ".join([*names, *(f"placement group {group.name or 'without a name'}" for group in self.groups)])


class ControlServer:
    """The control server of a cluster, asked with the token that this process has loaded (`driver.credentials`)."""

    def __init__(self, address: str, *, called: str | None = None, timeout_s: float = ANSWER_S) -> None:
        """Open the connection.

        Args:
            address: host and port.
            called: the cluster's name in messages.
            timeout_s: longest wait for each answer.
        """
        self._called, self._timeout_s = called or f"the Ray cluster at {address}", timeout_s
        self._channel = init_grpc_channel(address)
        self._actors = gcs_service_pb2_grpc.ActorInfoGcsServiceStub(self._channel)
        self._groups = gcs_service_pb2_grpc.PlacementGroupInfoGcsServiceStub(self._channel)
        self._jobs = gcs_service_pb2_grpc.JobInfoGcsServiceStub(self._channel)
        self._nodes = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(self._channel)
        self._workers = gcs_service_pb2_grpc.WorkerInfoGcsServiceStub(self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def nodes(self) -> list[Any]:
        """Return the living nodes.

        Raises:
            ClusterError: if the control server does not answer or refuses, here and in all that follow.
        """
        answer = self._ask(self._nodes.GetAllNodeInfo, gcs_service_pb2.GetAllNodeInfoRequest())
        return [node for node in answer.node_info_list if node.state == gcs_pb2.GcsNodeInfo.ALIVE]

    def resources(self) -> dict[str, float]:
        """Return what the living nodes have together, free or not."""
        total: dict[str, float] = {}
        for node in self.nodes():
            for name, amount in node.resources_total.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    def job(self, job_id: str) -> Job:
        """Return what is known of a driver by its job; an unknown one is over."""
        request = gcs_service_pb2.GetAllJobInfoRequest(
            job_or_submission_id=job_id, skip_submission_job_info_field=True, skip_is_running_tasks_field=True
        )
        answer = self._ask(self._jobs.GetAllJobInfo, request)
        for job in answer.job_info_list:
            if job.job_id.hex() == job_id:
                since = datetime.fromtimestamp(job.start_time / 1000, UTC)
                who = f"process {job.driver_pid} on {job.driver_ip_address} since {since:%Y-%m-%d %H:%M} UTC"
                return Job(job.is_dead, who)
        return Job(True, "a process that is gone")

    def actors(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Return the wanted actors that are not dead, also those without a name and those of other drivers."""
        answer = self._ask(self._actors.GetAllActorInfo, gcs_service_pb2.GetAllActorInfoRequest())
        dead = gcs_pb2.ActorTableData.DEAD
        return [actor for actor in answer.actor_table_data if actor.state != dead and wanted(actor)]

    def kill(self, actors: Iterable[Any]) -> None:
        """End actors for good; Ray ends the process of a stopped one after some seconds."""
        for actor in actors:
            request = gcs_service_pb2.KillActorViaGcsRequest(actor_id=actor.actor_id, force_kill=True, no_restart=True)
            self._ask(self._actors.KillActorViaGcs, request, forgives=grpc.StatusCode.NOT_FOUND)

    def end_runs(self, is_ours: Callable[[str], bool], timeout_s: float) -> None:
        """End all actors and placement groups of some namespaces, and wait until the actors' processes are gone.

        Raises:
            ClusterError: if something is left; it is named.
        """
        deadline, workers, clean_looks = time.monotonic() + timeout_s, set[bytes](), 0
        while clean_looks < 2:  # noqa: PLR2004 - one look may miss what was created during it
            left = self._left(is_ours)
            at_work = {node.node_id for node in self.nodes()}
            workers = {worker for worker in workers if self._runs(worker, at_work)}
            workers |= {actor.address.worker_id for actor in left.actors if actor.address.worker_id}
            clean_looks = 0 if left or workers else clean_looks + 1
            if time.monotonic() > deadline:
                what = str(left) or f"processes of actors that have ended ({len(workers)})"
                raise ClusterNotReadyError(f"after {timeout_s:g} s {self._called} still has {what}")
            self.kill(left.actors)
            for group in left.groups:
                request = gcs_service_pb2.RemovePlacementGroupRequest(placement_group_id=group.placement_group_id)
                self._ask(self._groups.RemovePlacementGroup, request, forgives=grpc.StatusCode.NOT_FOUND)
            time.sleep(_PAUSE_S)

    def _left(self, is_ours: Callable[[str], bool]) -> Leftover:
        answer = self._ask(self._groups.GetAllPlacementGroup, gcs_service_pb2.GetAllPlacementGroupRequest())
        removed = gcs_pb2.PlacementGroupTableData.REMOVED
        groups = answer.placement_group_table_data
        return Leftover(
            self.actors(lambda actor: is_ours(actor.ray_namespace)),
            [group for group in groups if group.state != removed and is_ours(group.ray_namespace)],
        )

    def _runs(self, worker: bytes, nodes: Collection[bytes]) -> bool:
        """Whether a process is there; nobody tells the control server of one whose node is gone."""
        request = gcs_service_pb2.GetWorkerInfoRequest(worker_id=worker)
        answer = self._ask(self._workers.GetWorkerInfo, request, forgives=grpc.StatusCode.NOT_FOUND)
        if answer is None:
            return False
        known = answer.worker_table_data
        return bool(known.is_alive) and known.worker_address.node_id in nodes

    def _ask(self, method: Any, request: Any, *, forgives: Any = None) -> Any:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            if error.code() == forgives:
                return None
            fault = ClusterNotReadyError if error.code() in _PASSING else ClusterError
            raise fault(f"{self._called} {self._told(error)}") from error
        except ray.exceptions.AuthenticationError as error:  # of this process: it has no token
            raise ClusterError(f"{self._called} was not asked: {str(error).partition('. ')[0]}") from error

    def _told(self, error: Any) -> str:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                f"did not answer within {self._timeout_s:g} s; is its control server (gcs_server) there, neither "
                "stopped nor overloaded?"
            )
        words = (str(error.details()).strip() or error.code().name).splitlines()[0]
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return (
                f"does not answer: {words.rstrip('.')}; set RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) to the token "
                "that it was started with"
            )
        return f"does not answer: {words.rstrip('.')}"
