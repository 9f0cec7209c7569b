"""The local cache under several processes of which some are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.artifacts import cache_crowd


@pytest.mark.parametrize("processes", [50, pytest.param(2000, marks=pytest.mark.s3)])
@pytest.mark.integration
def test_processes_that_fetch_evict_and_are_killed_at_once_leave_a_cache_that_is_whole(
    tmp_path: Path, processes: int
) -> None:
    """And whoever comes after a killed one downloads what that one had not."""
    command = [sys.executable, cache_crowd.__file__, str(tmp_path), str(processes)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    crowd = told["crowd"]
    assert crowd["failed"] == 0, finished.stderr
    assert crowd["killed"] >= processes / 10
    assert crowd["finished"] >= processes / 10
    assert 0 < crowd["bytes"] <= cache_crowd.LIMIT_BYTES
    assert crowd["leftovers"] == []
    assert crowd["rest"] == ["lock"]
    assert told["asked"] == 3  # of five blobs; a killed process counts for itself
