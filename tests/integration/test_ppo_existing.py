"""PPO on a user's own cluster: the run, the bits and the end are those of a cluster that was started for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flows.presets import resolve
from infra.clusters import ClusterRecord, lease_cluster, release_cluster
from infra.clusters.control_server import ControlServer
from infra.clusters.driver import credentials
from rlhf_core.config import PipelineConfig
from tasks.context import open_context
from tasks.ppo_group import TRAINER, lease
from tests.integration.existing_cluster import as_users_start_them
from tests.integration.ppo_runs import on_a_cluster
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.integration, pytest.mark.parallel]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    return resolve(
        "llama7b",
        model=str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)),
        episodes=2,
        overrides={
            "data.splits": {"sft": 8, "preferences": 8, "ppo": 16, "evaluation": 8},
            "ppo.prompts_per_episode": 16,
            "ppo.chunk_size": 8,
            "ppo.train_batch_size": 8,
            "ppo.micro_batch_size": 8,
            "ppo.max_new_tokens": 8,
            "ppo.lr": 1e-3,
            "ppo.reward": {"verifier": 0.0, "reward_model": 1.0},
            "ppo.cluster": {
                "num_makers": 2,
                "trainer_threads": 1,
                "maker_threads": 1,
                "object_store_mb": 128,
                "start_timeout_s": 600,
            },
        },
    )


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterRecord]:
    """A cluster that knows nothing of the run's store; with two logical GPUs, on which nobody asked to train."""
    with as_users_start_them():
        cluster = lease_cluster("theirs", directory=tmp_path / "c", num_cpus=4, num_gpus=2, object_store_mb=200)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(cluster.token))
        yield cluster
        assert cluster.is_running
        release_cluster("theirs")


def test_a_run_on_the_users_own_cluster_has_the_same_key_and_ends_with_the_same_bits(
    config: PipelineConfig, tmp_path: Path, theirs: ClusterRecord
) -> None:
    for name in ("local", "theirs"):
        (tmp_path / name).mkdir()
    with on_a_cluster(config, tmp_path / "local") as local:
        local.finish()
        expected = local.weights()
    own = {"address": theirs.address, "trainer_gpus": 0, "maker_gpus": 0}
    there = config.model_copy(
        update={"ppo": config.ppo.model_copy(update={"cluster": config.ppo.cluster.model_copy(update=own)})}
    )
    with on_a_cluster(there, tmp_path / "theirs") as run:
        assert run.plan.name == local.plan.name
        record = lease(run.plan, open_context())
        assert (record.kind, record.address) == ("existing", theirs.address)
        run.finish()
        with closing(ControlServer(theirs.address)) as server:
            names = {actor.name for actor in server.actors(lambda actor: actor.ray_namespace == record.namespace)}
        assert names == {TRAINER, "maker-0", "maker-1"}
        weights = run.weights()
    assert weights == expected
    assert len(expected) > 0
    with credentials(None), closing(ControlServer(theirs.address)) as server:
        assert server.actors(lambda _: True) == []
