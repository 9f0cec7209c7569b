"""What a Ray cluster is told, and what not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.clusters.ray_head import _environment
from infra.clusters.record import ClusterRecord
from infra.process_record import ProcessRecord

FOREIGN = (
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "PREFECT_CLIENT_CUSTOM_HEADERS",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    "RLHF_DATABASE_URL",
    "RAY_ADDRESS",
)


def test_no_process_of_a_cluster_is_told_what_is_for_prefect_or_of_another_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in FOREIGN:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("HF_HOME", "/models")
    record = ClusterRecord(name="night", mark="m", owner=ProcessRecord.of(os.getpid()), temp_dir=tmp_path)
    told = _environment(record, {"PREFECT_API_KEY": "key"})
    assert told.keys() & set(FOREIGN) == {"PREFECT_API_KEY"}, "but where the store's keys are read at the server"
    assert "hunter2" not in told.values()
    assert (told["HF_HOME"], told["RLHF_CLUSTER"]) == ("/models", "m")
