"""The store in a bucket of a real S3 server."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from infra.artifacts import ArtifactStore, S3Options, open_store
from infra.artifacts.backend import Backend
from infra.artifacts.pieces import PIECE_BYTES
from infra.artifacts.s3 import S3Backend
from infra.errors import StoreError
from tests.integration.flaky_proxy import FlakyProxy, flaky_proxy
from tests.integration.seaweed import Seaweed, free_ports, seaweed_server  # noqa: F401 - a fixture
from tests.unit.artifacts.pruning_contract import PruningContract
from tests.unit.artifacts.store_contract import StoreContract

pytestmark = pytest.mark.integration


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid4().hex[:8]}"


@pytest.fixture
def store(seaweed: Seaweed, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    for name, value in (
        ("TEST_ENDPOINT", seaweed.endpoint_url),
        ("TEST_ACCESS_KEY", seaweed.access_key),
        ("TEST_SECRET_KEY", seaweed.secret_key),
    ):
        monkeypatch.setenv(name, value)
    return open_store(f"s3://{seaweed.bucket}/{prefix}", cache_dir=tmp_path / "cache", s3=seaweed.options)


@pytest.fixture
def backend(seaweed: Seaweed, prefix: str, store: ArtifactStore) -> Backend:
    return S3Backend(store.url, seaweed.bucket, prefix, seaweed.options)


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FlakyProxy]:
    with flaky_proxy(seaweed.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def far_store(seaweed: Seaweed, proxy: FlakyProxy, store: ArtifactStore, tmp_path: Path) -> ArtifactStore:
    """The same place as `store`, seen through the proxy."""
    options = S3Options(proxy.url, seaweed.access_key, seaweed.secret_key, "us-east-1")
    return open_store(store.url, cache_dir=tmp_path / "cache", s3=options)


class TestStoreInABucket(StoreContract):
    opens_store = """
    from pathlib import Path
    from infra.artifacts import S3Options, open_store

    names = ("TEST_ENDPOINT", "TEST_ACCESS_KEY", "TEST_SECRET_KEY")
    store = open_store(url, cache_dir=Path("unused"), s3=S3Options(*(os.environ[name] for name in names)))
    """


class TestPruningInABucket(PruningContract):
    pass


def test_a_file_of_several_blobs_comes_back(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2 * PIECE_BYTES + 1))
    ref = store.commit("policy", "p", {"from-disk": path, "from-memory": path.read_bytes()[:-1]})
    directory = store.fetch(ref, tmp_path / "out")
    assert (directory / "from-disk").read_bytes() == path.read_bytes()
    assert (directory / "from-memory").read_bytes() == path.read_bytes()[:-1]


def test_the_writer_of_a_manifest_whose_answer_was_lost_knows_its_own(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy
) -> None:
    proxy.lose_answers(rb"^PUT \S*/versions/")
    numbered = far_store.commit("ppo-state", "run", {"f": b"1"}, version=5)
    proxy.lose_answers(rb"^PUT \S*/versions/")
    free = far_store.commit("ppo-state", "run", {"f": b"2"})
    assert proxy.count == 2
    assert (numbered.uri, free.uri) == ("ppo-state/run@5", "ppo-state/run@6")
    assert [manifest.ref for manifest in store.list()] == [numbered, free]


def test_the_mover_of_an_alias_whose_answer_was_lost_knows_its_own(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy
) -> None:
    refs = [store.commit("policy", "p", {"f": bytes([n])}) for n in range(2)]
    for ref in refs:  # the first is created, the second is swapped
        proxy.lose_answers(rb"^PUT \S*/aliases/")
        far_store.set_alias(ref, "champion", why="better", who="test")
    assert proxy.count == 2
    assert [move.uri for move in store.aliases("policy", "p")["champion"].history] == [ref.uri for ref in refs]


def test_a_server_that_is_busy_or_hangs_up_is_asked_again(far_store: ArtifactStore, proxy: FlakyProxy) -> None:
    proxy.answer_unavailable(rb"^PUT \S*/blobs/", times=2)
    proxy.lose_answers(rb"^GET .*versions", times=2)
    ref = far_store.commit("policy", "p", {"f": b"1"})
    proxy.lose_answers(rb"^GET \S*/blobs/", times=2)
    assert far_store.read_bytes(far_store.resolve(ref), "f") == b"1"
    assert proxy.count == 6


def test_a_body_damaged_on_its_way_is_refused_by_the_server_and_sent_again(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy
) -> None:
    proxy.flip_bodies(rb"^PUT \S*/blobs/")
    ref = far_store.commit("policy", "p", {"f": b"precious"})
    assert proxy.count == 1
    assert store.read_bytes(store.resolve(ref), "f") == b"precious"


def test_a_server_that_stays_away_is_an_error_after_the_deadline(
    seaweed: Seaweed, prefix: str, proxy: FlakyProxy
) -> None:
    options = S3Options(proxy.url, seaweed.access_key, seaweed.secret_key)
    backend = S3Backend("s3://rlhf", seaweed.bucket, prefix, options, deadline_s=1.0)
    assert backend.read("x") is None
    proxy.close()
    address = re.escape(proxy.url)
    with pytest.raises(StoreError, match=rf"{address} did not answer within 1 s while reading x in the bucket 'rlhf'"):
        backend.read("x")


def test_opening_says_in_one_sentence_what_is_wrong(
    seaweed: Seaweed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="infra")
    url, access, secret = seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key
    away = f"http://127.0.0.1:{free_ports(1)[0]}"
    for bucket, options, complaint in (
        ("rlhf", S3Options(url, access, "wrong-secret"), "refuses our secret key; check RLHF_S3_SECRET_KEY"),
        ("rlhf", S3Options(url, "wrong-key", secret), "does not know our access key; check RLHF_S3_ACCESS_KEY"),
        (
            "nowhere",
            S3Options(url, access, secret),
            r"has no bucket 'nowhere'; create it with `aws s3 mb s3://nowhere`",
        ),
        (
            "rlhf",
            S3Options(away, access, secret),
            r"did not answer within \d+ s .* \(no connection\); check that it runs",
        ),
        ("Bad_Bucket!", S3Options(url, access, secret), "the settings of the S3 store do not fit: Parameter valid"),
        ("rlhf", S3Options(f"http://user:{secret}@host", access, secret), "the address of the S3 server"),
        ("rlhf", S3Options("localhost:8333", access, secret), r"the address of the S3 server \(RLHF_S3_ENDPOINT_URL\)"),
    ):
        with pytest.raises(StoreError, match=complaint) as raised:
            open_store(f"s3://{bucket}", cache_dir=tmp_path, s3=options)
        told = f"{raised.value} {raised.value.__cause__!r} {caplog.text}"
        for credential in ("wrong-secret", "wrong-key", access, secret, "hunter2"):
            assert credential not in told


def test_no_credential_is_in_a_manifest(store: ArtifactStore, seaweed: Seaweed) -> None:
    data = store.resolve(store.commit("policy", "p", {"f": b"1"}, config={"a": 1})).to_json().decode()
    assert seaweed.access_key not in data
    assert seaweed.secret_key not in data


def test_a_server_that_does_not_enforce_conditions_is_refused(
    seaweed: Seaweed, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such server runs here: the condition is taken off on its way out, as those servers ignore it."""
    backend = S3Backend("s3://rlhf", seaweed.bucket, prefix, seaweed.options)

    def put_always(key: str, data: bytes, **_: str) -> bool:
        backend._put(key, data)
        return True

    monkeypatch.setattr(backend, "_put_if", put_always)
    with pytest.raises(StoreError, match="does not enforce conditional writes"):
        backend.probe()


def test_a_store_opened_before_a_fork_works_in_the_child(store: ArtifactStore) -> None:
    code = TestStoreInABucket().in_another_process(
        store,
        """
        print(store.commit("policy", "p", {"f": b"1"}).uri, flush=True)
        child = os.fork()
        if child == 0:
            print(store.commit("policy", "p", {"f": b"2"}).uri, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(store.commit("policy", "p", {"f": b"3"}).uri, flush=True)
        """,
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert finished.stdout.split() == [b"policy/p@1", b"policy/p@2", b"policy/p@3"]


def test_a_long_listing_is_read_to_its_end(backend: Backend, store: ArtifactStore) -> None:
    names = [f"{number:08d}.json" for number in range(1005)]  # a page of S3 has 1000
    for name in names:
        backend.create(f"versions/policy/p/{name}", b"")
    assert backend.children("versions/policy/p/") == names
    with pytest.raises(StoreError, match="the manifest policy/p@1004 cannot be read"):
        store.latest("policy", "p")
