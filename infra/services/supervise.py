"""`rlhf up --supervise`: look at the services every few seconds, and have those started again that died or hang.

This process only looks. What starts services is a command of its own each time, with the code and the settings of that
moment: a supervisor may be older than both by months. It starts nothing while another command changes the stack.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

import psutil

from infra.errors import InfraError
from infra.process_record import ProcessRecord
from infra.services import postgres
from infra.services.service import Report
from infra.services.state import StackState, is_locked
from infra.services.status import is_well
from infra.settings import settings

_LOOK_S = 5.0
_ASK_S = 10.0
"""From question to question whether a service works: these cost it something, a look at its process does not."""
_RECONNECTED_S = 60.0
"""A worker may be silent for so long after its server has begun to answer."""
_FIRST_S, _LONGEST_S = 10.0, 300.0
_STABLE_S = 120.0
_BRING_BACK_S, _UNDO_S = 900.0, 60.0
"""For all services to start, and to end again."""


class Backoff:
    """When a service is started again: at once, then later and later while it never works for long."""

    def __init__(self) -> None:
        self._delay_s = _FIRST_S
        self._not_before = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long it is left alone yet."""
        return max(self._not_before - now, 0.0)

    def tried(self, now: float) -> None:
        """Remember a try that has just ended, well or not."""
        self._not_before = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_S)

    def works(self, now: float) -> None:
        """Forget earlier tries if the service has worked for long."""
        if now > self._not_before + _STABLE_S:
            self._delay_s = _FIRST_S


def supervise(report: Report, bring_back: Sequence[str]) -> None:
    """Keep this process's stack up, until the stack is taken down or this process is asked to end.

    Args:
        report: takes a line for each thing that happens.
        bring_back: the command that calls `infra.services.bring_back` for its parent, this process.

    Raises:
        ServiceError: if the stack's state file is damaged.
    """
    home, us = settings().home, ProcessRecord.of(os.getpid())
    watch, care = _Watch(), _Care(report, bring_back)
    report(f"the stack is supervised: each {_LOOK_S:g} s its services are looked at")
    told = ""
    try:
        while (state := StackState.load(home)).supervisor == us:
            try:
                troubles = watch.troubles(state)
                if not (troubles and is_locked(home)):  # what another command starts does not answer yet
                    care.see_to(watch.names, troubles)
                told = ""
            except (InfraError, OSError, psutil.Error) as error:  # such as a setting that somebody is just writing
                if told != str(error):
                    report(f"the services cannot be looked after just now: {error}")
                told = str(error)
            time.sleep(_LOOK_S)
        report("the stack was taken down: supervision ends")
    except (KeyboardInterrupt, SystemExit):
        report("supervision ends; what runs goes on without it, until `rlhf down`")


class _Watch:
    """What is wrong with the services."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """All that have run: one that did not start is no longer in the stack's state."""
        self._ask_at = 0.0
        self._silent: dict[str, psutil.Process] = {}
        self._server: psutil.Process | None = None
        """The one that answers."""
        self._answers_since = 0.0

    def troubles(self, state: StackState) -> dict[str, str]:
        """Return what is wrong, by service."""
        self.names |= state.services.keys()
        if not settings().wants_local_store:
            self.names.discard("store")
        if state.database != "postgres":
            self.names.discard(postgres.NAME)
        found = {name: record.process() for name, record in state.services.items() if name in self.names}
        live = {name: process for name, process in found.items() if process}
        if (now := time.monotonic()) >= self._ask_at:
            self._ask_at = now + _ASK_S
            self._silent = dict(self._ask(state, live, now))
        hang = {name for name, process in self._silent.items() if live.get(name) == process}
        return dict.fromkeys(self.names - live.keys(), "has died") | dict.fromkeys(hang, "does not answer")

    def _ask(
        self, state: StackState, live: Mapping[str, psutil.Process], now: float
    ) -> Iterator[tuple[str, psutil.Process]]:
        others = {name: process for name, process in live.items() if name != "worker"}
        silent = {name: process for name, process in others.items() if not is_well(name, state, process)}
        yield from silent.items()
        server = None if "server" in silent else live.get("server")
        if server != self._server:
            self._server, self._answers_since = server, now
        knows = server and now > self._answers_since + _RECONNECTED_S  # the worker is asked for there
        if knows and (worker := live.get("worker")) and not is_well("worker", state, worker):
            yield "worker", worker


class _Care:
    """What is done about it."""

    def __init__(self, report: Report, bring_back: Sequence[str]) -> None:
        self._report = report
        self._bring_back = bring_back
        self._backoffs = defaultdict[str, Backoff](Backoff)
        self._told: set[str] = set()
        """The services of which it was said that they are left alone yet."""

    def see_to(self, names: Set[str], troubles: Mapping[str, str]) -> None:
        """Have services started again, unless they were just now.

        Args:
            names: of all.
            troubles: what is wrong, by service.
        """
        now = time.monotonic()
        for name in names - troubles.keys():
            self._backoffs[name].works(now)
        waits = {name: self._backoffs[name].wait_s(now) for name in troubles}
        self._told &= waits.keys()
        for name in sorted(name for name, wait_s in waits.items() if wait_s and name not in self._told):
            self._told.add(name)
            self._report(
                f"the {name} {troubles[name]} again, soon after the last try: the next is in {waits[name]:.0f} s"
            )
        if due := sorted(name for name, wait_s in waits.items() if not wait_s):
            for name in due:
                self._report(f"the {name} {troubles[name]}: bringing it back")
            self._run()
            for name in due:
                self._backoffs[name].tried(time.monotonic())
            self._told.difference_update(due)

    def _run(self) -> None:
        # In a session of its own: a terminal's Ctrl-C is for us, and we pass it on once.
        child = subprocess.Popen(self._bring_back, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            child.wait(_BRING_BACK_S)
        except BaseException as error:
            child.terminate()
            try:
                child.wait(_UNDO_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            self._report(f"what brings services back did not end within {_BRING_BACK_S:.0f} s, and was ended")
