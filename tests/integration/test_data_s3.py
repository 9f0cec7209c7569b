"""Data in a bucket of a real S3 server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import s3fs

from rlhf_core.config.data import SourceConfig
from rlhf_core.data.reading import Access, detect_role, read_set
from rlhf_core.errors import DataError
from tests.integration.flaky_proxy import FlakyProxy, flaky_proxy
from tests.integration.seaweed import Seaweed, free_ports, seaweed_server  # noqa: F401 - a fixture

pytestmark = pytest.mark.integration


def options(seaweed: Seaweed, url: str | None = None) -> dict[str, Any]:
    return replace(seaweed.options, endpoint_url=url or seaweed.endpoint_url).arguments()


@pytest.fixture
def access(seaweed: Seaweed, tmp_path: Path) -> Access:
    return Access(tmp_path / "cache", partial(options, seaweed))


@pytest.fixture
def folder(seaweed: Seaweed) -> str:
    return f"s3://{seaweed.bucket}/test-{uuid4().hex[:8]}"


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FlakyProxy]:
    with flaky_proxy(seaweed.endpoint_url) as proxy:
        yield proxy


def put(seaweed: Seaweed, address: str, *prompts: str) -> str:
    content = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode()
    files = s3fs.S3FileSystem(**options(seaweed), skip_instance_cache=True)
    files.pipe(address, gzip.compress(content) if address.endswith(".gz") else content)
    return address


def prompts(address: str, access: Access) -> list[str]:
    found = read_set([SourceConfig(path=address)], "prompts", access=access, bad_rows="refuse")
    return [row.prompt for row in found.rows]


def refusal(address: str, access: Access) -> str:
    with pytest.raises(DataError) as caught:
        prompts(address, access)
    message = str(caught.value)
    assert "\n" not in message
    assert address in message
    return message


def test_objects_patterns_and_prefixes_are_read(seaweed: Seaweed, folder: str, access: Access) -> None:
    one = put(seaweed, f"{folder}/b.jsonl", "b")
    put(seaweed, f"{folder}/a.jsonl.gz", "a")
    put(seaweed, f"{folder}/deep/c.jsonl", "c")
    assert prompts(one, access) == ["b"]
    assert prompts(f"{folder}/*.jsonl*", access) == ["a", "b"]
    assert prompts(f"{folder}/**/*.jsonl", access) == ["b", "c"]
    assert prompts(f"{folder}/", access) == ["a", "b"]
    assert detect_role(SourceConfig(path=one), access) == "prompts"


def test_the_files_of_a_set_are_named_by_their_addresses(seaweed: Seaweed, folder: str, access: Access) -> None:
    address = put(seaweed, f"{folder}/a.jsonl", "a", " ")
    assert f"row 2 of {address}" in refusal(address, access)


def test_an_unchanged_object_is_not_fetched_again_and_a_changed_one_is(
    seaweed: Seaweed, proxy: FlakyProxy, folder: str, tmp_path: Path
) -> None:
    address = put(seaweed, f"{folder}/a.jsonl", "old")
    access = Access(tmp_path / "cache", partial(options, seaweed, proxy.url))
    assert prompts(address, access) == ["old"]
    proxy.answer_unavailable(rb"^GET .*a\.jsonl", times=100)
    assert prompts(address, access) == ["old"]
    assert proxy.count == 0
    put(seaweed, address, "new")
    assert prompts(address, Access(access.cache_dir, partial(options, seaweed))) == ["new"]
    [*kept] = access.cache_dir.rglob("a.jsonl")
    assert len(kept) == 2
    assert not list(access.cache_dir.rglob(".fetching-*"))


def test_a_cut_off_answer_is_asked_for_again(seaweed: Seaweed, proxy: FlakyProxy, folder: str, tmp_path: Path) -> None:
    address = put(seaweed, f"{folder}/a.jsonl", "a")
    proxy.lose_answers(rb"^GET .*a\.jsonl")
    assert prompts(address, Access(tmp_path / "cache", partial(options, seaweed, proxy.url))) == ["a"]
    assert proxy.count == 1


def test_what_is_not_there_is_told(seaweed: Seaweed, folder: str, access: Access) -> None:
    put(seaweed, f"{folder}/deep/c.txt", "c")
    assert "there is no such object" in refusal(f"{folder}/none.jsonl", access)
    assert "there is no such object" in refusal("s3://no-such-bucket/a.jsonl", access)
    assert "no object matches" in refusal(f"{folder}/*.jsonl", access)
    assert "there is no data file under" in refusal(f"{folder}/deep/", access)
    assert "is no object but a prefix" in refusal(f"{folder}/deep", access)


def test_wrong_keys_are_told(seaweed: Seaweed, folder: str, tmp_path: Path) -> None:
    address = put(seaweed, f"{folder}/a.jsonl", "a")
    wrong = replace(seaweed.options, secret_key="wrong").arguments
    assert "the server refuses" in refusal(address, Access(tmp_path, wrong))
    assert not list(tmp_path.rglob("a.jsonl"))


def test_an_absent_server_is_told_with_its_address(seaweed: Seaweed, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    message = refusal("s3://bucket/a.jsonl", Access(tmp_path, partial(options, seaweed, url)))
    assert "cannot be fetched" in message
    assert url in message
    assert seaweed.secret_key not in message
