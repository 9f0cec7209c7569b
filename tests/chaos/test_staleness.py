"""Processes killed while makers run ahead of the trainer: the books balance, and every prompt is learnt from once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest

from tests.chaos.plan import PHASES, Aim, Victim
from tests.chaos.runs import Campaign, campaign, tiny_config

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(1800)]

SEED = 13
VICTIMS: tuple[Victim, ...] = ("maker", "trainer", "all makers")
SPARE = 2
"""Episodes after the last kill: the makers must have something left to run ahead with."""
IN_A_PASS = 2
"""Episodes that take all prompts once."""
ACCOUNTS = ("learnt", "dropped", "lost", "out", "waiting")


def _aims() -> list[Aim]:
    aims = [Aim(VICTIMS[place % len(VICTIMS)], phase) for place, phase in enumerate(PHASES)]
    random.Random(SEED).shuffle(aims)
    # In turn: a maker that dies four times and makes nothing in between is given up, and a new trainer counts anew.
    by_victim = [[aim for aim in aims if aim.victim == victim] for victim in VICTIMS]
    return [aim for turn in zip_longest(*by_victim) for aim in turn if aim]


AIMS = _aims()


@pytest.fixture(scope="module")
def ahead(lockstep: Campaign, forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    lockstep.driver.end()
    directory = tmp_path_factory.mktemp("ahead")
    config = tiny_config(
        directory,
        episodes=len(AIMS) + SPARE,
        max_staleness=1,
        prompts_per_episode=8,
        chunk_size=2,
        train_batch_size=4,
    )
    with campaign(config, directory, repeats=False, environment=forked) as made:
        yield made


@pytest.mark.parametrize("aim", AIMS, ids=str)
def test_a_run_whose_makers_are_ahead_goes_on(ahead: Campaign, aim: Aim) -> None:
    ahead.strike(aim)


def test_each_prompt_was_learnt_from_once_and_the_books_balance(ahead: Campaign) -> None:
    while ahead.due < ahead.config.ppo.episodes:
        assert ahead.play(ahead.due).is_done
        ahead.due += 1
    learnt = [[(row["key"], row["index"]) for row in _samples(ahead, episode)] for episode in range(ahead.due)]
    for first in range(0, ahead.due, IN_A_PASS):
        together = Counter(each for episode in learnt[first : first + IN_A_PASS] for each in episode)
        assert len(together) == ahead.config.data.splits.ppo
        assert set(together.values()) == {1}
    store = ahead.made.store
    facts = store.read_json(store.resolve(f"ppo-state/{ahead.name}"), "state.json")
    books = facts["rollouts"]["counts"]
    assert books["issued"] == sum(books[account] for account in ACCOUNTS)
    assert books["learnt"] == sum(map(len, learnt)) / ahead.config.ppo.chunk_size
    staleness = [record["metrics"]["staleness"] for record in facts["history"]]
    assert max(staleness) == ahead.config.ppo.max_staleness
    for record in facts["history"]:
        chunks = {name.removeprefix("chunks_"): number for name, number in record["rollouts"].items()}
        assert chunks["issued"] == sum(chunks[account] for account in ACCOUNTS)


def _samples(ahead: Campaign, episode: int) -> list[dict[str, Any]]:
    store = ahead.made.store
    manifest = store.resolve(f"ppo-state/{ahead.name}@{episode + 1}")
    return [json.loads(line) for line in store.read_bytes(manifest, "samples.jsonl").splitlines()]
