"""The queue: every unit is learnt from exactly once, none is too old, and the counts balance, whoever dies."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.rollout.lease_queue import Lease, LeaseCounts, LeaseQueue, MakersLostError


@dataclass(frozen=True)
class Piece:
    episode: int
    index: int
    rows: int = 4


def queue_of(*, episodes: int = 3, size: int = 2, **options: object) -> LeaseQueue[Piece, str]:
    return LeaseQueue(lambda episode: [Piece(episode, index) for index in range(size)], episodes=episodes, **options)  # type: ignore[arg-type]


def quiet(_done: int, _all: int) -> None: ...


def make(queue: LeaseQueue[Piece, str], version: int, maker: str = "m") -> tuple[int, int] | None:
    lease = queue.lease(maker)
    if lease is None:
        return None
    assert queue.made(lease, "made", version=version)
    return lease.unit.episode, lease.unit.index


def test_in_lockstep_an_episode_is_leased_only_when_the_one_before_is_learnt() -> None:
    queue = queue_of()
    assert [make(queue, 0), make(queue, 0), make(queue, 0)] == [(0, 0), (0, 1), None]
    found = queue.collect(0, version=0, timeout_s=0, on_progress=quiet)
    assert [made.unit.index for made in found] == [0, 1]
    assert queue.lease("m") is None  # while it is learnt
    queue.learnt(0)
    assert make(queue, 1) == (1, 0)


def test_with_staleness_one_makers_work_on_one_episode_ahead_and_no_further() -> None:
    queue = queue_of(max_staleness=1)
    assert [make(queue, 0) for _ in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), None]
    queue.collect(0, version=0, timeout_s=0, on_progress=quiet)
    queue.learnt(0)
    found = queue.collect(1, version=1, timeout_s=0, on_progress=quiet)
    assert [made.version for made in found] == [0, 0]  # one publication old: as allowed


def test_what_is_too_old_is_dropped_and_made_again() -> None:
    queue = queue_of(stale_samples="drop", limit=100)
    for _ in range(4):
        make(queue, 0)
    queue.collect(0, version=0, timeout_s=0, on_progress=quiet)
    queue.learnt(0)
    with pytest.raises(MakersLostError, match="0 came"):
        queue.collect(1, version=1, timeout_s=0, on_progress=quiet)
    assert [make(queue, 1), make(queue, 1)] == [(1, 0), (1, 1)]
    assert [made.version for made in queue.collect(1, version=1, timeout_s=0, on_progress=quiet)] == [1, 1]
    queue.learnt(1)
    assert queue.counts() == LeaseCounts(issued=6, learnt=4, dropped=2, lost=0, out=0, waiting=0)


def test_a_full_buffer_makes_makers_wait_but_never_for_what_is_being_collected() -> None:
    queue = queue_of(max_staleness=2, limit=4)
    assert [make(queue, 0), make(queue, 0)] == [(0, 0), None]  # 4 samples wait: no room for 4 more

    got: list[int] = []
    collector = threading.Thread(
        target=lambda: got.extend(
            made.unit.index for made in queue.collect(0, version=0, timeout_s=60, on_progress=quiet)
        )
    )
    collector.start()
    while make(queue, 0) is None:
        queue.wait_for_change(1)
    collector.join(60)
    assert got == [0, 1]
    assert [make(queue, 0), make(queue, 0)] == [(1, 0), None]  # beside the learning, one unit ahead


def test_a_dead_makers_units_are_due_again_and_what_it_sends_late_is_thrown_away() -> None:
    queue = queue_of()
    first = queue.lease("dying")
    assert first is not None
    assert queue.lost("dying") == 1
    again = queue.lease("other")
    assert again is not None
    assert again.unit == first.unit
    assert not queue.made(first, "late", version=0)
    assert queue.made(again, "in time", version=0)
    assert not queue.made(again, "twice", version=0)


def test_whoever_waits_in_vain_is_told_who_has_what_he_waits_for() -> None:
    queue = queue_of()
    make(queue, 0)
    queue.lease("maker-1")
    with pytest.raises(MakersLostError, match=r"the 2 chunks of episode 1, and 1 came; maker-1 had the rest"):
        queue.collect(0, version=0, timeout_s=0, on_progress=quiet)


def test_a_failure_reaches_whoever_collects() -> None:
    queue = queue_of()
    queue.fail(ValueError("a bad prompt"))
    with pytest.raises(ValueError, match="a bad prompt"):
        queue.collect(0, version=0, timeout_s=60, on_progress=quiet)


def test_a_restored_queue_has_what_waited_and_leases_again_what_was_out() -> None:
    queue = queue_of(max_staleness=1)
    make(queue, 0)
    make(queue, 0)
    queue.collect(0, version=0, timeout_s=0, on_progress=quiet)
    queue.learnt(0)
    make(queue, 1)
    queue.lease("m")
    restored = queue_of(max_staleness=1, completed=1)
    restored.restore(queue.facts(), queue.waiting())
    assert restored.counts() == LeaseCounts(issued=4, learnt=2, dropped=0, lost=1, out=0, waiting=1)
    assert [make(restored, 1) for _ in range(3)] == [(1, 1), (2, 0), (2, 1)]
    assert restored.counts().balance


def restarted(queue: LeaseQueue[Piece, str], **options: Any) -> LeaseQueue[Piece, str]:
    facts, waiting = queue.state()
    fresh = queue_of(**options)
    fresh.restore(facts, waiting)
    assert fresh.counts().balance
    return fresh


def go_on(queue: LeaseQueue[Piece, str], out: list[tuple[Lease[Piece], int]], version: int) -> None:
    """Whoever is alive goes on: an empty line of due units must never block the episode."""
    lease = queue.lease("c")
    if lease is not None:
        queue.made(lease, "result", version=version)
    elif out:
        held, sampled_by = out.pop()
        queue.made(held, "result", version=sampled_by)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_unit_is_lost_or_learnt_twice_and_none_is_too_old(data: st.DataObject) -> None:
    staleness, policy = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(["wait", "drop"]))
    limit = data.draw(st.sampled_from([4, 8, 20] if policy == "drop" else [0, 4, 8]))
    size = data.draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "episodes": 4,
        "size": size,
        "max_staleness": staleness,
        "stale_samples": policy,
        "limit": limit,
    }
    queue = queue_of(**options)
    learnt: Counter[tuple[int, int]] = Counter()
    out: list[tuple[Lease[Piece], int]] = []
    for episode in range(4):
        if data.draw(st.booleans()):  # the trainer dies, and goes on from the state that it took
            queue = restarted(queue, completed=episode, **options)
            out.clear()
        while True:
            for _ in range(data.draw(st.integers(0, 6))):
                move = data.draw(st.sampled_from(["lease", "made", "die"]))
                if move == "lease" and (lease := queue.lease(data.draw(st.sampled_from("ab")))) is not None:
                    out.append((lease, episode))  # the version that is published now
                elif move == "made" and out:
                    lease, version = out.pop(data.draw(st.integers(0, len(out) - 1)))
                    queue.made(lease, "result", version=version)
                elif move == "die":
                    queue.lost(data.draw(st.sampled_from("ab")))
            assert queue.counts().balance
            try:
                found = queue.collect(episode, version=episode, timeout_s=0, on_progress=quiet)
            except MakersLostError:
                go_on(queue, out, episode)
                continue
            break
        assert all(episode - made.version <= staleness for made in found)
        learnt.update((made.unit.episode, made.unit.index) for made in found)
        queue.learnt(episode)
        assert queue.counts().balance
    assert learnt == Counter({(episode, index): 1 for episode in range(4) for index in range(size)})
    assert queue.counts().learnt == 4 * size
