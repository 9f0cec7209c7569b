"""`ray start` as our clusters need it, run as `python -m infra.clusters.ray_start start --head ...`.

Where grpc is installed (TensorBoard brings it), `ray start` insists on a client server: a process of 100 MB on a
fixed port that would be taken when two clusters run. It has no option against it, only this question.

It gives its own raylet 30 s to register, which a busy machine may exceed, and has no option for that either. Here it
waits as long as the raylet lives, until whoever started it ends it: that one has a deadline, and a setting for it.
"""

from __future__ import annotations

import time
from typing import Any

import psutil
from ray._private import services
from ray.scripts import scripts

_get_node = services.get_node


def _node_once_registered(*given: Any) -> Any:
    while True:
        try:
            return _get_node(*given)
        except RuntimeError:
            if not _has_raylet():
                raise
            time.sleep(0.1)


def _has_raylet() -> bool:
    """Return whether this process has a raylet that has not ended."""
    children = psutil.Process().children()
    return any(each.name() == "raylet" and each.status() != psutil.STATUS_ZOMBIE for each in children)


if __name__ == "__main__":
    scripts.get_ray_client_dependency_error = lambda: "the client server is not wanted"
    services.get_node = _node_once_registered
    scripts.main()
