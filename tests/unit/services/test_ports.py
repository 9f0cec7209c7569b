"""Ports: the demanded one or none, else a free one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from infra.errors import ServiceError
from infra.services import seaweed
from infra.services.ports import choose_port, free_port, holder, is_free


@pytest.fixture
def occupied() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_with_a_listener_is_not_free(occupied: int) -> None:
    assert not is_free(occupied)


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_free(port)


def test_an_occupied_default_is_replaced_by_a_free_port(occupied: int) -> None:
    port = choose_port("a", demanded=None, variable="V", preferred=[occupied, None])
    assert port != occupied
    assert is_free(port)


def test_the_first_preferred_port_that_is_free_is_taken(occupied: int) -> None:
    first, second = free_port(), free_port()
    assert choose_port("a", demanded=None, variable="V", preferred=[first, second]) == first
    assert choose_port("a", demanded=None, variable="V", preferred=[None, occupied, second]) == second


def test_a_port_given_to_another_service_is_not_given_again() -> None:
    usual = free_port()
    assert choose_port("a", demanded=None, variable="V", preferred=[usual], taken=[usual]) != usual


def test_a_demanded_port_that_is_occupied_is_refused_in_one_sentence(occupied: int) -> None:
    with pytest.raises(ServiceError, match=rf"port {occupied} \(RLHF_S3_PORT\) for the store is occupied"):
        choose_port("the store", demanded=occupied, variable="RLHF_S3_PORT", preferred=[])


def test_the_store_takes_its_usual_port_back_when_it_may_and_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seaweed, "S3_PORT", free_port())
    remembered = seaweed.choose_ports({}, demanded=None, usual_first=False, taken=[]) | {"s3": free_port()}
    assert seaweed.choose_ports(remembered, demanded=None, usual_first=False, taken=[]) == remembered
    moved = seaweed.choose_ports(remembered, demanded=None, usual_first=True, taken=[])
    assert moved == remembered | {"s3": seaweed.S3_PORT}


def test_who_listens_on_a_port_is_told(occupied: int) -> None:
    found = holder(occupied)
    assert found is not None
    assert found.pid == os.getpid()
    assert holder(free_port()) is None
