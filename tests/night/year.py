"""A year in small: a stack, its sites, and whoever strikes them."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from infra.errors import ServiceError
from infra.forked_processes import forking_python
from infra.services import prefect_api, processes
from infra.settings import CHECKOUT
from tests.integration.local_stack import PROGRAMS, LocalStack, running, turn, usual_ports_occupied, wait_for
from tests.night.books import Books, balance, read_champion
from tests.night.notes import Note
from tests.night.sites import Site, Start, deployments, make_sites, runs_of, switch_off, switch_on
from tests.warm import warm_processes

T = TypeVar("T")
Victim = Literal["flow", "server", "worker", "store"]
SERVICES: tuple[Victim, ...] = ("server", "worker", "store")
HELD_TIMEOUT_S = 900.0
SETTLE_TIMEOUT_S = 600.0
EVERY_S = 2.0
"""From look to look at all runs, each of which the server works for."""
GIVEN_UP_S = 60.0
"""So long after its crash nobody starts a run again: that takes a quarter of a minute, or half on a busy machine."""
UNDER_WAY = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")


@dataclass(frozen=True)
class NightStack(LocalStack):
    """A stack with the year's short times."""

    def rlhf(self, *words: str, **variables: str) -> str:
        """Run our command, and return what it said."""
        python = str(PROGRAMS / "python")
        result = self.type(python, "-m", "tests.night.typed", *words, timeout_s=400, **variables)
        assert result.returncode == 0, f"rlhf {words}: {result.stdout}{result.stderr}"
        return result.stdout

    def up(self) -> str:
        """Bring the stack up, or what is missing of it, on the ports that it had: forked flows know no others."""
        with turn(), usual_ports_occupied():  # one turn for both: who has them now may leave them in its own
            return self.rlhf("up")

    def forget(self, *, deployed: bool) -> None:
        """Have `rlhf up` find that its deployments are made from other files, or that its services are of before."""
        state = self.state
        if deployed:
            state.deployed = "another source"
        else:
            for name in ("server", "worker"):
                state.services[name] = state.services[name].model_copy(update={"fingerprint": "of an older release"})
        state.save(self.home)

    def resume(self, run_id: str) -> None:
        """Let a suspended run go on, as its button in Prefect does."""
        answer = prefect_api.call(self.api_url, "POST", f"/flow_runs/{run_id}/resume", {})
        assert answer["status"] == "ACCEPT", answer

    def run(self, run_id: str) -> dict[str, Any]:
        """Return what the server says of a run."""
        found: dict[str, Any] = prefect_api.call(self.api_url, "GET", f"/flow_runs/{run_id}")
        return found

    def service(self, name: str) -> psutil.Process | None:
        """Return a service's process, if it lives."""
        record = self.state.services.get(name)
        return record.process() if record else None


@dataclass(frozen=True)
class Deed:
    """What was done to a year, when, and to whom."""

    kind: str
    stage: str
    site: str | None
    began: float
    ended: float
    killed: tuple[Victim, ...] = ()
    """Who was killed by it, as often as each is named."""
    spares_flows: bool = False
    """Whether no process of a flow is ended or stopped by it, so that no night need begin anew."""


@dataclass
class Year:
    """A stack with sites; its methods are mishaps."""

    stack: NightStack
    sites: list[Site]
    warm: Path
    deeds: list[Deed] = field(default_factory=list)
    _services: threading.Lock = field(default_factory=threading.Lock)
    _struck: threading.local = field(default_factory=threading.local)
    """When the deed that this thread does began."""
    _stack_of_warmth: ExitStack = field(default_factory=ExitStack)

    def deploy(self, starts: Mapping[str, Start]) -> None:
        """Register the sites' deployments; their nights begin a few seconds later.

        Args:
            starts: how flows are started, by site; the others' are forked.
        """
        for site in self.sites:
            site.write_data(time.time())
        file = self.stack.home / "night.yaml"
        every = {site.name: starts.get(site.name, Start()) for site in self.sites}
        file.write_text(deployments(self.sites, every, f"{forking_python(self.warm)} -mprefect.engine"))
        self.stack.deploy_tiny_flows(CHECKOUT, str(file))
        for site in self.sites:
            switch_on(self.stack.api_url, site)

    def warm_up(self) -> None:
        """Start the server that forks flows, with the settings of the worker's."""
        self.cool_down()
        worker = self.stack.service("worker")
        assert worker is not None
        told = {name: value for name, value in worker.environ().items() if name != processes.STACK_VARIABLE}
        self._stack_of_warmth.enter_context(warm_processes(self.warm, "tests.night.imports", told))

    def cool_down(self) -> None:
        """End it."""
        self._stack_of_warmth.close()

    def await_the_first_nights(self) -> None:
        """Wait until nights count at every site, and none that was due before is under way: it is in no books."""
        last_s = max(site.first_s for site in self.sites)
        time.sleep(max(0.0, last_s - time.time()))

        def are_over() -> bool:
            with suppress(ServiceError):  # the first mishap has begun
                return not any(
                    datetime.fromisoformat(run["expected_start_time"]).timestamp() < site.first_s
                    for site in self.sites
                    for run in self._open(site, due_before=last_s)
                )
            return False

        wait_for(
            are_over, "the nights before the first that count to be over", timeout_s=SETTLE_TIMEOUT_S, every_s=EVERY_S
        )

    def end(self) -> None:
        """Switch the schedules off that are still on."""
        for site in self.sites:
            if site.last_s == math.inf:
                switch_off(self.stack.api_url, site)

    def keep_the_days(self, until: Callable[[], bool]) -> None:
        """Write every site's data of the day shortly before its night is due."""
        written: dict[str, int] = {}
        while not until():
            for site in self.sites:
                now = time.time() + 1
                if written.get(site.name) != site.day(now):
                    site.write_data(now)
                    written[site.name] = site.day(now)
            time.sleep(0.2)

    def settle(self, *sites: Site) -> None:
        """Wait until no run of these sites, or of any, is under way any longer, and none will be.

        Prefect's scheduler may add nights that it planned before their schedule was switched off: they are deleted.
        """

        def is_over() -> bool:
            with suppress(ServiceError):
                runs, soon = self._open(*sites or self.sites), time.time() + EVERY_S
                for run in runs:
                    due = datetime.fromisoformat(run["expected_start_time"]).timestamp()
                    if run["auto_scheduled"] and run["state"]["type"] == "SCHEDULED" and due > soon:
                        prefect_api.call(self.stack.api_url, "DELETE", f"/flow_runs/{run['id']}")
                return not runs
            return False

        wait_for(is_over, "the last nights to be over", timeout_s=SETTLE_TIMEOUT_S, every_s=EVERY_S)

    def has_come(self, site: Site, due_s: float, *, beside: int) -> bool:
        """Return whether a night that was due at a time, or later, is at work beside a process, or is over.

        Args:
            site: of both.
            due_s: seconds since 1970.
            beside: id of the other night's process.
        """
        if any(each.time > due_s and each.pid != beside for each in site.desk.notes()):
            return True
        which = {
            "expected_start_time": {"after_": datetime.fromtimestamp(due_s - site.period_s / 2, UTC).isoformat()},
            "state": {"type": {"not_any_": [*UNDER_WAY, "CRASHED"]}},
        }
        return any(runs_of(self.stack.api_url, site, **which))

    def _open(self, *sites: Site, due_before: float | None = None) -> list[dict[str, Any]]:
        which: dict[str, Any] = {"state": {"type": {"any_": [*UNDER_WAY, "CRASHED"]}}}
        if due_before is not None:
            which["expected_start_time"] = {"before_": datetime.fromtimestamp(due_before, UTC).isoformat()}
        return [run for run in runs_of(self.stack.api_url, *sites, **which) if _is_open(run)]

    def books(self, *, may_fail: Iterable[str] = ()) -> Books:
        """Return what became of the nights."""
        runs = {site.name: list(runs_of(self.stack.api_url, site)) for site in self.sites}
        store = self.stack.store(self.stack.home / "books")
        champions = {site.name: read_champion(store, site.name) for site in self.sites}
        return balance(self.sites, runs, store, champions, may_fail=may_fail)

    @contextmanager
    def deed(
        self,
        kind: str,
        stage: str = "-",
        site: Site | None = None,
        *,
        killed: tuple[Victim, ...] = (),
        spares_flows: bool = False,
    ) -> Iterator[None]:
        """Write down what is done in a block. It begins when the night is there that was waited for."""
        self._struck.began = time.time()
        yield
        began, ended = self._struck.began, time.time()
        self.deeds.append(Deed(kind, stage, site.name if site else None, began, ended, killed, spares_flows))

    def held(self, site: Site, stage: str) -> Note:
        """Hold a site's next night at a stage, and return the note of its process once it is there."""
        known = sum(1 for _ in site.desk.notes())
        site.desk.hold_at(stage)

        def look() -> Note | None:
            return next((each for each in list(site.desk.notes())[known:] if each.what == "held"), None)

        found = wait_for(look, f"a night of {site.name} to come to {stage}", timeout_s=HELD_TIMEOUT_S)
        self._struck.began = time.time()
        return found

    @contextmanager
    def in_turn(self, site: Site, stage: str) -> Iterator[None]:
        """Hold a site's next night at a stage, and keep the services to the block, in which they are struck.

        Nights are waited for side by side: that takes longer than most strikes do. One that another strike has ended
        meanwhile is no longer at its stage, and the next one is held.
        """
        while True:
            note = self.held(site, stage)
            with self._services:
                if psutil.pid_exists(note.pid):
                    self._struck.began = time.time()
                    yield
                    return

    def kill(self, *names: Victim) -> None:
        """Kill services."""
        for name in names:
            process = self.stack.service(name)
            assert process is not None, f"the {name} does not run"
            for each in [process] if name == "worker" else processes.tree(process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()

    def next_site(self, sites: Sequence[Site], *, least_s: float = 1.0) -> Site:
        """Return the site whose night is due next, but not at once."""
        return min(sites, key=lambda site: (site.until_due(time.time()) - least_s) % site.period_s)


def _is_open(run: Mapping[str, Any]) -> bool:
    kind = run["state"]["type"]
    since = datetime.fromisoformat(run["state"]["timestamp"]).timestamp()
    return kind in UNDER_WAY or (kind == "CRASHED" and time.time() - since < GIVEN_UP_S)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, if it still lives: another mishap may have been quicker."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).send_signal(number)


@contextmanager
def year(
    directory: Path,
    names: Sequence[str],
    *,
    period_s: float,
    starts: Mapping[str, Start],
    bad_days: int | None = None,
) -> Iterator[Year]:
    """Bring a stack up with sites on it; end all of it, and see that nothing is left.

    Args:
        directory: for all that it writes.
        names: of the sites.
        period_s: from night to night.
        starts: how flows are started, by site; the others' are forked, and not imported for each.
        bad_days: every so many days' data are bad; None: no day's, where a site has too few nights to meet a good one.
    """
    with night_stack(directory) as stack:
        made = Year(stack, make_sites(names, period_s, stack.home, bad_days), directory / "warm")
        try:
            made.warm_up()
            made.deploy(starts)
            yield made
        finally:
            for site in made.sites:
                site.desk.let_go()
            made.cool_down()


@contextmanager
def night_stack(directory: Path) -> Iterator[NightStack]:
    """Run a stack whose services may be killed: nobody takes their ports meanwhile, as none is a usual one."""
    with running(NightStack(directory / "home", directory / ".env")) as stack:
        yield stack


def kills(deeds: Sequence[Deed]) -> dict[Victim, Counter[str]]:
    """Return how often each victim was killed at each stage; one that never was has an empty count."""
    found: dict[Victim, Counter[str]] = {victim: Counter() for victim in ("flow", *SERVICES)}
    for deed in deeds:
        for victim in deed.killed:
            found[victim][deed.stage] += 1
    return found


def restarted_for_nothing(deeds: Sequence[Deed], books: Books) -> list[str]:
    """Return nights that were begun several times though nobody had ended or stopped their process."""
    hard = [deed for deed in deeds if not deed.spares_flows]
    excused = {(night.site, night.due) for deed in hard for night in books.struck(deed.site, deed.began, deed.ended)}
    return [
        f"{night.site}, night of {night.due:.0f}: began {night.starts} times, though its process was left alone"
        for night in books.nights
        if night.starts > 1 and (night.site, night.due) not in excused
    ]


def failed_for_nothing(deeds: Sequence[Deed], books: Books, causes: Mapping[str, str]) -> list[str]:
    """Return nights that failed without the mishap after which one may.

    Args:
        deeds: what befell the year.
        books: its nights.
        causes: the mishap, by how the sentence begins.
    """
    excused = {
        (night.site, night.due, deed.kind)
        for deed in deeds
        if deed.kind in causes.values()
        for night in books.struck(deed.site, deed.began, deed.ended)
    }
    return [
        f"{night.site}, night of {night.due:.0f}: failed with nothing having befallen it: {night.says}"
        for night in books.nights
        if night.outcome == "failed"
        and (night.site, night.due, next(kind for told, kind in causes.items() if night.says.startswith(told)))
        not in excused
    ]


def drawn(seed: int) -> random.Random:
    """Return the chance of a year: the same one each time."""
    return random.Random(seed)
