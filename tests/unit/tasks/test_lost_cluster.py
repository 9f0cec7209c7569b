"""What is done with the actors of an attempt that failed: nothing, where their cluster has gone with them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from flows.cli import train_prompts_on_ray
from infra.clusters import ClusterRecord, is_lost, lease
from infra.errors import ClusterError
from infra.process_record import ProcessRecord
from rlhf_core.coati.roles.flags import build_parser
from rlhf_core.config import DataConfig, PipelineConfig
from rlhf_core.errors import LostRankError
from tasks import clusters, ppo, ppo_group, supervised
from tasks.results import Parent, PPORun

ALIVE = ProcessRecord.of(os.getpid())
GONE = ProcessRecord(pid=ALIVE.pid, started=ALIVE.started + 1)
RUN = PPORun(
    name="night",
    key="k",
    preset="quickstart",
    config=PipelineConfig(name="night", data=DataConfig(task="chain_sum")),
    actor=Parent(uri="model/base", digest="0" * 64),
    reward_model=None,
    dataset=Parent(uri="dataset/d@1", digest="0" * 64),
    source_digest="0" * 64,
    flow_run=None,
)


def _hold(monkeypatch: pytest.MonkeyPatch, *head: ProcessRecord) -> None:
    record = ClusterRecord(
        name=RUN.name, mark="none has it", owner=ALIVE, temp_dir=Path("/tmp/rf-1"), log_dir=Path("/tmp/logs"), head=head
    )
    held: Any = lease._LocalLease.__new__(lease._LocalLease)
    held.record = record
    monkeypatch.setitem(lease._LEASES, RUN.name, held)


def test_a_cluster_is_lost_when_one_of_rays_own_processes_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_lost(RUN.name)  # none is held
    for head, expected in (((), False), ((ALIVE, ALIVE), False), ((GONE, ALIVE), True), ((ALIVE, GONE), True)):
        _hold(monkeypatch, *head)
        assert is_lost(RUN.name) is expected


@pytest.mark.parametrize(
    ("head", "is_connected", "ended"),
    [((ALIVE, ALIVE), True, ["night"]), ((GONE, ALIVE), True, []), ((ALIVE, ALIVE), False, [])],
)
def test_a_failed_attempt_asks_nothing_of_a_lost_cluster_or_before_it_is_connected(
    monkeypatch: pytest.MonkeyPatch, head: tuple[ProcessRecord, ...], is_connected: bool, ended: list[str]
) -> None:
    """Ray would try for a minute to reach the control server, and then end this very process; or start a cluster."""
    _hold(monkeypatch, *head)
    monkeypatch.setattr(ray, "is_initialized", lambda: is_connected)
    asked: list[str] = []
    monkeypatch.setattr(ppo_group, "end_group", lambda run: asked.append(run.name))
    with pytest.raises(LostRankError), ppo._EndingTheGroupOnFailure(RUN):
        raise LostRankError("rank 1 has ended")
    assert asked == ended


def test_a_cluster_that_does_not_end_leaves_the_runs_own_end_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(_: str) -> None:
        raise ClusterError("processes of cluster 'night' are left: 7 (raylet)")

    monkeypatch.setattr("infra.clusters.release_cluster", stuck)
    monkeypatch.setattr(clusters, "run_logger", lambda: logging.getLogger("run"))
    clusters.end_cluster("night")
    assert "the cluster of night has not ended yet: processes of cluster 'night' are left: 7 (raylet)" in caplog.text


def test_a_cluster_that_does_not_end_replaces_nothing_that_was_said_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stuck(_: str) -> None:
        raise ClusterError("processes of a cluster are left")

    def said(*_: object, **__: object) -> None:
        raise LostRankError("rank 1 has ended")

    monkeypatch.setattr("infra.clusters.release_cluster", stuck)
    monkeypatch.setattr("infra.clusters.lease_cluster", said)
    monkeypatch.setattr("infra.clusters.connect", said)
    monkeypatch.setattr(supervised, "lease_for", lambda *_, **__: None)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    of_run: dict[str, Any] = {"trainers": RUN.config.sft, "cluster": RUN.config.ppo.cluster, "context": None}
    with pytest.raises(LostRankError, match="rank 1 has ended"):
        supervised.run_on_ranks(lambda _: None, stage="sft", name="night", **of_run)
    with (
        pytest.raises(LostRankError, match="rank 1 has ended"),
        train_prompts_on_ray._leased(build_parser().parse_args([])),
    ):
        pass
