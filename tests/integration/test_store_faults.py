"""What a network and a server in trouble may do to the store: delay it, and nothing else."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore
from infra.artifacts.ref import blob_key
from infra.artifacts.s3 import S3Backend
from infra.artifacts.s3_requests import Patience
from infra.errors import StoreError
from tests.integration.flaky_proxy import FlakyProxy
from tests.integration.s3_stores import (  # noqa: F401 - fixtures
    given_backend,
    given_far_store,
    given_prefix,
    given_proxy,
    given_store,
)
from tests.integration.seaweed import Seaweed, run_seaweed, seaweed_server  # noqa: F401 - a fixture
from tests.unit.artifacts.store_contract import sha256

pytestmark = pytest.mark.integration

REQUESTS = {
    "lease": rb"^PUT \S*/leases/",
    "look for a blob": rb"^HEAD \S*/blobs/",
    "blob": rb"^PUT \S*/blobs/",
    "manifest": rb"^PUT \S*/versions/",
    "index": rb"^PUT \S*/keys/",
    "alias": rb"^PUT \S*/aliases/",
    "read a manifest": rb"^GET \S*/versions/[^?]*\.json",
    "read a blob": rb"^GET \S*/blobs/",
    "list": rb"^GET \S*list-type",
    "delete": rb"^DELETE ",
}
FAULTS: dict[str, Callable[[FlakyProxy, bytes], object]] = {
    "its answer lost": lambda proxy, request: proxy.lose_answers(request, times=2),
    "its answer cut short": lambda proxy, request: proxy.truncate_answers(request, times=2),
    "refused by a busy server": lambda proxy, request: proxy.answer_unavailable(request, times=2),
    "refused for its rate": lambda proxy, request: proxy.answer_unavailable(request, times=2, status=429),
    "refused by a broken server": lambda proxy, request: proxy.answer_unavailable(request, times=2, status=500),
    "reset": lambda proxy, request: proxy.reset(request, times=2),
    "cut short": lambda proxy, request: proxy.cut_requests(request, times=2),
    "damaged": lambda proxy, request: proxy.flip_bodies(request, times=2),
    "sent twice": lambda proxy, request: proxy.send_twice(request, times=2),
}


@pytest.fixture
def hasty(seaweed: Seaweed, proxy: FlakyProxy, prefix: str, store: ArtifactStore, tmp_path: Path) -> ArtifactStore:
    """The same place as `store`, behind the proxy, for one who waits half a second for an answer, then asks again."""
    options = replace(seaweed.options, endpoint_url=proxy.url)
    backend = S3Backend(store.url, seaweed.bucket, prefix, options, Patience(read_s=0.5, deadline_s=60.0))
    return ArtifactStore(backend, tmp_path / "cache")


@pytest.mark.s3
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("request_", REQUESTS)
def test_every_request_may_go_wrong_in_every_way(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy, request_: str, fault: str
) -> None:
    """Twice each, in a life of commits, moves, reads and a prune; then the store is as if nothing had been."""
    if fault == "damaged" and not REQUESTS[request_].startswith(b"^PUT"):
        pytest.skip("there is no body to be damaged")
    FAULTS[fault](proxy, REQUESTS[request_])
    refs = []
    for step in range(3):
        files = {"own": b"own%d" % step, "shared": b"shared"}
        refs.append(far_store.commit("ppo-state", "run", files, key=f"k{step}"))
        far_store.set_alias(refs[-1], "best", why=f"step {step}", who="test")
    assert far_store.read_bytes(far_store.resolve("ppo-state/run@2"), "own") == b"own1"
    assert far_store.read_bytes(far_store.resolve("ppo-state/run@best"), "shared") == b"shared"
    assert far_store.prune("ppo-state", "run", keep=1) == [1, 2]
    assert proxy.count == 2

    backend = store._backend
    assert [manifest.ref for manifest in store.list()] == refs[2:]
    assert [move.uri for move in store.aliases("ppo-state", "run")["best"].history] == [ref.uri for ref in refs]
    assert [store.find("ppo-state", f"k{step}") is not None for step in range(3)] == [False, False, True]
    for body, there in ((b"own0", False), (b"own1", False), (b"own2", True), (b"shared", True)):
        assert (backend.size(blob_key(sha256(body))) is not None) == there
    assert backend.children("leases/") == backend.children("trash/deleting/") == []


def test_the_writer_of_a_manifest_whose_answer_was_lost_knows_its_own(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy
) -> None:
    proxy.lose_answers(rb"^PUT \S*/versions/")
    numbered = far_store.commit("ppo-state", "run", {"f": b"1"}, version=5)
    proxy.send_twice(rb"^PUT \S*/versions/")
    free = far_store.commit("ppo-state", "run", {"f": b"2"})
    assert proxy.count == 2
    assert (numbered.uri, free.uri) == ("ppo-state/run@5", "ppo-state/run@6")
    assert [manifest.ref for manifest in store.list()] == [numbered, free]


def test_the_mover_of_an_alias_whose_answer_was_lost_knows_its_own(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy
) -> None:
    refs = [store.commit("policy", "p", {"f": bytes([n])}) for n in range(4)]
    spoilers = (proxy.lose_answers, proxy.lose_answers, proxy.send_twice, proxy.truncate_answers)
    for ref, spoil in zip(refs, spoilers, strict=True):  # the first is created, the others are swapped
        spoil(rb"^PUT \S*/aliases/")
        far_store.set_alias(ref, "champion", why="better", who="test")
    assert proxy.count == 4
    assert [move.uri for move in store.aliases("policy", "p")["champion"].history] == [ref.uri for ref in refs]


def test_a_server_that_is_busy_or_hangs_up_is_asked_again(far_store: ArtifactStore, proxy: FlakyProxy) -> None:
    proxy.answer_unavailable(rb"^PUT \S*/blobs/", times=2)
    proxy.answer_unavailable(rb"^PUT \S*/leases/", status=429)
    proxy.lose_answers(rb"^GET .*versions", times=2)
    ref = far_store.commit("policy", "p", {"f": b"1" * 1000})
    proxy.lose_answers(rb"^GET \S*/blobs/", times=2)
    proxy.truncate_answers(rb"^GET \S*/blobs/")
    assert far_store.read_bytes(far_store.resolve(ref), "f") == b"1" * 1000
    assert proxy.count == 8


def test_a_body_damaged_or_cut_on_its_way_is_refused_by_the_server_and_sent_again(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy
) -> None:
    for number, spoil in enumerate((proxy.flip_bodies, proxy.cut_requests, proxy.reset)):
        spoil(rb"^PUT \S*/blobs/")
        body = b"precious" * 1000 + bytes([number])
        ref = far_store.commit("policy", "p", {"f": body})
        assert store.read_bytes(store.resolve(ref), "f") == body
    assert proxy.count == 3


def test_an_answer_that_comes_after_its_request_was_repeated_changes_nothing(
    store: ArtifactStore, hasty: ArtifactStore, proxy: FlakyProxy
) -> None:
    held = [proxy.hold_answers(rb"^PUT \S*/versions/"), proxy.hold_answers(rb"^PUT \S*/aliases/")]
    refs = [hasty.commit("policy", "p", {"f": b"1"})]
    hasty.set_alias(refs[0], "champion", why="first", who="test")
    for each in held:
        each.set()
    refs.append(hasty.commit("policy", "p", {"f": b"2"}))
    hasty.set_alias(refs[1], "champion", why="better", who="test")
    assert proxy.count == 2
    assert [manifest.ref for manifest in store.list()] == refs
    assert [move.uri for move in store.aliases("policy", "p")["champion"].history] == [ref.uri for ref in refs]


def test_a_request_that_arrives_once_more_long_after_overwrites_nothing(
    store: ArtifactStore, far_store: ArtifactStore, proxy: FlakyProxy
) -> None:
    proxy.keep_copies(rb"^PUT \S*/(versions|aliases|blobs)/", times=6)
    refs = []
    for step in range(2):  # the second alias is swapped, not created
        refs.append(far_store.commit("policy", "p", {"f": bytes([step])}))
        far_store.set_alias(refs[step], "champion", why=f"step {step}", who="test")
    refs.append(store.commit("policy", "p", {"f": b"\2"}))
    store.set_alias(refs[2], "champion", why="step 2", who="test")

    answers = proxy.deliver_copies()
    assert sorted(answers) == [200, 200, 412, 412, 412, 412]  # a blob once more is the same blob
    assert [manifest.ref for manifest in store.list()] == refs
    assert [move.uri for move in store.aliases("policy", "p")["champion"].history] == [ref.uri for ref in refs]
    for step, ref in enumerate(refs):
        assert store.read_bytes(store.resolve(ref), "f") == bytes([step])


def test_a_server_that_stays_away_is_an_error_after_the_deadline(
    seaweed: Seaweed, prefix: str, proxy: FlakyProxy
) -> None:
    options = replace(seaweed.options, endpoint_url=proxy.url)
    backend = S3Backend("s3://rlhf", seaweed.bucket, prefix, options, Patience(deadline_s=2.0))
    proxy.answer_unavailable(rb"", times=100)
    complaint = r"could not do what we asked within 2 s, reading x in the bucket 'rlhf': it answered 503 \(503\)"
    with pytest.raises(StoreError, match=complaint):
        backend.read("x")
    proxy.close()
    address = re.escape(proxy.url)
    with pytest.raises(StoreError, match=rf"{address} did not answer within 2 s while reading x in the bucket 'rlhf'"):
        backend.read("x")


@pytest.mark.parametrize(
    ("moment", "how", "away_s"),
    [
        ("blobs/", "stopped", 2.0),
        ("versions/", "killed", 2.0),
        *[
            pytest.param(moment, how, 60.0, marks=pytest.mark.s3)
            for moment in ("blobs/", "versions/")
            for how in ("stopped", "killed")
        ],
    ],
)
def test_a_store_that_is_away_delays_a_commit_and_does_not_end_it(
    moment: str, how: str, away_s: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes away when the commit is about to send its first blob, or its manifest."""
    caplog.set_level(logging.WARNING, logger="infra")
    with run_seaweed() as server, ThreadPoolExecutor(1) as pool:
        patience = Patience(connect_s=0.5, read_s=1.0) if away_s < 10 else Patience()
        backend = S3Backend("s3://rlhf/x", server.bucket, "x", server.options, patience)
        store = ArtifactStore(backend, tmp_path / "cache")
        first = store.commit("policy", "p", {"f": b"first"})
        run = backend._retrier.run

        def run_when_it_is_away(what: str, attempt: Any, **limits: Any) -> Any:
            if what.startswith(f"writing {moment}"):
                backend._retrier.run = run  # type: ignore[method-assign]
                server.signal(signal.SIGSTOP) if how == "stopped" else server.kill()
            return run(what, attempt, **limits)

        backend._retrier.run = run_when_it_is_away  # type: ignore[method-assign]
        committing = pool.submit(store.commit, "policy", "p", {"f": b"second", "g": b"third"})
        with pytest.raises(StillWaiting):
            committing.result(timeout=away_s)
        server.signal(signal.SIGCONT) if how == "stopped" else server.start()
        second = committing.result(timeout=120)

        assert [manifest.ref for manifest in store.list()] == [first, second]
        assert [store.read_bytes(store.resolve(second), path) for path in ("f", "g")] == [b"second", b"third"]
        assert store.commit("policy", "p", {"f": b"second", "g": b"third"}) == second
    if away_s > 10:
        assert f"the S3 server {server.endpoint_url} does not answer" in caplog.text
        assert "answers again" in caplog.text
