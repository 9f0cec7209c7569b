"""What befalls a year: a list drawn with a fixed seed, and how each entry is carried out."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil

from infra.errors import ServiceError
from infra.services import prefect_api
from tests.integration.local_stack import wait_for
from tests.night.sites import NIGHTLY, Site
from tests.night.stages import STAGES
from tests.night.typed import LOST_AFTER_S
from tests.night.year import HELD_TIMEOUT_S, SERVICES, Victim, Year, send_signal

T = TypeVar("T")

POWER_CUTS = 2
"""With these, and a kill in each of the eight stages, each victim is killed ten times at least."""
TOGETHER = 4
"""In so many stages all services are killed at once; in the others one alone, and the other two."""
AWAY_S = (0.0, 3.0, 10.0)
STOPPED_S = LOST_AFTER_S + 15
LONG_AWAY_S: dict[Victim, float] = {"server": LOST_AFTER_S + 15, "worker": 30.0, "store": 30.0}
STOPPED_AT = ("sft", "ppo", "evaluate")
STARTS = 4
"""So often is a run that crashes begun, before it is given up."""
FAULT = "today's data are spoilt: every row has two answers; give rows with one"
SPOILT, GIVEN_UP, DOWN = "spoilt data", "flow killed at every start", "stack down over a night"
MAY_FAIL = {
    FAULT: SPOILT,
    "The run crashed in start 4": GIVEN_UP,
    "The process of this run ended with the local stack": DOWN,
    "The run crashed, and the local stack was ended before": DOWN,
}
"""How the sentence begins with which a night may fail, and what must have befallen it."""


@dataclass(frozen=True)
class Mishap:
    """One entry of the list."""

    kind: str
    stage: str
    strike: Callable[[Year, Site, str], None]
    killed: tuple[Victim, ...] = ()
    """Whom it kills, as often as each is named."""
    spares_flows: bool = False


def answered(ask: Callable[[], T]) -> T:
    """Return the server's answer, which another mishap may just have killed."""

    def look() -> list[T]:
        with suppress(ServiceError):
            return [ask()]
        return []

    return wait_for(look, "the server's answer", timeout_s=HELD_TIMEOUT_S)[0]


def kill(*victims: Victim, away_s: float) -> Callable[[Year, Site, str], None]:
    """Return a strike that kills services while a night is at its stage, and starts them again after a time."""

    def strike(year: Year, site: Site, stage: str) -> None:
        with year.in_turn(site, stage):
            year.kill(*victims)
            site.desk.let_go()
            time.sleep(away_s)
            year.stack.up()

    return strike


def kill_all(year: Year, site: Site, stage: str) -> None:
    """Strike as a power cut does: services and flows are gone at once."""
    with year.in_turn(site, stage):
        year.kill(*SERVICES)
        for process in year.stack.processes():
            send_signal(process.pid, signal.SIGKILL)
        site.desk.let_go()
        time.sleep(3)
        year.stack.up()


def kill_flow(year: Year, site: Site, stage: str) -> None:
    """Strike a flow's process alone; what it was to learn from changes before it begins again."""
    note = year.held(site, stage)
    site.write_data(time.time(), edited=True)
    send_signal(note.pid, signal.SIGKILL)
    site.desk.let_go()


def kill_again_and_again(year: Year, site: Site, stage: str) -> None:
    """Strike every start of a run."""
    for _ in range(STARTS):
        note = year.held(site, stage)
        send_signal(note.pid, signal.SIGKILL)
    site.desk.let_go()


def stopped(pids: list[int], for_s: float) -> None:
    """Stop processes for a time, in this order, and let them go on in the other."""
    for pid in pids:
        send_signal(pid, signal.SIGSTOP)
    try:
        time.sleep(for_s)
    finally:
        for pid in reversed(pids):
            send_signal(pid, signal.SIGCONT)


def stop_flow(*, for_s: float = STOPPED_S) -> Callable[[Year, Site, str], None]:
    """Return a strike that stops a flow for longer than a run may be silent."""

    def strike(year: Year, site: Site, stage: str) -> None:
        stopped([year.held(site, stage).pid], for_s)
        site.desk.let_go()

    return strike


def stop(victim: Victim) -> Callable[[Year, Site, str], None]:
    """Return a strike that stops a service for as long."""

    def strike(year: Year, site: Site, stage: str) -> None:
        with year.in_turn(site, stage):
            process = year.stack.service(victim)
            assert process is not None, f"the {victim} does not run"
            stopped([process.pid], STOPPED_S)
            site.desk.let_go()

    return strike


def sleep_through(year: Year, site: Site, stage: str) -> None:
    """Stop everything: services and all flows, as when the lid is closed."""
    with year.in_turn(site, stage):
        site.desk.let_go()
        stopped([process.pid for process in year.stack.processes()], STOPPED_S)


def down_and_up(year: Year, site: Site, stage: str) -> None:
    """End the stack as a person does, a night being at work, and start it again after every site has missed one."""
    with year.in_turn(site, stage):
        year.stack.rlhf("down")
        site.desk.let_go()
        time.sleep(site.period_s)
        year.stack.up()


def redeploy(year: Year, site: Site, stage: str) -> None:
    """Register the product's deployments anew beside a night, after a person has changed one: the change stays."""
    with year.in_turn(site, stage):
        api_url = year.stack.api_url
        found = prefect_api.deployment(api_url, NIGHTLY)
        assert found is not None
        tags = [*found["tags"], f"mine-{len(found['tags'])}"]
        prefect_api.call(api_url, "PATCH", f"/deployments/{found['id']}", {"tags": tags})
        year.stack.forget(deployed=True)
        year.stack.up()
        site.desk.let_go()
        after = prefect_api.deployment(api_url, NIGHTLY)
        assert after is not None
        assert sorted(after["tags"]) == sorted(tags)


def upgrade(year: Year, site: Site, stage: str) -> None:
    """Have the server and the worker be of an older release, so that `rlhf up` starts them anew."""
    with year.in_turn(site, stage):
        before = year.stack.service("server")
        year.stack.forget(deployed=False)
        year.stack.up()
        assert year.stack.service("server") != before
        site.desk.let_go()


def suspend(year: Year, site: Site, stage: str) -> None:
    """Suspend a night for longer than a run may be silent, and resume it, as a person does who is to approve."""
    note = year.held(site, stage)
    details = {"pause_reschedule": True}
    answered(lambda: year.stack.set_state(note.run, "PAUSED", name="Suspended", state_details=details))
    what = f"a suspended night of {site.name} to end its process"
    wait_for(lambda: not psutil.pid_exists(note.pid), what, timeout_s=HELD_TIMEOUT_S)
    site.desk.let_go()
    time.sleep(STOPPED_S)
    assert answered(lambda: year.stack.run(note.run))["state"]["name"] == "Suspended"
    answered(lambda: year.stack.resume(note.run))


def linger(year: Year, site: Site, stage: str) -> None:
    """Have a night last until the next one is at work, or over: it is skipped where nothing is left out."""
    note = year.held(site, stage)
    due_s = time.time() + site.until_due(time.time())
    what = f"the next night of {site.name} to come"
    wait_for(lambda: answered(lambda: year.has_come(site, due_s, beside=note.pid)), what, timeout_s=HELD_TIMEOUT_S)
    site.desk.let_go()


def spoil(year: Year, site: Site, stage: str) -> None:
    """Give a night data that it refuses; it is held meanwhile, and the next night has its own again."""
    note = year.held(site, stage)
    site.write_data(time.time(), fault=FAULT)
    site.desk.let_go()
    what = f"a night of {site.name} with spoilt data to end"
    wait_for(lambda: not psutil.pid_exists(note.pid), what, timeout_s=HELD_TIMEOUT_S)
    site.write_data(time.time())


def meet_an_error(year: Year, site: Site, stage: str) -> None:
    """Have a night meet an error that passes, as when a server hangs up."""
    del year
    known = sum(1 for _ in site.desk.notes())
    site.desk.fail_at(stage)

    def has_failed() -> bool:
        return any(note.what == "failed" for note in list(site.desk.notes())[known:])

    wait_for(has_failed, f"a night of {site.name} to meet an error at {stage}", timeout_s=HELD_TIMEOUT_S)


def service_mishaps(chance: random.Random) -> list[Mishap]:
    """Return what befalls services, in a drawn order: each is killed in each stage."""
    long_away = dict(zip(chance.sample(STOPPED_AT, len(SERVICES)), SERVICES, strict=True))
    together = chance.sample([stage for stage in STAGES if stage not in long_away], TOGETHER)
    all_names = f"{', '.join(SERVICES[:-1])} and {SERVICES[-1]}"
    found = [
        Mishap(f"{all_names} killed", stage, kill(*SERVICES, away_s=chance.choice(AWAY_S)), SERVICES, spares_flows=True)
        for stage in together
    ]
    for stage in [stage for stage in STAGES if stage not in together]:
        alone = long_away.get(stage) or chance.choice(SERVICES)
        others = tuple(victim for victim in SERVICES if victim != alone)
        away_s = LONG_AWAY_S[alone] if stage in long_away else chance.choice(AWAY_S)
        told = f"{alone} killed, and long away" if stage in long_away else f"{alone} killed"
        found.append(Mishap(told, stage, kill(alone, away_s=away_s), killed=(alone,), spares_flows=True))
        strike = kill(*others, away_s=chance.choice(AWAY_S))
        found.append(Mishap(f"{' and '.join(others)} killed", stage, strike, killed=others, spares_flows=True))
    stages = chance.sample(STAGES, POWER_CUTS)
    found += [Mishap("power cut", stage, kill_all, killed=(*SERVICES, "flow")) for stage in stages]
    found += [
        Mishap("server stopped", chance.choice(STOPPED_AT), stop("server"), spares_flows=True),
        Mishap("worker stopped", chance.choice(STOPPED_AT), stop("worker"), spares_flows=True),
        Mishap("machine asleep", chance.choice(STOPPED_AT), sleep_through),
        Mishap(DOWN, chance.choice(STOPPED_AT), down_and_up),
        Mishap("deployments registered anew", chance.choice(STOPPED_AT), redeploy, spares_flows=True),
        Mishap("upgrade", chance.choice(STOPPED_AT), upgrade, spares_flows=True),
    ]
    chance.shuffle(found)
    return found


def flow_mishaps(chance: random.Random) -> list[Mishap]:
    """Return what befalls flows alone, in a drawn order."""
    found = [Mishap("flow killed", stage, kill_flow, killed=("flow",)) for stage in STAGES]
    found += [Mishap("flow stopped", stage, stop_flow()) for stage in STOPPED_AT]
    found += [Mishap("night lasts into the next", stage, linger, spares_flows=True) for stage in STOPPED_AT[1:]]
    found += [Mishap("suspended for a person", stage, suspend) for stage in STOPPED_AT[:2]]
    found += [Mishap("an error that passes", stage, meet_an_error, spares_flows=True) for stage in STOPPED_AT]
    found += [Mishap(SPOILT, "data", spoil) for _ in range(3)]
    chance.shuffle(found)
    return [Mishap(GIVEN_UP, "ppo", kill_again_and_again, killed=("flow",) * STARTS), *found]
