"""A further rank of a detached trainer: a Ray actor that takes part in what the first rank does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from rlhf_core.config import PPOConfig
from rlhf_core.phases import reached
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.published_weights import weights_to_publish
from rlhf_core.ray_tools.group import GROUPS, GroupMember, share_state
from rlhf_core.strategy.ranks import current_ranks
from rlhf_core.types import Experience


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
            learn_episode(self._learner, rows, seed=self._seed, episode=episode)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def publish(self) -> None:
        """Take part in gathering the weights that the first rank publishes."""
        with self._working():
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
        with self._working():
            self._learner.merged_weights("actor")
