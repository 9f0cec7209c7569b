"""Processes that drive a run, and may be killed: one that calls the tasks on order, and one that runs the flow.

They are forked from a server that has imported all they need, so a new one is there within moments.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from tasks.results import PPORun
from tests.chaos.plan import MAKER_PHASES, Aim, PlanFolder
from tests.chaos.watcher import Forgotten, wire

ATTEMPTS = 3
"""As Prefect makes of an episode's task."""
RETRY_DELAY_S = 0.5
PLAY_TIMEOUT_S = 900.0
COMMIT_TIMEOUT_S = 300.0
MAKERS_TIMEOUT_S = 300.0
PRELOADED = ["torch", "transformers", "ray", "flows.ppo", "tests.chaos.driver"]


@dataclass(frozen=True)
class Stage:
    """Where a run is played, and how it is disturbed."""

    environment: Mapping[str, str]
    directory: Path
    """Of plans and the log."""
    forgets: Forgotten = ""


@dataclass(frozen=True)
class Played:
    """What a driver says of an episode."""

    failures: tuple[str, ...]
    """The sentence of each attempt that failed."""
    is_done: bool


class Driver:
    """A process that plays episodes when it is told to, held from the tests' process."""

    def __init__(self, stage: Stage, run: PPORun) -> None:
        self.stage, self.run = stage, run
        self._process: Any = None
        self._orders: Connection

    @property
    def pid(self) -> int:
        assert self._process is not None
        return int(self._process.pid)

    def order(self, what: Literal["play", "stand", "store the policy"], *details: Any) -> None:
        """Have something done; a process is started if there is none."""
        if self._process is None:
            self._start()
        with suppress(BrokenPipeError):  # killed since the last answer
            self._orders.send((what, details))

    def answer(self, timeout_s: float = PLAY_TIMEOUT_S) -> Played | None:
        """Return what the process said; None if it was killed."""
        try:
            assert self._orders.poll(timeout_s), f"waited {timeout_s:.0f} s for the driver, and it said nothing"
            answer = self._orders.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(60)
            assert self._process.exitcode == -signal.SIGKILL, f"the driver ended with {self._process.exitcode}"
            self._process = None
            return None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Played)
        return answer

    def end(self) -> None:
        """End the process and its cluster."""
        if self._process is None:
            return
        self._orders.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._process = None

    def _start(self) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        self._process = _context().Process(target=_obey, args=(self.stage, self.run, theirs))
        self._process.start()
        theirs.close()


def start_flow(stage: Stage, parameters: Mapping[str, Any]) -> Any:
    """Start a process that runs the flow `ppo` to its end, or its own; return it."""
    process = _context().Process(target=_flow, args=(stage, dict(parameters)))
    process.start()
    return process


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _flow(stage: Stage, parameters: dict[str, Any]) -> None:
    os.environ.update(stage.environment)
    wire(stage.directory, stage.forgets)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.ppo import ppo

    # Prefect read the environment when the forking server imported it, and would start a server of its own here
    with temporary_settings({PREFECT_API_URL: stage.environment["PREFECT_API_URL"]}):
        ppo(**parameters)


def _obey(stage: Stage, run: PPORun, orders: Connection) -> None:
    from tasks.clusters import end_cluster

    os.environ.update(stage.environment)
    wire(stage.directory, stage.forgets)
    doings: dict[str, Callable[..., Played]] = {"play": _play, "stand": _stand, "store the policy": _store_policy}
    try:
        while True:
            try:
                what, details = orders.recv()
            except EOFError:
                return
            try:
                orders.send(doings[what](stage, run, *details))
            except Exception as error:  # told, and judged by the tests
                orders.send(RuntimeError(f"{type(error).__name__}: {error}"))
    finally:
        end_cluster(run.name)


def _play(stage: Stage, run: PPORun, episode: int, aim: Aim | None, deed: Mapping[str, Any]) -> Played:
    """Play an episode until its state is committed, whatever dies."""
    from rlhf_core.ray_tools.calls import ask
    from tasks.context import open_context
    from tasks.ppo import ppo_episode
    from tasks.ppo_group import trainer_for

    folder, context = PlanFolder(stage.directory), open_context()

    def play() -> None:
        ppo_episode.fn(run, episode)
        stored = ask(trainer_for(run, episode + 1, context).await_commit, COMMIT_TIMEOUT_S)
        if stored <= episode:
            raise ConnectionError(f"episode {episode + 1} was over, and went with its trainer")
        folder.note(role="driver", stored=stored)

    if aim is None:
        return _attempt(play, folder)
    trainer_for(run, episode, context)
    makers = _await_makers(run, folder)
    folder.make(aim, **(deed or {"targets": _targets(run, aim, makers)}))
    return _attempt(play, folder)


def _stand(stage: Stage, run: PPORun, episode: int) -> Played:
    """Have the actors be where an episode begins."""
    from tasks.context import open_context
    from tasks.ppo_group import trainer_for

    return _attempt(lambda: trainer_for(run, episode, open_context()), PlanFolder(stage.directory))


def _store_policy(_: Stage, run: PPORun) -> Played:
    from tasks.ppo import publish_policy

    publish_policy.fn(run)
    return Played((), is_done=True)


def _attempt(work: Callable[[], Any], folder: PlanFolder) -> Played:
    """Do something as often as Prefect would."""
    from tasks.failures import first_line, passes

    failures: list[str] = []
    while len(failures) < ATTEMPTS:
        try:
            work()
        except Exception as error:
            failures.append(first_line(error))
            folder.note(role="driver", failure=failures[-1])
            if not passes(error):
                break
            time.sleep(RETRY_DELAY_S)
        else:
            return Played(tuple(failures), is_done=True)
    return Played(tuple(failures), is_done=False)


def _await_makers(run: PPORun, folder: PlanFolder) -> list[int]:
    """Return the process ids of all makers, once each has weights: one may still come back from the kill before."""
    import ray

    found: list[int] = []
    deadline = time.monotonic() + MAKERS_TIMEOUT_S
    for index in range(run.config.ppo.cluster.num_makers):
        while True:
            assert time.monotonic() < deadline, f"waited {MAKERS_TIMEOUT_S:.0f} s for maker-{index} to take weights"
            with suppress(ray.exceptions.RayError, TimeoutError):
                pid = int(ray.get(ray.get_actor(f"maker-{index}").ping.remote(), timeout=30))
                if any(event["pid"] == pid and event.get("phase") == "swap" for event in folder.events()):
                    found.append(pid)
                    break
            time.sleep(0.1)
    return found


def _targets(run: PPORun, aim: Aim, makers: list[int]) -> tuple[int, ...]:
    """Return who is to die, by process id; nobody: a maker that comes there itself."""
    import ray

    from tasks.context import open_context
    from tasks.ppo_group import TRAINER, lease

    def pid(name: str) -> int:
        return int(ray.get(ray.get_actor(name).ping.remote(), timeout=30))

    head = lease(run, open_context()).head
    if aim.victim == "maker":
        return () if aim.phase in MAKER_PHASES else (makers[aim.occurrence % len(makers)],)
    found = {
        "all makers": lambda: tuple(makers),
        "trainer": lambda: (pid(TRAINER),),
        "second rank": lambda: (pid(f"{TRAINER}-1"),),
        "head": lambda: (head[0].pid,),
        "raylet": lambda: (head[1].pid,),
        "driver": lambda: (os.getpid(),),
    }
    return found[aim.victim]()
