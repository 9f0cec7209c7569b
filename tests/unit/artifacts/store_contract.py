"""What every store does, wherever it keeps its objects; each backend's tests inherit these."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pytest

from infra.artifacts import ArtifactRef, ArtifactStore
from infra.artifacts.backend import Backend
from infra.artifacts.ref import blob_key
from infra.errors import ReferenceNotFoundError, StoreError, VersionExistsError

T = TypeVar("T")
WRITERS = 16


def at_once(function: Callable[[int], T], count: int = WRITERS) -> list[T | Exception]:
    """Return what each of so many threads got from the function, started at the same moment."""
    barrier = threading.Barrier(count)

    def run(number: int) -> T | Exception:
        barrier.wait(timeout=60)
        try:
            return function(number)
        except StoreError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class StoreContract:
    """Inherited by the tests of each backend, which give the fixtures `store` and `backend` (of the same place)."""

    opens_store: str
    """Python code that opens the same store as `store` in another process; `url` is the store's address."""

    def test_what_was_committed_comes_back(self, store: ArtifactStore, tmp_path: Path) -> None:
        large = os.urandom(9 << 20)  # more than one piece
        (tmp_path / "weights").write_bytes(large)
        ref = store.commit(
            "policy",
            "llama7b",
            {"model.safetensors": tmp_path / "weights", "tokenizer/vocab.json": b'{"a": 1}', "empty": b""},
            key="abc",
            parents=[ArtifactRef("model/smollm2-135m-instruct", "0" * 64)],
            config={"lr": 1e-5, "path": Path("x"), "betas": (0.9, 0.95)},
            metrics={"reward": 0.5},
            source_digest="feed",
            flow_run="run-1",
        )

        directory = store.fetch(ref, tmp_path / "out")
        assert (directory / "model.safetensors").read_bytes() == large
        assert (directory / "tokenizer" / "vocab.json").read_bytes() == b'{"a": 1}'
        assert (directory / "empty").read_bytes() == b""
        manifest = store.resolve("policy/llama7b")
        assert (manifest.uri, manifest.ref, ref.uri) == ("policy/llama7b@1", ref, "policy/llama7b@1")
        assert manifest.config == {"lr": 1e-5, "path": "x", "betas": [0.9, 0.95]}
        assert (manifest.metrics, manifest.source_digest, manifest.flow_run) == ({"reward": 0.5}, "feed", "run-1")
        assert manifest.parents == (ArtifactRef("model/smollm2-135m-instruct", "0" * 64),)
        assert manifest.packages["torch"] == version("torch")
        assert store.find("policy", "abc") == manifest
        assert store.find("policy", "abd") is None
        assert store.read_json(manifest, "tokenizer/vocab.json") == {"a": 1}

    def test_a_directory_is_stored_with_all_that_is_in_it(self, store: ArtifactStore, tmp_path: Path) -> None:
        source = tmp_path / "model"
        (source / "deep" / "er").mkdir(parents=True)
        (source / "config.json").write_bytes(b"{}")
        (source / "deep" / "er" / "x").write_bytes(b"x")
        ref = store.commit("sft", "quickstart", source)
        assert [entry.path for entry in store.resolve(ref).files] == ["config.json", "deep/er/x"]

    def test_a_reference_means_the_latest_a_version_or_an_alias(self, store: ArtifactStore) -> None:
        first, second, third = (store.commit("policy", "p", {"f": bytes([n])}) for n in range(3))
        store.set_alias("policy/p@2", "champion", why="better", who="test")
        assert store.resolve("policy/p").ref == store.resolve("policy/p@latest").ref == third
        assert store.resolve("policy/p@1").ref == first
        assert store.resolve("policy/p@champion").ref == second
        assert store.latest("policy", "p") == store.resolve(third)
        assert store.latest("policy", "q") is None

    def test_list_is_in_order_of_kind_name_and_version(self, store: ArtifactStore) -> None:
        for number, (kind, name) in enumerate((("policy", "b"), ("policy", "a"), ("dataset", "z"), ("policy", "a"))):
            store.commit(kind, name, {"f": bytes([number])})
        everything = [manifest.uri for manifest in store.list()]
        assert everything == ["dataset/z@1", "policy/a@1", "policy/a@2", "policy/b@1"]
        assert [manifest.uri for manifest in store.list("policy", "a")] == ["policy/a@1", "policy/a@2"]

    def test_one_of_many_writers_of_a_version_wins(self, store: ArtifactStore) -> None:
        results = at_once(lambda n: store.commit("ppo-state", "run", {"f": bytes([n])}, version=7))
        won = [result for result in results if isinstance(result, ArtifactRef)]
        lost = [result for result in results if isinstance(result, VersionExistsError)]
        assert (len(won), len(lost)) == (1, WRITERS - 1)
        assert store.resolve("ppo-state/run@7").ref == won[0]

    def test_many_writers_of_a_name_get_a_version_each(self, store: ArtifactStore) -> None:
        results = at_once(lambda n: store.commit("policy", "p", {"f": bytes([n])}))
        uris = {result.uri for result in results if isinstance(result, ArtifactRef)}
        assert uris == {f"policy/p@{version}" for version in range(1, WRITERS + 1)}
        for result in results:
            assert isinstance(result, ArtifactRef)
            assert store.resolve(result.uri).ref == result

    @pytest.mark.integration
    def test_writers_in_several_processes_get_a_version_each(self, store: ArtifactStore) -> None:
        code = self.in_another_process(
            store,
            """
            for number in range(4):
                print(store.commit("policy", "p", {"f": os.urandom(8)}).uri, flush=True)
            """,
        )
        processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
        uris = [line for process in processes for line in process.communicate(timeout=120)[0].decode().split()]
        assert sorted(uris) == sorted(f"policy/p@{version}" for version in range(1, 13))

    def test_the_same_content_under_the_same_number_is_no_conflict(self, store: ArtifactStore) -> None:
        first = store.commit("ppo-state", "run", {"f": b"same"}, version=0, key="k0")
        assert store.commit("ppo-state", "run", {"f": b"same"}, version=0, key="k0") == first
        with pytest.raises(VersionExistsError, match="ppo-state/run@0 is already in the store with other content"):
            store.commit("ppo-state", "run", {"f": b"other"}, version=0)

    def test_the_same_content_made_otherwise_is_a_new_version_that_shares_its_blobs(
        self, store: ArtifactStore, backend: Backend
    ) -> None:
        refs = [store.commit("policy", "p", {"f": b"same"}, config={"lr": rate}) for rate in (1, 2)]
        assert [ref.uri for ref in refs] == ["policy/p@1", "policy/p@2"]
        assert refs[0].digest == refs[1].digest
        assert len(backend.children(f"blobs/sha256/{sha256(b'same')[:2]}/")) == 1

    def test_the_same_content_configuration_and_parents_are_the_same_version(self, store: ArtifactStore) -> None:
        parents = [store.commit("dataset", "d", {"f": bytes([n])}) for n in range(2)]

        def again(files: bytes = b"same", **fields: Any) -> str:
            return store.commit("policy", "p", {"f": files}, **{"parents": parents, "config": {"a": 1}} | fields).uri

        assert again() == again(parents=parents[::-1]) == "policy/p@1"
        assert again(config={}) == "policy/p@2"
        assert again(parents=parents[:1]) == "policy/p@3"
        assert again(b"other") == "policy/p@4"
        assert again(metrics={"seconds": 2.0}, key="k") == "policy/p@1"
        found = store.find("policy", "k")
        assert found is not None
        assert found.uri == "policy/p@1"
        assert store.commit("policy", "q", {"f": b"same"}, parents=parents, config={"a": 1}).uri == "policy/q@1"

    def test_many_writers_of_the_same_at_once_make_one_version(self, store: ArtifactStore) -> None:
        refs = at_once(lambda n: store.commit("policy", "p", {"f": b"same"}, metrics={"writer": n}))
        assert {str(ref) for ref in refs} == {"policy/p@1"}
        assert [manifest.uri for manifest in store.list()] == ["policy/p@1"]

    def test_a_repeated_commit_sends_blobs_that_were_lost(self, store: ArtifactStore, backend: Backend) -> None:
        ref = store.commit("policy", "p", {"f": b"abc"})
        backend.delete(blob_key(sha256(b"abc")))
        assert store.commit("policy", "p", {"f": b"abc"}) == ref
        assert store.read_bytes(store.resolve(ref), "f") == b"abc"

    def test_a_blob_that_is_there_is_not_sent_again(self, store: ArtifactStore, backend: Backend) -> None:
        store.commit("policy", "p", {"f": b"abc"})
        backend.delete(blob_key(sha256(b"abc")))
        backend.upload(blob_key(sha256(b"abc")), b"xyz")  # same size: taken for the real one
        ref = store.commit("policy", "p", {"f": b"abc"}, config={"lr": 1})
        assert ref.uri == "policy/p@2"
        with pytest.raises(StoreError, match=r"'f' of policy/p@2 .* is damaged"):
            store.read_bytes(store.resolve(ref), "f")

    @pytest.mark.parametrize(
        ("stored", "complaint"),
        [(b"weightt", "is damaged"), (b"weig", "has 4 B instead of 7"), (None, "is missing from the store")],
    )
    def test_a_bad_blob_is_named_and_its_file_does_not_appear(
        self, store: ArtifactStore, backend: Backend, tmp_path: Path, stored: bytes | None, complaint: str
    ) -> None:
        ref = store.commit("policy", "p", {"good": b"good", "model.bin": b"weights"})
        key = blob_key(sha256(b"weights"))
        backend.delete(key)
        if stored is not None:
            backend.upload(key, stored)
        with pytest.raises(StoreError, match=rf"'model\.bin' of policy/p@1 \(blob {key}\) {complaint}"):
            store.fetch(ref, tmp_path / "out")
        assert not (tmp_path / "out" / "model.bin").exists()
        assert not list((tmp_path / "out").glob(".*"))

    def test_cached_fetches_once_and_mends_what_is_cut_short(self, store: ArtifactStore) -> None:
        ref = store.commit("policy", "p", {"f": b"abc", "g/h": b"de"})
        directory = store.cached(ref)
        inode = (directory / "f").stat().st_ino
        assert store.cached("policy/p") == directory
        assert (directory / "f").stat().st_ino == inode
        (directory / "g" / "h").chmod(0o644)
        (directory / "g" / "h").write_bytes(b"d")
        assert (store.cached(ref) / "g" / "h").read_bytes() == b"de"
        results = at_once(lambda n: store.cached(store.commit("policy", "q", {"f": b"new", "n": bytes([n % 2])})), 4)
        assert all(isinstance(result, Path) and (result / "f").read_bytes() == b"new" for result in results)
        assert not list(directory.parent.glob("parts/*"))

    def test_a_killed_writer_leaves_nothing_to_be_seen(self, store: ArtifactStore, backend: Backend) -> None:
        code = self.in_another_process(
            store,
            """
            create = store._backend.create

            def create_or_wait(key, data):
                if key.startswith("versions/"):
                    print("all blobs are there", flush=True)
                    signal.pause()
                return create(key, data)

            store._backend.create = create_or_wait
            store.commit("policy", "p", {"f": b"body"}, key="k")
            """,
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"all blobs are there\n"
            process.kill()
        assert backend.size(blob_key(sha256(b"body"))) == 4
        assert store.list() == []
        assert store.find("policy", "k") is None
        assert store.commit("policy", "p", {"f": b"body"}, key="k").uri == "policy/p@1"

    def test_lineage_reaches_the_outside_and_says_what_was_pruned(self, store: ArtifactStore) -> None:
        data = store.commit("dataset", "d", {"f": b"d"})
        sft = store.commit("sft", "s", {"f": b"s"}, parents=[data, "model/base"])
        state = store.commit("ppo-state", "r", {"f": b"0"}, parents=[sft])
        store.commit("ppo-state", "r", {"f": b"1"}, parents=[sft])
        policy = store.commit("policy", "p", {"f": b"p"}, parents=[state, sft, "dataset/d"])
        store.prune("ppo-state", "r", keep=1)

        tree = store.lineage("policy/p")
        assert tree.ref == policy
        assert [parent.ref.uri for parent in tree.parents] == ["ppo-state/r@1", "sft/s@1", "dataset/d@1"]
        pruned, supervised, problems = tree.parents
        assert (pruned.manifest, pruned.parents) == (None, ())
        assert [parent.ref.uri for parent in supervised.parents] == ["dataset/d@1", "model/base"]
        assert supervised.parents[0] is problems
        assert supervised.parents[1].manifest is None

    def test_an_unknown_reference_offers_the_nearest(self, store: ArtifactStore) -> None:
        with pytest.raises(ReferenceNotFoundError, match=r"no policy/p: it is empty so far"):
            store.resolve("policy/p")
        store.commit("policy", "llama7b", {"f": b"1"})
        store.commit("sft", "mistral", {"f": b"1"})
        store.set_alias("policy/llama7b", "champion", why="first", who="test")
        for reference, complaint in {
            "policy/lama7b": r"no policy/lama7b \(did you mean policy/llama7b\?\); it holds policy/llama7b$",
            "policy/mistral": r"did you mean sft/mistral ",
            "policy/llama7b@9": r"the versions of policy/llama7b are 1$",
            "policy/llama7b@champoin": r"did you mean champion\?\); the aliases of policy/llama7b are latest, champion",
            "polcy/llama7b": r"did you mean policy\?\); the kinds are dataset, sft",
        }.items():
            with pytest.raises(ReferenceNotFoundError, match=complaint):
                store.resolve(reference)

    def in_another_process(self, store: ArtifactStore, body: str) -> str:
        opening = f"import os, signal\nurl = {store.url!r}\n{textwrap.dedent(self.opens_store)}"
        return f"{opening}\n{textwrap.dedent(body)}"
