"""Manifests on this machine's disk, by the tags that a bucket's list names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from infra.artifacts.catalog import KeptManifests

DATA = b'{"kind": "policy"}'
MD5 = hashlib.md5(DATA).hexdigest()


@pytest.mark.parametrize("tag", [MD5, f'"{MD5}"'])
def test_what_was_read_is_found_by_the_tag_of_its_object(tmp_path: Path, tag: str) -> None:
    kept = KeptManifests(tmp_path / "manifests")
    assert kept.find(tag) is None
    kept.add(tag, DATA)
    assert kept.find(MD5) == DATA


@pytest.mark.parametrize("tag", ["", f'"{MD5}-2"', hashlib.md5(b"other").hexdigest(), hashlib.sha256(DATA).hexdigest()])
def test_a_tag_that_is_not_its_md5_keeps_nothing(tmp_path: Path, tag: str) -> None:
    kept = KeptManifests(tmp_path)
    kept.add(tag, DATA)
    assert kept.find(tag) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_longer_listed_goes_whoever_put_it_there(tmp_path: Path) -> None:
    kept = KeptManifests(tmp_path)
    kept.add(MD5, DATA)
    kept.add(hashlib.md5(b"gone").hexdigest(), b"gone")
    (tmp_path / "of-somebody").mkdir()  # cannot be unlinked, and keeps nothing else
    kept.keep_only([f'"{MD5}"', ""])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([MD5, "of-somebody"])


def test_a_place_that_cannot_be_written_costs_requests_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = KeptManifests(tmp_path / "file" / "manifests")
    kept.add(MD5, DATA)
    kept.keep_only([MD5])
    assert kept.find(MD5) is None
