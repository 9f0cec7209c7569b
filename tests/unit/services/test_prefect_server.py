"""What the local Prefect server is told, by us and by the user."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from burner_redis.pubsub import PubSub
from docket import Docket, Worker
from prefect.settings import Settings

from infra.server_database import look_less_often
from infra.services.prefect_server import UNHURRIED, prefect_server
from infra.services.service import stack_environment


@pytest.fixture(autouse=True)
def env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [each for each in os.environ if each.upper().startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    return tmp_path / ".env"


def told(home: Path) -> dict[str, str]:
    """Return the environment that the server would be started with."""
    return stack_environment("id", prefect_server(home, 4200, None, "rlhf:word", 60).environment)


def test_the_server_asks_for_the_password_and_pages_from_elsewhere_have_no_business_there(tmp_path: Path) -> None:
    service = prefect_server(tmp_path, 4201, None, "rlhf:word", 60)
    assert service.environment["PREFECT_SERVER_API_AUTH_STRING"] == "rlhf:word"
    origins = service.environment["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"].split(",")
    assert origins == ["http://127.0.0.1:4201"], "by the name of localhost it may be another user's page"
    assert "rlhf:word" not in " ".join(service.command)
    another = prefect_server(tmp_path, 4201, None, "rlhf:other", 60)
    assert another.fingerprint != service.fingerprint, "a server that runs is started anew"
    assert "rlhf:word" not in service.fingerprint


def test_what_the_user_says_of_his_server_is_passed_on(
    tmp_path: Path, env_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env_file.write_text("PREFECT_SERVER_LOGGING_LEVEL=ERROR\nPREFECT_SERVER_METRICS_ENABLED=false\n")
    monkeypatch.setenv("PREFECT_SERVER_METRICS_ENABLED", "true")
    monkeypatch.setenv("prefect_server_keepalive_timeout", "9")
    found = told(tmp_path)
    assert found["PREFECT_SERVER_LOGGING_LEVEL"] == "ERROR"
    assert found["PREFECT_SERVER_METRICS_ENABLED"] == "true"
    assert found["PREFECT_SERVER_KEEPALIVE_TIMEOUT"] == "9"


def test_runs_are_kept_as_long_as_the_settings_say_and_the_users_word_on_his_server_wins(
    tmp_path: Path, env_file: Path
) -> None:
    vacuum = "PREFECT_SERVER_SERVICES_DB_VACUUM"
    found = told(tmp_path)
    assert (found[f"{vacuum}_ENABLED"], found[f"{vacuum}_RETENTION_PERIOD"]) == ("events,flow_runs", "5184000")
    env_file.write_text(f"{vacuum}_ENABLED=events\nPREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS=7\n")
    found = told(tmp_path)
    assert found[f"{vacuum}_ENABLED"] == "events"
    assert found["PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS"] == "7"


def test_prefect_knows_every_setting_that_makes_an_idle_server_look_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in UNHURRIED:
        monkeypatch.setenv(name, "61")
    services = Settings().server.services
    looks = [getattr(services, name) for name in type(services).model_fields]
    seconds = [value for each in looks for name, value in each.model_dump().items() if name.endswith("loop_seconds")]
    assert seconds.count(61) == len(UNHURRIED)


def test_a_server_looks_for_its_own_work_once_a_second_and_still_hears_what_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PubSub, "_queue_get", PubSub._queue_get)

    async def listen() -> Any:
        async with Docket(url="memory://idle") as docket, Worker(docket) as worker, docket._pubsub() as channel:
            look_less_often()
            assert worker.scheduling_resolution == worker.minimum_check_interval == timedelta(seconds=1)
            await channel.psubscribe("told:*")
            async with docket.redis() as redis:
                assert (await channel.get_message(timeout=None))["type"] == "psubscribe"
                await redis.publish("told:it", "work")
            return await asyncio.wait_for(channel.get_message(timeout=None), 60)

    assert asyncio.run(listen())["data"] in {"work", b"work"}


@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_SERVER_API_AUTH_STRING",
        "prefect_server_api_auth_string",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS",
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED",
        "PREFECT_SERVER_API_DEFAULT_LIMIT",
        "PREFECT_SERVER_API_HOST",
        "PREFECT_SERVER_API_BASE_PATH",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
        "PREFECT_API_DATABASE_CONNECTION_URL",
        "PREFECT_SERVER_DATABASE_PASSWORD",
        "PREFECT_SERVER_ANALYTICS_ENABLED",
        "PREFECT_SERVER_EPHEMERAL_ENABLED",
        "PREFECT_API_URL",
        "PREFECT_API_AUTH_STRING",
        "PREFECT_API_KEY",
        "PREFECT_CLIENT_CUSTOM_HEADERS",
        "PREFECT_PROFILES_PATH",
    ],
)
def test_what_the_stack_decides_and_what_is_for_another_server_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = told(tmp_path)
    monkeypatch.setenv(name, "theirs")
    assert told(tmp_path) == before


def test_what_the_server_is_told_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:own")
    assert not [name for name in stack_environment("id", {}) if name.startswith("PREFECT_SERVER_")]
