"""What is different between two versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore, commit, open_store
from infra.artifacts.diff import Change, FileChange, flatten


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


def test_everything_that_differs_is_named_and_the_rest_is_not(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "PIECE_BYTES", 4)
    data = [store.commit("dataset", "d", {"f": b"%d" % step}) for step in range(2)]
    store.commit(
        "policy",
        "p",
        {"same": b"same", "large": b"aaaabbbbcc", "old": b"old"},
        parents=[data[0], "model/base"],
        config={"ppo": {"lr": 0.1, "betas": [0.9, 0.95]}, "gone": None, "data": [{"path": "x"}]},
        metrics={"reward": 0.5, "kl": 0.1},
        source_digest="before",
    )
    store.commit(
        "policy",
        "p",
        {"same": b"same", "large": b"aaaaBBBBcc", "new": b"bbbb"},
        parents=[data[1], "model/base"],
        config={"ppo": {"lr": 0.2, "betas": [0.9, 0.95]}, "data": [{"path": "x"}, {"path": "y"}]},
        metrics={"reward": 0.75, "kl": 0.1},
        source_digest="after",
    )
    found = store.diff("policy/p@1", "policy/p@2")
    assert (found.before, found.after) == ("policy/p@1", "policy/p@2")
    assert found.config == (
        Change("data.1.path", "added", None, "y"),
        Change("gone", "removed", None, None),
        Change("ppo.lr", "changed", 0.1, 0.2),
    )
    assert found.metrics == (Change("reward", "changed", 0.5, 0.75),)
    assert found.parents == (Change("dataset/d", "changed", "1", "2"),)
    assert found.source == Change("", "changed", "before", "after")
    assert found.packages == ()
    assert found.files == (
        FileChange("large", "changed", 10, 10, 6),
        FileChange("new", "added", 0, 4, 4),  # a blob of the earlier `large`
        FileChange("old", "removed", 3, 0, 0),
        FileChange("same", "same", 4, 4, 4),
    )
    # distinct blobs of the later one: same, aaaa, BBBB, cc, bbbb; all but BBBB were there
    assert (found.before_bytes, found.after_bytes, found.shared_bytes) == (17, 18, 14)
    assert json.loads(json.dumps(found.as_dict()))["files"][0]["shared_bytes"] == 6


def test_a_version_does_not_differ_from_itself(store: ArtifactStore) -> None:
    store.commit("policy", "p", {"f": b"1"}, config={"a": {}}, metrics={"x": float("nan")})
    found = store.diff("policy/p", "policy/p@1")
    assert (found.config, found.metrics, found.parents, found.packages, found.source) == ((), (), (), (), None)
    assert [each.what for each in found.files] == ["same"]


def test_what_one_of_them_does_not_say_is_added_or_removed(store: ArtifactStore) -> None:
    store.commit("sft", "s", {"f": b"1"}, parents=["model/base"])
    store.commit("policy", "p", {"f": b"1"}, config={"a": 1}, source_digest="new")
    found = store.diff("sft/s", "policy/p")
    assert found.config == (Change("a", "added", None, 1),)
    assert found.parents == (Change("model/base", "removed", "", None),)
    assert found.source == Change("", "changed", "", "new")


def test_empty_containers_are_values() -> None:
    assert dict(flatten({"a": {"b": {}}, "c": [], "d": [[1], 2]})) == {"a.b": {}, "c": [], "d.0": [1], "d.1": 2}


def test_what_equal_files_share_is_all_of_them(store: ArtifactStore) -> None:
    one, two = (store.commit("dataset", name, {"x": b"same", "y": b"same"}) for name in ("one", "two"))
    found = store.diff(one, two)
    assert found.shared_bytes == found.after_bytes == 8
