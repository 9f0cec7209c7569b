"""`ray start` without Ray's client server, run as `python -m infra.clusters.ray_start start --head ...`.

Where grpc is installed (TensorBoard brings it), `ray start` insists on a client server: a process of 100 MB on a
fixed port that would be taken when two clusters run. It has no option against it, only this question.
"""

from __future__ import annotations

from ray.scripts import scripts

if __name__ == "__main__":
    scripts.get_ray_client_dependency_error = lambda: "the client server is not wanted"
    scripts.main()
