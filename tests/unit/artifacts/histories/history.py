"""One history of a store: who enters, how far each goes, and what must hold all the time and in the end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra.artifacts import ArtifactStore
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import Catalog, KeyIndex, keys_of
from infra.artifacts.deletion import Retention
from infra.artifacts.leases import LeaseOutlivedError
from infra.errors import ReferenceNotFoundError, StoreError, VersionExistsError
from tests.unit.artifacts.histories.ledger import Ledger, LossError
from tests.unit.artifacts.histories.stage import Actor, MemoryBackend, stage

COUNTED, NUMBERED = ("policy", "p"), ("ppo-state", "r")
ALIAS = "champion"
REQUEST_S = 100.0
DAYS = timedelta(days=4).total_seconds()
BODIES = [b"a", b"bb", b"ccc"]
WRITER = [("create", "versions/"), ("size", "blobs/"), ("children", "versions/"), ("delete", "leases/")]
READER = [("read", "versions/"), ("size", "blobs/")]
MOVER = [("write", "aliases/"), ("create", "leases/"), ("read", "versions/")]
DELETER = [("delete", "blobs/"), ("delete", "versions/"), ("children", "leases/"), ("create", "trash/deleting/")]
"""Requests before which an actor of that role is worth stopping."""


class History:
    """A store, those who use it now, and the ledger; a context that ends with the last look.

    Args:
        open_place: returns an empty store; what it enters into the stack ends with the history.
    """

    def __init__(self, open_place: Callable[[ExitStack], Backend]) -> None:
        self._curtain = ExitStack()
        self.clock = self._curtain.enter_context(stage())
        self._cache_dir = Path(self._curtain.enter_context(TemporaryDirectory()))
        self.ledger = Ledger(self.clock)
        self._open_place = open_place
        self.place: Backend = MemoryBackend()
        self.cast: list[Actor] = []
        self._killed_writers: list[Actor] = []
        self._count = 0

    def begin(self) -> None:
        """Begin with something to be lost: old versions, of which one came from an old state, and an alias.

        That past is played in memory, and then written to the place: it is always the same.
        """
        self.finish(self.write_numbered([b"state"], 0))
        self.finish(self.write(BODIES[:1], parent="ppo-state/r"))
        self.finish(self.write_numbered(BODIES[1:2], 1))
        for files in (BODIES[1:3], [b"last"]):
            self.finish(self.write(files))
        self.finish(self.promote(2))
        self.place = self._open_place(self._curtain)
        for key, data in self.ledger.objects.items():
            self.place.create(key, data)

    # ---- who enters

    def write(self, files: list[bytes], *, by: int = 2, parent: str | None = None) -> Actor:
        """Somebody who commits under the next number."""
        return self._write(COUNTED, files, None, by, [parent] if parent else [])

    def write_numbered(self, files: list[bytes], number: int, *, in_flight: bool = False) -> Actor:
        """Somebody who commits under a number of his own."""
        actor = self._write(NUMBERED, files, number, 2, [])
        actor.in_flight = in_flight
        return actor

    def read(self, artifact: tuple[str, str], selector: str = "") -> Actor:
        """Somebody who resolves a reference and reads all files; what was there all the time must be found."""
        reference = f"{artifact[0]}/{artifact[1]}{selector}"
        if ALIAS in selector:
            expected = any(f"/{artifact[1]}/" in key for key in self.ledger.aliases())
        else:
            expected = any((each.kind, each.name) == artifact for each in self.ledger.manifests.values())

        def look(store: ArtifactStore) -> None:
            try:
                manifest = store.resolve(reference)
            except ReferenceNotFoundError:
                if expected:
                    raise LossError(f"{reference} was there all the time, and a reader did not find it") from None
                return
            try:
                for entry in manifest.files:
                    store.read_bytes(manifest, entry.path)
            except StoreError as error:
                if manifest.uri in self.ledger.manifests and manifest.uri not in self.ledger.late:
                    raise LossError(f"{manifest.uri} is there and cannot be read: {error}") from None

        return self._enter("reader", look, READER)

    def promote(self, which: int) -> Actor:
        """Somebody who points the alias at one of the versions that ever were."""
        known = [uri for uri, each in self.ledger.ever.items() if (each.kind, each.name) == COUNTED]
        target = known[which % len(known)]
        return self._enter("promoter", lambda store: store.promote(target, ALIAS, why="better", who="t"), MOVER)

    def roll_back(self) -> Actor:
        """Somebody who points the alias back."""
        return self._enter("rollback", lambda store: store.rollback(*COUNTED, ALIAS, why="worse", who="t"), MOVER)

    def prune(self, artifact: tuple[str, str], keep: int) -> Actor:
        """Somebody who deletes old versions of one name at once."""
        actor = self._enter("pruner", lambda store: store.prune(*artifact, keep=keep), DELETER)
        actor.keeps, actor.honours_lineage = keep, True
        return actor

    def collect(self, keep: int, kinds: tuple[str, ...] = (COUNTED[0], NUMBERED[0])) -> Actor:
        """Somebody who deletes what nothing needs, without any grace time."""
        rules, none = Retention(dict.fromkeys(kinds, keep)), timedelta()

        def act(store: ArtifactStore) -> Any:
            return store.collect(rules, delete=True, grace=none, least_grace=none)

        actor = self._enter("collector", act, DELETER)
        actor.keeps, actor.honours_lineage = keep, True
        return actor

    # ---- what happens

    def step(self, actor: Actor, requests: int = 1) -> None:
        """Let somebody make so many requests."""
        for _ in range(requests):
            if not actor.is_over:
                self._step(actor)
        self._settle()

    def step_to(self, actor: Actor, method: str, prefix: str) -> None:
        """Let somebody go on until right before a request."""
        actor.halt = (method, prefix)
        while actor.halt and not actor.is_over:
            self.step(actor)

    def finish(self, actor: Actor) -> None:
        """Let somebody go on to the end."""
        while not actor.is_over:
            self._step(actor)
        self._settle()

    def kill(self, actor: Actor) -> None:
        """End somebody where he is."""
        actor.kill()
        self._settle()

    def let_time_pass(self, seconds: float) -> None:
        """Let time pass between two requests, or while the manifest of one who is `in_flight` is under way."""
        if seconds > REQUEST_S:
            self._hurry(0.0)
            self._settle()
        self.clock.seconds += seconds

    # ---- how it ends

    def end(self) -> None:
        """Let all come to an end, run again what was killed, clean up, and look at the store itself."""
        while self.cast:
            self.finish(self.cast[0])
        for killed in self._killed_writers:
            again = self._add(Actor(f"rerun of {killed}", killed.body, self.place, self.ledger.note, WRITER))
            self.finish(again)
            sent = [key for who, key, was_there in self.ledger.uploads if who is again and was_there]
            if sent:
                raise LossError(f"{again} sent {sent[0]}, which was there")
        self.ledger.late.clear()
        self.ledger.check(always=True)
        self.clock.seconds += DAYS
        self.finish(self.collect(2))
        self._look()

    def close(self) -> None:
        """Send all away."""
        for actor in self.cast:
            actor.kill()
        self._curtain.close()

    def _look(self) -> None:
        """Look at the store itself, not at the ledger: with its own `verify`, and for what should have gone."""
        store = ArtifactStore(self.place, self._cache_dir)
        if problems := store.verify().problems:
            raise LossError(f"verify finds: {'; '.join(problems)}")
        stored = {manifest.uri: manifest for manifest in store.list()}
        if stored != self.ledger.manifests:
            raise LossError(f"the store has {sorted(stored)}, and should have {sorted(self.ledger.manifests)}")
        folders = [f"blobs/sha256/{folder}/" for folder in self.place.children("blobs/sha256/")]
        blobs = {folder + rest for folder in folders for rest in self.place.children(folder)}
        if waste := blobs - self.ledger.needed_blobs():
            raise LossError(f"{sorted(waste)} stay for ever")
        index = KeyIndex(self.place, Catalog(self.place))
        owned = {key for each in stored.values() for key in keys_of(each)}
        folders = [f"keys/{kind}/" for kind, _ in (COUNTED, NUMBERED)]
        keys = {folder + name for folder in folders for name in self.place.children(folder)}
        if stale := [key for key in sorted(keys - owned) if index.is_stale(key)]:
            raise LossError(f"{stale} stay for ever")
        if left := [name for prefix in ("leases/", "trash/deleting/") for name in self.place.children(prefix)]:
            raise LossError(f"{left} stay for ever")

    # ---- behind the stage

    def _step(self, actor: Actor) -> None:
        actor.step()
        self.ledger.check()
        self._hurry()

    def _hurry(self, limit_s: float = REQUEST_S) -> None:
        """Let those make their request who have been about to for so long: no request takes longer."""
        for other in self.cast:
            is_under_way = other.is_poised and not other.is_over and not (other.in_flight and other.is_writing)
            if is_under_way and self.clock.seconds - other.poised_s >= limit_s:
                other.step()
                self.ledger.check()

    def _write(
        self, artifact: tuple[str, str], files: list[bytes], version: int | None, by: int, parents: list[str]
    ) -> Actor:
        named = {f"f{number}": body for number, body in enumerate(files)}

        def act(store: ArtifactStore) -> Any:
            return store.commit(*artifact, named, version=version, config={"by": by}, key=f"k{by}", parents=parents)

        actor = self._enter("writer", act, WRITER)
        actor.is_writer = True
        return actor

    def _enter(self, role: str, act: Callable[[ArtifactStore], Any], landmarks: list[tuple[str, str]]) -> Actor:
        def body(backend: Backend) -> Any:
            return act(ArtifactStore(backend, self._cache_dir))

        self._count += 1
        return self._add(Actor(f"{role} {self._count}", body, self.place, self.ledger.note, landmarks))

    def _add(self, actor: Actor) -> Actor:
        self.cast.append(actor)
        return actor

    def _settle(self) -> None:
        """See off those who have ended, and look at what they say."""
        for actor in [each for each in self.cast if each.is_over]:
            self.cast.remove(actor)
            if actor.is_killed and actor.is_writer:
                self._killed_writers.append(actor)
            elif actor.error is not None and not _is_fair(actor.error):
                raise actor.error
            elif actor.is_writer and actor.result is not None:
                self.ledger.check_commit(actor, actor.result.uri, actor.result.digest)
        self.ledger.check()


def _is_fair(error: Exception) -> bool:
    """Return whether an actor may be told so."""
    if isinstance(error, VersionExistsError | ReferenceNotFoundError | LeaseOutlivedError):
        return True
    words = ("its move to", "cannot be rolled back", "was removed while it was written", "could not be moved within")
    return isinstance(error, StoreError) and any(each in str(error) for each in words)
