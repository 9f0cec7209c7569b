"""Histories written by hand: each is dangerous in its own way, and shows the loss when its safeguard is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from infra.artifacts import aliases, catalog, commit, deletion, leases, store
from infra.artifacts.backend import Backend
from infra.artifacts.leases import Claim, Lease
from tests.unit.artifacts.histories.history import ALIAS, BODIES, COUNTED, NUMBERED, History

HALF_A_DAY_S = 13 * 3600.0


class Danger(NamedTuple):
    """A history, and what to replace (object, attribute, by what) so that it ends in a loss."""

    play: Callable[[History], None]
    without: tuple[Any, str, Any]


def manifest_first(backend: Backend, draft: Any, sources: Any, number: Claim, write: Callable[[Lease], Any]) -> Any:
    """As `commit`, in the wrong order."""
    bodies = commit._bodies(draft, sources)
    claim = number.join(Claim(frozenset(bodies), frozenset(parent.uri for parent in draft.parents)))
    with leases.lease(backend, draft.writer, claim) as held:
        manifest = write(held)
        commit.send_missing(backend, bodies)
    return manifest


@contextmanager
def no_lease(backend: Backend, holder: str, _: Claim) -> Iterator[Lease]:
    yield Lease(backend, holder)


def claim_without_a_look(_: Any, found: Any, held: Lease) -> bool:
    held.cover(Claim(versions=frozenset({found.uri})))
    return True


def nothing(*_: Any) -> None:
    pass


def writer_is_stopped(history: History) -> None:
    history.step(history.write([b"new"]), 20)


def writer_sleeps_while_what_it_found_is_pruned(history: History) -> None:
    """Its manifest is under way for longer than its lease lives."""
    writer = history.write_numbered(BODIES[2:], 2, in_flight=True)
    history.step_to(writer, "create", "versions/")
    history.let_time_pass(HALF_A_DAY_S)
    history.finish(history.prune(COUNTED, 1))
    history.finish(writer)


def writer_sleeps_while_what_it_sent_is_collected(history: History) -> None:
    writer = history.write_numbered([b"new"], 2, in_flight=True)
    history.step_to(writer, "create", "versions/")
    history.let_time_pass(HALF_A_DAY_S)
    history.finish(history.collect(1))
    history.finish(writer)


def writer_sleeps_before_its_manifest(history: History) -> None:
    writer = history.write([b"new"], by=0)
    history.step_to(writer, "create", "keys/")
    history.let_time_pass(HALF_A_DAY_S)
    history.finish(history.collect(1))
    history.finish(writer)


def writer_finds_what_is_pruned_meanwhile(history: History) -> None:
    writer = history.write(BODIES[1:3])
    history.step_to(writer, "delete", "leases/")
    history.finish(history.prune(COUNTED, 1))
    history.finish(writer)


def writer_finds_what_is_about_to_go(history: History) -> None:
    """Whoever deletes it looked for leases after the writer's first, and before the one of what was found."""
    writer = history.write(BODIES[1:3])
    history.step_to(writer, "create", "keys/")
    history.step_to(writer, "create", "leases/")
    deleter = history.prune(COUNTED, 1)
    history.step_to(deleter, "delete", "versions/")
    history.step(writer, 4)
    history.finish(deleter)
    history.finish(writer)


def writer_is_killed_after_its_manifest(history: History) -> None:
    writer = history.write([b"new"], by=0)
    history.step_to(writer, "create", "versions/")
    history.step(writer)
    history.kill(writer)
    history.finish(history.write([b"newer"], by=1))


def champion_came_from_what_is_pruned(history: History) -> None:
    history.finish(history.promote(0))
    history.finish(history.prune(NUMBERED, 1))


def deleter_finds_a_writer(history: History) -> None:
    writer = history.write(BODIES[:1], by=0)
    history.step_to(writer, "create", "versions/")
    deleter = history.prune(COUNTED, 1)
    history.step_to(deleter, "delete", "blobs/")
    history.step(writer)
    history.finish(deleter)


def writer_finds_a_deleter(history: History) -> None:
    deleter = history.prune(COUNTED, 1)
    history.step_to(deleter, "delete", "blobs/")
    writer = history.write(BODIES[:1], by=0)
    history.step(writer, 8)
    history.finish(deleter)


def alias_moves_to_what_is_deleted(history: History) -> None:
    mover = history.promote(0)
    history.step_to(mover, "write", "aliases/")
    history.finish(history.prune(COUNTED, 1))
    history.finish(mover)


def mover_sleeps(history: History) -> None:
    mover = history.promote(0)
    history.step_to(mover, "create", "leases/")
    history.step_to(mover, "read", "aliases/")
    history.step(mover)
    history.let_time_pass(HALF_A_DAY_S)
    history.finish(history.prune(COUNTED, 1))
    history.finish(mover)


def alias_moves_to_what_came_from_what_is_deleted(history: History) -> None:
    collector = history.collect(1, kinds=NUMBERED[:1])
    history.step_to(collector, "delete", "versions/")
    mover = history.promote(0)
    history.step(mover, 20)
    history.finish(collector)


def numbers_are_taken_and_deleted(history: History) -> None:
    writer = history.write([b"slow"], by=0)
    history.step_to(writer, "create", "versions/")
    for number in range(2):
        history.finish(history.write([b"fast%d" % number], by=1))
    history.finish(history.prune(COUNTED, 1))
    history.finish(writer)


def newest_is_replaced_while_it_is_looked_for(history: History) -> None:
    _replace_while(history, history.read(COUNTED), ("read", "versions/"))


def alias_moves_while_it_is_read(history: History) -> None:
    _replace_while(history, history.read(COUNTED, f"@{ALIAS}"), ("read", "versions/"))


def _replace_while(history: History, reader: Any, stop: tuple[str, str]) -> None:
    history.step_to(reader, *stop)
    history.finish(history.write([b"newer"], by=0))
    history.finish(history.promote(3))
    history.finish(history.prune(COUNTED, 1))
    history.finish(reader)


DANGERS = {
    "the manifest is written first": Danger(writer_is_stopped, (store, "commit", manifest_first)),
    "what is gone is not sent again": Danger(writer_sleeps_while_what_it_found_is_pruned, (commit, "resend", nothing)),
    "a writer does not see that its lease is outlived": Danger(
        writer_sleeps_while_what_it_sent_is_collected, (Lease, "is_outlived", False)
    ),
    "a writer does not begin anew": Danger(writer_sleeps_before_its_manifest, (Lease, "check", nothing)),
    "a writer does not claim what it finds": Danger(
        writer_finds_what_is_pruned_meanwhile, (commit, "_stays", lambda *_: True)
    ),
    "a writer does not look whether it is there still": Danger(
        writer_finds_what_is_about_to_go, (commit, "_stays", claim_without_a_look)
    ),
    "a writer does not look for the same": Danger(
        writer_is_killed_after_its_manifest, (commit, "_same", lambda *_: None)
    ),
    "an alias keeps nothing but its version": Danger(
        champion_came_from_what_is_pruned, (deletion, "reached", lambda roots, _: set(roots))
    ),
    "a deleter does not look for leases": Danger(deleter_finds_a_writer, (deletion, "live_leases", lambda _: Claim())),
    "a writer does not look for deleters": Danger(
        writer_finds_a_deleter, (leases, "await_deletions", lambda *_: set())
    ),
    "an alias moves without a lease": Danger(alias_moves_to_what_is_deleted, (aliases, "lease", no_lease)),
    "a mover does not see that its lease is outlived": Danger(mover_sleeps, (Lease, "check", nothing)),
    "an alias keeps its version and not what that came from": Danger(
        alias_moves_to_what_came_from_what_is_deleted,
        (aliases, "_reached", lambda _, target: Claim(versions=frozenset({target.uri}))),
    ),
    "a writer does not lease the numbers that it tries": Danger(
        numbers_are_taken_and_deleted, (Claim, "covers", lambda self, uri: uri in self.versions)
    ),
    "the newest is looked for once": Danger(newest_is_replaced_while_it_is_looked_for, (catalog, "LOOKS", 1)),
    "an alias is read once": Danger(alias_moves_while_it_is_read, (catalog, "LOOKS", 1)),
}
"""By the safeguard that is left out."""
