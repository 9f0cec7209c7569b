"""Lineage in both directions, and as a tree."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef, ArtifactStore, lineage, open_store
from infra.artifacts.lineage import descend, draw, trace
from infra.artifacts.manifest import Manifest
from infra.artifacts.pieces import describe


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


def manifest(name: str, *parents: ArtifactRef) -> Manifest:
    return Manifest.draft((describe("f", name.encode()),), kind="policy", name=name, version=1, parents=parents)


def words(lines: list[str]) -> list[str]:
    """Return each line up to its reference."""
    return [found[0] for line in lines if (found := re.match(r"[│├└─ ]*\S+", line))]


def test_descendants_are_all_that_was_made_from_an_artifact(store: ArtifactStore) -> None:
    data = store.commit("dataset", "d", {"f": b"d"})
    sft = store.commit("sft", "s", {"f": b"s"}, parents=[data, "model/base"])
    for step in range(2):
        store.commit("policy", "p", {"f": b"%d" % step}, parents=[sft, data])
    store.commit("policy", "other", {"f": b"other"}, parents=["model/base"])
    tree = store.descendants("dataset/d")
    assert tree.ref == data
    assert [child.ref.uri for child in tree.children] == ["sft/s@1", "policy/p@1", "policy/p@2"]
    supervised, first, _ = tree.children
    assert supervised.children[0] is first
    assert store.descendants("policy/other").children == ()


def test_a_tree_is_drawn_with_each_artifacts_own_branches_once(store: ArtifactStore) -> None:
    data = store.commit("dataset", "d", {"f": b"d"})
    sft = store.commit("sft", "s", {"f": b"s"}, parents=[data, "model/ba\nse"])
    state = store.commit("ppo-state", "r", {"f": b"0"}, version=1)
    store.commit("ppo-state", "r", {"f": b"1"}, version=2)
    store.commit("policy", "p", {"f": b"p"}, parents=[sft, data, sft, state])
    store.prune("ppo-state", "r", keep=1)
    assert words(draw(store.lineage("policy/p"))) == [
        "policy/p@1",
        "├── sft/s@1",
        "│   ├── dataset/d@1",
        "│   └── model/ba\\nse",
        "├── dataset/d@1",
        "├── sft/s@1",
        "└── ppo-state/r@1",
    ]
    lines = draw(store.lineage("policy/p"))
    assert lines[3].endswith("model/ba\\nse  from outside")
    assert lines[5].endswith("(parents above)")
    assert lines[6].endswith("pruned since")
    assert words(draw(store.descendants("dataset/d"))) == [
        "dataset/d@1",
        "├── sft/s@1",
        "│   └── policy/p@1",
        "└── policy/p@1",
    ]


def test_many_ways_to_the_same_ancestor_are_followed_once() -> None:
    """Forty diamonds in a row: 2^40 ways."""
    known = {}
    last = manifest("start")
    known[last.ref] = last
    for step in range(40):
        sides = [manifest(f"{side}{step}", last.ref) for side in ("left", "right")]
        last = manifest(f"join{step}", *(each.ref for each in sides))
        known |= {each.ref: each for each in (*sides, last)}
    reads: list[ArtifactRef] = []

    def read(ref: ArtifactRef) -> Manifest:
        reads.append(ref)
        return known[ref]

    root = trace(last, read)
    assert len(reads) == len(set(reads)) == 120
    assert len(draw(root)) == 1 + 40 * 4  # each join has two sides, each of which names the start
    assert len(draw(descend(next(iter(known.values())), known.values()))) == 1 + 40 * 4


def test_a_chain_longer_than_is_followed_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MAX_DEPTH", 2)
    chain = [manifest("v0")]
    for step in range(1, 5):
        chain.append(manifest(f"v{step}", chain[-1].ref))
    known = {each.ref: each for each in chain}
    lines = draw(trace(chain[-1], known.get))
    assert words(lines) == ["policy/v4@1", "└── policy/v3@1", "    └── policy/v2@1"]
    assert [line.endswith("(goes on)") for line in lines] == [False, False, True]


def test_a_circle_which_only_a_hand_can_make_is_cut() -> None:
    one = manifest("one")
    two = manifest("two", one.ref)
    again = one.model_copy(update={"parents": (two.ref,), "created": datetime.now(UTC)})
    known = {again.ref: again, two.ref: two}
    assert words(draw(trace(again, known.get))) == ["policy/one@1", "└── policy/two@1"]
    assert words(draw(descend(again, known.values()))) == ["policy/one@1", "└── policy/two@1"]


def test_a_parent_whose_number_another_has_by_now_counts_as_gone(store: ArtifactStore) -> None:
    store.commit("dataset", "d", {"f": b"another"})
    store.commit("sft", "s", {"f": b"s"}, parents=[ArtifactRef("dataset/d@1", "f" * 64)])
    [parent] = store.lineage("sft/s").parents
    assert parent.manifest is None
    assert store.descendants("dataset/d").children == ()
