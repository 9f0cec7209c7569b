"""Lineage in both directions, and as a tree."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef, ArtifactStore, open_store
from infra.artifacts.commit import describe
from infra.artifacts.lineage import descend, draw, trace, walk
from infra.artifacts.manifest import Manifest


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


def manifest(name: str, *parents: ArtifactRef, kind: str = "policy", version: int = 1) -> Manifest:
    body = describe("f", f"{kind} {name} {version}".encode())
    return Manifest.draft((body,), kind=kind, name=name, version=version, parents=parents)


def nights(count: int) -> list[Manifest]:
    """Return a policy that is trained every night from the one before, with each night's data and evaluation."""
    made = [manifest("nightly", ArtifactRef("model/base", ""), version=1)]
    for night in range(2, count + 1):
        data = manifest("night", kind="dataset", version=night)
        policy = manifest("nightly", made[-1 if night == 2 else -2].ref, data.ref, version=night)
        made += [data, policy, manifest("nightly", policy.ref, kind="evaluation", version=night)]
    return made


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
    sft = store.commit("sft", "s", {"f": b"s"}, parents=[data, "model/base"])
    state = store.commit("ppo-state", "r", {"f": b"0"}, version=1)
    store.commit("ppo-state", "r", {"f": b"1"}, version=2)
    store.commit("policy", "p", {"f": b"p"}, parents=[sft, data, sft, state])
    store.prune("ppo-state", "r", keep=1)
    assert words(draw(store.lineage("policy/p"))) == [
        "policy/p@1",
        "├── sft/s@1",
        "│   ├── dataset/d@1",
        "│   └── model/base",
        "├── dataset/d@1",
        "├── sft/s@1",
        "└── ppo-state/r@1",
    ]
    lines = draw(store.lineage("policy/p"))
    assert lines[3].endswith("model/base  from outside")
    assert lines[5].endswith("sft/s@1  (above)")
    assert lines[6].endswith("pruned since")
    assert words(draw(store.descendants("dataset/d"))) == [
        "dataset/d@1",
        "├── sft/s@1",
        "│   └── policy/p@1",
        "└── policy/p@1",
    ]


def test_in_a_narrow_place_digest_and_date_make_way_and_names_stay_whole() -> None:
    made = manifest("p", manifest("s", kind="sft").ref)
    assert draw(trace(made, lambda _: None), width=11) == ["policy/p@1", "└── sft/s@1  pruned since"]
    wide = f"policy/p@1  {made.created:%Y-%m-%d %H:%M} UTC  {made.digest[:12]}"
    assert [draw(trace(made, lambda _: None), width=width)[0] for width in (len(wide), len(wide) - 1)] == [
        wide,
        wide[:-14],
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
    assert len(walk(root)) == len(walk(descend(next(iter(known.values())), known.values()))) == 121
    assert len(draw(root)) == 1 + 16 // 2 * 4 + 1  # each join has two sides, each of which names the start
    assert draw(root)[-1] == f"… and {121 - 8 * 3 - 1} more: rlhf artifacts lineage policy/join39@1 --json names all"


def test_a_row_of_five_hundred_training_states_is_followed_to_its_beginning_and_drawn_with_its_ends() -> None:
    sft = manifest("s", kind="sft")
    states = [manifest("r", sft.ref, kind="ppo-state", version=1)]
    for episode in range(2, 501):
        states.append(manifest("r", sft.ref, states[-1].ref, kind="ppo-state", version=episode))
    policy = manifest("p", sft.ref, states[-1].ref)
    known = {each.ref: each for each in (sft, *states, policy)}
    up, down = trace(policy, known.get), descend(sft, known.values())
    assert len(walk(up)) == len(walk(down)) == 502
    assert len(repr(up)) < 10_000
    tip = [" " * 4 * depth + "└── " for depth in range(6)]
    assert [line.partition("  20")[0] for line in draw(up) if "sft" not in line] == [
        "policy/p@1",
        *(f"{tip[depth]}ppo-state/r@{500 - depth}" for depth in range(3)),
        f"{tip[3]}… ppo-state/r@497 to @2, 496 versions",
        f"{tip[4]}ppo-state/r@1",
    ]
    assert [line.partition("  20")[0] for line in draw(down)] == [
        "sft/s@1",
        "├── ppo-state/r@1",
        *(f"│   {tip[depth]}ppo-state/r@{2 + depth}" for depth in range(2)),
        f"│   {tip[2]}… ppo-state/r@4 to @499, 496 versions",
        f"│   {tip[3]}ppo-state/r@500",
        f"│   {tip[4]}policy/p@1",
        "├── ppo-state/r@2 to @500, 499 versions  (above)",
        "└── policy/p@1  (above)",
    ]


def test_what_is_not_drawn_is_counted_and_it_is_said_where_all_of_it_is() -> None:
    made = nights(10)
    known = {each.ref: each for each in made}
    policy = next(each for each in reversed(made) if each.kind == "policy")
    up = draw(trace(policy, known.get))
    assert "│   │   ├── … policy/nightly@7 to @2, 6 versions" in up
    assert up[-1] == "… and 6 more: rlhf artifacts lineage policy/nightly@10 --json names all"  # data of six nights
    assert len([line for line in up if "dataset/night@" in line]) == 3
    down = draw(descend(made[0], made))
    assert down[-1] == "… and 6 more: rlhf artifacts lineage policy/nightly@1 --down --json names all"  # evaluations
    assert draw(trace(made[2], known.get))[-1].startswith("└── dataset/night@2")  # all of it is there


def test_many_versions_side_by_side_that_lead_nowhere_are_one_line() -> None:
    sft = manifest("s", kind="sft")
    states = [manifest("r", sft.ref, kind="ppo-state", version=episode) for episode in range(1, 6)]
    assert draw(descend(sft, [sft, *states]))[1:] == ["└── ppo-state/r@1 to @5, 5 versions"]
    assert len(draw(descend(sft, [sft, *states[1:]]))) == 5


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
