"""Whether a lease on a user's own cluster still stands, as its watcher says; and whether its nodes have our code."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from infra.clusters import existing
from infra.clusters.existing import Charge, _ExistingLease, code_digests
from infra.clusters.record import ClusterRecord
from infra.errors import ClusterError
from infra.process_record import ProcessRecord

ADDRESS = "10.0.0.5:6379"


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> _ExistingLease:
    monkeypatch.setattr(existing, "ControlServer", lambda _: SimpleNamespace(nodes=list))
    record = ClusterRecord(
        kind="existing", name="night", mark="m", owner=ProcessRecord.of(os.getpid()), address=ADDRESS
    )
    return _ExistingLease(record, Charge("rlhf:night:m", "job", 120.0), 7.0)


def answers(lease: _ExistingLease, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Have the watcher answer, or not."""

    def result(timeout_s: float) -> None:
        assert timeout_s == 7.0
        if error is not None:
            raise error

    beat = SimpleNamespace(future=lambda: SimpleNamespace(result=result))
    lease._watcher = SimpleNamespace(beat=SimpleNamespace(remote=lambda: beat))
    context: Any = SimpleNamespace(get_job_id=lambda: "job")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


@pytest.mark.parametrize(("error", "is_good"), [(None, True), (ray.exceptions.ActorDiedError(), False)])
def test_a_lease_stands_as_long_as_its_watcher_does(
    lease: _ExistingLease, monkeypatch: pytest.MonkeyPatch, error: Exception | None, *, is_good: bool
) -> None:
    answers(lease, monkeypatch, error)
    assert lease.is_good(ADDRESS) is is_good


def test_a_watcher_that_does_not_answer_is_told_in_one_sentence(
    lease: _ExistingLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(lease, monkeypatch, TimeoutError())
    with pytest.raises(ClusterError, match=r"watcher of run 'night' did not answer within 7 s .*10\.0\.0\.5:6379$"):
        lease.is_good(ADDRESS)


def test_a_package_is_known_by_the_content_and_place_of_its_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "made_up_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is read, not run')")
    (package / "inner" / "a.py").write_text("A = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = [code_digests([package.name])[package.name]]
    (package / "data.json").write_text("{}")
    assert code_digests([package.name])[package.name] == seen[0]  # no code
    (package / "inner" / "a.py").write_text("A = 2")
    seen.append(code_digests([package.name])[package.name])
    (package / "inner" / "a.py").rename(package / "inner" / "b.py")
    seen.append(code_digests([package.name])[package.name])
    assert len(set(seen)) == 3
    assert code_digests(["no_such_package"]) == {"no_such_package": ""}
