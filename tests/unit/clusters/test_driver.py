"""What a driver tells a cluster when it connects, without a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from infra.clusters import driver
from infra.clusters.record import ClusterRecord
from infra.process_record import ProcessRecord

SECRET = "xyzzy"
WORKER = (
    "import os, pickle, sys; pickle.load(sys.stdin.buffer)(); print(os.environ['STORE_SECRET'], 'HIDDEN' in os.environ)"
)


def test_a_jobs_secrets_travel_apart_from_what_ray_logs_and_puts_on_command_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(driver, "_probe", lambda *_: None)
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    monkeypatch.setenv("HIDDEN", "of this process alone")
    record = ClusterRecord(
        kind="existing", name="night", mark="m", owner=ProcessRecord.of(os.getpid()), address="10.0.0.5:6379"
    )
    driver.connect(record, environment={"STORE_SECRET": SECRET})
    ((field, hook),) = given["runtime_env"].items()
    assert field == "worker_process_setup_hook"  # a function: Ray keeps it with those of the job, and names its key
    # A worker of a node that has cloudpickle, as Ray's have, and none of our code.
    packages = str(Path(ray.__file__).parents[1])
    told = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({packages!r}); import ray.cloudpickle; {WORKER}",
        ],
        input=ray.cloudpickle.dumps(hook),
        capture_output=True,
        cwd=tmp_path,
        env={},
        check=True,
    )
    assert told.stdout.split() == [SECRET.encode(), b"False"]


def test_a_signal_that_comes_while_rays_handler_stands_is_answered_by_the_flows_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CancelledError(BaseException):
        """As Prefect's handler raises it."""

    def cancel(*_: object) -> None:
        raise CancelledError

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(driver, "_probe", lambda *_: None)
    monkeypatch.setattr(ray, "init", init)
    record = ClusterRecord(
        kind="existing", name="night", mark="m", owner=ProcessRecord.of(os.getpid()), address="10.0.0.5:6379"
    )
    before = signal.signal(signal.SIGTERM, cancel)
    try:
        with pytest.raises(CancelledError):
            driver.connect(record)
        assert signal.getsignal(signal.SIGTERM) is cancel
    finally:
        signal.signal(signal.SIGTERM, before)
