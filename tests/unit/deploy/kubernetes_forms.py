"""Whether a Kubernetes document has the form that the server would accept: names and types of all its fields.

What Kubernetes defines itself is compared with the classes of `lightkube-models`, which are generated from its API.
What KubeRay defines is compared with `RAY_CLUSTER`, our own summary of its CustomResourceDefinition: every field of a
RayCluster beside its pod templates (and those parts of it that we shall not use: services, ingress, Redis).
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator

Document = dict[str, Any]
# The classes ask a client of Kubernetes, which we do not need, for its kind of dataclasses: they get plain ones.
_plain: Any = types.ModuleType("lightkube.core.schema")
_plain.dataclass, _plain.field, _plain.DictMixin = dataclasses.dataclass, dataclasses.field, object
sys.modules.setdefault(_plain.__name__, _plain)
sys.modules.setdefault("lightkube.core", types.ModuleType("lightkube.core"))
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_GROUP = {
    "labels": _STRINGS,
    "rayStartParams": _STRINGS,
    "resources": _STRINGS,
    "template": {"type": "object"},
}
RAY_CLUSTER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["headGroupSpec"],
    "properties": {
        "authOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"enableK8sTokenAuth": {"type": "boolean"}, "mode": {"enum": ["disabled", "token"]}},
        },
        "enableInTreeAutoscaling": {"type": "boolean"},
        "headGroupSpec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["template"],
            "properties": {**_GROUP, "enableIngress": {"type": "boolean"}, "serviceType": {"type": "string"}},
        },
        "headServiceAnnotations": _STRINGS,
        "managedBy": {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
        "rayVersion": {"type": "string"},
        "suspend": {"type": "boolean"},
        "ttlSecondsAfterIdle": _COUNT,
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["groupName", "maxReplicas", "minReplicas", "template"],
                "properties": {
                    **_GROUP,
                    "groupName": {"type": "string"},
                    "idleTimeoutSeconds": _COUNT,
                    "maxReplicas": _COUNT,
                    "minReplicas": _COUNT,
                    "numOfHosts": _COUNT,
                    "replicas": _COUNT,
                    "suspend": {"type": "boolean"},
                },
            },
        },
    },
}


def faults(document: Document) -> list[str]:
    """Return what is wrong with the form of a document, one line each; nothing if it is well formed."""
    if document["apiVersion"] == "ray.io/v1" and document["kind"] == "RayCluster":
        return list(_faults_of_a_ray_cluster(document))
    group, _, version = document["apiVersion"].rpartition("/")
    module = (group.partition(".")[0] or "core") + "_" + version
    return list(_mismatches(_model(module, document["kind"]), document, document["kind"]))


def crd_schema(definition: Document) -> Document:
    """Return the JSON schema of version v1 in a CustomResourceDefinition; what it does not name is refused."""
    (version,) = (version for version in definition["spec"]["versions"] if version["name"] == "v1")
    schema: Document = version["schema"]["openAPIV3Schema"]
    # The server's own part: it checks metadata by itself.
    closed: Document = _closed(schema)
    closed["properties"]["metadata"] = {"type": "object"}
    return closed


def _faults_of_a_ray_cluster(document: Document) -> Iterator[str]:
    for key in document.keys() - {"apiVersion", "kind", "metadata", "spec"}:
        yield f"RayCluster.{key}: no such field"
    yield from _mismatches(_model("meta_v1", "ObjectMeta"), document["metadata"], "RayCluster.metadata")
    spec = document["spec"]
    for error in Draft202012Validator(RAY_CLUSTER).iter_errors(spec):
        yield f"RayCluster.spec{error.json_path.removeprefix('$')}: {error.message}"
    for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])):
        name = group.get("groupName", "head")
        yield from _mismatches(_model("core_v1", "PodTemplateSpec"), group["template"], f"template of {name}")


def _mismatches(kind: Any, value: Any, where: str) -> Iterator[str]:
    """Yield where a value differs from a type of lightkube's: a class of fields, a list, a mapping, a plain value."""
    origin = get_origin(kind)
    if origin in {Union, types.UnionType}:
        choices = [list(_mismatches(choice, value, where)) for choice in get_args(kind) if choice is not type(None)]
        if all(choices):
            yield from choices[0]
    elif dataclasses.is_dataclass(kind):
        yield from _mismatches_of_fields(kind, value, where)
    elif kind in {dict, list} or origin in {dict, list}:
        yield from _mismatches_of_items(kind, value, where)
    elif kind is not Any and type(value) is not kind:
        yield f"{where}: {kind.__name__} is expected, not {value!r}"


def _mismatches_of_items(kind: Any, value: Any, where: str) -> Iterator[str]:
    container = get_origin(kind) or kind
    if not isinstance(value, container):
        yield f"{where}: {container.__name__} is expected, not {value!r}"
    elif arguments := get_args(kind):
        for key, item in value.items() if container is dict else enumerate(value):
            yield from _mismatches(arguments[-1], item, f"{where}[{key!r}]")


def _mismatches_of_fields(kind: Any, value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: {kind.__name__} is expected, not {value!r}"
        return
    fields = {field.metadata.get("json", field.name): field for field in dataclasses.fields(kind)}
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in value:
            yield f"{where}.{name}: must be there"
    for key, item in value.items():
        if key not in fields:
            yield f"{where}.{key}: no such field"
        else:
            yield from _mismatches(_hints(kind)[fields[key].name], item, f"{where}.{key}")


def _model(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"lightkube.models.{module}"), name)


@cache
def _hints(kind: Any) -> Document:
    return get_type_hints(kind)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no other fields than those that it names, unless it says that they may."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(item) for key, item in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
