"""Runs of the `ppo` flow's actors alone, with tiny models on a leased cluster: no flow, no store, a slower hand."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from infra.clusters import connect, disconnect, lease_cluster, release_cluster
from rlhf_core.coati.ppo_setup import scorer_of
from rlhf_core.config import PPOConfig, TemplateConfig
from rlhf_core.data import Problem, PromptTemplate
from rlhf_core.detached.run import RunMaker, RunTrainer, TrainerRank
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import merged_parameters
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.state import EpisodeRecord, TrainingState
from rlhf_core.ray_tools.group import form_group
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.types import Sample
from tests.tiny_llama import tiny_llama, tiny_tokenizer
from tests.unit.coati.ppo_trainers import reward_model

SEED, WAIT_S = 7, 300.0
PROBLEMS = [Problem(f"{number} plus {number * 3}") for number in range(24)]
STEPS, CHUNKS = "steps.jsonl", "chunks"
"""Files of what was done when; of makers, one for each process."""


def config(**changes: Any) -> PPOConfig:
    """Return a run of five episodes of four chunks, which learns each episode three times, in float32."""
    cluster = {"num_makers": 1, "trainer_threads": 1, "maker_threads": 1, "start_timeout_s": WAIT_S}
    given: dict[str, Any] = {
        "episodes": 5, "prompts_per_episode": 16, "chunk_size": 4, "train_batch_size": 8, "micro_batch_size": 4,
        "max_epochs": 3, "max_new_tokens": 4, "top_k": 20, "lam": 0.95, "kl_coef": 0.1, "lr": 1e-3, "critic_lr": 1e-3,
        "warmup_steps": 1, "lora": None, "dtype": "float32", "rollout_dtype": "float32",
        "reward": {"verifier": 0.0, "reward_model": 1.0},
    }  # fmt: skip
    cluster |= changes.pop("cluster", {})
    return PPOConfig.model_validate(given | changes | {"cluster": cluster})


def template() -> PromptTemplate:
    """Return how a prompt stands before the model."""
    return PromptTemplate(tiny_tokenizer(), TemplateConfig())


def scorer() -> Scorer:
    """Return the judge of responses."""
    return scorer_of(reward_model(), scaled=True)


def write_line(path: Path, facts: dict[str, Any]) -> None:
    """Add a line of JSON to a file."""
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


class LearnerFactory:
    """Builds the learner; each of its steps is written down in `STEPS`, and may be made to last longer.

    Args:
        settings: of the run.
        directory: where steps are written, by the first rank.
        step_s: what a step takes at least.
    """

    def __init__(self, settings: PPOConfig, directory: Path, step_s: float = 0.0) -> None:
        self._settings, self._directory, self._step_s = settings, directory, step_s

    def __call__(self) -> PPOLearner:
        """Return it."""
        torch.set_num_threads(1)
        actor = tiny_llama(initializer_range=0.2)
        critic = Critic.from_causal_lm(actor)
        learner = PPOLearner.build(actor, critic, self._settings, device="cpu", seed=SEED)
        step = learner.training_step

        def written(*arguments: Any) -> Any:
            started = time.time()
            stats = step(*arguments)
            time.sleep(max(0.0, started + self._step_s - time.time()))
            if learner.ranks.is_first:
                write_line(self._directory / STEPS, stats._asdict() | {"from": started, "to": time.time()})
            return stats

        learner.training_step = written  # type: ignore[method-assign, assignment]
        return learner


class PacedMaker(ExperienceMaker):
    """Takes a time for each chunk, at least, and writes down when it was at work."""

    chunk_s = 0.0
    sample_bytes = 0
    """What each sample's text weighs; 0 leaves it as it was sampled."""
    directory: Path

    def make_experience(self, *arguments: Any, **named: Any) -> Any:
        """Make it, and wait for the rest of the time."""
        started = time.time()
        made = super().make_experience(*arguments, **named)
        time.sleep(max(0.0, started + self.chunk_s - time.time()))
        place = {"episode": named["episode"], "version": named["policy_version"]}
        write_line(self.directory / f"{CHUNKS}-{os.getpid()}.jsonl", place | {"from": started, "to": time.time()})
        if self.sample_bytes:
            heavy = [replace(sample, response=os.urandom(self.sample_bytes // 2).hex()) for sample in made.samples]
            made = made._replace(samples=heavy)
        return made


class MakerFactory:
    """Builds a maker with the weights that the learner starts with.

    Args:
        settings: of the run.
        directory: where the times of chunks are written.
        chunk_s: what a chunk takes at least.
    """

    sample_bytes = 0
    """What the text of a sample weighs; 0 leaves it."""

    def __init__(self, settings: PPOConfig, directory: Path, chunk_s: float = 0.0) -> None:
        self._settings, self._directory, self._chunk_s = settings, directory, chunk_s

    def __call__(self) -> ExperienceMaker:
        """Return it."""
        torch.set_num_threads(1)
        actor, initial = (tiny_llama(initializer_range=0.2) for _ in range(2))
        made = PacedMaker(
            actor, Critic.from_causal_lm(actor), scorer(), initial, config=self._settings, template=template(),
            seed=SEED,
        )  # fmt: skip
        made.chunk_s, made.directory, made.sample_bytes = self._chunk_s, self._directory, self.sample_bytes
        return made


class MemoryKeeper:
    """Keeps the last state in the trainer's process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: TrainingState | None = None

    def commit_state(self, state: TrainingState, samples: list[Sample]) -> None:  # noqa: ARG002
        """Keep it."""
        self._last = state

    def last_state(self) -> TrainingState | None:
        """Return it."""
        return self._last

    def commit_policy(self, save: Callable[[Path], None], *, history: tuple[EpisodeRecord, ...]) -> None:  # noqa: ARG002
        """Write the policy."""
        save(self._directory)

    def keep_failed_batch(self, save: Callable[[Path], None]) -> str:  # noqa: ARG002
        """Keep nothing."""
        return "nowhere"


def save_policy(actor: torch.nn.Module, directory: Path) -> None:
    """Write the weights."""
    torch.save(merged_parameters(actor), directory / "policy.pt")


@contextmanager
def cluster(directory: Path, cpus: int = 6) -> Iterator[None]:
    """A cluster for several runs, one after the other."""
    name = f"rollouts-{directory.name}"
    record = lease_cluster(name, directory=directory, num_cpus=cpus, object_store_mb=200)
    try:
        connect(record)
        yield
    finally:
        disconnect()
        release_cluster(name)


class RolloutRun:
    """The actors of one run.

    Args:
        settings: of the run.
        directory: empty, for what it writes.
        step_s: what an optimizer step takes at least.
        chunk_s: what a chunk takes at least.
        sample_bytes: what the text of a sample weighs; 0 leaves it.
    """

    def __init__(
        self, settings: PPOConfig, directory: Path, *, step_s: float = 0.0, chunk_s: float = 0.0, sample_bytes: int = 0
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.settings, self.directory = settings, directory
        learner_fn = LearnerFactory(settings, directory, step_s)
        options = {"num_cpus": 1, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
        peers = [f"trainer-{rank}" for rank in range(1, settings.num_trainers)]
        first: Any = RunTrainer
        further: Any = TrainerRank
        maker: Any = RunMaker
        maker_fn = MakerFactory(settings, directory, chunk_s)
        maker_fn.sample_bytes = sample_bytes
        self.makers = {
            name: maker.options(name=name, max_restarts=-1, **options).remote(name, maker_fn)
            for name in (f"maker-{number}" for number in range(settings.cluster.num_makers))
        }
        self.trainer = first.options(name="trainer", **options).remote(
            list(self.makers), learner_fn, PROBLEMS, settings, SEED, MemoryKeeper(directory), save_policy,
            peers=peers,
        )  # fmt: skip
        self.ranks = {"trainer": self.trainer} | {
            name: further.options(name=name, **options).remote(learner_fn, settings, SEED) for name in peers
        }

    def start(self) -> None:
        """Bring all up."""
        if len(self.ranks) > 1:
            form_group(self.ranks, start_timeout_s=WAIT_S, collective_timeout_s=WAIT_S)
        ray.get(self.trainer.build.remote(), timeout=WAIT_S)  # it has its peers build
        ray.get(self.trainer.synchronise.remote(), timeout=WAIT_S)

    def run(self, episodes: Sequence[int] | None = None) -> list[EpisodeRecord]:
        """Run episodes, all of them by default, one call each."""
        due = range(self.settings.episodes) if episodes is None else episodes
        return [ray.get(self.trainer.run_episode.remote(episode), timeout=WAIT_S) for episode in due]

    def await_depth(self, samples: int) -> None:
        """Wait until so many samples are made and not learnt."""
        deadline = time.monotonic() + WAIT_S
        while (depth := ray.get(self.trainer.queue_depth.remote(), timeout=WAIT_S)) < samples:
            assert time.monotonic() < deadline, f"{depth} of {samples} samples are made"
            time.sleep(0.05)

    def await_revival(self, name: str, former: int) -> float:
        """Wait until another process of a maker's name has built its models; return how long that took."""
        started = time.monotonic()
        while True:
            assert time.monotonic() < started + WAIT_S, f"{name} did not come up again"
            with suppress(ray.exceptions.RayActorError):
                if ray.get(self.makers[name].ping.remote(), timeout=WAIT_S) != former:
                    break
            time.sleep(0.1)
        ray.get(self.makers[name].build.remote(), timeout=WAIT_S)
        return time.monotonic() - started

    def finish(self) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Return the figures of every optimizer step, and the policy."""
        ray.get(self.trainer.commit_policy.remote(), timeout=WAIT_S)
        steps = [json.loads(line) for line in (self.directory / STEPS).read_text().splitlines()]
        return steps, torch.load(self.directory / "policy.pt", weights_only=True)

    def end(self) -> None:
        """End the actors, and wait until their names are free."""
        names = {*self.ranks, *self.makers}
        for actor in (*self.ranks.values(), *self.makers.values()):
            ray.kill(actor)
        deadline = time.monotonic() + WAIT_S
        while names & set(ray.util.list_named_actors()):
            assert time.monotonic() < deadline, "actors that were killed are still there"
            time.sleep(0.05)


@contextmanager
def rollout_run(settings: PPOConfig, directory: Path, **options: Any) -> Iterator[RolloutRun]:
    """A run that is up, and ended afterwards."""
    run = RolloutRun(settings, directory, **options)
    try:
        run.start()
        yield run
    finally:
        run.end()
