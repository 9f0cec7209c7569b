"""A store that somebody else writes to: what it says is refused in one sentence, and leads nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore, open_store
from infra.artifacts.manifest import FileEntry, digest_of
from infra.artifacts.ref import alias_key, blob_key, index_key, version_key
from infra.errors import InfraError, StoreError

BODY = b"owned"
NOW = datetime.now(UTC).isoformat()
OUTSIDE = (
    "../escaped",
    "../../escaped",
    "sub/../../escaped",
    "/tmp/escaped",
    "//host/escaped",
    "..",
    "./escaped",
    "..\\escaped",
    "C:\\escaped",
    "~/../escaped\n",
    "escaped\x00.txt",
    "escaped\u202e",
    "",
)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "in" / "store").as_uri(), cache_dir=tmp_path / "in" / "cache")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "in" / "store"


def write(root: Path, key: str, content: Any) -> None:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def manifest(paths: list[str], **changes: Any) -> dict[str, Any]:
    """A manifest that is right in everything but what a test makes wrong."""
    hashed = sha256(BODY).hexdigest()
    listing = json.dumps(sorted([path, hashed] for path in paths), separators=(",", ":"))
    return {
        "schema_version": "1.0",
        "kind": "policy",
        "name": "p",
        "version": 1,
        "digest": sha256(listing.encode()).hexdigest(),
        "files": [{"path": path, "size": len(BODY), "sha256": hashed, "blobs": []} for path in paths],
        "created": "2026-01-01T00:00:00Z",
        "writer": "w",
    } | changes


def plant(root: Path, content: dict[str, Any]) -> None:
    write(root, blob_key(sha256(BODY).hexdigest()), BODY)
    write(root, version_key("policy", "p", 1), content)


def everything(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


READERS: dict[str, Callable[[ArtifactStore, Path], object]] = {
    "fetch": lambda store, directory: store.fetch("policy/p", directory),
    "cached": lambda store, _: store.cached("policy/p@1"),
    "list": lambda store, _: store.list("policy"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_in_a_manifest_leads_out(
    store: ArtifactStore, root: Path, tmp_path: Path, path: str, reader: str
) -> None:
    plant(root, manifest(["good.txt", path]))
    before = everything(tmp_path)
    with pytest.raises(StoreError, match=r"the manifest policy/p@1 cannot be read: .*cannot be a file of an artifact"):
        READERS[reader](store, tmp_path / "in" / "out")
    assert everything(tmp_path) == before


def test_a_manifest_made_by_hand_is_read_where_it_does_no_harm(
    store: ArtifactStore, root: Path, tmp_path: Path
) -> None:
    plant(root, manifest(["good.txt", "sub/good.txt"]))
    assert (store.fetch("policy/p", tmp_path / "out") / "sub" / "good.txt").read_bytes() == BODY


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "../p"}, "cannot be the name of an artifact"),
        ({"kind": "../policy"}, "no kind of artifact"),
        ({"kind": "sft"}, "it is sft/p@1"),
        ({"key": "../../k"}, "cannot be the key"),
        ({"version": -1}, "version"),
        ({"version": 10**9}, "version"),
        ({"digest": "../x"}, "digest"),
        ({"parents": "policy/p@1"}, "parents"),
        ({"files": {"a": "b"}}, "files"),
        ({"created": "yesterday"}, "created"),
    ],
)
def test_no_other_field_of_a_manifest_is_believed(
    store: ArtifactStore, root: Path, change: dict[str, Any], complaint: str
) -> None:
    plant(root, manifest(["good.txt"]) | change)
    with pytest.raises(StoreError, match=complaint):
        store.resolve("policy/p@1")


def test_a_blobs_name_is_a_hash_and_nothing_else(store: ArtifactStore, root: Path, tmp_path: Path) -> None:
    good = manifest(["good.txt"])
    for name in ("../../../../etc/passwd", "0" * 63, "0" * 65, "0" * 63 + "/", "0" * 63 + "G"):
        for files in (
            [good["files"][0] | {"sha256": name}],
            [good["files"][0] | {"blobs": [{"size": len(BODY), "sha256": name}]}],
        ):
            plant(root, good | {"files": files})
            with pytest.raises(StoreError, match="cannot be read"):
                store.fetch("policy/p", tmp_path / "out")


def test_a_blob_that_is_a_link_to_something_else_is_refused(store: ArtifactStore, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"mine!")  # as long as the body: only its hash tells
    plant(root, manifest(["good.txt"]))
    blob = root / blob_key(sha256(BODY).hexdigest())
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(StoreError, match="is damaged"):
        store.fetch("policy/p", tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


POINTERS = ("../../../etc/passwd", "policy/../p@1", "policy/p@../1", "", "policy/p@champion", "sft/s@1", 7, None)


@pytest.mark.parametrize("uri", POINTERS)
def test_an_alias_leads_to_a_version_of_its_own_artifact_or_nowhere(
    store: ArtifactStore, root: Path, uri: object
) -> None:
    store.commit("sft", "s", {"f": b"1"})
    plant(root, manifest(["good.txt"]))
    move = {"uri": uri, "digest": "0" * 64, "why": "", "who": "", "when": "2026-01-01T00:00:00Z", "id": "i"}
    write(root, alias_key("policy", "p", "champion"), {"history": [move]})
    with pytest.raises(InfraError, match="alias"):
        store.resolve("policy/p@champion")


@pytest.mark.parametrize(
    "entry", [*({"uri": uri, "digest": ""} for uri in POINTERS), [], 7, None, {"uri": "policy/p@1"}]
)
def test_an_entry_of_the_index_leads_to_a_version_or_nowhere(store: ArtifactStore, root: Path, entry: object) -> None:
    store.commit("sft", "s", {"f": b"1"})
    plant(root, manifest(["good.txt"]))
    write(root, index_key("policy", "k"), entry)
    with pytest.raises(StoreError, match=r"keys/policy/k\.json"):
        store.find("policy", "k")


@pytest.mark.parametrize("uri", ["../../etc/passwd", "policy/../p@1", "policy/P@1", "s3://other/policy/p@1", ""])
def test_a_parent_that_is_no_reference_is_said_to_be_none(store: ArtifactStore, root: Path, uri: str) -> None:
    plant(root, manifest(["good.txt"], parents=[{"uri": uri, "digest": ""}]))
    with pytest.raises(StoreError, match="names no artifact"):
        store.lineage("policy/p@1")


def test_parents_that_go_in_a_circle_come_to_an_end(store: ArtifactStore, root: Path) -> None:
    own = manifest(["good.txt"])
    plant(root, own | {"parents": [{"uri": "policy/p@1", "digest": own["digest"]}]})
    tree = store.lineage("policy/p@1")
    depth = 0
    while tree.parents:
        tree, depth = tree.parents[0], depth + 1
    assert depth < 1000


def test_a_file_of_the_wrong_size_is_refused(store: ArtifactStore, root: Path, tmp_path: Path) -> None:
    good = manifest(["good.txt"])
    for size in (0, 1, 1 << 40):
        plant(root, good | {"files": [good["files"][0] | {"size": size}]})
        with pytest.raises(StoreError, match=f"has 5 B instead of {size}"):
            store.fetch("policy/p", tmp_path / "out")


def test_the_digest_of_the_hand_made_manifest_is_that_of_the_code() -> None:
    made = manifest(["b", "a"])
    assert digest_of([FileEntry.model_validate(entry) for entry in made["files"]]) == made["digest"]


NOTES: list[Any] = [
    7,
    [],
    {},
    {"created": "yesterday", "blobs": []},
    {"created": "2026-01-01T00:00:00", "blobs": []},
    {"created": NOW, "blobs": 7},
    {"created": NOW, "blobs": [["a"]]},
    {"created": NOW, "blobs": [7]},
    {"created": NOW, "blobs": [], "versions": [7]},
    {"created": NOW, "blobs": [], "keys": [7]},
    {"created": NOW, "blobs": [], "onward": ["ppo-state/s@x"]},
    {"created": NOW, "blobs": [], "onward": ["ppo-state/s"]},
]


@pytest.mark.parametrize("folder", ["leases", "trash/deleting"])
@pytest.mark.parametrize("note", NOTES, ids=range(len(NOTES)))  # each worker has a time of its own
def test_a_note_that_is_none_is_named_and_nothing_is_deleted(
    store: ArtifactStore, root: Path, note: Any, folder: str
) -> None:
    for number in (1, 2):
        store.commit("ppo-state", "s", {"f": f"{number}".encode()}, version=number)
    write(root, f"{folder}/0.json", note)
    before = everything(root / "versions") | everything(root / "blobs")
    with pytest.raises(StoreError, match=rf"{folder}/0\.json in the artifact store cannot be read"):
        store.prune("ppo-state", "s", keep=1)
    assert everything(root / "versions") | everything(root / "blobs") == before


def test_what_a_later_release_stored_under_a_kind_of_its_own_is_not_deleted_from_under_it(
    store: ArtifactStore, root: Path
) -> None:
    for number in (1, 2):
        store.commit("ppo-state", "s", {"f": f"{number}".encode()}, version=number)
    write(root, "versions/judge/j/00000001.json", manifest(["f"], kind="judge", name="j", schema_version="1.1"))
    before = everything(root)
    with pytest.raises(StoreError, match=r"versions of a kind that this release does not know \(judge\)"):
        store.prune("ppo-state", "s", keep=1)
    assert everything(root) == before


@pytest.mark.parametrize("blob", ["../../../versions/policy/p/00000001.json", "a", "A" * 64])
def test_a_deletion_that_was_left_unfinished_deletes_blobs_and_nothing_else(
    store: ArtifactStore, root: Path, blob: str
) -> None:
    plant(root, manifest(["good.txt"]))
    for number in (1, 2):
        store.commit("ppo-state", "s", {"f": f"{number}".encode()}, version=number)
    write(root, "trash/deleting/0.json", {"created": "2026-01-01T00:00:00+00:00", "blobs": [blob]})
    with pytest.raises(StoreError, match="is no SHA-256, so there is no blob of it"):
        store.prune("ppo-state", "s", keep=1)
    assert store.resolve("policy/p@1").uri == "policy/p@1"
