"""A run that is played again and again while its processes are killed, and what it must come to."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load

from flows.presets import resolve
from infra.artifacts import ArtifactStore
from infra.clusters import ClusterRecord
from infra.errors import ReferenceNotFoundError
from rlhf_core.config import PipelineConfig
from tasks.ppo_keeper import SAMPLES
from tests.chaos.driver import Driver, Played, Stage
from tests.chaos.plan import COLLECTING_PHASES, Aim, PlanFolder
from tests.chaos.table import ROWS, Row, parted, revivals
from tests.integration.cluster_processes import wait_until_nothing_is_left
from tests.integration.ppo_runs import TINY_RUN, Run
from tests.tiny_llama import write_tiny_llama

EPISODES = 5
KEPT = "ppo-state=all"
WAITING = "waiting."
REVIVAL_TIMEOUT_S = 300.0
MOST_LOST = 3
"""Times that a maker may be killed before it has made a chunk: on a busy machine the other makes all, and a fourth time
it would be given up."""
MOMENT_TIMEOUT_S = 120.0


def tiny_config(directory: Path, *, seed: int = 0, episodes: int = EPISODES, **ppo: Any) -> PipelineConfig:
    """A run of episodes of a second; all that is carried from one to the next is at work.

    Args:
        directory: where the model is written.
        seed: of the run.
        episodes: of the run.
        ppo: further settings, by the key below `ppo`, in which `__` stands for a dot.
    """
    model = directory / "model"
    if not model.exists():
        write_tiny_llama(model, initializer_range=0.2)
    further = {f"ppo.{name.replace('__', '.')}": value for name, value in ppo.items()}
    return resolve("llama7b", model=str(model), episodes=episodes, seed=seed, overrides=TINY_RUN | further)


def state_digest(store: ArtifactStore, name: str, version: int) -> str:
    """The SHA-256 of a committed state's tensors, but for chunks that wait, and of the samples that it learnt from.

    How many chunks of the next episode are made when a state is taken is a matter of luck; what is in them is not.
    """
    manifest = store.resolve(f"ppo-state/{name}@{version}")
    tensors: dict[str, torch.Tensor] = {}
    for file in manifest.files:
        if file.path.endswith(".safetensors"):
            tensors |= load(store.read_bytes(manifest, file.path))
    digest = hashlib.sha256(store.read_bytes(manifest, SAMPLES))
    kept = sorted(name for name in tensors if not name.startswith(WAITING))
    assert {name.partition(".")[0] for name in kept} == {"actor", "critic", "random"}
    for each in kept:
        tensor = tensors[each]
        digest.update(f"{each} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Campaign:
    """One configuration in one home; its undisturbed digests, and the episode that is due."""

    config: PipelineConfig
    directory: Path
    stage: Stage
    made: Run
    driver: Driver
    folder: PlanFolder
    digests: list[str] = field(default_factory=list)
    """Of the state after each episode, undisturbed."""
    policy: str = ""
    due: int = 0
    lost: int = 0
    """Times that makers were killed since they were built with their trainer."""
    has_diverged: bool = False
    """The last case left other bits behind; the next begins with an empty store."""

    @property
    def name(self) -> str:
        return self.made.plan.name

    def strike(self, aim: Aim) -> Row:
        """Play the episode that is due, with a kill in it, and hold its state to the undisturbed one's."""
        if self.has_diverged:
            self.begin()
        is_late = self.due >= self.config.ppo.episodes - (aim.phase in COLLECTING_PHASES)
        strikes_makers = aim.victim in ("maker", "all makers")
        if is_late or (strikes_makers and self.lost == MOST_LOST):
            self.finish()
            self.begin()
        self.lost = self.lost + 1 if strikes_makers else 0
        started = time.time()
        return self.judge(aim, self.play(self.due, aim), started)

    def finish(self) -> None:
        """Play what is left, undisturbed, and hold states and policy to those of the undisturbed run."""
        while self.due < self.config.ppo.episodes:
            assert self.play(self.due).is_done
            self.due += 1
            assert state_digest(self.made.store, self.name, self.due) == self.digests[self.due - 1]
        assert self.store_policy() == self.policy

    def play(self, episode: int, aim: Aim | None = None) -> Played:
        """Play an episode; where the driver is killed, the next one goes on."""
        self.driver.order("play", episode, aim, {})
        return self.driver.answer() or self._gone_on_with("play", episode, None, {})

    def _gone_on_with(self, what: Literal["play", "stand"], *details: Any) -> Played:
        """Have the next driver do what one that was killed did not, once nothing of that one's cluster is left."""
        with suppress(FileNotFoundError):  # the last thing to go
            wait_until_nothing_is_left(self.cluster)
        self.driver.order(what, *details)
        played = self.driver.answer()
        assert played is not None, "the driver was killed twice"
        return played

    def judge(self, aim: Aim, played: Played, started: float) -> Row:
        """Return what became of a case; fail unless it came to pass, and the state has the undisturbed bits."""
        assert played.is_done, f"{aim}: {played.failures}"
        self._await_deed(aim)
        self.due += 1
        self.driver.order("stand", self.due)
        standing = self.driver.answer() or self._gone_on_with("stand", self.due)
        assert standing.is_done, standing.failures
        if self.lost:
            self._await_revival(started, 1 if aim.victim == "maker" else self.config.ppo.cluster.num_makers)
        digest = state_digest(self.made.store, self.name, self.due)
        self.has_diverged = bool(self.digests) and digest != self.digests[self.due - 1]
        row = Row.of(aim, episode=self.due, digest=digest, events=list(self.folder.events()), since=started)
        assert not self.has_diverged, f"after {aim} in episode {self.due}: {digest}, not {self.digests[self.due - 1]}"
        ROWS.append(row)
        return row

    def _await_deed(self, aim: Aim) -> None:
        """Wait until the plan is carried out: makers may come to its phase when an episode is over."""
        deadline = time.monotonic() + MOMENT_TIMEOUT_S
        while self.folder.pending() is not None:
            assert time.monotonic() < deadline, f"the moment never came: {aim}"
            time.sleep(0.05)

    def _await_revival(self, started: float, number: int) -> None:
        """Wait until the makers that were killed are there again: an episode may be over before."""
        deadline = time.monotonic() + REVIVAL_TIMEOUT_S
        while True:
            _, before, after = parted(list(self.folder.events()), started)
            if len(revivals(before, after)) >= number or any("restored" in event for event in after):
                return
            assert time.monotonic() < deadline, f"waited {REVIVAL_TIMEOUT_S:.0f} s for {number} makers to come up again"
            time.sleep(0.1)

    def begin(self) -> None:
        """Begin the run again, in an empty store."""
        self.made.begin()
        self.due, self.lost, self.has_diverged = 0, 0, False

    def store_policy(self) -> str:
        """Store the policy; return the SHA-256 of its weights."""
        self.driver.order("store the policy")
        assert self.driver.answer() is not None
        with surroundings(self.stage):
            return policy_digest(self.made)

    @property
    def cluster(self) -> ClusterRecord:
        return ClusterRecord.load(self.directory / "home" / "clusters" / f"{self.name}.json")


@contextmanager
def campaign(
    config: PipelineConfig,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    known: Campaign | None = None,
    repeats: bool = True,
    run_type: type[Run] = Run,
) -> Iterator[Campaign]:
    """A run on a cluster of its own that was played once undisturbed, and has begun again.

    Args:
        config: of the run.
        directory: for all that it writes.
        environment: further variables, such as those of another store, or by which actors' processes are forked.
        known: the same run, whose undisturbed digests are these ones too; then it is not played.
        repeats: whether it comes to the same bits every time, as in lockstep; else nothing is played or compared.
        run_type: plans the run.
    """
    plans = directory.with_name(f"{directory.name}-plans")  # not on a disk that is to be full
    plans.mkdir()
    stage = Stage(
        {
            "RLHF_HOME": str(directory / "home"),
            "RLHF_STORE_URL": f"file://{directory}/store",
            "RLHF_RETENTION": KEPT,
            "RAY_memory_monitor_refresh_ms": "0",  # or Ray kills too, when others fill the machine
            **(environment or {}),
        },
        plans,
    )
    with surroundings(stage):
        made = run_type(config, directory)
        fresh = Campaign(config, directory, stage, made, Driver(stage, made.plan), PlanFolder(plans))
        try:
            if known is None and repeats:
                _play_undisturbed(fresh)
            elif known is not None:
                assert fresh.name == known.name
                fresh.digests, fresh.policy = known.digests, known.policy
            yield fresh
        finally:
            fresh.driver.end()


@contextmanager
def surroundings(stage: Stage) -> Iterator[None]:
    """Let this process look into a stage's store and home: of several campaigns, each has its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stage.environment.items():
            patch.setenv(name, value)
        yield


def policy_digest(made: Run) -> str:
    """The SHA-256 of the finished policy's weights."""
    return hashlib.sha256(json.dumps(sorted(made.weights().items())).encode()).hexdigest()


def committed(made: Run) -> int:
    """How many episodes are committed."""
    try:
        return made.store.resolve(f"ppo-state/{made.plan.name}").version
    except ReferenceNotFoundError:
        return 0


def _play_undisturbed(fresh: Campaign) -> None:
    for episode in range(fresh.config.ppo.episodes):
        played = fresh.play(episode)
        assert played.is_done, played.failures
        fresh.digests.append(state_digest(fresh.made.store, fresh.name, episode + 1))
    fresh.policy = fresh.store_policy()
    fresh.begin()
