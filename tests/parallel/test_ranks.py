"""Ranks are started once; those that fail, die or keep silent name themselves, and spoil no other case."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import ranks
from tests.parallel.ranks import run_and_lose, run_on_ranks

pytestmark = pytest.mark.parallel

CASES = "tests.parallel.runner_cases"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_same_processes_run_every_case(tmp_path: Path, world_size: int) -> None:
    found = run_on_ranks(CASES, ["process", "process:a:/b", "refused"], tmp_path, world_size=world_size)
    again = run_on_ranks(CASES, ["process"], tmp_path, world_size=world_size)
    pids = {each["process"].numbers["pid"] for each in found}
    assert len(pids) == world_size
    assert pids == {each["process"].numbers["pid"] for each in again}
    assert [each["process:a:/b"].numbers["words"] for each in found] == [2.0] * world_size
    assert [each["process"].tensors["total"].item() for each in found] == [world_size] * world_size
    assert [each["refused"].sentence for each in found] == [f"rank {rank} is refused" for rank in range(world_size)]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("wrong_on_the_last", ["rank 2 of 3 failed", "KeyError: 'what is missing'", "rank 0 of 3 gave no answer"]),
        ("dead_on_the_last", ["rank 2 of 3 died with code 3", "last words"]),
        ("silent_on_the_last", ["rank 2 of 3 gave no answer (limit 2 s)"]),
    ],
)
def test_a_rank_that_fails_is_named_where_its_case_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, said: list[str]
) -> None:
    run_on_ranks(CASES, ["process"], tmp_path, world_size=3)  # started, so that the limit is the case's own
    monkeypatch.setattr(ranks, "CASE_S", 2.0)
    (found, *_) = run_on_ranks(CASES, [case], tmp_path, world_size=3)
    with pytest.raises(AssertionError) as caught:
        found[case]
    for words in [f"{CASES}: {case} on 3 ranks", *said]:
        assert words in str(caught.value)
    after = run_on_ranks(CASES, ["process"], tmp_path, world_size=3)
    assert [each["process"].tensors["total"].item() for each in after] == [3.0] * 3


def test_ranks_may_die_where_that_is_the_case(tmp_path: Path) -> None:
    living, dead = run_and_lose(CASES, "dead_on_the_last", tmp_path)
    assert living is not None
    assert living.numbers == {"lives": 1.0}
    assert dead is None
