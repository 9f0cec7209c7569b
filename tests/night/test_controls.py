"""What each safeguard is for: with one left out, a mishap costs a night.

The year beside it has mishaps of these kinds and all safeguards, and loses none. Two are not in the year: a twin with
all safeguards meets them here. One twin is started as the controls are that leave something out, with nothing left out.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from tests.night.books import Books
from tests.night.mishaps import MAY_FAIL, kill_flow, linger, meet_an_error, stop_flow
from tests.night.sites import LEFT_OUT_BY, Site, Start, switch_off
from tests.night.table import markdown, show
from tests.night.typed import LOST_AFTER_S, WITHOUT_ORDER
from tests.night.year import Year, restarted_for_nothing, send_signal, year

pytestmark = [pytest.mark.night, pytest.mark.timeout(1500)]

PERIOD_S = 120.0
"""Twice the year's, which is played beside it."""
_WIDTH = 150
WITHOUT = "tests/night/without.py:pipeline"


def leaving_out(name: str) -> Start:
    """Return a start of the stub without a safeguard."""
    return Start(entrypoint=WITHOUT, environment={LEFT_OUT_BY: name})


@dataclass(frozen=True)
class Control:
    """A safeguard, how it is left out, and the mishap that it is there for."""

    safeguard: str
    start: Start
    stage: str
    strike: Callable[[Year, Site, str], None]
    spares_flows: bool = False
    """Whether the mishap ends and stops no process of a flow."""


CONTROLS = {
    "no-run-lock": Control(
        "one process works on a run",
        leaving_out("lock of the run"),
        "ppo",
        stop_flow(for_s=2 * LOST_AFTER_S),  # until it has been started again, however busy the machine is
    ),
    "no-turns": Control("one run at a time", Start(less_tags=("one-at-a-time",)), "ppo", linger, spares_flows=True),
    "no-restarts": Control("a crashed run is started again", Start(less_tags=("resumes",)), "ppo", kill_flow),
    "no-plan": Control("a run is what it was when it began", leaving_out("plan"), "sft", kill_flow),
    "no-classes": Control(
        "errors that pass are tried again",
        leaving_out("classes of failures"),
        "ppo",
        meet_an_error,
        spares_flows=True,
    ),
}
NO_WAITS, NO_ORDER = "no-waits", "no-order"
IMPATIENT = Start(cold=True, environment={"PREFECT_PLUGINS_ENABLED": "false", "PREFECT_CLIENT_MAX_RETRIES": "0"})
"""With Prefect's own clients, told not to ask a server again that is away: Prefect reads that as it is imported."""
COSTS = {
    "no-run-lock": ("was at work",),
    "no-turns": ("was at work",),
    "no-restarts": ("lost: Crashed after 1",),
    "no-plan": ("one night made 2",),
    "no-classes": ("lost: Failed after 1",),
    NO_WAITS: ("lost: Crashed after 1", "though its process was left alone"),
    NO_ORDER: ("lost: Crashed after 1",),
}
"""What each costs, in words of the books; one of them."""
WHOLE = [f"whole-{name}" for name in (NO_WAITS, NO_ORDER)]
"""Their twins: nothing is left out, and the same befalls them."""


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """What became of the nights of all controls and their twins."""
    starts = {name: control.start for name, control in CONTROLS.items()} | {NO_WAITS: IMPATIENT}
    starts |= {f"whole-{NO_WAITS}": replace(IMPATIENT, environment={}), f"whole-{NO_ORDER}": Start(entrypoint=WITHOUT)}
    names = [*CONTROLS, NO_WAITS, NO_ORDER, *WHOLE]
    with year(tmp_path_factory.mktemp("controls"), names, period_s=PERIOD_S, starts=starts) as made:
        sites = {site.name: site for site in made.sites}
        made.await_the_first_nights()
        in_parallel(
            [
                lambda site=sites[name], control=control: befall(made, site, control)
                for name, control in CONTROLS.items()
            ]
        )
        outage(made, [sites[NO_WAITS], sites[f"whole-{NO_WAITS}"]])
        crash_after_the_server(made, sites[f"whole-{NO_ORDER}"], {})
        beside = [sites[name] for name in (NO_WAITS, f"whole-{NO_WAITS}", f"whole-{NO_ORDER}")]
        for site in beside:
            switch_off(made.stack.api_url, site)  # what follows would cost them a night, too
        made.settle(*beside)  # or a restart that is still due
        crash_after_the_server(made, sites[NO_ORDER], {WITHOUT_ORDER: "1"})
        made.end()
        made.settle()
        found = made.books(may_fail=MAY_FAIL)
        found.faults += restarted_for_nothing(made.deeds, found)
    rows = [("left out", "what it cost")]
    rows += [(name, next(iter(cost(found, name)), "-")[:_WIDTH]) for name in names]
    show(markdown(rows))
    return found


def cost(books: Books, name: str) -> list[str]:
    """Return what is wrong with the nights of a site."""
    return [fault for fault in books.faults if fault.startswith((f"{name},", f"{name}:"))]


def befall(made: Year, site: Site, control: Control) -> None:
    """Have a control's mishap befall a site, whose schedule then ends: it has shown what it is there for."""
    with made.deed(control.safeguard, control.stage, site, spares_flows=control.spares_flows):
        control.strike(made, site, control.stage)
    switch_off(made.stack.api_url, site)


def in_parallel(strikes: list[Callable[[], object]]) -> None:
    """Carry out strikes side by side; raise what one of them raised."""
    with ThreadPoolExecutor(len(strikes)) as threads:
        for struck in [threads.submit(strike) for strike in strikes]:
            struck.result()


def outage(made: Year, sites: list[Site]) -> None:
    """Kill the server before nights of several sites end, and start it again after that."""
    with made.deed("server killed", "report", killed=("server",), spares_flows=True):
        in_parallel([lambda site=site: made.held(site, "report") for site in sites])
        made.kill("server")
        for site in sites:
            site.desk.let_go()
        time.sleep(5)
        made.stack.up()


def crash_after_the_server(made: Year, site: Site, variables: dict[str, str]) -> None:
    """Kill the server beside a night, start it again, and then kill the night's process."""
    with made.deed("server killed, and then a flow", "ppo", site, killed=("server", "flow")):
        note = made.held(site, "ppo")
        made.kill("server")
        made.stack.rlhf("up", **variables)
        send_signal(note.pid, signal.SIGKILL)
        site.desk.let_go()


@pytest.mark.parametrize("name", COSTS)
def test_a_safeguard_left_out_costs_a_night(books: Books, name: str) -> None:
    found = cost(books, name)
    assert any(words in fault for fault in found for words in COSTS[name]), f"{name} cost {found or 'nothing'}"


@pytest.mark.parametrize("name", WHOLE)
def test_with_all_safeguards_the_same_costs_none(books: Books, name: str) -> None:
    assert cost(books, name) == []
