"""The store on a second S3 server, Ceph's: it refuses If-Match of the right tag, so one process at a time may write."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import aiobotocore.session
import pytest

from infra.artifacts import ArtifactStore, S3Options, open_store
from infra.artifacts.backend import Backend, Enforced
from infra.artifacts.commit import PIECE_BYTES
from infra.artifacts.s3 import S3Backend
from infra.artifacts.s3_requests import Patience
from infra.errors import StoreError
from tests.integration.radosgw import Radosgw, radosgw_server  # noqa: F401 - a fixture
from tests.unit.artifacts.alias_contract import AliasContract
from tests.unit.artifacts.lock_contract import LockContract
from tests.unit.artifacts.newest_contract import NewestContract
from tests.unit.artifacts.pruning_contract import PruningContract
from tests.unit.artifacts.store_contract import StoreContract

pytestmark = [pytest.mark.integration, pytest.mark.s3]


@pytest.fixture
def backend(radosgw: Radosgw) -> Backend:
    prefix = f"test-{uuid4().hex[:8]}"
    options = replace(radosgw.options, single_writer=True)
    patience = Patience.of(None, patient=True)  # the first requests of a cluster that has just started take long
    return S3Backend(f"s3://{radosgw.bucket}/{prefix}", radosgw.bucket, prefix, options, patience)


@pytest.fixture
def store(radosgw: Radosgw, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    monkeypatch.setenv("TEST_ENDPOINT", radosgw.endpoint_url)
    monkeypatch.setenv("TEST_ACCESS_KEY", str(radosgw.options.access_key))
    monkeypatch.setenv("TEST_SECRET_KEY", str(radosgw.options.secret_key))
    backend.probe()
    options = replace(radosgw.options, single_writer=True)
    return open_store(backend.url, cache_dir=tmp_path / "cache", s3=options, patient=True)


class TestStoreInCeph(StoreContract):
    opens_store = """
    from pathlib import Path
    from infra.artifacts import S3Options, open_store

    names = ("TEST_ENDPOINT", "TEST_ACCESS_KEY", "TEST_SECRET_KEY")
    s3 = S3Options(*(os.environ[name] for name in names), single_writer=True)
    store = open_store(url, cache_dir=Path("unused"), s3=s3)
    """


class TestAliasesInCeph(AliasContract):
    pass


class TestLocksInCeph(LockContract):
    pass


class TestPruningInCeph(PruningContract):
    pass


class TestNewestInCeph(NewestContract):
    pass


def test_it_is_refused_without_the_promise_of_one_writer(radosgw: Radosgw, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"conditional writes, compare-and-swap \(If-Match\), so two writers"):
        open_store(f"s3://{radosgw.bucket}/x", cache_dir=tmp_path, s3=radosgw.options)
    backend = S3Backend("s3://x", radosgw.bucket, "x", replace(radosgw.options, single_writer=True))
    backend.probe()
    assert backend._enforced == Enforced(create=True, replace=False)
    assert backend.children("probe/") == []


def test_a_file_of_several_blobs_comes_back(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(PIECE_BYTES + 1))
    ref = store.commit("policy", "p", {"weights": tmp_path / "weights"})
    assert (store.fetch(ref, tmp_path / "out") / "weights").read_bytes() == (tmp_path / "weights").read_bytes()


def test_what_is_wrong_is_said_in_one_sentence(radosgw: Radosgw, tmp_path: Path) -> None:
    good = replace(radosgw.options, single_writer=True)
    for bucket, options, complaint in (
        ("rlhf", replace(good, secret_key="wrong-secret"), "forbids us looking around .*; check the keys"),
        ("rlhf", replace(good, access_key="wrong-key"), "forbids us looking around .*; check the keys"),
        ("nowhere", good, "has no bucket 'nowhere'; create it"),
    ):
        with pytest.raises(StoreError, match=complaint):
            open_store(f"s3://{bucket}", cache_dir=tmp_path, s3=options)


def test_a_full_quota_is_told_at_once_and_what_is_there_can_be_read(radosgw: Radosgw, store: ArtifactStore) -> None:
    ref = store.commit("policy", "p", {"f": os.urandom(1 << 20)})
    radosgw.admin("quota", "set", "--quota-scope=user", "--uid=test", "--max-size=1")
    radosgw.admin("quota", "enable", "--quota-scope=user", "--uid=test")
    try:
        with pytest.raises(StoreError, match=r"has no room left for writing .*QuotaExceeded\): its disk or a quota"):
            store.commit("policy", "p", {"f": os.urandom(1 << 20)})
        assert len(store.read_bytes(store.resolve(ref), "f")) == 1 << 20
    finally:
        radosgw.admin("quota", "disable", "--quota-scope=user", "--uid=test")


def test_temporary_keys_work_with_their_session_token_and_not_without(
    radosgw: Radosgw, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    temporary = asyncio.run(temporary_keys(radosgw))
    store = open_store(f"s3://{radosgw.bucket}/sts", cache_dir=tmp_path, s3=replace(temporary, single_writer=True))
    ref = store.commit("policy", "p", {"f": b"1"})
    assert store.read_bytes(store.resolve(ref), "f") == b"1"
    with pytest.raises(StoreError, match="forbids us looking around"):
        open_store(f"s3://{radosgw.bucket}/sts", cache_dir=tmp_path, s3=replace(temporary, session_token=None))
    for secret in (temporary.access_key, temporary.secret_key, temporary.session_token):
        assert secret
        assert secret not in caplog.text
        assert secret not in store.resolve(ref).to_json().decode()


async def temporary_keys(radosgw: Radosgw) -> S3Options:
    """Return keys that the server lends for a quarter of an hour, to whoever takes on a role."""
    trust = {"Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/test"]}, "Action": ["sts:AssumeRole"]}
    rights = {"Effect": "Allow", "Action": ["s3:*"], "Resource": "arn:aws:s3:::*"}
    role = ("role", "create", "--role-name=lent", "--path=/")
    radosgw.admin(*role, f"--assume-role-policy-doc={policy(trust)}")
    radosgw.admin("role", "policy", "put", "--role-name=lent", "--policy-name=s3", f"--policy-doc={policy(rights)}")
    options = radosgw.options
    client = aiobotocore.session.get_session().create_client(
        "sts",
        endpoint_url=options.endpoint_url,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        region_name=options.region,
    )
    async with client as sts:
        wanted = {"RoleArn": "arn:aws:iam:::role/lent", "RoleSessionName": "test", "DurationSeconds": 900}
        lent = (await sts.assume_role(**wanted))["Credentials"]
    return replace(
        options,
        access_key=lent["AccessKeyId"],
        secret_key=lent["SecretAccessKey"],
        session_token=lent["SessionToken"],
    )


def policy(statement: dict[str, object]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
