"""`ray start` on a busy machine."""

from __future__ import annotations

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
    assert ray_start._node_once_registered("127.0.0.1:1", "node") == {"labels": {}}
