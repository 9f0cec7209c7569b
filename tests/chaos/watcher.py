"""How a plan comes into the actors' processes: factories and a keeper of the tests' own, around the real ones.

Production code knows nothing of plans. A task that starts actors takes these classes from where they are defined, and
there `wire` replaces them, in the driver's process alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

from infra.artifacts import ArtifactStore, open_default_store
from rlhf_core import phases
from rlhf_core.ppo.state import RolloutState, TrainingState
from rlhf_core.strategy.ranks import current_ranks
from tasks import ppo_keeper, ppo_models
from tasks.results import PPORun
from tests.chaos.plan import Plan, PlanFolder

Forgotten = Literal["", "moments", "controls", "value line"]
"""What a keeper loses of the state that it reads back: for controls, which must notice."""
FILLING_BYTES = 1 << 16


class Watcher:
    """Notes each phase that its process comes to, and carries out the plan that is for it."""

    def __init__(self, directory: Path, role: str) -> None:
        self._folder, self._role = PlanFolder(directory), role
        self._lock = threading.Lock()
        self._number, self._count = 0.0, 0

    def __call__(self, phase: phases.Phase) -> None:
        """Come to a phase."""
        with self._lock:
            self._folder.note(role=self._role, phase=phase)
            plan = self._folder.pending()
            if plan is None or (plan.witness, plan.phase) != (self._role, phase):
                return
            if plan.number != self._number:
                self._number, self._count = plan.number, 0
            self._count += 1
            if self._count == plan.occurrence and self._folder.take():
                self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        targets = plan.targets or (os.getpid(),)
        self._folder.note(role=self._role, deed=plan.phase, targets=targets)
        if plan.fill:
            _fill(Path(plan.fill))
            return
        for pid in sorted(targets, key=lambda pid: pid == os.getpid()):  # itself last
            with suppress(ProcessLookupError):
                os.kill(pid, plan.signal)


class WatchedFactory:
    """Builds what another factory builds, in a process that is watched from then on."""

    def __init__(self, directory: Path, role: str, factory: Callable[[], Any]) -> None:
        self._directory, self._role, self._factory = directory, role, factory

    def __call__(self) -> Any:
        """Watch, and build."""
        rank = current_ranks().rank if self._role == "trainer" else 0
        role = f"{self._role}-{rank}" if rank else self._role
        phases.watch(Watcher(self._directory, role))
        return self._factory()


class WatchedKeeper(ppo_keeper.StoreKeeper):
    """Says what it restored, and comes to the phases of a commit; one that forgets something is for the controls."""

    def __init__(self, directory: Path, forgets: Forgotten, run: PPORun) -> None:
        super().__init__(run)
        self._directory, self._forgets = directory, forgets

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_directory": self._directory, "_forgets": self._forgets}

    @cached_property
    def _store(self) -> ArtifactStore:
        store = open_default_store(patient=True)
        store._backend = cast(Any, _WatchedBackend(store._backend))
        return store

    def last_state(self) -> TrainingState | None:
        state = super().last_state()
        PlanFolder(self._directory).note(role="trainer", restored=len(state.history) if state else 0)
        return state and forget(state, self._forgets)


def forget(state: TrainingState, what: Forgotten) -> TrainingState:
    """Return a state without something that a continuation needs."""
    if what == "moments":
        tensors = {name: body * 0 if ".exp_avg" in name else body for name, body in state.tensors.items()}
        return replace(state, tensors=tensors)
    if what == "controls":
        return replace(state, controls={**(state.controls or {}), "kl_coef": 0.5}, rollouts=RolloutState())
    if what == "value line":
        return replace(state, learner={**state.learner, "learner": {**state.learner["learner"], "value_line": None}})
    return state


class _WatchedBackend:
    """A store's backend whose uploads and manifests of training states are phases."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def upload(self, key: str, body: bytes) -> None:
        phases.reached("upload")
        self._backend.upload(key, body)

    def create(self, key: str, data: bytes) -> bool:
        if key.startswith("versions/"):
            phases.reached("manifest")
        return bool(self._backend.create(key, data))


def wire(directory: Path, forgets: Forgotten) -> None:
    """Have the tasks of this process start watched actors.

    Args:
        directory: of the plan.
        forgets: what a restored trainer loses.
    """

    def watched(role: str, factory: Callable[[PPORun], Any]) -> Callable[[PPORun], WatchedFactory]:
        return lambda run: WatchedFactory(directory, role, factory(run))

    modules = cast(Any, ppo_models), cast(Any, ppo_keeper)
    modules[0].LearnerFactory = watched("trainer", ppo_models.LearnerFactory)
    modules[0].MakerFactory = watched("maker", ppo_models.MakerFactory)
    modules[1].StoreKeeper = partial(WatchedKeeper, directory, forgets)


def _fill(ballast: Path) -> None:
    """Write a file until the disk that it is on is full."""
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(FILLING_BYTES))
