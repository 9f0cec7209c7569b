"""Histories of a store in a directory and in memory; and that they find the loss when a safeguard is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from infra.artifacts.backend import Backend
from infra.artifacts.leases import DELETION_LIFE
from infra.artifacts.local import LocalBackend
from tests.unit.artifacts.histories.dangers import DANGERS, Danger
from tests.unit.artifacts.histories.history import BODIES, History
from tests.unit.artifacts.histories.ledger import LossError
from tests.unit.artifacts.histories.machine import StoreMachine, play
from tests.unit.artifacts.histories.stage import MemoryBackend
from tests.unit.artifacts.store_contract import sha256

SAMPLE, ALL = 25, 1000
FOUND_WITHIN = 3000
"""Chosen histories, of which one must show the loss; the rarer dangers are left to the histories written by hand."""
CHOSEN = (
    "the manifest is written first",
    "a deleter does not look for leases",
    "an alias moves without a lease",
)


class MachineInMemory(StoreMachine):
    def open_place(self, curtain: ExitStack) -> Backend:
        del curtain
        return MemoryBackend()


class MachineInADirectory(StoreMachine):
    def open_place(self, curtain: ExitStack) -> Backend:
        directory = Path(curtain.enter_context(TemporaryDirectory()))
        backend = LocalBackend(directory.as_uri(), directory)
        (directory / "tmp").mkdir()
        return backend


@pytest.fixture
def history() -> Iterator[History]:
    history = History(lambda _: MemoryBackend())
    try:
        history.begin()
        yield history
    finally:
        history.close()


def test_a_sample_of_histories_in_a_directory() -> None:
    assert play(MachineInADirectory, SAMPLE) >= SAMPLE


@pytest.mark.s3
def test_many_histories_in_a_directory() -> None:
    assert play(MachineInADirectory, ALL) >= ALL


@pytest.mark.parametrize("danger", DANGERS.values(), ids=lambda danger: danger.play.__name__)
def test_a_dangerous_history_loses_nothing(history: History, danger: Danger) -> None:
    danger.play(history)
    history.end()


@pytest.mark.parametrize("left_out", DANGERS)
def test_a_dangerous_history_shows_the_loss_when(
    history: History, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    danger = DANGERS[left_out]
    monkeypatch.setattr(*danger.without)

    def whole() -> None:
        danger.play(history)
        history.end()

    with pytest.raises(LossError):
        whole()


def test_a_deleter_whose_clock_is_ten_minutes_behind_is_waited_for(history: History) -> None:
    created = history.clock.now() - timedelta(minutes=10)
    note = {"created": created.isoformat(), "blobs": [sha256(BODIES[0])], "versions": []}
    assert history.place.create("trash/deleting/behind.json", json.dumps(note).encode())
    begun_s = history.clock.seconds
    history.step_to(history.write(BODIES[:1], by=0), "size", "blobs/")
    assert history.clock.seconds - begun_s >= DELETION_LIFE.total_seconds()


@pytest.mark.s3
@pytest.mark.parametrize("left_out", CHOSEN)
def test_chosen_histories_find_the_loss_when(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*DANGERS[left_out].without)
    with pytest.raises(LossError):
        play(MachineInMemory, FOUND_WITHIN, shrink=False)
