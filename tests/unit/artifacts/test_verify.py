"""Verification finds each kind of damage, names it, and finds nothing where nothing is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef, ArtifactStore, commit, open_store, verify
from infra.artifacts.ref import blob_key
from infra.errors import StoreError
from tests.unit.artifacts.store_contract import sha256

Damage = Callable[[Path], object]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """A store with a chain, an alias, a key, a file of several blobs, and a parent that was pruned."""
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    data = store.commit("dataset", "d", {"rows": b"rows"}, key="k")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commit, "PIECE_BYTES", 4)
        store.commit("sft", "s", {"w": b"abcdefghij", "rows": b"rows"}, parents=[data, "model/base"])
    state = store.commit("ppo-state", "r", {"f": b"1"}, version=1)
    store.commit("ppo-state", "r", {"f": b"2"}, version=2)
    store.commit("policy", "p", {"w": b"weights"}, parents=["sft/s", state])
    assert store.prune("ppo-state", "r", keep=1) == [1]
    store.set_alias("policy/p@1", "champion", why="first", who="test")
    return store


def blob(root: Path, body: bytes) -> Path:
    return root / blob_key(sha256(body))


def test_a_store_in_order_has_no_problem_and_is_counted(store: ArtifactStore) -> None:
    for quick in (False, True):
        found = store.verify(quick=quick)
        assert found.problems == ()
        # rows, abcd, efgh, ij, 2, weights; one parent was pruned, one came from outside
        assert (found.versions, found.blobs, found.bytes, found.removed_parents) == (4, 6, 22, 1)
    one = store.verify("policy/p")
    assert (one.versions, one.blobs, one.bytes, one.removed_parents, one.problems) == (1, 1, 7, 1, ())


def plant(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)


def edit(path: Path, **change: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))


def edit_text(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda root: blob(root, b"weights").unlink(), "is missing: 'w' of policy/p@1 cannot be fetched"),
        (lambda root: blob(root, b"rows").unlink(), "is missing: 'rows' of dataset/d@1 and 1 more cannot be fetched"),
        (lambda root: blob(root, b"weights").write_bytes(b"weight"), "has 6 B instead of 7: 'w' of policy/p@1"),
        (lambda root: blob(root, b"weights").write_bytes(b"wEights"), "is damaged, its content hashes to"),
        (lambda root: blob(root, b"efgh").write_bytes(b"EFGH"), "is damaged, its content hashes to .*'w' of sft/s@1"),
        (
            lambda root: (root / "versions/policy/p/00000001.json").write_text('{"schema_ver'),
            "the manifest policy/p@1 cannot be read: Invalid JSON",
        ),
        (
            lambda root: edit(root / "versions/policy/p/00000001.json", schema_version="2.0"),
            "the manifest policy/p@1 cannot be read: .*upgrade rlhf-flows",
        ),
        (lambda root: (root / "versions/policy/p/notes.txt").touch(), "policy/p/notes.txt is no manifest"),
        (lambda root: (root / "versions/adapter").mkdir(), "versions/adapter/ holds artifacts of a kind"),
        (lambda root: (root / "versions/policy/P").mkdir(), "versions/policy/P: 'P' cannot be the name"),
        (
            lambda root: (root / "versions/policy/p/00000001.json").unlink(),
            "the alias 'champion' of policy/p points at policy/p@1, which is not in the store",
        ),
        (
            lambda root: (root / "aliases/policy/p/champion.json").write_text("[]"),
            r"the alias aliases/policy/p/champion.json cannot be read",
        ),
        (
            lambda root: (root / "aliases/policy/p/Champion.json").write_text("{}"),
            "aliases/policy/p/Champion.json in the artifact store is no alias: remove it",
        ),
        (
            lambda root: edit_text(root / "aliases/policy/p/champion.json", "policy/p@1", "sft/s@1"),
            "the alias 'champion' of policy/p points at sft/s@1, which is another artifact",
        ),
        (lambda root: (root / "keys/dataset/k.json").write_text("[]"), "keys/dataset/k.json .* cannot be read"),
        (lambda root: edit(root / "keys/dataset/k.json", uri="../d"), "keys/dataset/k.json .* cannot be read"),
        (lambda root: edit(root / "keys/dataset/k.json", digest=7), "keys/dataset/k.json .* cannot be read"),
        (lambda root: edit(root / "keys/dataset/k.json", digest=""), "keys/dataset/k.json .* cannot be read"),
        (
            lambda root: (root / "keys/policy/k.json").write_bytes((root / "keys/dataset/k.json").read_bytes()),
            "keys/policy/k.json .* cannot be read",
        ),
        (
            lambda root: edit(root / "keys/dataset/k.json", digest="f" * 64),
            "keys/dataset/k.json points at dataset/d@1 with digest ffffffffffff, which has",
        ),
        (
            lambda root: plant(root / "hints/policy/p.json", "[]"),
            "hints/policy/p.json .* cannot be read; remove it, it",
        ),
        (
            lambda root: plant(root / "hints/policy/p.json", '{"version": 2}'),
            "hints/policy/p.json says 2, but there is no such version nor a later one; remove it",
        ),
        (lambda root: (root / "leases/x.json").write_text("[]"), "leases/x.json in the artifact store cannot be read"),
        (lambda root: (root / "trash/x.json").write_text("[]"), "trash/x.json in the artifact store cannot be read"),
    ],
)
def test_each_damage_is_one_line_that_names_it(
    store: ArtifactStore, tmp_path: Path, damage: Damage, complaint: str
) -> None:
    damage(tmp_path / "store")
    problems = store.verify().problems
    assert len([problem for problem in problems if re.search(complaint, problem)]) == 1
    assert not any("\n" in problem for problem in problems)
    assert len(problems) == 1


def put_in_place(path: Path) -> None:
    """Put a directory where a file should be."""
    path.unlink()
    path.mkdir()


def test_what_cannot_be_read_is_told_and_ends_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    store.commit("evaluation", "e", {"empty": b""})
    root = tmp_path / "store"
    blob(root, b"").unlink()
    blob(root, b"").symlink_to("/proc/self/mem")  # has no size, and is a disk error to whoever reads it
    blob(root, b"rows").write_bytes(b"rOws")
    named = ["versions/ppo-state/r/00000002.json", "aliases/policy/p/champion.json", "keys/dataset/k.json"]
    for key in named:
        put_in_place(root / key)
    for folder in ("leases", "trash"):
        (root / folder / "x.json").mkdir(parents=True)
    problems = store.verify().problems
    for key in (*named, "leases/x.json", "trash/x.json"):
        [problem] = [problem for problem in problems if f"cannot read {key} in the artifact store" in problem]
        assert f"the directory {root}: Is a directory" in problem
    for complaint in (
        r"cannot be read \(Input/output error\): 'empty' of evaluation/e@1 cannot be fetched",
        "is damaged, its content hashes to .*: 'rows' of dataset/d@1",
    ):
        assert len([problem for problem in problems if re.search(complaint, problem)]) == 1
    assert len(problems) == 7


def test_a_store_that_goes_away_meanwhile_is_an_error_and_not_a_store_in_order(
    store: ArtifactStore, tmp_path: Path
) -> None:
    def unmount(*_: int) -> None:
        if (tmp_path / "store").exists():
            (tmp_path / "store").rename(tmp_path / "elsewhere")

    with pytest.raises(StoreError, match=r"the artifact store file://.* has gone away while it was looked through"):
        store.verify(progress=unmount)


def test_entries_of_the_index_that_lead_to_nothing_are_counted_and_no_problem(
    store: ArtifactStore, tmp_path: Path
) -> None:
    """What a removed version has left, and a writer who was killed before its manifest."""
    assert store.verify().stale_keys == 0
    [content] = (tmp_path / "store" / "keys" / "policy").glob("content-*.json")
    edit(content, digest="f" * 64)  # another took the number that it was to have
    edit(tmp_path / "store" / "keys" / "dataset" / "k.json", uri="dataset/d@7")
    found = store.verify()
    assert (found.stale_keys, found.problems) == (2, ())


def test_all_problems_are_told_at_once(store: ArtifactStore, tmp_path: Path) -> None:
    root = tmp_path / "store"
    blob(root, b"weights").unlink()
    blob(root, b"ij").write_bytes(b"JI")
    edit(root / "keys/dataset/k.json", digest="f" * 64)
    assert len(store.verify().problems) == 3
    assert len(store.verify("policy/p@champion").problems) == 1
    assert store.verify("dataset/d").problems == ()


def test_quick_looks_at_sizes_and_reads_no_blob(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob(tmp_path / "store", b"weights").write_bytes(b"wEights")
    blob(tmp_path / "store", b"2").write_bytes(b"22")
    monkeypatch.setattr(store._backend, "download", None)
    [problem] = store.verify(quick=True).problems
    assert "has 2 B instead of 1: 'f' of ppo-state/r@2" in problem


def test_a_parent_that_is_another_by_now_is_told(store: ArtifactStore) -> None:
    store.commit("policy", "p", {"w": b"2"}, parents=[ArtifactRef("dataset/d@1", "f" * 64)])
    for reference in (None, "policy/p"):
        [problem] = store.verify(reference).problems
        assert problem.startswith("policy/p@2 came from dataset/d@1 with digest ffffffffffff, but that version has")


def test_adapters_whose_base_is_gone_are_told(store: ArtifactStore) -> None:
    store.commit("policy", "p", {"base.json": b"{}"}, parents=[ArtifactRef("sft/gone@1", "f" * 64)])
    for reference in (None, "policy/p"):
        [problem] = store.verify(reference).problems
        assert problem == "policy/p@2 is adapters over what sft/gone@1 held, which is gone"


def test_a_parent_that_is_no_reference_or_cannot_be_read_is_told(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "store" / "versions" / "policy" / "p" / "00000001.json"
    removed = {reference: store.verify(reference).removed_parents for reference in (None, "policy/p@1")}
    edit_text(path, "sft/s@1", "../s@1")
    [problem] = store.verify("policy/p@1").problems
    assert problem.startswith("'../s@1' names no artifact")
    edit_text(path, "../s@1", "sft/s@1")
    (tmp_path / "store" / "versions" / "sft" / "s" / "00000001.json").write_text("{")
    for reference, count in removed.items():
        found = store.verify(reference)
        [problem] = found.problems
        assert problem.startswith("the manifest sft/s@1 cannot be read")
        assert found.removed_parents == count, "it is there"


def test_blobs_that_do_not_make_up_the_file_are_told(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "store" / "versions" / "sft" / "s" / "00000001.json"
    manifest = json.loads(path.read_bytes())
    entry = next(entry for entry in manifest["files"] if entry["path"] == "w")
    entry["blobs"].reverse()
    path.write_text(json.dumps(manifest))
    [problem] = store.verify().problems
    assert problem.startswith("the blobs of 'w' do not make up what hashes to")


def test_what_is_pruned_while_it_is_verified_is_no_problem(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit("ppo-state", "r", {"f": b"3"}, version=3)
    check = verify.check_blobs

    def prune_first(*arguments: object, **more: object) -> list[str]:
        store.prune("ppo-state", "r", keep=1)
        return check(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "check_blobs", prune_first)
    assert store.verify().problems == ()


@pytest.mark.parametrize("moment", ["listed", "read"])
def test_what_is_stored_while_it_is_verified_is_no_problem(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    name = {"listed": "_strangers", "read": "_check_aliases"}[moment]
    check = getattr(verify, name)

    def store_first(*arguments: object) -> object:
        new = store.commit("policy", "p", {"w": b"new"})
        store.set_alias(new, "champion", why="better", who="test")
        return check(*arguments)

    monkeypatch.setattr(verify, name, store_first)
    assert store.verify().problems == ()


def test_a_blob_that_goes_between_the_look_and_the_reading_is_missing(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = blob(tmp_path / "store", b"weights")
    download = store._backend.download

    def lose(key: str, size: int) -> Iterator[bytes]:
        if key == blob_key(sha256(b"weights")):
            body.unlink()
        return download(key, size)

    monkeypatch.setattr(store._backend, "download", lose)
    [problem] = store.verify().problems
    assert "is missing: 'w' of policy/p@1 cannot be fetched" in problem


def test_damage_is_mended_as_its_sentence_says(store: ArtifactStore, tmp_path: Path) -> None:
    body = blob(tmp_path / "store", b"rows")
    body.write_bytes(b"rOws")
    [problem] = store.verify("dataset/d").problems
    assert problem.endswith("restore it, or remove the blob, if it is there, and commit the same again")
    body.unlink()
    assert store.commit("dataset", "d", {"rows": b"rows"}).uri == "dataset/d@1"
    assert store.verify().problems == ()


def test_progress_adds_up_to_the_bytes_that_are_read(store: ArtifactStore) -> None:
    told: list[tuple[int, int]] = []
    store.verify(progress=lambda read, total: told.append((read, total)))
    assert {total for _, total in told} == {22}
    assert sum(read for read, _ in told) == 22
