"""What is in the store at each moment of a history, and what must hold of it then."""

from __future__ import annotations

import json
from typing import Any

from infra.artifacts.deletion import reached
from infra.artifacts.leases import TRUST_LIFE
from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import LEASES, VERSIONS, blob_key
from tests.unit.artifacts.histories.stage import Actor, StageClock


class LossError(AssertionError):
    """Something that was promised did not hold."""


class Ledger:
    """Follows every request that changes the store, and raises LossError as soon as a promise is broken."""

    def __init__(self, clock: StageClock) -> None:
        self.objects: dict[str, bytes] = {}
        self.manifests: dict[str, Manifest] = {}
        """Those that are visible, by reference."""
        self.ever: dict[str, Manifest] = {}
        """All that ever were."""
        self.gone_at: dict[str, int] = {}
        self.late: set[str] = set()
        """Versions whose manifest was under way for longer than its lease lived, until their writer has looked."""
        self.uploads: list[tuple[Actor, str, bool]] = []
        """Who sent which blob, and whether it was there."""
        self.moves = 0
        self.wrong = ""
        self._is_changed = False
        self._clock = clock
        self._leased: dict[Actor, tuple[int, float]] = {}
        self._released: dict[Actor, tuple[int, float]] = {}

    def note(self, actor: Actor, method: str, key: str, data: bytes, result: Any) -> None:
        """Enter a request; called in the actor's thread, so what is wrong is kept for `check`."""
        self.moves += 1
        self._is_changed = self._is_changed or method in {"create", "replace", "delete", "upload"}
        if method == "upload":
            self.uploads.append((actor, key, self.objects.get(key) == data))
            self.objects[key] = data
        elif method in {"create", "replace"} and result:
            self.objects[key] = data
            if key.startswith(LEASES) and (actor not in self._leased or actor in self._released):
                self._leased[actor] = (self.moves, self._clock.seconds)
                self._released.pop(actor, None)
            if key.startswith(VERSIONS):
                self._appear(actor, Manifest.from_json(data, key))
        elif method == "delete":
            self.objects.pop(key, None)
            if key.startswith(LEASES) and actor in self._leased:
                self._released.setdefault(actor, (self.moves, self._clock.seconds))
            if key.startswith(VERSIONS):
                self._disappear(actor, key)

    def check(self, *, always: bool = False) -> None:
        """Look whether all that is visible is whole, and no alias points at nothing; if anything has changed."""
        if not (self._is_changed or always):
            return
        self._is_changed = False
        for uri, manifest in self.manifests.items():
            missing = [blob.sha256 for blob in manifest.blobs if blob_key(blob.sha256) not in self.objects]
            if missing and uri not in self.late:
                raise LossError(f"{uri} is visible without its blob {missing[0]}")
        for alias, uri in self.aliases().items():
            if uri not in self.manifests:
                raise LossError(f"{alias} points at {uri}, which is not there")
        if self.wrong:
            raise LossError(self.wrong)

    def aliases(self) -> dict[str, str]:
        """Return where each alias points."""
        found = {key: data for key, data in self.objects.items() if key.startswith("aliases/")}
        return {key: json.loads(data)["history"][-1]["uri"] for key, data in found.items()}

    def check_commit(self, actor: Actor, uri: str, digest: str) -> None:
        """Look whether the version that a commit returned holds what was committed, and was there to the end."""
        self.late.discard(uri)
        self.check(always=True)
        if uri not in self.ever or self.ever[uri].digest != digest:
            raise LossError(f"{actor} was told that it had made {uri}, which is another's or nobody's")
        (begun, begun_s), (ended, ended_s) = self._leased[actor], self._released[actor]
        needed_until = begun if ended_s - begun_s > TRUST_LIFE.total_seconds() else ended
        if self.gone_at.get(uri, self.moves) < needed_until:
            raise LossError(f"{actor} was told that it had made {uri}, which had gone before")

    def needed_blobs(self) -> set[str]:
        return {blob_key(blob.sha256) for manifest in self.manifests.values() for blob in manifest.blobs}

    def _appear(self, actor: Actor, manifest: Manifest) -> None:
        uri = manifest.uri
        if uri in self.ever:
            self.wrong = f"{actor} made {uri} for the second time"
        if manifest.kind == "policy" and manifest.identity in {each.identity for each in self.manifests.values()}:
            self.wrong = f"{actor} made {uri} of what is a version already"
        self.ever[uri] = self.manifests[uri] = manifest
        outlived = self._clock.seconds - self._leased[actor][1] > TRUST_LIFE.total_seconds()
        if actor.in_flight and outlived:
            self.late.add(uri)

    def _disappear(self, actor: Actor, key: str) -> None:
        gone = [uri for uri, each in self.manifests.items() if key == _key(each)]
        for uri in gone:
            old = self.manifests[uri]
            newer = [each for each in self.manifests.values() if _artifact(each) == _artifact(old)]
            if sum(each.version > old.version for each in newer) < actor.keeps:
                self.wrong = f"{actor} deleted {uri}, which is among the newest {actor.keeps}"
            if actor.honours_lineage and uri in reached(self.aliases().values(), self.manifests.values()):
                self.wrong = f"{actor} deleted {uri}, from which something came that an alias points at"
            del self.manifests[uri]
            self.gone_at[uri] = self.moves


def _artifact(manifest: Manifest) -> tuple[str, str]:
    return manifest.kind, manifest.name


def _key(manifest: Manifest) -> str:
    return f"{VERSIONS}{manifest.kind}/{manifest.name}/{manifest.version:08d}.json"
