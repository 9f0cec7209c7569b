"""Whoever ends in the midst of a collective is named by all others, within seconds; nobody else is."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf_core.errors import LostRankError
from rlhf_core.strategy import liveness
from rlhf_core.strategy.liveness import Liveness, naming_lost_rank
from rlhf_core.strategy.ranks import ALONE, Ranks, current_ranks, join_alone, leave
from rlhf_core.strategy.rendezvous import GroupStore
from tests.unit.strategy.lost_ranks import Fate, play

SECONDS = 5.0
DEADLINE_S = 40.0


def further(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.parallel)


@pytest.mark.integration
@pytest.mark.parametrize(("world_size", "victim"), [further(2, 0), further(2, 1), (3, 0), (3, 1), further(4, 1)])
def test_a_killed_rank_is_named_by_all_others_long_before_the_deadline(world_size: int, victim: int) -> None:
    told = play(Fate(victim, "SIGKILL"), world_size=world_size, deadline_s=DEADLINE_S)
    assert [each.rank for each in told] == [rank for rank in range(world_size) if rank != victim]
    for each in told:
        assert each.sentence.startswith(f"LostRankError: rank {victim} of {world_size} has ended (process ")
        assert each.after_s < SECONDS


@pytest.mark.integration
@pytest.mark.parametrize("agent", [False, further(True)])
def test_a_rank_that_waits_for_one_that_was_told_does_not_wait_to_the_deadline(agent: bool) -> None:
    told = play(Fate(0, "SIGKILL"), world_size=3, deadline_s=DEADLINE_S, in_a_row=True, agent=agent)
    assert [each.sentence.partition(" (")[0] for each in told] == ["LostRankError: rank 0 of 3 has ended"] * 2
    assert max(each.after_s for each in told) < SECONDS


def test_a_rank_that_lost_another_stays_what_it_was_and_says_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 0.05)
    store = dist.HashStore()  # type: ignore[attr-defined]
    join_alone()
    try:
        monitor = Liveness(GroupStore(store, 1, 2, False, timedelta(seconds=10)))
        Liveness(GroupStore(store, 0, 2, False, timedelta(seconds=10)))
        store.set("liveness/left/0", "ValueError: a shape")
        liveness.begin(monitor)
        with (
            pytest.raises(LostRankError, match="rank 0 of 2 has left"),
            naming_lost_rank(Ranks(0, 2)),
        ):
            raise RuntimeError("gloo: closed")
        assert not dist.is_initialized()
        ranks = current_ranks()
        assert (ranks.rank, ranks.world_size, ranks.is_first) == (1, 2, False)
        with pytest.raises(LostRankError, match="rank 0 of 2 has left"), naming_lost_rank(ranks):
            ranks.barrier()
        with pytest.raises(OSError, match="disk"), naming_lost_rank(ranks):
            raise OSError("the disk is full")
    finally:
        leave()
    assert current_ranks() is ALONE


@pytest.mark.parallel
def test_where_torchrun_keeps_the_store_it_is_the_same() -> None:
    told = play(Fate(0, "SIGKILL"), world_size=2, deadline_s=DEADLINE_S, agent=True)
    assert told[0].sentence.startswith("LostRankError: rank 0 of 2 has ended")


@pytest.mark.integration
@pytest.mark.parametrize(("world_size", "victim"), [(3, 1), further(2, 0)])
def test_a_rank_that_hangs_ends_the_others_at_the_deadline_and_is_named(world_size: int, victim: int) -> None:
    told = play(Fate(victim, "SIGSTOP"), world_size=world_size, deadline_s=3.0)
    assert len(told) == world_size - 1
    for each in told:
        assert each.sentence.startswith(f"LostRankError: rank {victim} of {world_size} is stopped")
        assert 2.0 < each.after_s < 3.0 + SECONDS


@pytest.mark.integration
@pytest.mark.parametrize("failing", [further(0), 1])
def test_a_rank_that_fails_by_itself_is_named_with_its_reason(failing: int) -> None:
    for each in play(Fate(failing, "raises"), world_size=3, deadline_s=DEADLINE_S):
        assert each.sentence.startswith(f"LostRankError: rank {failing} of 3 has left (ValueError: a shape)")


def _no_store() -> None:
    raise RuntimeError("Broken pipe")


def test_a_rank_of_another_machine_is_lost_when_its_signs_of_life_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 0.05)
    monkeypatch.setattr(liveness, "PATIENCE_S", 1.0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second, third = (Liveness(GroupStore(store, rank, 3, True, timedelta(seconds=10))) for rank in range(3))
    second._store.set("who/1", '["elsewhere", 1]')
    for each in (first, second, third):
        each.begin()
    second._exchange = _no_store  # type: ignore[method-assign]  # its thread ends without a word
    try:
        said = first.who_is_lost()
        assert said.startswith("rank 1 of 3 shows no sign of life (process 1 on elsewhere)")
        assert first._signs[2].knows, "the store goes with the first: it must not go before the others know"
        assert third.who_is_lost() == said
    finally:
        for each in (first, third):
            each.end()


def test_where_all_live_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 0.05)
    store = dist.HashStore()  # type: ignore[attr-defined]
    both = [Liveness(GroupStore(store, rank, 2, True, timedelta(seconds=10))) for rank in range(2)]
    for each in both:
        each.begin()
    try:
        assert both[1].who_is_lost().startswith("the 2 ranks lost each other though all of them live")
    finally:
        for each in both:
            each.end()


def test_what_neither_gloo_nor_nccl_raised_passes_through() -> None:
    two = Ranks(0, 2)
    with pytest.raises(RuntimeError, match="shape"), naming_lost_rank(two):
        torch.ones(2) @ torch.ones(3, 3)  # the message has "shape" in it
    with pytest.raises(LostRankError, match="a rank of 2 is lost"), naming_lost_rank(two):
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    with pytest.raises(RuntimeError, match="gloo"), naming_lost_rank(Ranks(0, 1)):
        raise RuntimeError("gloo: alone there is nobody to lose")
