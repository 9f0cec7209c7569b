"""A Prefect server and its database: writers on sqlite are served in turn, an absent one is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from jsonschema import Draft202012Validator, SchemaError
from prefect.server.api import server
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.utilities.schema_tools import validation
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request

from infra import server_database

pytestmark = pytest.mark.integration
WRITERS = 6
READ, WRITE = sa.text("SELECT n FROM counter"), sa.text("UPDATE counter SET n = :n")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AioSqliteConfiguration:
    """A counter in a database, and transactions as Prefect's own server has them."""
    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", server_database._begin_as_reader)
    return AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/counter.db")


async def count(database: AioSqliteConfiguration) -> int:
    """Have each writer add one to what it reads, all at once, and return what they come to."""
    engine = await database.engine()
    async with engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE counter AS SELECT 0 AS n"))

    async def add() -> None:
        async with AsyncSession(engine) as session, database.begin_transaction(session):
            n = await session.scalar(READ)
            await asyncio.sleep(0.05)  # for the others to read the same, where they may
            await session.execute(WRITE, {"n": n + 1})

    async with asyncio.timeout(60):
        await asyncio.gather(*(add() for _ in range(WRITERS)))
    async with AsyncSession(engine) as session:
        found = int(await session.scalar(READ) or 0)
    await engine.dispose()
    return found


def test_writers_at_once_are_all_served(database: AioSqliteConfiguration) -> None:
    server_database.write_in_turn()
    assert asyncio.run(count(database)) == WRITERS


def test_prefects_own_transactions_refuse_them(database: AioSqliteConfiguration) -> None:
    with pytest.raises(sa.exc.OperationalError, match="locked"):
        asyncio.run(count(database))


def test_a_transaction_within_another_one_does_not_wait_for_it(database: AioSqliteConfiguration) -> None:
    server_database.write_in_turn()

    async def read_within() -> int | None:
        engine = await database.engine()
        async with engine.begin() as connection:
            await connection.execute(sa.text("CREATE TABLE counter AS SELECT 7 AS n"))
        async with (
            asyncio.timeout(30),
            AsyncSession(engine) as outer,
            database.begin_transaction(outer),
            AsyncSession(engine) as inner,
            database.begin_transaction(inner),
        ):
            found: int | None = await inner.scalar(READ)
        await engine.dispose()
        return found

    assert asyncio.run(read_within()) == 7


@pytest.mark.parametrize(
    ("error", "later"), [(ConnectionRefusedError(), True), (FileNotFoundError(), True), (ValueError(), False)]
)
def test_a_server_wants_to_be_asked_later_while_its_database_is_away(
    monkeypatch: pytest.MonkeyPatch, error: Exception, later: bool
) -> None:
    monkeypatch.setattr(server, "is_client_retryable_exception", server_database._passes)
    server_database.ask_later_while_it_is_away()
    answer = asyncio.run(server.custom_internal_exception_handler(Request({"type": "http"}), error))
    assert answer.status_code == (503 if later else 500)


def test_a_schema_is_checked_once_and_a_wrong_one_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    for validator in (Draft202012Validator, validation._VALIDATOR):
        monkeypatch.setattr(validator, "check_schema", validator.check_schema)  # put back at the end
    check = Draft202012Validator.check_schema
    monkeypatch.setattr(Draft202012Validator, "check_schema", lambda schema: (checked.append(schema), check(schema)))
    server_database.check_schemas_once()
    right, wrong = {"type": "object"}, {"type": "no type"}
    for _ in range(2):
        Draft202012Validator.check_schema(right)
        with pytest.raises(SchemaError):
            Draft202012Validator.check_schema(wrong)
        validation.is_valid_schema(right)
        with pytest.raises(ValueError, match="no type"):
            validation.is_valid_schema(wrong)
    assert checked == [right, wrong, wrong]
