"""Which errors pass, and how often they are met again before a run is left to be started anew."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import botocore.exceptions
import httpx
import pytest
import ray.exceptions
import requests
from huggingface_hub.errors import OfflineModeIsEnabled
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Failed

from infra.artifacts.s3_requests import RefusedError
from infra.errors import (
    ClusterError,
    ClusterNotReadyError,
    InfraError,
    ReferenceNotFoundError,
    SettingsError,
    StoreAwayError,
    StoreError,
    StoreNotReadyError,
    VersionExistsError,
)
from rlhf_core.errors import (
    ConfigError,
    DataAwayError,
    DataError,
    LostRankError,
    ModelError,
    NoRoomError,
    TrainingError,
)
from rlhf_core.rollout.lease_queue import MakersLostError
from rlhf_core.weights import WeightsError
from tasks import failures
from tasks.failures import FEW, PATIENT, attended_or_not, further_attempts, passes, passes_in, sentence
from tests.unit.untrusted_server import untrusted_server

REQUEST = httpx.Request("GET", "http://127.0.0.1:4200/api/flow_runs/1")


@pytest.fixture(autouse=True)
def _unattended() -> Iterator[None]:
    run: Any = SimpleNamespace(deployment_id="d")
    with attended_or_not(run):
        yield


def raised_in_an_actor(cause: Exception) -> ray.exceptions.RayTaskError:
    error = ray.exceptions.RayTaskError("run_episode", "a remote\ntraceback", cause)
    return error.as_instanceof_cause()


def answered(status: int) -> httpx.HTTPStatusError:
    response = httpx.Response(status, request=REQUEST)
    return PrefectHTTPStatusError(f"{status}\nfor a request", request=REQUEST, response=response)


LOST = [
    ray.exceptions.ActorDiedError(),
    ray.exceptions.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory"),
    ray.exceptions.NodeDiedError("the node was preempted"),
    TimeoutError("waited 5 s for the trainer"),
    LostRankError("rank 1 of 2 has ended"),
    MakersLostError("every maker has died"),
    WeightsError("bucket 3 is damaged"),
]
NOT_THERE_YET = [
    ClusterNotReadyError("did not start within 120 s"),
    NoRoomError("waited 120 s for room"),
    StoreNotReadyError("another process has held it for 120 s"),
    DataAwayError("s3://bucket/rows cannot be fetched"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    OSError(errno.EHOSTUNREACH, "no route"),
    OSError(errno.ESTALE, "stale file handle"),
    socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution"),
    httpx.ConnectError("refused", request=REQUEST),
    httpx.ReadTimeout("late"),
    answered(503),
    answered(500),
    answered(429),
    aiohttp.ServerDisconnectedError(),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://store"),
]
WAITED_FOR = [StoreAwayError("the store did not answer within 900 s")]
FINAL = [
    ValueError("a shape"),
    TrainingError("the loss is not finite"),
    DataError("row 3"),
    ConfigError("unknown key"),
    ModelError("no such model"),
    SettingsError("RLHF_STORE_URL"),
    StoreError("the store holds something else"),
    ReferenceNotFoundError("sft/x@1"),
    VersionExistsError("ppo-state/x@1"),
    RefusedError("no room left", "InsufficientStorage"),
    ClusterError("other code of package tasks"),
    InfraError("something else"),
    OSError(errno.ENOSPC, "no space left on device"),
    OSError(errno.EIO, "input/output error"),
    FileNotFoundError(errno.ENOENT, "no such file"),
    httpx.UnsupportedProtocol("ftp"),
    answered(401),
    answered(404),
    answered(422),
    botocore.exceptions.NoCredentialsError(),
]
CASES = [(error, FEW) for error in LOST] + [(error, PATIENT) for error in NOT_THERE_YET]
CASES += [(error, 0) for error in WAITED_FOR]


@pytest.mark.parametrize(("error", "attempts"), CASES, ids=lambda each: type(each).__name__)
def test_what_passes_is_tried_again_and_then_told_in_one_line(error: Exception, attempts: int) -> None:
    for met in (error, raised_in_an_actor(error)):
        assert passes(met)
        assert further_attempts(met) == attempts
        assert len(sentence(met).splitlines()) == 1


def ask_with_httpx(url: str) -> None:
    httpx.get(url)


def ask_with_requests(url: str) -> None:
    requests.get(url, timeout=10)


def ask_with_aiohttp(url: str) -> None:
    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await session.get(url)

    asyncio.run(ask())


def ask_for_data(url: str) -> None:
    try:
        ask_with_aiohttp(url)
    except aiohttp.ClientError as error:
        raise DataAwayError(f"{url} cannot be fetched: {error}") from None


@pytest.mark.parametrize("ask", [ask_with_httpx, ask_with_requests, ask_with_aiohttp, ask_for_data])
def test_a_server_whose_certificate_is_refused_is_not_away(ask: Callable[[str], None], tmp_path: Path) -> None:
    with untrusted_server(tmp_path) as url, pytest.raises(Exception, match="certificate verify failed") as met:
        ask(url)
    assert not passes(met.value)


def test_who_works_offline_has_no_server_that_is_away() -> None:
    error = OfflineModeIsEnabled("outgoing traffic has been disabled")
    assert isinstance(error, ConnectionError)
    assert not passes(error)


@pytest.mark.parametrize("error", FINAL, ids=lambda each: type(each).__name__)
def test_a_mistake_a_bug_a_bad_number_and_a_full_disk_are_never_tried_again(error: Exception) -> None:
    assert not passes(error)
    assert not passes(raised_in_an_actor(error))


def test_a_person_who_waits_is_told_after_two_further_attempts() -> None:
    with attended_or_not(None):
        assert {further_attempts(error) for error in NOT_THERE_YET} == {FEW}


@pytest.mark.parametrize(("error", "attempts"), [(WAITED_FOR[0], 0), (LOST[0], FEW), (NOT_THERE_YET[0], PATIENT)])
def test_a_task_is_tried_again_as_often_as_its_error_is_worth(error: Exception, attempts: int) -> None:
    state: Any = Failed(data=error)
    asked = [passes_in(None, SimpleNamespace(run_count=count), state) for count in range(1, PATIENT + 2)]
    assert asked == [True] * attempts + [False] * (PATIENT + 1 - attempts)


def test_a_task_that_returned_its_failure_is_not_tried_again() -> None:
    assert not passes_in(None, SimpleNamespace(run_count=1), Failed(message="no row"))


def test_the_attempts_of_a_night_last_longer_than_an_outage_of_ten_minutes() -> None:
    assert sum(failures.DELAYS_S) > 600


@pytest.mark.parametrize("kind", [StoreAwayError, StoreNotReadyError, ClusterNotReadyError])
def test_whoever_catches_the_wider_class_catches_what_passes_too(kind: type[InfraError]) -> None:
    assert issubclass(kind, StoreError | ClusterError)
