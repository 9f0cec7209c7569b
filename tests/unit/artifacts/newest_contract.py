"""Finding the newest of many versions: what holds in every store; each backend's tests inherit these."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from infra.artifacts import ArtifactStore, catalog
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import highest_version
from infra.artifacts.ref import hint_key, version_key
from infra.errors import VersionExistsError

HINT = hint_key("policy", "p")


class NewestContract:
    """Inherited by the tests of each backend, which give the fixtures `store` and `backend` (of the same place)."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog, "FEW", 3)

    def fill(self, backend: Backend, numbers: range) -> None:
        for number in numbers:
            assert backend.create(version_key("policy", "p", number), b"")

    def found(self, backend: Backend, *, leave_hint: bool = False) -> int:
        return highest_version(backend, "policy", "p", leave_hint=leave_hint)

    def test_the_highest_is_found_at_any_number(self, backend: Backend) -> None:
        assert self.found(backend) == 0
        for number in range(1, 13):
            self.fill(backend, range(number, number + 1))
            assert self.found(backend, leave_hint=number % 2 == 0) == number
        assert highest_version(backend, "policy", "other") == 0

    @pytest.mark.parametrize(
        "hint",
        [b"", b"[]", b"\xff", b"null", b"{}", *(b'{"version": %s}' % number for number in (b"9", b"99", b"2", b"0"))],
        ids=lambda hint: hint.decode(errors="replace") or "empty",
    )
    def test_a_hint_that_was_altered_hides_nothing(self, backend: Backend, hint: bytes) -> None:
        self.fill(backend, range(1, 9))
        assert backend.create(HINT, hint)
        assert self.found(backend) == 8

    @pytest.mark.parametrize("number", ["-1", "1e3", '"4"', "123456789", "[4]"])
    def test_a_hint_that_is_no_number_of_a_version_hides_nothing(self, backend: Backend, number: str) -> None:
        self.fill(backend, range(1, 9))
        assert backend.create(HINT, f'{{"version": {number}}}'.encode())
        assert self.found(backend) == 8

    def test_strangers_in_the_folder_do_no_harm(self, backend: Backend) -> None:
        backend.create("versions/policy/p/!", b"")
        backend.create("versions/policy/p/notes.txt", b"")
        backend.create("versions/policy/p/00000002.json.bak", b"")
        assert self.found(backend) == 0
        self.fill(backend, range(1, 9))
        backend.create(HINT, b'{"version": 20}')
        assert self.found(backend) == 8

    def test_the_number_that_a_hint_names_may_be_pruned(self, backend: Backend) -> None:
        self.fill(backend, range(1, 10))
        backend.create(HINT, b'{"version": 6}')
        for number in range(2, 9):
            backend.delete(version_key("policy", "p", number))
        self.fill(backend, range(10, 12))
        assert self.found(backend) == 11

    def test_commits_go_on_above_many_versions(self, store: ArtifactStore) -> None:
        refs = [store.commit("policy", "p", {"f": bytes([number])}) for number in range(9)]
        assert [ref.uri for ref in refs] == [f"policy/p@{number}" for number in range(1, 10)]
        assert store.resolve("policy/p").ref == refs[-1]
        store.commit("policy", "p", {"f": b"30"}, version=30)
        with pytest.raises(VersionExistsError, match="has gone on to 30, and a number that was removed"):
            store.commit("policy", "p", {"f": b"20"}, version=20)
        assert store.commit("policy", "p", {"f": b"31"}).uri == "policy/p@31"
        assert store.verify().problems == ()


class Counting:
    """A backend that counts what is asked of it, and gives no more names than are asked for, as a bucket does."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.requests: Counter[str] = Counter()
        self.names = 0

    def children(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        found = self._backend.children(prefix, after, most)[:most]
        self.requests["children"] += 1
        self.names += len(found)
        return found

    def __getattr__(self, method: str) -> Any:
        self.requests[method] += 1
        return getattr(self._backend, method)
