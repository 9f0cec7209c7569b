"""The PPO trainer as a detached Ray actor: deals chunks, learns, publishes weights, commits its state."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from rlhf_core.buffer.naive import NaiveExperienceBuffer
from rlhf_core.config import PPOConfig
from rlhf_core.data import Problem
from rlhf_core.detached.chunks import episode_problems, make_chunks
from rlhf_core.detached.dealer import deal
from rlhf_core.detached.learning import learn_or_keep
from rlhf_core.detached.maker import MadeChunk
from rlhf_core.detached.member import GROUPS, GroupMember
from rlhf_core.detached.metrics import episode_metrics
from rlhf_core.detached.peers import Peers, SharedState, share_state
from rlhf_core.detached.state import EpisodeRecord, StateKeeper, TrainerPosition
from rlhf_core.detached.weights import pack, published_weights
from rlhf_core.strategy.ranks import current_ranks
from rlhf_core.trainer.ppo.controls import RewardControls
from rlhf_core.trainer.ppo.learner import PPOLearner, PPOStats
from rlhf_core.types import Experience, Sample

CONTROLS = "controls"
"""Among the learner's facts in a training state: what sets the next episode's rewards."""


@ray.remote(concurrency_groups=GROUPS | {"commit": 1})
class DetachedPPOTrainer(GroupMember):
    """Runs episodes in lockstep with its makers: every sample comes from the version that learns from it.

    A shell around `PPOLearner`. It restores itself from the keeper's last state, so building one is
    how a run starts and how it goes on: `build`, then `synchronise`, then `run_episode` for each episode due.

    Of several ranks that train one model this is the first, which deals, publishes and commits for all. The others,
    each a `TrainerRank`, form a group with it (`form_group`) before it is built, and are called by it from then on.

    Args:
        experience_maker_holder_name_list: names of the makers, looked up in this actor's namespace.
        learner_fn: builds the learner inside this process.
        problems: prompts of the run, in a fixed order.
        config: the run's configuration.
        seed: seed of prompts' order, sampling and minibatches.
        keeper: where states, the policy and failed batches go.
        save_policy: writes the learner's finished policy, whose merged weights it is given, to a directory.
        peers: names of the other ranks, in their order, looked up in this actor's namespace.
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        learner_fn: Callable[[], PPOLearner],
        problems: Sequence[Problem],
        config: PPOConfig,
        seed: int,
        keeper: StateKeeper,
        save_policy: Callable[[PPOLearner, Mapping[str, torch.Tensor], Path], None],
        peers: Sequence[str] = (),
    ) -> None:
        self._maker_names = tuple(experience_maker_holder_name_list)
        self._learner_fn = learner_fn
        self._learner: PPOLearner
        self._problems, self._config, self._seed = list(problems), config, seed
        self._keeper, self._save_policy = keeper, save_policy
        self._incarnation = uuid.uuid4().hex
        self._history: tuple[EpisodeRecord, ...] = ()
        self._controls = RewardControls(config)
        self._makers: dict[str, Any] = {}
        self._peers = Peers(peers, config.cluster.collective_timeout_s)
        self._progress = "starting"
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._commit: Future[None] | None = None

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def build(self) -> None:
        """Build the learner and restore the last committed state; apart from `__init__`, whose errors Ray garbles."""
        state = self._keeper.last_state()
        with self._peers.taking_part("build"):
            self._learner = self._learner_fn()
            shared = share_state(SharedState(state.tensors, state.learner) if state else None, current_ranks())
            if shared is not None:
                self._learner.load_state(*shared)
        if state is not None:
            self._controls.load_state(state.learner[CONTROLS])
            self._history = state.history

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def position(self) -> TrainerPosition:
        """Return where this trainer stands."""
        return TrainerPosition(
            next_episode=len(self._history),
            incarnation=self._incarnation,
            has_all_makers=set(self._makers) == set(self._maker_names),
            last=self._history[-1] if self._history else None,
        )

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def progress(self) -> str:
        """Return what this trainer is doing, for the run's log."""
        return self._progress

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def synchronise(self) -> None:
        """Find the makers by name and give each the weights of this trainer's version."""
        found = {name: ray.get_actor(name) for name in self._maker_names}
        self._publish(found, len(self._history))
        self._makers = found

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def run_episode(self, episode: int) -> EpisodeRecord:
        """Collect, learn, publish; leave the commit of the new state to the next episode's time; return the record.

        Raises:
            ValueError: another episode is due.
            RlhfError: makers or a rank were lost, a number was not finite, or the commit before this one failed.
        """
        if episode != len(self._history):
            raise ValueError(f"episode {len(self._history)} is due, but episode {episode} was asked for")
        made, seconds = self._collect(episode)
        samples = [sample for chunk in made for sample in chunk.samples]
        started = time.perf_counter()
        self._progress = f"episode {episode + 1}: learning from {len(samples)} samples"
        metrics = self._learn(made, samples, episode)
        seconds["learn"] = time.perf_counter() - started
        version = episode + 1
        started = time.perf_counter()
        self._progress = f"episode {episode + 1}: publishing weights, version {version}"
        self._publish(self._makers, version)
        seconds["synchronise"] = time.perf_counter() - started
        started = time.perf_counter()
        self.await_commit()  # the one before: it had all of this episode's time, and no third state is in memory
        with self._peers.taking_part("state"):
            snapshot, learner = self._learner.state()  # the learner's only pause: a copy to host memory
        seconds["commit"] = time.perf_counter() - started
        record = EpisodeRecord(episode, version, self._incarnation, metrics, seconds)
        self._history = (*self._history, record)
        facts = learner | {CONTROLS: self._controls.state()}
        self._commit = self._committer.submit(self._commit_state, snapshot, facts, self._history, samples)
        self._progress = f"episode {episode + 1}: done"
        return record

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
        """Store the finished policy, as a directory that `AutoModelForCausalLM.from_pretrained` loads."""
        self._progress = "storing the policy"
        with self._peers.taking_part("policy"):
            weights = self._learner.merged_weights("actor")
        self._keeper.commit_policy(partial(self._save_policy, self._learner, weights), history=self._history)

    def _learn(self, made: list[MadeChunk], samples: list[Sample], episode: int) -> dict[str, float]:
        """Learn from an episode's chunks; return its figures."""
        buffer = NaiveExperienceBuffer(self._config.train_batch_size)
        for chunk in made:
            buffer.append(Experience.from_numpy(chunk.experience), chunk.samples)
        experience = buffer.collect()
        with self._peers.taking_part("learn", self._peers.put(experience.to_numpy), episode):
            stats = learn_or_keep(
                self._learner, experience, samples, seed=self._seed, episode=episode, keeper=self._keeper
            )
        return self._take_note(samples, stats, experience.policy_version, episode)

    def _take_note(
        self, samples: list[Sample], stats: Sequence[PPOStats], versions: torch.Tensor, episode: int
    ) -> dict[str, float]:
        """Return the episode's figures, and let its samples set the next one's rewards."""
        metrics = episode_metrics(
            samples, stats, versions=versions, learnt_at=episode, controls=self._controls.current()
        )
        self._controls.update(
            kl_per_sample=torch.tensor([sample.kl for sample in samples]),
            scores=torch.tensor([sample.score for sample in samples]),
        )
        return metrics

    def _collect(self, episode: int) -> tuple[list[MadeChunk], dict[str, float]]:
        started = time.perf_counter()
        problems = episode_problems(self._problems, self._config, seed=self._seed, episode=episode)
        chunks = make_chunks(problems, self._config, episode=episode)

        def report(done: int, total: int) -> None:
            self._progress = f"episode {episode + 1}: {done} of {total} chunks made"

        report(0, len(chunks))
        timeout_s = self._config.cluster.episode_timeout_s
        made: list[MadeChunk] = deal(
            chunks,
            self._makers,
            version=len(self._history),
            controls=self._controls.current(),
            timeout_s=timeout_s,
            on_chunk=report,
        )
        wall = time.perf_counter() - started
        work = {phase: sum(chunk.seconds[phase] for chunk in made) for phase in ("generate", "score")}
        total = sum(work.values()) or 1.0
        # Makers work side by side: their wall time is shared out in proportion to their work.
        return made, {phase: wall * seconds / total for phase, seconds in work.items()}

    def _publish(self, makers: dict[str, Any], version: int) -> None:
        """Send the weights as `version` to every living maker, and wait until each holds them; forget dead ones."""
        dtype = getattr(torch, self._config.rollout_dtype)
        with self._peers.taking_part("publish"):
            manifest, references = pack(published_weights(self._learner, dtype), version=version, put=ray.put)
        timeout_s = self._config.cluster.start_timeout_s
        pending = {name: maker.load_weights.remote(manifest, references, timeout_s) for name, maker in makers.items()}
        for name, reference in pending.items():
            try:
                ray.get(reference, timeout=timeout_s)
            except RayActorError:
                makers.pop(name)  # the dealer goes on with the others; the next episode replaces it

    def _commit_state(
        self,
        tensors: Mapping[str, torch.Tensor],
        learner: dict[str, Any],
        history: tuple[EpisodeRecord, ...],
        samples: list[Sample],
    ) -> None:
        self._keeper.commit_state(tensors=tensors, learner=learner, history=history, samples=samples)
