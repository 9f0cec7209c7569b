"""What the processes of a cluster have written, as it is read while they write on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher

from infra.clusters.output import MOST_BYTES, MOST_LINES, Written, output_of
from infra.clusters.record import ClusterRecord
from infra.process_record import ProcessRecord


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    own = ProcessRecord.of(os.getpid())
    return ClusterRecord(name="night", mark="m", owner=own, temp_dir=tmp_path / "t", log_dir=tmp_path / "kept")


@pytest.fixture
def logs(record: ClusterRecord) -> Path:
    """Where Ray's processes write."""
    logs = record.ray_dir / "session_latest" / "logs"
    logs.mkdir(parents=True)
    return logs


def test_each_line_is_read_once_and_when_it_is_whole(record: ClusterRecord, logs: Path) -> None:
    (logs / "worker-ab12-01000000-77.err").write_text(":job_id:01000000\n:actor_name:RunMaker\none\ntwo\nthr")
    (logs / "worker-ab12-01000000-77.out").write_text("printed\n")
    (logs / "raylet.err").write_text("of Ray itself\n")
    output = output_of(record)
    assert output.read() == [Written("77", True, ["one", "two"]), Written("77", False, ["printed"])]
    assert output.read() == []
    with (logs / "worker-ab12-01000000-77.err").open("a") as file:
        file.write("ee\n")
    assert output.read() == [Written("77", True, ["three"])]


def test_at_the_last_look_a_line_without_end_is_read_too(record: ClusterRecord, logs: Path) -> None:
    (logs / "worker-ab12-01000000-77.err").write_text("one\nFatal: no room")
    (logs / "worker-ab12-01000000-78.err").write_text("killed")
    output = output_of(record)
    assert output.read() == [Written("77", True, ["one"])]
    assert output.read(last=True) == [Written("77", True, ["Fatal: no room"]), Written("78", True, ["killed"])]
    assert output.read(last=True) == []


def test_of_too_much_the_last_lines_are_read_and_it_is_known_how_much_was_left_out(
    record: ClusterRecord, logs: Path
) -> None:
    lines = [f"line {number}" for number in range(MOST_BYTES // 4)]
    text = "".join(f"{line}\n" for line in lines)
    (logs / "worker-ab12-01000000-77.out").write_text(text)
    output = output_of(record)
    [written] = output.read()
    assert written.lines[-1] == lines[-1]
    assert written.lines[0] in lines, "whole"
    assert written.bytes_left_out == len(text) - sum(len(line) + 1 for line in written.lines)
    assert output.read() == []


def test_a_line_without_end_is_not_waited_for_in_vain(record: ClusterRecord, logs: Path) -> None:
    path = logs / "worker-ab12-01000000-77.out"
    path.write_text("." * (MOST_BYTES + 10))
    output = output_of(record)
    assert sum(len(each.lines[0]) for each in output.read()) == MOST_BYTES
    with path.open("a") as file:
        file.write("\nand on\n")
    assert output.read() == [Written("77", False, ["and on"])]


def test_what_was_written_last_is_read_after_the_logs_were_moved(record: ClusterRecord, logs: Path) -> None:
    path = logs / "worker-ab12-01000000-77.err"
    path.write_text("one\n")
    output = output_of(record)
    assert output.read() == [Written("77", True, ["one"])]
    with path.open("a") as file:
        file.write("two\n")
    record.log_dir.mkdir()
    logs.rename(record.log_dir / "ray")
    assert output.read() == [Written("77", True, ["two"])]


def test_of_a_users_own_cluster_what_its_log_monitors_publish_of_our_actors_is_taken_until_it_is_closed(
    record: ClusterRecord,
) -> None:
    output = output_of(record.model_copy(update={"kind": "existing"}))
    told = {"ip": "10.0.0.5", "pid": 77, "is_err": True, "lines": ["one", "two"]}
    for job in ("01000000", None):  # of no job: the processes of Ray itself
        global_worker_stdstream_dispatcher.emit({**told, "job": job})
    assert output.read() == [Written("77 on 10.0.0.5", True, ["one", "two"])]
    for lines in (["first"], ["many"] * MOST_LINES):
        global_worker_stdstream_dispatcher.emit({**told, "job": "01000000", "lines": lines})
    assert output.read() == [Written("77 on 10.0.0.5", True, ["many"] * MOST_LINES, len("first\n"))]
    output.close()
    global_worker_stdstream_dispatcher.emit({**told, "job": "01000000"})
    assert output.read() == []
