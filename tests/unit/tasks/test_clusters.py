"""Which cluster a stage runs on, and what is told of the user's own before anything is fetched or started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import infra.clusters
from infra.errors import ClusterError
from infra.settings import settings
from rlhf_core.config import ClusterConfig, DataConfig, PipelineConfig
from tasks import clusters
from tasks import preflight as preflight_module
from tasks.clusters import address_of
from tasks.preflight import leaves_process, preflight

NOBODY = "127.0.0.1:9"


def _on(address: str | None, **sft: object) -> PipelineConfig:
    config = PipelineConfig.model_validate(
        {"name": "test", "data": DataConfig(task="gcd"), "sft": sft, "ppo": {"cluster": {"address": address}}}
    )
    assert config.ppo.cluster.address == address
    return config


def test_the_configuration_names_the_cluster_or_else_the_setting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of(ClusterConfig()) is None
    monkeypatch.setenv("RLHF_RAY_ADDRESS", "10.0.0.5:6379")
    assert address_of(ClusterConfig()) == "10.0.0.5:6379"
    assert address_of(ClusterConfig(address="10.0.0.6:6379")) == "10.0.0.6:6379"


def test_only_ppo_and_stages_with_several_trainers_use_a_cluster() -> None:
    config = _on(NOBODY, num_trainers=2, strategy="ddp")
    assert [leaves_process(config, stage) for stage in ("ppo", "sft", "reward_model")] == [True, True, False]
    assert not leaves_process(_on(NOBODY), "sft")


def test_an_address_where_nobody_answers_is_told_before_memory_store_and_references_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looked(*_: object, **__: object) -> None:
        raise AssertionError("the cluster comes first")

    monkeypatch.setattr(preflight_module, "open_context", looked)
    with pytest.raises(ClusterError, match=rf"the Ray cluster at {NOBODY} does not answer: ") as caught:
        preflight.fn(_on(NOBODY), trains="ppo", stages=["ppo"])
    assert "\n" not in str(caught.value)


def test_a_run_with_several_trainers_on_this_machine_is_warned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(clusters, "run_logger", lambda: SimpleNamespace(warning=said.append))
    monkeypatch.setattr(infra.clusters, "lease_cluster", lambda *_, **__: "leased")
    monkeypatch.delenv("RLHF_RAY_ADDRESS", raising=False)
    clusters._warn_of_trainers.cache_clear()
    context = SimpleNamespace(settings=settings())
    for trainers in (1, 2, 2):
        rest = {"num_trainers": trainers, "num_cpus": 2, "object_store_mb": 80}
        assert clusters.lease_for("run", ClusterConfig(), context, **rest) == "leased"  # type: ignore[arg-type]
        assert len(said) == min(1, trainers - 1)
    assert said == ["several trainers on one machine: any user of it can reach their ports (docs/security.md)"]
