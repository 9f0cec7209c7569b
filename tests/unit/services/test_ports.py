"""Ports: the demanded one or none, else a free one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from infra.errors import ServiceError
from infra.services.ports import choose_port, free_port, is_free


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
    port = choose_port("a", demanded=None, variable="V", remembered=occupied, default=occupied)
    assert port != occupied
    assert is_free(port)


def test_the_port_of_the_last_time_comes_before_the_usual_one() -> None:
    last, usual = free_port(), free_port()
    assert choose_port("a", demanded=None, variable="V", remembered=last, default=usual) == last


def test_a_port_given_to_another_service_is_not_given_again() -> None:
    usual = free_port()
    assert choose_port("a", demanded=None, variable="V", remembered=None, default=usual, taken=[usual]) != usual


def test_a_demanded_port_that_is_occupied_is_refused_in_one_sentence(occupied: int) -> None:
    with pytest.raises(ServiceError, match=rf"port {occupied} \(RLHF_S3_PORT\) for the store is occupied"):
        choose_port("the store", demanded=occupied, variable="RLHF_S3_PORT", remembered=None, default=None)
