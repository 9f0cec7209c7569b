import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from infra.clusters import ClusterRecord, lease_cluster, reap_orphans, release_cluster
from infra.clusters.lease import hold
from infra.errors import ClusterError
from infra.process_record import ProcessRecord
from tasks.clusters import end_cluster


def _left_behind(directory: Path, owner: ProcessRecord) -> Path:
    record = ClusterRecord(
        name="night", mark="none has it", owner=owner, temp_dir=directory / "rf-1", log_dir=directory / "logs" / "n"
    )
    record.temp_dir.mkdir()
    record.log_dir.mkdir(parents=True)
    record.save(directory / "night.json")
    return record.temp_dir


def test_importing_the_package_imports_neither_ray_nor_torch() -> None:
    program = "import sys, infra.clusters, infra.clusters.lease; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_name_that_another_live_process_holds_is_refused(tmp_path: Path) -> None:
    _left_behind(tmp_path, ProcessRecord.of(os.getppid()))
    with pytest.raises(ClusterError, match=rf"'night' is held by process {os.getppid()} since"):
        lease_cluster("night", directory=tmp_path, num_cpus=1)
    assert (tmp_path / "night.json").exists()


@pytest.mark.parametrize(
    ("object_store_mb", "tmpdir", "message"),
    [(10, None, "needs at least 80; raise object_store_mb"), (80, "t" * 60, "set TMPDIR to a shorter one")],
)
def test_what_ray_would_choke_on_is_refused_and_nothing_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    object_store_mb: int,
    tmpdir: str | None,
    message: str,
) -> None:
    if tmpdir is not None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / tmpdir))
    with pytest.raises(ClusterError, match=message):
        lease_cluster("night", directory=tmp_path, num_cpus=1, object_store_mb=object_store_mb)
    assert not list(tmp_path.glob("*.json"))


def test_only_clusters_without_an_owner_are_orphans(tmp_path: Path) -> None:
    me = ProcessRecord.of(os.getpid())
    temp_dir = _left_behind(tmp_path, me)
    assert reap_orphans(tmp_path) == []
    assert temp_dir.exists()
    gone = ClusterRecord.load(tmp_path / "night.json").model_copy(
        update={"owner": ProcessRecord(pid=me.pid, started=me.started + 1)}
    )
    gone.save(tmp_path / "night.json")
    (tmp_path / "broken.json").write_text("{")  # does not keep it from the others
    assert reap_orphans(tmp_path) == ["night"]
    assert not temp_dir.exists()
    assert reap_orphans(tmp_path / "nowhere") == []


def test_releasing_a_cluster_that_is_not_held_ends_no_process() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    release_cluster("never leased")
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_a_runs_lease_is_ended_even_where_ray_does_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck() -> None:
        raise ClusterError("Ray did not let this process leave its cluster within 60 s")

    monkeypatch.setattr("infra.clusters.driver.disconnect", stuck)
    ended: list[float] = []
    lease: Any = SimpleNamespace(record=SimpleNamespace(name="night"), end=ended.append, forget=lambda: None)
    hold(lease)
    end_cluster("night")
    assert len(ended) == 1
