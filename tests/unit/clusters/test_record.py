import os
from pathlib import Path

import pytest

from infra.clusters import ClusterRecord
from infra.clusters.record import record_path
from infra.errors import ClusterError
from infra.process_record import ProcessRecord


def _record(directory: Path) -> ClusterRecord:
    return ClusterRecord(
        name="night",
        mark="m",
        owner=ProcessRecord.of(os.getpid()),
        head=(ProcessRecord(pid=7, started=1.5), ProcessRecord(pid=8, started=2.0)),
        address="127.0.0.1:1",
        temp_dir=directory / "rf-1",
        log_dir=directory / "logs",
    )


def test_a_record_is_read_as_it_was_written_and_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "night.json"
    record = _record(tmp_path)
    record.save(path)
    assert ClusterRecord.load(path) == record
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]  # no draft is left
    assert (record.head_pid, record.watchdog_pid) == (7, 0)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"name": 1}'])
def test_what_is_no_record_is_refused_by_its_file_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "night.json"
    path.write_text(content)
    with pytest.raises(ClusterError, match=r"night\.json is not the record"):
        ClusterRecord.load(path)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 101])
def test_a_name_that_could_not_be_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ClusterError, match="no name for a cluster"):
        record_path(tmp_path, name)


def test_a_cluster_runs_only_while_both_of_rays_processes_do(tmp_path: Path) -> None:
    me = ProcessRecord.of(os.getpid())
    gone = ProcessRecord(pid=me.pid, started=me.started + 1)
    record = _record(tmp_path)
    assert record.model_copy(update={"head": (me, me)}).is_running
    assert not record.model_copy(update={"head": (me, gone)}).is_running
    assert not record.model_copy(update={"head": ()}).is_running
