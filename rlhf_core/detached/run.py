"""The PPO trainer of a run as an actor: schedules chunks, learns, publishes weights, commits; and its further ranks."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from transformers import PreTrainedModel

from rlhf_core.config import PPOConfig
from rlhf_core.counting import counted, ordinal
from rlhf_core.data import Problem
from rlhf_core.detached.rollouts import Rollouts
from rlhf_core.errors import TrainingError
from rlhf_core.freed_memory import give_back
from rlhf_core.models.base import check_bases
from rlhf_core.models.base_on_gpu import Loan, loans_of
from rlhf_core.models.loading import default_device
from rlhf_core.phases import reached
from rlhf_core.ppo.best import best_episode, is_measured, why_it_stops
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.episode import EpisodeLearner, learn_episode
from rlhf_core.ppo.learner import PPOLearner, PPOStats
from rlhf_core.ppo.loop import Collected, Loop
from rlhf_core.ppo.metrics import episode_metrics, staleness, step_means
from rlhf_core.ppo.order import in_key_order
from rlhf_core.ppo.published_weights import pieces_to_publish, weights_to_publish
from rlhf_core.ppo.state import EpisodeRecord, RolloutState, TrainingState
from rlhf_core.ray_tools.group import GROUPS, GroupMember, Peers
from rlhf_core.rollout import worker
from rlhf_core.strategy.ranks import ALONE, SharedState, current_ranks, share_state
from rlhf_core.types import EpisodeControls, Experience, Sample
from rlhf_core.weights import Publisher
from rlhf_core.weights.in_parts import write_pieces

logger = logging.getLogger(__name__)

WAITING = ("generate", "score")
"""Phases in which the trainer waits for the makers."""


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """Where a trainer stands: with the run's name, the triple that must match before it is reused."""

    next_episode: int
    """Also the version of its weights."""
    incarnation: str
    has_all_makers: bool
    """No maker is given up; one that is being revived comes back by itself."""
    last: EpisodeRecord | None
    """The episode before; None at the start."""
    stops: str | None = None
    """Why the run ends here, before its last episode; None if it goes on."""


class StateKeeper(Protocol):
    """Keeps training states and the finished policy; the artifact store behind it is not the core's to know."""

    def commit_state(self, state: TrainingState, samples: list[Sample]) -> None:
        """Store the state after `state.history[-1]`, and that episode's samples; return once nothing can lose it.

        The tensors may be the learner's own: they stay as they are until this returns, and no longer.
        """

    def last_state(self) -> TrainingState | None:
        """Return the last committed state, or None before the first."""

    def keep_best(self, save: Callable[[Path], None]) -> None:
        """Keep the policy of the best episode so far, in place of a former one; the next state holds it, too."""

    def commit_policy(self, save: Callable[[Path], None], *, history: tuple[EpisodeRecord, ...]) -> None:
        """Store the policy of the best episode, or else what `save` writes to a directory as `save_pretrained` does."""

    def keep_failed_batch(self, save: Callable[[Path], None]) -> str:
        """Keep a batch that could not be learnt from, which `save` writes to a directory; return where it is."""


class _Episode:
    """The episode that is under way: what is learnt from, and the trainer's time by phase.

    Args:
        collected: what is learnt from.
        controls: that its rewards were made with.
        waits: seconds of waiting for the makers, by phase.
        stored_s: seconds of waiting until the former state was stored.
    """

    def __init__(
        self, collected: Collected, controls: EpisodeControls, waits: Mapping[str, float], stored_s: float = 0.0
    ) -> None:
        self.collected, self.controls = collected, controls
        self.seconds = dict(waits) | {"commit": stored_s}
        self.waited_s = stored_s
        """Of the other phases' time, what was spent waiting for makers and store."""
        self._since = time.perf_counter()

    def ends(self, phase: str) -> None:
        """Take the time since the phase before for this one's."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


@ray.remote(concurrency_groups=GROUPS | {"commit": 1})
class RunTrainer(GroupMember):
    """Runs episodes beside its makers: in lockstep, or up to `max_staleness` episodes behind them.

    A shell around `PPOLearner`. It restores itself from the keeper's last state, so building one is
    how a run starts and how it goes on: `build`, then `synchronise`, then `run_episode` for each episode due. Makers
    work on between two episodes: the scheduler's threads drive them as long as this process lives.

    Of several ranks that train one model this is the first, which leases, publishes and commits for all. The others,
    each a `TrainerRank`, form a group with it (`form_group`) before it is built, and are called by it from then on.

    Args:
        makers: names of the makers, looked up in this actor's namespace.
        learner_fn: builds the learner inside this process.
        problems: prompts of the run, in a fixed order.
        config: the run's configuration.
        seed: seed of prompts' order, sampling and minibatches.
        keeper: where states, the policy and failed batches go.
        save_policy: writes the finished policy, which it is given with its exact weights, to a directory.
        peers: names of the other ranks, in their order, looked up in this actor's namespace.
        weights_dtype: what makers are sent weights in, no less exact than their `rollout_dtype`; None takes that.
        measure: returns the policy's figures on the development split; None where nothing is measured.
    """

    def __init__(
        self,
        makers: Sequence[str],
        learner_fn: Callable[[], PPOLearner],
        problems: Sequence[Problem],
        config: PPOConfig,
        seed: int,
        keeper: StateKeeper,
        save_policy: Callable[[PreTrainedModel, Path], None],
        peers: Sequence[str] = (),
        weights_dtype: str | None = None,
        measure: Callable[[PreTrainedModel], Mapping[str, float]] | None = None,
    ) -> None:
        self._measure = measure
        self._maker_names = tuple(makers)
        self._learner_fn = learner_fn
        self._learner: PPOLearner
        self._problems, self._config, self._seed = list(problems), config, seed
        self._keeper, self._save_policy = keeper, save_policy
        self._incarnation = uuid.uuid4().hex
        self._history: tuple[EpisodeRecord, ...] = ()
        self._controls = RewardControls(config, ALONE)  # the first rank has every sample of an episode
        self._rollouts: Rollouts
        self._loop: Loop
        self._episode: _Episode
        self._publisher = Publisher(
            transport=config.cluster.weights_transport,
            bucket_bytes=config.cluster.bucket_bytes,
            dtype=getattr(torch, weights_dtype or config.rollout_dtype),
            sparse=config.cluster.sparse_weights,
        )
        self._peers = Peers(peers, config.cluster.collective_timeout_s)
        self._progress = "starting"
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._commit: Future[None] | None = None
        logger.info("process %d begins", os.getpid())

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def build(self) -> None:
        """Restore the last committed state and build the learner, while makers build theirs; before, if they borrow.

        Apart from `__init__`, whose errors Ray garbles.
        """
        state = self._keeper.last_state()
        if state is not None:
            self._controls.load_state(state.controls or {})
            self._history = state.history
        lends = default_device().type != "cpu" and self._config.shares_base
        self._rollouts = Rollouts(
            self._problems, self._config, seed=self._seed, controls=self._controls, completed=len(self._history),
            kept=state.rollouts if state is not None else RolloutState(), on_trouble=logger.warning,
            lends=self._lent if lends else tuple,
        )  # fmt: skip
        for name in self._maker_names:
            self._rollouts.scheduler.add(name, ray.get_actor(name))
        if not lends:
            self._rollouts.scheduler.start()
        # Ranks start at their own pace, and the first may be done long before another has its models.
        with self._peers.taking_part("build", timeout_s=self._config.cluster.start_timeout_s):
            self._learner = self._learner_fn()
            shared = share_state(SharedState(state.tensors, state.learner) if state else None, current_ranks())
            if shared is not None:
                self._learner.load_state(*shared)
        if lends:  # what makers on this GPU borrow is there now
            self._rollouts.scheduler.start()
        episodes = EpisodeLearner(
            self._learner, seed=self._seed, train_batch_size=self._config.train_batch_size, is_shared=True,
            own_makers=True, keep=self._keep_batch,
        )  # fmt: skip
        if state is not None:
            episodes.position = state.position
        self._loop = Loop(
            episodes, collect=self._collect, publish=self._publish, keep=self._keep, peers=self._with_peers,
            controls=self._controls,
        )  # fmt: skip

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def position(self) -> TrainerPosition:
        """Return where this trainer stands."""
        return TrainerPosition(
            next_episode=len(self._history),
            incarnation=self._incarnation,
            has_all_makers=set(self._rollouts.scheduler.living) == set(self._maker_names),
            last=self._history[-1] if self._history else None,
            stops=why_it_stops([record.metrics for record in self._history], self._config),
        )

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def progress(self) -> str:
        """Return what this trainer is doing, for the run's log."""
        return self._progress

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def queue_depth(self) -> int:
        """Return how many samples are made and not learnt."""
        return self._rollouts.queue.samples_waiting

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def synchronise(self) -> None:
        """Give every maker the weights of this trainer's version, and wait until they hold them."""
        self._send(len(self._history), completed=None)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def run_episode(self, episode: int) -> EpisodeRecord:
        """Collect, learn, publish; leave the commit of the new state to the next episode's time; return the record.

        Raises:
            ValueError: another episode is due.
            RlhfError: makers or a rank were lost, a number was not finite, or the commit before this one failed; or
                such an error ended this episode before.
        """
        if episode != len(self._history):
            raise ValueError(
                f"episode {ordinal(len(self._history))} is due, but episode {ordinal(episode)} was asked for"
            )
        if self._loop.episode != episode or self._loop.learner.has_begun:
            raise TrainingError(
                f"this trainer failed in episode {ordinal(episode)} once it had begun to learn it; build it anew, from "
                "its last state"
            )
        _check_bases(self._learner)
        self._loop.run_episode(self._config.max_epochs)
        self._progress = f"episode {ordinal(episode)}: done"
        return self._history[-1]

    @ray.method(concurrency_group="commit")  # type: ignore[untyped-decorator]
    def await_commit(self) -> int:
        """Wait until the last episode's state is stored; return the number of stored episodes.

        Does not wait for an episode that runs, which may itself wait for a rank that is gone.

        Raises:
            TimeoutError: it took longer than `cluster.commit_timeout_s`.
        """
        commit, episodes = self._commit, len(self._history)
        if commit is not None:
            try:
                commit.result(timeout=self._config.cluster.commit_timeout_s)
            except TimeoutError as error:
                raise TimeoutError(
                    f"waited {self._config.cluster.commit_timeout_s:.0f} s for the training state of episode "
                    f"{episodes} to be stored, and it was not; is the object store alive?"
                ) from error
        return episodes

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def commit_policy(self) -> None:
        """Store the finished policy, in the form that `save_policy` gives it."""
        self._progress = "storing the policy"
        _check_bases(self._learner)
        with self._peers.taking_part("policy"), self._learner.exact("actor") as actor:
            self._keeper.commit_policy(partial(self._save_policy, actor), history=self._history)

    def _lent(self) -> tuple[Loan, ...]:
        return loans_of(*_models(self._learner))

    def _collect(self, episode: int) -> Collected:
        def report(done: int, total: int) -> None:
            self._progress = f"episode {ordinal(episode)}: {done} of {counted(total, 'chunk')} made"

        made, waits = self._rollouts.collect(episode, report)
        started = time.perf_counter()
        if not self._config.max_staleness:
            self._progress = f"episode {ordinal(episode)}: waiting until the state before it is stored"
            self.await_commit()  # of tensors that are changed from here on
        stored_s = time.perf_counter() - started
        samples = [sample for chunk in made for sample in chunk.samples]
        self._progress = f"episode {ordinal(episode)}: learning from {counted(len(samples), 'sample')}"
        rows = in_key_order((Experience.from_numpy(chunk.experience), chunk.samples) for chunk in made)
        self._episode = _Episode(Collected(rows, samples), self._rollouts.controls_of(episode), waits, stored_s)
        return self._episode.collected

    def _with_peers(self, episode: int) -> AbstractContextManager[None]:
        return self._peers.taking_part("learn", self._peers.put(self._episode.collected.experience.to_numpy), episode)

    def _keep_batch(self, save: Callable[[Path], None]) -> str:
        return f"the batch is kept in {self._keeper.keep_failed_batch(save)}"

    def _publish(self, version: int) -> None:
        _check_bases(self._learner)
        give_back()  # what the passes needed, before makers begin theirs and the snapshot comes
        self._episode.ends("learn")
        self._progress = f"episode {ordinal(version - 1)}: publishing weights, version {version}"
        self._episode.waited_s += self._send(version, completed=version)
        self._episode.ends("synchronise")

    def _keep(self, episode: int, steps: Sequence[PPOStats]) -> None:
        """Have the state stored beside the next episode: in lockstep as it lies, for nothing is learnt in that time."""
        started = time.perf_counter()
        self.await_commit()  # the one before, unless in lockstep: no third state is in memory
        self._episode.waited_s += time.perf_counter() - started
        _check_bases(self._learner)
        measured = self._measured(episode)
        with self._peers.taking_part("state"):
            reached("snapshot")
            copied = self._config.max_staleness > 0
            snapshot, learner = self._learner.state(copied=copied)  # the learner's only pause
        self._episode.ends("commit")
        now = self._episode
        rows, samples = now.collected
        metrics = episode_metrics(samples, now.controls, ALONE) | step_means(steps)
        metrics |= staleness(rows.policy_version, learnt_at=episode) | measured
        figures = self._figures(now.seconds, now.waited_s)
        record = EpisodeRecord(episode, self._loop.episode, self._incarnation, metrics, now.seconds, figures)
        self._history = (*self._history, record)
        state = TrainingState(
            replace(self._loop.learner.position), learner, self._controls.state(), snapshot, history=self._history,
            rollouts=self._rollouts.state(),
        )  # fmt: skip
        self._commit = self._committer.submit(self._keeper.commit_state, state, samples)
        del self._episode  # its rows, before the next ones come

    def _measured(self, episode: int) -> dict[str, float]:
        """Return the policy's figures on the development split, where they are due; keep it if it is the best so far.

        Makers work on the next episode meanwhile.
        """
        if self._measure is None or not is_measured(episode, self._config):
            return {}
        self._episode.ends("commit")
        self._progress = f"episode {ordinal(episode)}: measuring on the development split"
        with self._peers.taking_part("policy"), self._learner.exact("actor") as actor:
            figures = dict(self._measure(actor))
            if best_episode([*(record.metrics for record in self._history), figures]) == episode:
                self._keeper.keep_best(partial(self._save_policy, actor))
        give_back()
        self._episode.ends("measure")
        return figures

    def _send(self, version: int, *, completed: int | None) -> float:
        """Publish the weights as `version`, which makers take before their next chunk; return the seconds waited."""
        scheduler = self._rollouts.scheduler
        if completed is None:
            scheduler.await_up(self._config.cluster.start_timeout_s)
        self._publisher.retire(scheduler.versions_in_use)
        facts: dict[str, Any] = {
            "version": version, "fully": not self._config.sends_adapters, "nodes": scheduler.nodes
        }  # fmt: skip
        with self._peers.taking_part("publish", self._publisher.form):
            publication = None
            if (pieces := pieces_to_publish(self._learner, self._config)) is not None:
                publication = self._publisher.publish_pieces(pieces, self._learner.ranks, **facts)
            if publication is None:
                publication = self._publisher.publish(weights_to_publish(self._learner, self._config), **facts)
        return self._rollouts.publish(publication, completed=completed)

    def _figures(self, seconds: Mapping[str, float], waited_s: float) -> dict[str, float]:
        """Return how busy trainer and makers were; `waited_s` of its phases the trainer waited for makers and store."""
        busy_s = sum(took for phase, took in seconds.items() if phase not in WAITING)
        return self._rollouts.figures(busy_s=busy_s - waited_s)


def _models(learner: PPOLearner) -> list[Any]:
    trained = (learner.trained(role) for role in ("actor", "critic"))
    return [each.model for each in trained if each is not None]


def _check_bases(learner: PPOLearner) -> None:
    """Check that nobody has changed what the models are mapped from: before an episode, publication and commits."""
    check_bases(*_models(learner))


@ray.remote(concurrency_groups=GROUPS)
class TrainerRank(GroupMember):
    """Holds this rank's part of the learner, and nothing that the first rank does not have: it commits nothing.

    Each method is called when the first rank does the same with its own part; what they return together, it keeps.

    Args:
        learner_fn: builds the learner inside this process, once it has joined the group.
        config: the run's configuration.
        seed: of the run.
    """

    def __init__(self, learner_fn: Callable[[], PPOLearner], config: PPOConfig, seed: int) -> None:
        self._learner_fn = learner_fn
        self._learner: PPOLearner
        self._config, self._seed = config, seed
        logger.info("process %d begins", os.getpid())

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def build(self) -> None:
        """Build the learner, and restore the state that the first rank found, if there is one."""
        with self._working():
            self._learner = self._learner_fn()
            state = share_state(None, current_ranks())
            if state is not None:
                self._learner.load_state(*state)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def learn(self, experience: Sequence[Any], episode: int) -> None:
        """Learn an episode's experience.

        Args:
            experience: reference of all its rows as plain arrays, inside a list so that Ray leaves fetching to us.
            episode: from 0.
        """
        with self._working():
            (arrays,) = ray.get(list(experience), timeout=self._config.cluster.collective_timeout_s)
            rows = Experience.from_numpy(arrays)
            _check_bases(self._learner)
            learn_episode(self._learner, rows, seed=self._seed, episode=episode)
            give_back()  # what the passes needed, before makers begin theirs

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def publish(self, form: Mapping[str, Any]) -> None:
        """Write this rank's parts of the weights that the first rank publishes, or take part in gathering them.

        Args:
            form: `Publisher.form` of the first rank.
        """
        with self._working():
            pieces = pieces_to_publish(self._learner, self._config)
            if pieces is not None and write_pieces(pieces, self._learner.ranks, **form):
                return
            for _ in weights_to_publish(self._learner, self._config):
                pass

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def state(self) -> None:
        """Take part in gathering the state that the first rank commits."""
        with self._working():
            reached("snapshot")
            self._learner.state()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def policy(self) -> None:
        """Take part in gathering the finished policy's weights."""
        with self._working(), self._learner.exact("actor"):
            pass


@ray.remote(concurrency_groups=worker.GROUPS)
class RunMaker(worker.MakerActor):
    """A maker of a PPO run: the flow starts it, and the scheduler in the trainer's process drives it."""
