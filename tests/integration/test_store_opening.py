"""Opening a store in a bucket: what is tried, who is let in, and what is said when it cannot be."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore, open_store
from infra.artifacts.backend import Enforced
from infra.artifacts.s3 import S3Backend
from infra.artifacts.s3_requests import Patience
from infra.errors import StoreError
from tests.integration.flaky_proxy import FlakyProxy
from tests.integration.s3_stores import (  # noqa: F401 - fixtures
    given_backend,
    given_prefix,
    given_proxy,
    given_store,
)
from tests.integration.seaweed import Seaweed, run_seaweed, seaweed_server  # noqa: F401 - a fixture
from tests.unit.artifacts.alias_contract import AliasContract
from tests.unit.artifacts.lock_contract import LockContract
from tests.unit.artifacts.pruning_contract import PruningContract
from tests.unit.artifacts.store_contract import StoreContract, at_once

pytestmark = pytest.mark.integration

BOTH, NO_CREATE, NO_REPLACE, NEITHER = (Enforced(*kept) for kept in ((1, 1), (0, 1), (1, 0), (0, 0)))


class CarelessBackend(S3Backend):
    """A server that ignores some conditions, as several do: they are taken off on their way out."""

    keeps = NEITHER

    def _put_if(self, key: str, data: bytes, **condition: str) -> bool:
        if self.keeps.create if "IfNoneMatch" in condition else self.keeps.replace:
            return super()._put_if(key, data, **condition)
        self._put(key, data)
        return True


@pytest.fixture
def careless(seaweed: Seaweed, prefix: str) -> Callable[..., CarelessBackend]:
    """Return a function that makes a backend which keeps these conditions."""

    def make(keeps: Enforced, *, single_writer: bool) -> CarelessBackend:
        options = replace(seaweed.options, single_writer=single_writer)
        backend = CarelessBackend(f"s3://rlhf/{prefix}", seaweed.bucket, prefix, options)
        backend.keeps = keeps
        return backend

    return make


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which nobody answers: it is taken, so that no other process comes to listen there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_opening_says_in_one_sentence_what_is_wrong(
    seaweed: Seaweed, taken_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    good, secret = seaweed.options, "wrong-secret"
    away = f"http://127.0.0.1:{taken_port}"
    for bucket, options, complaint in (
        ("rlhf", replace(good, secret_key=secret), "refuses our secret key; check RLHF_S3_SECRET_KEY"),
        ("rlhf", replace(good, access_key="wrong-key"), "does not know our access key; check RLHF_S3_ACCESS_KEY"),
        ("rlhf", replace(good, session_token="wrong-token"), "does not know our access key"),
        ("nowhere", good, r"has no bucket 'nowhere'; create it with `aws s3 mb s3://nowhere`"),
        ("rlhf", replace(good, endpoint_url=away), r"did not answer within \d+ s .* \(no connection\); check that"),
        ("Bad_Bucket!", good, "the settings of the S3 store do not fit: Parameter valid"),
        ("rlhf", replace(good, endpoint_url=f"http://user:{secret}@host"), "the address of the S3 server"),
        ("rlhf", replace(good, endpoint_url="localhost:8333"), r"address of the S3 server \(RLHF_S3_ENDPOINT_URL\)"),
        (f"wrong-key:{secret}@rlhf", good, "must not hold a user or password"),
    ):
        with pytest.raises(StoreError, match=complaint) as raised:
            open_store(f"s3://{bucket}", cache_dir=tmp_path, s3=options)
        told = f"{raised.value} {raised.value.__cause__!r} {caplog.text}"
        assert "\n" not in str(raised.value)
        for credential in (secret, "wrong-key", "wrong-token", seaweed.access_key, seaweed.secret_key):
            assert credential not in told


def test_no_credential_is_in_a_manifest(store: ArtifactStore, seaweed: Seaweed) -> None:
    data = store.resolve(store.commit("policy", "p", {"f": b"1"}, config={"a": 1})).to_json().decode()
    assert seaweed.access_key not in data
    assert seaweed.secret_key not in data


def test_nothing_that_was_tried_stays(store: ArtifactStore) -> None:
    assert store._backend.children("probe/") == []


def test_what_a_server_keeps_is_tried_once_by_a_process(
    store: ArtifactStore, seaweed: Seaweed, proxy: FlakyProxy, tmp_path: Path
) -> None:
    options = replace(seaweed.options, endpoint_url=proxy.url)
    open_store(store.url, cache_dir=tmp_path, s3=options)
    proxy.lose_answers(rb"^PUT ")
    open_store(store.url, cache_dir=tmp_path, s3=options)
    assert proxy.count == 0, "nothing was written at the second opening"


def test_who_may_only_read_opens_the_store_and_is_told_at_the_first_write(
    store: ArtifactStore, seaweed: Seaweed, tmp_path: Path
) -> None:
    ref = store.commit("policy", "p", {"f": b"1"})
    reader = open_store(store.url, cache_dir=tmp_path / "cache", s3=seaweed.reader)
    assert reader.read_bytes(reader.resolve("policy/p"), "f") == b"1"
    forbidden = r"forbids us writing leases/\S+ in the bucket 'rlhf'; check the keys, or ask for that permission"
    with pytest.raises(StoreError, match=forbidden):
        reader.commit("policy", "p", {"f": b"2"})
    assert [manifest.ref for manifest in reader.list()] == [ref]


@pytest.mark.parametrize("minutes", [-7, 7])
def test_a_server_with_another_clock_is_refused(
    store: ArtifactStore, seaweed: Seaweed, proxy: FlakyProxy, tmp_path: Path, minutes: int
) -> None:
    options = replace(seaweed.options, endpoint_url=proxy.url)
    proxy.clock_ahead = timedelta(minutes=minutes)
    side = "behind" if minutes > 0 else "ahead of"
    with pytest.raises(StoreError, match=rf"our clock is 7 minutes {side} that of the S3 server {proxy.url}"):
        open_store(store.url, cache_dir=tmp_path, s3=options)
    proxy.clock_ahead = timedelta(minutes=minutes // 2)
    open_store(store.url, cache_dir=tmp_path, s3=options)


@pytest.mark.parametrize("nth", range(4))
def test_an_answer_that_is_lost_while_a_server_is_tried_is_not_held_against_it(
    seaweed: Seaweed, proxy: FlakyProxy, store: ArtifactStore, tmp_path: Path, nth: int
) -> None:
    """The probe writes four times; the condition of a repeated write fails, for its object is there."""
    proxy.keep_copies(rb"^PUT \S*/probe/", times=nth)
    proxy.lose_answers(rb"^PUT \S*/probe/")
    open_store(store.url, cache_dir=tmp_path, s3=replace(seaweed.options, endpoint_url=proxy.url))
    assert proxy.count == nth + 1


@pytest.mark.parametrize(
    ("keeps", "named"),
    [
        (NO_CREATE, "create-if-absent (If-None-Match)"),
        (NO_REPLACE, "compare-and-swap (If-Match)"),
        (NEITHER, "create-if-absent (If-None-Match) and compare-and-swap (If-Match)"),
    ],
)
def test_a_server_that_does_not_enforce_conditions_is_refused_unless_there_is_one_writer(
    careless: Callable[..., CarelessBackend], tmp_path: Path, keeps: Enforced, named: str
) -> None:
    with pytest.raises(StoreError, match="does not enforce conditional writes") as raised:
        careless(keeps, single_writer=False).probe()
    assert f"conditional writes, {named}, so two writers" in str(raised.value)
    assert "RLHF_STORE_SINGLE_WRITER=true" in str(raised.value)

    backend = careless(keeps, single_writer=True)
    backend.probe()
    assert backend.children("probe/") == []
    store = ArtifactStore(backend, tmp_path)
    results = at_once(lambda n: store.commit("policy", "p", {"f": bytes([n])}), 4)  # one process, four threads
    assert {str(result) for result in results} == {f"policy/p@{version}" for version in range(1, 5)}
    at_once(lambda n: store.set_alias(f"policy/p@{n + 1}", "champion", why=f"{n}", who="test"), 4)
    assert len(store.aliases("policy", "p")["champion"].history) == 4


def test_the_promise_of_one_writer_takes_nothing_from_a_server_that_keeps_conditions(
    careless: Callable[..., CarelessBackend],
) -> None:
    backend = careless(BOTH, single_writer=True)
    backend.probe()
    assert backend._enforced == BOTH


def test_a_server_that_has_answered_once_is_waited_for(seaweed: Seaweed, prefix: str, proxy: FlakyProxy) -> None:
    options = replace(seaweed.options, endpoint_url=proxy.url)
    backend = S3Backend("s3://rlhf", seaweed.bucket, prefix, options, Patience(open_s=0.01))
    proxy.answer_unavailable(rb"^GET ", times=2)
    with pytest.raises(StoreError, match=r"could not do what we asked within 0 s|did not answer within 0 s"):
        backend.probe()
    S3Backend("s3://rlhf", seaweed.bucket, prefix, options).probe()
    proxy.answer_unavailable(rb"^GET ", times=3)
    backend.probe()


@pytest.mark.s3
def test_a_store_that_is_full_says_so_and_can_still_be_read(tmp_path: Path) -> None:
    """A quota: SeaweedFS answers 500 to all that would write."""
    with run_seaweed() as server:
        backend = S3Backend("s3://rlhf", server.bucket, "", server.options, Patience(deadline_s=5.0))
        store = ArtifactStore(backend, tmp_path)
        ref = store.commit("policy", "p", {"f": os.urandom(3 << 20)})
        server.shell("s3.bucket.quota -name=rlhf -sizeMB=1 -op=set\n")
        for _ in range(60):  # until the server has counted
            if "read only" in server.shell("s3.bucket.quota.enforce -apply\n"):
                break
        with pytest.raises(StoreError, match=r"could not do what we asked .*; look into its log, and whether its disk"):
            store.commit("policy", "p", {"f": b"2"})
        assert [manifest.ref for manifest in store.list()] == [ref]
        server.shell("s3.bucket.quota -name=rlhf -op=remove\ns3.bucket.quota.enforce -apply\n")
        assert store.commit("policy", "p", {"f": b"2"}).uri == "policy/p@2"


@pytest.fixture
def backend(careless: Callable[..., CarelessBackend], store: ArtifactStore) -> CarelessBackend:
    backend = careless(NEITHER, single_writer=True)
    backend.probe()
    store._backend = backend
    store._catalog._backend = backend
    return backend


@pytest.mark.s3
@pytest.mark.usefixtures("backend")
class TestOneWriterOfACarelessServer(StoreContract):
    opens_store = """
    from pathlib import Path
    from infra.artifacts import S3Options, open_store

    names = ("TEST_ENDPOINT", "TEST_ACCESS_KEY", "TEST_SECRET_KEY")
    store = open_store(url, cache_dir=Path("unused"), s3=S3Options(*(os.environ[name] for name in names)))
    """

    @pytest.mark.skip(reason="many processes write, which is what the user promised not to do")
    def test_writers_in_several_processes_get_a_version_each(self, store: ArtifactStore) -> None: ...


@pytest.mark.s3
@pytest.mark.usefixtures("backend")
class TestAliasesByOneWriter(AliasContract):
    pass


@pytest.mark.s3
@pytest.mark.usefixtures("backend")
class TestLocksByOneWriter(LockContract):
    pass


@pytest.mark.s3
@pytest.mark.usefixtures("backend")
class TestPruningByOneWriter(PruningContract):
    pass
