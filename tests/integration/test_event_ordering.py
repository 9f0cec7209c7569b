"""The order of events across a server that is killed: Prefect's evaluation of automations, on both of its databases."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Coroutine, Iterator
from contextlib import closing, contextmanager, nullcontext
from contextvars import copy_context
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import MODELS_DEPENDENCIES
from prefect.server.events import triggers
from prefect.server.events.models.automations import automations_session as prefects_session
from prefect.server.events.models.automations import create_automation
from prefect.server.events.ordering import CausalOrdering, EventArrivedEarly, memory
from prefect.server.events.schemas.automations import Automation, EventTrigger, Firing
from prefect.server.events.schemas.events import Event, ReceivedEvent
from prefect.server.events.storage.database import write_events
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings
from prefect.types._datetime import DateTime, create_datetime_instance, now

from infra import event_ordering, server_database
from infra.event_ordering import GRACE_S, LEADER_S, STOPPED_S
from infra.services.automations import wanted
from tests.integration.local_stack import wait_for

LOST_AFTER_S = 300.0
LATER_S = LEADER_S + 1


@contextmanager
def postgres(directory: Path) -> Iterator[str]:
    """A Postgres of the test's own, where there is one to be had."""
    programs = {name: shutil.which(name) for name in ("initdb", "postgres")}
    if not all(programs.values()):
        pytest.skip("there is no Postgres here")
    owner: dict[str, Any] = {"user": "postgres"} if os.geteuid() == 0 else {}  # it refuses to run as root
    if owner:
        shutil.chown(directory, "postgres")
    where = str(directory / "data")
    quiet: dict[str, Any] = {"cwd": "/", "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **owner}
    subprocess.run(
        [str(programs["initdb"]), "-D", where, "-U", "us", "--auth=trust", "--no-sync"],
        check=True,
        timeout=120,
        **quiet,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [str(programs["postgres"]), "-D", where, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-F"], **quiet
    )
    try:
        wait_for(lambda: _listens(port), "Postgres")
        yield f"postgresql+asyncpg://us@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.stack)])
def database(request: pytest.FixtureRequest) -> Iterator[None]:
    """A new database of Prefect's server."""
    kept = MODELS_DEPENDENCIES.copy()
    with tempfile.TemporaryDirectory() as name:  # short, and open to the user as whom Postgres runs
        directory = Path(name)
        directory.chmod(0o755)
        sqlite = nullcontext(f"sqlite+aiosqlite:///{directory}/prefect.db")
        with (
            sqlite if request.param == "sqlite" else postgres(directory) as address,
            temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: address}),
        ):
            MODELS_DEPENDENCIES.update({"database_config": None, "query_components": None, "orm": None})
            asyncio.run(provide_database_interface().create_db())
            yield
    MODELS_DEPENDENCIES.update(kept)


@pytest.fixture
def fired(database: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a server makes of events: the automations that have fired, by name, and nothing loaded at first."""
    del database
    monkeypatch.setattr(triggers, "__automations_lock", None)  # of another test's loop
    names: list[str] = []

    async def act(firing: Firing) -> None:
        names.append(firing.trigger.automation.name)

    monkeypatch.setattr(triggers, "act", act)
    monkeypatch.setattr(event_ordering, "collect_in_a_thread", lambda: None)  # this is no server
    monkeypatch.setattr(triggers, "get_triggers_causal_ordering", _ours)
    monkeypatch.setattr(event_ordering, "_BEGAN", now("UTC"))
    _kill()
    yield names
    triggers.clear_loaded_automations()
    _kill()


def _ours() -> CausalOrdering:
    return event_ordering.CausalOrdering("triggers")


def _prefects() -> CausalOrdering:
    return memory.CausalOrdering("triggers")


def _kill() -> None:
    """Forget what a server keeps in memory."""
    event_ordering.CausalOrdering.clear_all_scopes()
    memory.CausalOrdering.clear_all_scopes()
    event_ordering.LISTENING = event_ordering.Listening()
    triggers.next_proactive_runs.clear()


def event(name: str, run: UUID, *, follows: UUID | None = None, at: DateTime | None = None) -> ReceivedEvent:
    """A state of a run, or its heartbeat, as the server takes it in."""
    deployment = {"prefect.resource.id": f"prefect.deployment.{run}", "prefect.resource.role": "deployment"}
    tag = {"prefect.resource.id": "prefect.tag.resumes", "prefect.resource.role": "tag"}
    made = Event(
        occurred=at or now("UTC"),
        event=f"prefect.flow-run.{name}",
        resource={"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.run-count": "1"},
        related=[deployment, tag],
        id=uuid4(),
        follows=follows,
    )
    return made.receive(at)


def load(*names: str) -> None:
    """Let automations of ours be the server's, as when it starts."""

    async def create() -> None:
        db = provide_database_interface()
        async with db.session_context(begin_transaction=True) as session:
            await session.execute(sa.delete(db.Automation))
            for each in wanted(lost_after_s=LOST_AFTER_S):
                if each["name"] in names:
                    await cast(Any, create_automation)(session, Automation.model_validate({**each, "id": uuid4()}))
        await triggers.reconcile_automations(force=True)

    asyncio.run(create())


CRASHED = "A run that crashed once is to be started again"
RESTART = "A crashed run is started again"
LOST = "A run that was lost with its worker has crashed"


async def write(*events: ReceivedEvent) -> None:
    async with provide_database_interface().session_context(begin_transaction=True) as session:
        await write_events(session, list(events))


async def parked() -> list[UUID]:
    db = provide_database_interface()
    async with db.session_context() as session:
        return list((await session.scalars(sa.select(db.AutomationEventFollower.follower_event_id))).all())


async def unpark() -> None:
    db = provide_database_interface()
    async with db.session_context(begin_transaction=True) as session:
        await session.execute(sa.delete(db.AutomationEventFollower))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def cleanly() -> None:
        await unpark()
        await scenario

    asyncio.run(cleanly())


def ago(seconds: float) -> DateTime:
    return cast(DateTime, create_datetime_instance(now("UTC") - timedelta(seconds=seconds)))


def test_a_crash_after_what_a_former_server_saw_counts_at_once(
    fired: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = uuid4()
    running = event("Running", run_id, at=ago(60))
    crash = event("Crashed", run_id, follows=running.id)

    async def scenario() -> None:
        await write(running)
        await triggers.reactive_evaluation(crash)

    load(CRASHED)
    with monkeypatch.context() as patched:
        patched.setattr(triggers, "get_triggers_causal_ordering", _prefects)
        with pytest.raises(EventArrivedEarly):
            run(scenario())
    assert fired == [], "Prefect's own order parks it"
    crash = event("Crashed", run_id, follows=running.id)
    run(triggers.reactive_evaluation(crash))
    assert fired == [CRASHED]


def test_a_state_is_past_though_the_killed_server_did_not_write_its_event_down(fired: list[str]) -> None:
    run_id, state = uuid4(), uuid4()

    async def scenario() -> None:
        db = provide_database_interface()
        async with db.session_context(begin_transaction=True) as session:
            flow = db.Flow(name=f"flow-{run_id}")
            session.add(flow)
            await session.flush()
            session.add(db.FlowRun(id=run_id, flow_id=flow.id))
            await session.flush()
            session.add(
                db.FlowRunState(id=state, flow_run_id=run_id, type="RUNNING", name="Running", timestamp=ago(60))
            )
        await triggers.reactive_evaluation(event("Crashed", run_id, follows=state))
        assert await parked() == []

    load(CRASHED)
    run(scenario())
    assert fired == [CRASHED]


def test_an_event_that_comes_before_the_one_it_follows_is_looked_at_after_it(fired: list[str]) -> None:
    run_id = uuid4()
    running = event("Running", run_id)
    crash = event("Crashed", run_id, follows=running.id)

    async def scenario() -> None:
        await write(running)  # what another part of the server has written down is not looked at yet
        for _ in range(2):  # a message may come twice
            with pytest.raises(EventArrivedEarly):
                await triggers.reactive_evaluation(crash)
        assert await parked() == [crash.id]
        assert fired == []
        assert not await _ours().event_has_been_seen(running.id)
        await triggers.reactive_evaluation(running)
        assert fired == [CRASHED]
        assert await parked() == []
        assert await _ours().event_has_been_seen(crash.id)

    load(CRASHED)
    run(scenario())


def test_what_was_parked_when_the_server_was_killed_is_looked_at_by_the_next(fired: list[str]) -> None:
    crash = event("Crashed", uuid4(), follows=uuid4(), at=ago(LATER_S - 2))

    async def scenario() -> None:
        with pytest.raises(EventArrivedEarly):
            await triggers.reactive_evaluation(crash)
        assert await _ours().get_lost_followers() == []
        _kill()
        await asyncio.sleep(2)
        assert [each.id for each in await _ours().get_lost_followers()] == [crash.id]
        _kill()  # before it could look at it
        assert await parked() == [crash.id]
        await triggers.periodic_evaluation(ago(0))
        assert fired == [CRASHED]
        assert await parked() == []
        await triggers.periodic_evaluation(ago(0))

    load(CRASHED)
    run(scenario())
    assert fired == [CRASHED]


def test_an_event_that_waited_is_looked_at_once_however_it_is_come_by(
    fired: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = uuid4()
    crash = event("Crashed", run_id, follows=uuid4(), at=ago(LATER_S))
    restarting = event("Restarting", run_id, follows=crash.id, at=ago(LATER_S))
    found = triggers.find_interested_triggers
    looked_at: list[UUID] = []

    def note(each: ReceivedEvent) -> Collection[EventTrigger]:
        looked_at.append(each.id)
        return found(each)

    async def scenario() -> None:
        for each in (crash, restarting):
            await _ours().record_follower(each)
        await triggers.periodic_evaluation(ago(0))  # both have waited too long, and one follows the other
        await _ours().record_follower(restarting)  # as if the database had refused to forget it
        await triggers.periodic_evaluation(ago(0))
        assert await parked() == []

    load(CRASHED)
    monkeypatch.setattr(triggers, "find_interested_triggers", note)
    run(scenario())
    assert looked_at == [crash.id, restarting.id]
    assert fired == [CRASHED]


def test_an_event_whose_leader_is_done_while_it_is_parked_is_looked_at_at_once(
    fired: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = uuid4()
    running = event("Running", run_id)
    crash = event("Crashed", run_id, follows=running.id)
    park = event_ordering.CausalOrdering.record_follower

    async def park_as_the_leader_ends(ordering: event_ordering.CausalOrdering, follower: ReceivedEvent) -> None:
        await ordering.record_event_as_seen(running)
        await park(ordering, follower)

    async def scenario() -> None:
        await triggers.reactive_evaluation(crash)
        assert await parked() == []

    load(CRASHED)
    monkeypatch.setattr(event_ordering.CausalOrdering, "record_follower", park_as_the_leader_ends)
    run(scenario())
    assert fired == [CRASHED]


def test_a_parked_event_that_cannot_be_looked_at_is_given_up(fired: list[str]) -> None:
    del fired
    old = event("Crashed", uuid4(), follows=uuid4(), at=ago(LATER_S))

    async def scenario() -> None:
        await _ours().record_follower(old)
        handed = [await _ours().get_lost_followers() for _ in range(6)]
        assert [len(each) for each in handed] == [1, 1, 1, 1, 1, 0]
        assert await parked() == []

    run(scenario())


def test_a_parked_event_that_cannot_be_looked_at_keeps_no_other_from_its_turn(
    fired: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (event("Crashed", uuid4(), follows=uuid4(), at=ago(LATER_S)) for _ in range(2))
    found = triggers.find_interested_triggers

    def fail(each: ReceivedEvent) -> Collection[EventTrigger]:
        if each.id == bad.id:
            raise sa.exc.OperationalError("select", {}, Exception("database is locked"))
        return found(each)

    async def scenario() -> None:
        for each in (bad, good):
            await _ours().record_follower(each)
        await triggers.periodic_evaluation(ago(0))
        assert await parked() == [bad.id]
        for _ in range(5):
            await triggers.periodic_evaluation(ago(0))
        assert await parked() == []

    load(CRASHED)
    monkeypatch.setattr(triggers, "find_interested_triggers", fail)
    run(scenario())
    assert fired == [CRASHED]


def test_silence_while_no_server_listened_is_no_silence(fired: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alive, dead = uuid4(), uuid4()
    long_ago = ago(LOST_AFTER_S + 200)

    async def beats_and_dies() -> None:
        for each in (alive, dead):
            await triggers.reactive_evaluation(event("heartbeat", each, at=long_ago))

    async def comes_back() -> None:
        await event_ordering.evaluate_proactive_triggers()
        await triggers.reactive_evaluation(event("heartbeat", alive))
        await event_ordering.evaluate_proactive_triggers()

    async def looks(after_s: float) -> None:
        for trigger in list(triggers.triggers.values()):
            await triggers.proactive_evaluation(trigger, ago(-after_s))

    load(LOST)
    with monkeypatch.context() as patched:
        patched.setattr(triggers, "get_triggers_causal_ordering", _prefects)
        patched.setattr(event_ordering, "evaluate_proactive_triggers", event_ordering._evaluate)
        run(beats_and_dies())
        _kill()
        run(comes_back())
        assert fired == [LOST, LOST], "with Prefect's own both are lost"
    fired.clear()
    run(beats_and_dies())
    _kill()
    triggers.clear_loaded_automations()
    run(event_ordering.evaluate_proactive_triggers())  # one part of the server begins before another has loaded them
    run(triggers.reconcile_automations(force=True))
    run(comes_back())
    assert fired == []
    run(looks(GRACE_S + 1))
    assert fired == [LOST], "the one that is dead is noticed all the same"
    run(looks(LOST_AFTER_S + 1))
    assert fired == [LOST, LOST], "and the other one once it is silent"


def test_on_sqlite_an_event_is_not_lost_where_others_write(fired: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(PREFECT_API_DATABASE_CONNECTION_URL.value())
    if "sqlite" not in address:
        pytest.skip("Postgres waits for its rows")
    path = address.split("///")[1]
    held = threading.Event()

    def write_meanwhile() -> None:
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("UPDATE automation SET updated = updated")
            held.set()
            time.sleep(1)  # the other side has read by then, and waits
            other.commit()

    async def begins_again(run_id: UUID) -> None:
        await triggers.reactive_evaluation(event("Restarting", run_id, at=ago(5)))
        writer = threading.Thread(target=write_meanwhile)
        held.clear()
        writer.start()
        held.wait(timeout=10)
        try:
            await triggers.reactive_evaluation(event("Pending", run_id))
        finally:
            writer.join()

    load(RESTART)
    with monkeypatch.context() as patched:
        patched.setattr(triggers, "automations_session", prefects_session)
        patched.setattr(AioSqliteConfiguration, "begin_transaction", server_database._begin_as_reader)
        with pytest.raises(sa.exc.OperationalError, match="locked"):
            run(begins_again(uuid4()))
    run(begins_again(uuid4()))
    assert fired == []


def test_a_restart_that_the_server_sees_before_it_has_noted_it_is_no_second_one(
    fired: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = uuid4()
    note = triggers.act
    outside = copy_context()
    seen: list[asyncio.Task[None]] = []

    async def act_and_see(firing: Firing) -> None:
        await note(firing)
        sign = triggers.reactive_evaluation(event("Scheduled", run_id))
        seen.append(asyncio.create_task(sign, context=outside))  # as whoever takes the server's messages does
        await asyncio.wait(seen, timeout=1)  # as much time as it needs, if nothing keeps it waiting

    async def scenario() -> None:
        await triggers.reactive_evaluation(event("Restarting", run_id, at=ago(LATER_S)))
        await triggers.reactive_evaluation(event("heartbeat", uuid4()))  # the server goes by the time of what it hears
        await event_ordering.evaluate_proactive_triggers()
        await asyncio.gather(*seen)

    load(RESTART)
    monkeypatch.setattr(triggers, "act", act_and_see)
    run(scenario())
    assert fired == [RESTART]


def test_a_server_that_was_stopped_has_heard_nothing(fired: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1e9]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    began: list[float] = []

    async def begin() -> bool:
        began.append(clock[0])
        return True

    monkeypatch.setattr(event_ordering, "_begin_anew", begin)

    async def scenario() -> None:
        for pause_s in (0.0, 5.0, STOPPED_S - 1, 8 * 3600.0, 5.0, STOPPED_S + 1):
            clock[0] += pause_s
            await asyncio.gather(*(event_ordering.LISTENING.note() for _ in range(3)))

    run(scenario())
    assert [each - 1e9 for each in began] == [0.0, 28864.0, 28930.0]
    assert fired == []


def test_the_server_takes_it_for_an_order_of_events() -> None:
    from prefect.server.events.ordering import CausalOrderingModule, get_triggers_causal_ordering

    assert isinstance(event_ordering, CausalOrderingModule)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PREFECT_SERVER_EVENTS_CAUSAL_ORDERING", "infra.event_ordering")
        with temporary_settings():
            assert get_triggers_causal_ordering() is get_triggers_causal_ordering()
