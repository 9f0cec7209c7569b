"""The work pools of infra/deploy/pools: what a worker makes of them is what Docker and Kubernetes accept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from docker.models.containers import _create_container_args
from jsonschema import Draft202012Validator
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.workers.base import BaseJobConfiguration

from infra.services.worker import EVERY_WORKER
from infra.settings import CHECKOUT, Settings
from infra.strict_yaml import load_yaml
from tests.unit.deploy.compose_file import services
from tests.unit.deploy.kubernetes_forms import faults

POOLS = CHECKOUT / "infra" / "deploy" / "pools"
NAMES = ("docker", "kubernetes")
IMAGE = "REGISTRY/rlhf-flows:TAG"
OF_A_RUN = {"name": "brave-owl", "command": "prefect flow-run execute"}
"""What a worker fills in for each run."""


class Everything(BaseJobConfiguration, extra="allow"):
    """What a worker of any type reads from a work pool."""


def template(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((POOLS / f"{name}.json").read_text())
    return found


def job(name: str, **variables: Any) -> dict[str, Any]:
    """Return what a worker would make of the pool for a run, by Prefect's own templating."""
    values = {"image": IMAGE, **OF_A_RUN, **variables}
    return asyncio.run(Everything.from_template_and_values(template(name), values, client=object())).model_dump()  # type: ignore[arg-type]


def pod(**variables: Any) -> dict[str, Any]:
    found: dict[str, Any] = job("kubernetes", **variables)["job_manifest"]["spec"]["template"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_prefect_accepts_the_template_and_each_default_by_its_own_schema(name: str) -> None:
    WorkPoolCreate(name="rlhf", type=name, base_job_template=template(name))
    schema = template(name)["variables"]
    Draft202012Validator.check_schema(schema)
    defaults = {key: each["default"] for key, each in schema["properties"].items() if "default" in each}
    Draft202012Validator(schema).validate({**defaults, **OF_A_RUN, "image": IMAGE})


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_told_what_those_of_our_workers_are_and_more_by_its_deployment(name: str) -> None:
    assert EVERY_WORKER.items() <= job(name)["env"].items()
    told = job(name, env={"RLHF_RETENTION": "policy=5"})["env"]
    assert {**EVERY_WORKER, "RLHF_RETENTION": "policy=5"}.items() <= told.items()
    for variable in told:
        assert variable.startswith("PREFECT_") or variable.removeprefix("RLHF_").lower() in Settings.model_fields


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_is_in_a_pool(name: str) -> None:
    text = (POOLS / f"{name}.json").read_text()
    for secret in ("SECRET_KEY", "ACCESS_KEY", "AUTH_STRING", "API_KEY"):
        assert secret not in text


def container(**variables: Any) -> dict[str, Any]:
    """Return what docker-py would send to Docker, as Prefect's worker calls it."""
    made = job("docker", **variables)
    more = made["container_create_kwargs"]
    found: dict[str, Any] = _create_container_args(
        {
            "image": made["image"],
            "command": made["command"],
            "environment": made["env"],
            "volumes": made["volumes"],
            "auto_remove": made["auto_remove"],
            "version": "1.50",
            **more,
        }
    )
    return found


def test_a_container_has_no_more_rights_than_those_of_the_compose_file() -> None:
    made, worker = container(), services()["worker"]
    host = made["host_config"]
    assert made["user"] == worker["user"]
    assert (host["Init"], host["ReadonlyRootfs"]) == (worker["init"], worker["read_only"])
    assert (host["CapDrop"], host["SecurityOpt"]) == (worker["cap_drop"], worker["security_opt"])
    assert [f"{path}:{options}" for path, options in host["Tmpfs"].items()] == worker["tmpfs"]
    assert host["ShmSize"] == 8 << 30
    assert host["Binds"] == ["rlhf-home:/home/rlhf"]
    assert "DeviceRequests" not in host


def test_a_container_gets_the_gpus_and_the_shared_memory_that_a_deployment_asks_for() -> None:
    gpus = [{"count": -1, "capabilities": [["gpu"]]}]
    host = container(device_requests=gpus, shm_size="32g")["host_config"]
    (asked,) = host["DeviceRequests"]
    assert (asked["Count"], asked["Capabilities"]) == (-1, [["gpu"]])
    assert host["ShmSize"] == 32 << 30


def test_kubernetes_knows_every_field_of_a_job() -> None:
    for variables in ({}, {"gpus": "1", "node_selector": {"gpu": "h200"}}):
        manifest = job("kubernetes", **variables)["job_manifest"]
        spec = manifest["spec"]["template"]["spec"]
        assert (spec.pop("parallelism"), spec.pop("completions")) == (
            1,
            1,
        )  # the worker wants them here, and Kubernetes
        (only,) = spec["containers"]  # drops them with a warning
        only["args"] = only["args"].split()  # as the worker does
        assert faults(manifest) == []
        manifest["spec"]["template"]["spec"]["toleration"] = []
        assert len(faults(manifest)) == 1


def test_a_jobs_pod_is_as_safe_as_those_of_the_other_files() -> None:
    file = CHECKOUT / "infra" / "deploy" / "kubernetes" / "prefect-worker.yaml"
    ours, theirs = load_yaml(file)["spec"]["template"], pod()
    (our_container,), (their_container,) = ours["spec"]["containers"], theirs["spec"]["containers"]
    for field in ("securityContext", "automountServiceAccountToken", "terminationGracePeriodSeconds"):
        assert theirs["spec"][field] == ours["spec"][field]
    for field in ("securityContext", "envFrom", "volumeMounts"):
        assert their_container[field] == our_container[field]
    assert {each["name"] for each in theirs["spec"]["volumes"]} == {each["name"] for each in ours["spec"]["volumes"]}
    assert theirs["metadata"]["labels"]["app.kubernetes.io/part-of"] == "rlhf"  # as the network policy selects
    assert their_container["resources"]["requests"] == their_container["resources"]["limits"]


def test_a_job_gets_the_room_that_a_deployment_asks_for() -> None:
    spec = pod(gpus="2", memory="128Gi", shared_memory="32Gi")["spec"]
    (only,) = spec["containers"]
    assert only["resources"]["limits"] == {"cpu": "8", "memory": "128Gi", "nvidia.com/gpu": "2"}
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    assert "nvidia.com/gpu" not in pod()["spec"]["containers"][0]["resources"]["limits"]
    assert "nodeSelector" not in pod()["spec"]
