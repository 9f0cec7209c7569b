"""`ray start` on a busy machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from infra.clusters import ray_start


def test_a_node_is_waited_for_until_it_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([RuntimeError("GCS cannot find the node"), RuntimeError("GCS cannot find the node"), {"labels": {}}])

    def get_node(address: str, node: str) -> object:
        assert (address, node) == ("127.0.0.1:1", "node")
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray_start, "_get_node", get_node)
    monkeypatch.setattr(ray_start, "_has_raylet", lambda: True)
    assert ray_start._node_once_registered("127.0.0.1:1", "node") == {"labels": {}}


def test_a_raylet_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def get_node(_address: str, _node: str) -> object:
        raise RuntimeError("GCS cannot find the node")

    monkeypatch.setattr(ray_start, "_get_node", get_node)
    raylet = shutil.copy(shutil.which("sleep") or "sleep", tmp_path / "raylet")
    with subprocess.Popen([raylet, "60"]) as process:
        assert ray_start._has_raylet()
        process.kill()
        with pytest.raises(RuntimeError, match="cannot find the node"):
            ray_start._node_once_registered("127.0.0.1:1", "node")
