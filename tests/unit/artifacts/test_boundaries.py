"""What may not get into the store, and what may not get out of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactRef, ArtifactStore, S3Options, open_store
from infra.artifacts.manifest import FileEntry, Manifest, check_path, digest_of
from infra.artifacts.ref import parse_reference
from infra.errors import ReferenceNotFoundError, StoreError


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("path", ["../up", "/abs", "a/../b", "a//b", "./a", "a/", "", ".", "..", "a\\b", "a\nb"])
def test_a_path_that_could_lead_out_is_refused_before_anything_is_written(
    store: ArtifactStore, tmp_path: Path, path: str
) -> None:
    with pytest.raises(StoreError, match="cannot be a file of an artifact"):
        store.commit("policy", "p", {path: b"x"})
    assert not (tmp_path / "store" / "blobs").exists()


def test_ordinary_paths_are_accepted() -> None:
    for path in ("a", "a/b.json", ".hidden", "a b/c", "ünï", "..a"):
        assert check_path(path) == path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("polcy", "p", {"f": b""}), r"no kind of artifact 'polcy' \(did you mean policy\?\)"),
        (("policy", "Llama", {"f": b""}), "'Llama' cannot be the name of an artifact"),
        (("policy", "../x", {"f": b""}), "cannot be the name of an artifact"),
        (("policy", "p", {}), "without files"),
        (("policy", "p", {"f": Path("nowhere")}), "cannot store nowhere as 'f': there is no such file"),
        (("policy", "p", Path("nowhere")), "cannot store nowhere: expected a directory"),
        (("policy", "p", {"a": b"", "a/b": b""}), "both a file and a folder"),
    ],
)
def test_a_mistake_in_a_commit_is_one_sentence(
    store: ArtifactStore, tmp_path: Path, arguments: tuple[str, str, dict[str, bytes]], complaint: str
) -> None:
    with pytest.raises(StoreError, match=complaint):
        store.commit(*arguments)
    assert not (tmp_path / "store" / "blobs").exists()


def test_keys_aliases_and_parents_are_checked(store: ArtifactStore) -> None:
    with pytest.raises(StoreError, match=r"'\.\./k' cannot be the key"):
        store.commit("policy", "p", {"f": b""}, key="../k")
    with pytest.raises(StoreError, match="config or metrics are not plain JSON"):
        store.commit("policy", "p", {"f": b""}, config={"model": object()})
    ref = store.commit("policy", "p", {"f": b""})
    for alias in ("latest", "12", "Best", "a/b"):
        with pytest.raises(StoreError, match="cannot be"):
            store.set_alias(ref, alias, why="", who="")
    with pytest.raises(StoreError, match="must name a version, not an alias"):
        store.commit("policy", "p", {"f": b""}, parents=[ArtifactRef("policy/p@champion", "")])
    with pytest.raises(ReferenceNotFoundError, match="no sft/s"):
        store.commit("policy", "p", {"f": b""}, parents=["sft/s"])
    with pytest.raises(StoreError, match="keep at least 1"):
        store.prune("policy", "p", keep=0)


def _committed(store: ArtifactStore, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Commit a version; return where its manifest lies, and what stands in it."""
    store.commit("policy", "p", {"f": b"1"})
    path = tmp_path / "store" / "versions" / "policy" / "p" / "00000001.json"
    return path, json.loads(path.read_bytes())


@pytest.mark.parametrize("text", ["policy", "policy/", "policy/p@", "policy/P", "policy/p/q", "policy/p@a b", "/p", ""])
def test_what_is_not_a_reference_is_refused(text: str) -> None:
    with pytest.raises(ReferenceNotFoundError, match="names no artifact"):
        parse_reference(text)


def test_a_reference_with_another_digest_is_refused(store: ArtifactStore) -> None:
    ref = store.commit("policy", "p", {"f": b"1"})
    with pytest.raises(StoreError, match="holds other files than it is referred to with"):
        store.resolve(ArtifactRef(ref.uri, "f" * 64))
    with pytest.raises(ReferenceNotFoundError, match="came from outside"):
        store.resolve(ArtifactRef("model/x", ""))


def test_the_digest_is_that_of_the_sorted_paths_and_hashes() -> None:
    # sha256 of [["a","00..."],["b","11..."]], by `printf | sha256sum`
    entries = [FileEntry(path="b", size=1, sha256="1" * 64), FileEntry(path="a", size=2, sha256="0" * 64)]
    assert digest_of(entries) == "eebed40868b4687c4c7fb1763a2d0e2b2f12014c991765ce887dc8fb1f5c4b53"


def test_a_manifest_altered_by_hand_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    path, good = _committed(store, tmp_path)
    entry = good["files"][0]
    for change, complaint in (
        ({"files": [entry | {"path": "../../escaped"}]}, "cannot be a file of an artifact"),
        ({"files": [entry | {"sha256": "0" * 64}]}, "the digest is not that of the files"),
        ({"files": [entry, entry]}, "named twice"),
        ({"version": 2}, "says that it is policy/p@2"),
        ({"schema_version": "2.0"}, "it has schema 2.0, this release reads 1.0; upgrade rlhf-flows"),
        ({"schema_version": "one"}, "is no version of the schema"),
        ({"files": [entry | {"blobs": [{"size": 9, "sha256": "0" * 64}]}]}, "do not add up to its size"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(StoreError, match=f"manifest policy/p@1.*{re.escape(complaint)}"):
            store.resolve("policy/p@1")
    path.write_text('{"schema_ver')
    with pytest.raises(StoreError, match="the manifest policy/p@1 cannot be read: Invalid JSON"):
        store.resolve("policy/p@1")


def test_a_manifest_of_a_later_major_version_is_not_to_be_removed_whatever_else_is_new_in_it(
    store: ArtifactStore, tmp_path: Path
) -> None:
    path, good = _committed(store, tmp_path)
    for change in ({"digest": 7}, {"kind": "adapter"}, {"files": [good["files"][0] | {"path": "a\\b"}]}):
        path.write_text(json.dumps(good | {"schema_version": "2.0"} | change))
        with pytest.raises(StoreError, match=r"upgrade rlhf-flows to read it$"):
            store.resolve("policy/p@1")


def test_a_file_that_cannot_be_read_is_not_stored(store: ArtifactStore) -> None:
    unreadable = Path("/proc/self/mem")  # its beginning is mapped nowhere
    with pytest.raises(StoreError, match=f"^cannot store {unreadable}: Input/output error$"):
        store.commit("policy", "p", {"f": unreadable})


def test_a_manifest_of_a_later_minor_version_and_of_the_first_form_are_read(
    store: ArtifactStore, tmp_path: Path
) -> None:
    path, good = _committed(store, tmp_path)
    path.write_text(json.dumps(good | {"schema_version": "1.7", "surprise": 1}))
    assert store.resolve("policy/p@1").schema_version == "1.7"
    path.write_text(json.dumps(good | {"schema_version": 1}))
    assert store.resolve("policy/p@1").schema_version == "1.0"


def test_fetch_does_not_write_through_a_link_that_leads_out(store: ArtifactStore, tmp_path: Path) -> None:
    ref = store.commit("policy", "p", {"sub/f": b"1"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="would be written outside of"):
        store.fetch(ref, tmp_path / "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_fetch_refuses_a_directory_with_other_files_and_one_that_cannot_be_made(
    store: ArtifactStore, tmp_path: Path
) -> None:
    ref = store.commit("policy", "p", {"f": b"1"})
    directory = store.fetch(ref, tmp_path / "out")
    assert store.fetch(ref, directory) == directory  # its own files are no obstacle
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds files that are not of policy/p@1 \(notes.txt\)"):
        store.fetch(ref, directory)
    with pytest.raises(StoreError, match=r"cannot write policy/p@1 to .*notes\.txt"):
        store.fetch(ref, directory / "notes.txt")


def test_an_unknown_file_of_an_artifact_lists_those_it_has(store: ArtifactStore) -> None:
    manifest = store.resolve(store.commit("policy", "p", {"f": b"no json"}))
    with pytest.raises(StoreError, match=r"policy/p@1 has no file 'g'; its files are f"):
        store.read_bytes(manifest, "g")
    with pytest.raises(StoreError, match="'f' of policy/p@1 is not JSON"):
        store.read_json(manifest, "f")


def test_a_manifest_survives_storing_with_figures_that_json_lacks(store: ArtifactStore) -> None:
    manifest = store.resolve(store.commit("run", "r", {"f": b""}, metrics={"loss": float("nan"), "kl": [1.0]}))
    assert manifest.metrics == {"loss": "NaN", "kl": [1.0]}
    assert Manifest.from_json(manifest.to_json(), "again") == manifest


def test_credentials_do_not_show_in_options() -> None:
    assert "s3cret" not in repr(S3Options("http://host", access_key="s3cret-key", secret_key="s3cret"))
