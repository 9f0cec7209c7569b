"""Whether the nodes of a cluster have the code that this process has; Ray compares only its own and Python's versions.

A trainer of another commit would at best fail to load, and at worst train in silence on other numbers than its run's
key says.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.errors import ClusterError, ClusterNotReadyError


def code_digests(packages: Iterable[str]) -> dict[str, str]:
    """Return a digest of the Python files of each package; an empty one where there is no such package."""
    found = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        digest = hashlib.sha256()
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
        found[package] = digest.hexdigest() if spec else ""
    return found


def check_same_code(packages: Iterable[str], *, timeout_s: float) -> None:
    """Check on every node of the connected cluster that packages are there, and have this process's code.

    Raises:
        ClusterError: if a node lacks one, has other code, or does not say so in time; it is named.
    """
    packages = list(packages)
    calls = {_asked(node["NodeID"], packages): node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    ours, deadline = code_digests(packages), time.monotonic() + timeout_s
    for call, node in calls.items():
        try:
            theirs = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterNotReadyError(
                f"waited {timeout_s:g} s for node {node} of the Ray cluster to say what code it has, and it did not; "
                "raise ppo.cluster.start_timeout_s, or see the logs of that cluster"
            ) from error
        except ray.exceptions.RayError as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ClusterNotReadyError(
                f"node {node} of the Ray cluster cannot run anything for this process: {first}"
            ) from error
        for package in packages:
            if theirs[package] != ours[package]:
                fault = "other code of" if theirs[package] else "no"
                raise ClusterError(
                    f"node {node} of the Ray cluster has {fault} package {package}; install this commit there (the "
                    "same checkout, `pip install -e .`) and start its Ray anew"
                )


def _asked(node: str, packages: list[str]) -> Any:
    """Ask a node, with a function that travels whole: our packages may not be there."""
    here = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(here)
    try:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(code_digests).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        return task.remote(packages)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(here)
