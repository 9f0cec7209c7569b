"""The files of infra/deploy: each has the form that its reader accepts, and they agree with the code and each other."""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prefect
import pytest
import ray
from jsonschema import Draft7Validator, Draft202012Validator, ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from infra.clusters.ray_head import SILENT_NODE
from infra.services.worker import EVERY_WORKER, WORK_POOL
from infra.settings import Settings
from infra.strict_yaml import load_yaml
from tests.unit.deploy.kubernetes_forms import Document, crd_schema, faults

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "infra" / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
RAY_UP = sorted((DEPLOY / "ray").glob("*.yaml"))
CRD = "KUBERAY_CRD"
"""An environment variable: the file of KubeRay's own CustomResourceDefinition of RayCluster."""
IMAGE = "REGISTRY/rlhf-flows:TAG"


def load(path: Path) -> Document:
    document = load_yaml(path)
    assert isinstance(document, dict)
    return document


def ray_cluster() -> Document:
    return load(DEPLOY / "kubernetes" / "raycluster.yaml")


def templates() -> dict[str, Document]:
    """All pod templates by name, the head's first."""
    spec = ray_cluster()["spec"]
    groups = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    worker = load(DEPLOY / "kubernetes" / "prefect-worker.yaml")["spec"]["template"]
    return {name: group["template"] for name, group in groups.items()} | {"prefect-worker": worker}


def container(template: Document) -> Document:
    (only,) = template["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def variables(template: Document) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(template).get("env", [])}


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_knows_every_field_of_each_document(path: Path) -> None:
    assert faults(load(path)) == []


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda spec: spec["headGroupSpec"].update(replica=1), r"RayCluster\.spec\.headGroupSpec: .*'replica'"),
        (lambda spec: spec["workerGroupSpecs"][0].update(replicas="2"), r"workerGroupSpecs\[0\]\.replicas: '2'"),
        (lambda spec: spec["workerGroupSpecs"][1].pop("maxReplicas"), r"workerGroupSpecs\[1\]: 'maxReplicas'"),
        (lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), r"rayStartParams.*: 0 is not"),
        (lambda spec: spec["authOptions"].update(mode="tokens"), r"authOptions\.mode: 'tokens'"),
        (
            lambda spec: container(spec["headGroupSpec"]["template"])["ports"][0].pop("containerPort"),
            r"template of head\.spec\.containers\[0\]\.ports\[0\]\.containerPort: must be there",
        ),
        (
            lambda spec: spec["workerGroupSpecs"][1]["template"]["spec"].update(toleration=[]),
            r"template of gpu\.spec\.toleration: no such field",
        ),
        (
            lambda spec: spec["headGroupSpec"]["template"]["spec"]["securityContext"].update(runAsUser="1000"),
            r"securityContext\.runAsUser: int is expected, not '1000'",
        ),
    ],
)
def test_a_field_of_another_name_or_type_is_found(spoil: Callable[[Document], Any], fault: str) -> None:
    document = ray_cluster()
    spoil(document["spec"])
    found = faults(document)
    assert len(found) == 1
    assert re.search(fault, found[0]), found


def test_a_definition_refuses_what_it_does_not_name() -> None:
    spec = {"type": "object", "required": ["size"], "properties": {"size": {"type": "integer"}}}
    free = {"type": "object", "properties": {"a": {}}, "x-kubernetes-preserve-unknown-fields": True}
    whole = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": spec, "free": free}}
    versions = [{"name": "v1", "schema": {"openAPIV3Schema": whole}}, {"name": "v1alpha1"}]
    validator = Draft202012Validator(crd_schema({"spec": {"versions": versions}}))
    validator.validate({"metadata": {"name": "rlhf"}, "spec": {"size": 1}, "free": {"b": 1}})
    for wrong in ({"spec": {"size": 1, "more": 1}}, {"spec": {}}, {"spec": {"size": "1"}}, {"status": {}}):
        assert not validator.is_valid(wrong), wrong


def test_kuberay_itself_accepts_the_cluster() -> None:
    if CRD not in os.environ:
        pytest.skip(f"set {CRD} to KubeRay's ray.io_rayclusters.yaml; infra/deploy/README.md says where it is")
    validator = Draft202012Validator(crd_schema(load(Path(os.environ[CRD]))))
    validator.validate(ray_cluster())
    spoilt = ray_cluster()
    spoilt["spec"]["headGroupSpec"]["replica"] = 1
    with pytest.raises(ValidationError, match="replica"):
        validator.validate(spoilt)


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_ray_up_accepts_the_file_by_its_own_schema(path: Path) -> None:
    document = load(path)
    validate_config(prepare_config(copy.deepcopy(document)))
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    Draft7Validator(schema).validate(document)
    with pytest.raises(ValidationError, match="head_node_typ"):
        validate_config(prepare_config({**document, "head_node_typ": "head"}))


@pytest.mark.parametrize("name", ["head", "cpu", "gpu", "prefect-worker"])
def test_every_pod_runs_our_image_without_rights_and_within_limits(name: str) -> None:
    template = templates()[name]
    pod, only = template["spec"], container(template)
    assert only["image"] == IMAGE
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert only["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert only["resources"]["requests"] == only["resources"]["limits"]
    assert {"startupProbe", "livenessProbe"} <= only.keys()
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "rlhf"  # as the network policy selects
    mounted = {mount["name"] for mount in only["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", ["head", "cpu", "gpu"])
def test_rays_object_store_fits_into_shared_memory_and_that_into_the_container(name: str) -> None:
    spec = ray_cluster()["spec"]
    groups = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    group = groups[name]
    store = int(group["rayStartParams"]["object-store-memory"])
    (shared,) = (volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shared-memory")
    size = gibibytes(shared["emptyDir"]["sizeLimit"])
    assert store < size < gibibytes(container(group["template"])["resources"]["limits"]["memory"])


def gibibytes(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) << 30


def test_the_flows_pod_is_a_node_of_the_cluster_that_gives_nothing() -> None:
    cluster, template = ray_cluster(), templates()["prefect-worker"]
    told = variables(template)
    assert told["RLHF_RAY_ADDRESS"] == f"{cluster['metadata']['name']}-head-svc:6379"  # as KubeRay names the service
    assert told["RAY_AUTH_MODE"] == cluster["spec"]["authOptions"]["mode"]
    assert told["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": cluster["metadata"]["name"], "key": "auth_token"}}
    (script,) = container(template)["args"]
    assert "--num-cpus=0" in script
    assert f"--pool {WORK_POOL} " in script
    settings = load(DEPLOY / "kubernetes" / "settings.example.yaml")
    assert container(template)["envFrom"] == [{"secretRef": {"name": settings["metadata"]["name"]}}]


def test_every_setting_that_is_named_exists() -> None:
    for path in [*KUBERNETES, *RAY_UP, DEPLOY / "README.md", DEPLOY / "Dockerfile"]:
        for name in re.findall(r"\bRLHF_([A-Z0-9_]*[A-Z0-9])\b", path.read_text()):
            assert name.lower() in Settings.model_fields, (path.name, name)


def test_a_silent_node_is_given_up_as_on_our_own_clusters() -> None:
    assert SILENT_NODE.items() <= variables(templates()["head"]).items()
    for path in RAY_UP:
        started = " ".join(load(path)["head_start_ray_commands"])
        assert {f"{name}={value}" for name, value in SILENT_NODE.items()} <= set(started.split())


def test_a_prefect_worker_is_told_what_ours_are() -> None:
    assert EVERY_WORKER.items() <= variables(templates()["prefect-worker"]).items()
    for path in RAY_UP:
        options = load(path)["docker"]["run_options"]
        assert {f"--env {name}={value}" for name, value in EVERY_WORKER.items()} <= set(options), path.name


@pytest.mark.parametrize("section", ["Kubernetes, with KubeRay", "Machines over ssh, with `ray up`"])
def test_the_readme_has_crashed_runs_started_again(section: str) -> None:
    _, _, steps = (DEPLOY / "README.md").read_text().partition(f"## {section}\n")
    assert re.search(r"rlhf deploy'?`", steps.partition("\n## ")[0])  # which sees to that, too


def test_nodes_run_the_ray_and_the_python_that_the_code_is_locked_to() -> None:
    assert ray_cluster()["spec"]["rayVersion"] == ray.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    image = re.search(r"^FROM python:(\d+\.\d+)-slim", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    assert project["requires-python"].startswith(f">={image[1]},")


def test_the_readme_has_workers_installed_with_the_locked_prefect() -> None:
    found = re.findall(r"prefect==([\d.]+)", (DEPLOY / "README.md").read_text())
    assert set(found) == {prefect.__version__}


def test_the_readme_names_every_file() -> None:
    readme = (DEPLOY / "README.md").read_text()
    for path in [*KUBERNETES, *RAY_UP, *DEPLOY.glob("compose/*.yaml"), *DEPLOY.glob("pools/*"), DEPLOY / "Dockerfile"]:
        assert str(path.relative_to(DEPLOY)) in readme, path
