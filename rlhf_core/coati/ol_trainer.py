"""coati's `OLTrainer`: `fit` of a trainer that collects what it learns from, over the one loop of PPO."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.coati.callbacks import Callback, tell, tell_at_the_end
from rlhf_core.counting import counted, ordinal
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.loop import Loop
from rlhf_core.training.loaders import Batches

logger = logging.getLogger(__name__)


class OLTrainer(ABC):
    """Collects, learns and throws away, episode by episode. A subclass makes the `Loop`, with its own phases.

    Args:
        callbacks: are told of everything, in their order; the ends of the fit and of an episode also after an error.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = tuple(callbacks)
        self._loop: Loop
        self._num_collect_steps = 0
        """Batches of prompts in an episode of this fit."""

    def fit(
        self,
        num_episodes: int,
        num_collect_steps: int,
        num_update_steps: int,
        prompt_dataloader: Batches,
        pretrain_dataloader: Batches | None = None,
        log_dir: str | Path | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Collect on-policy experience, learn from it, throw it away.

        Goes on where an earlier fit or the loaded checkpoint stood: `num_episodes` counts from the run's beginning, and
        a dataloader that the earlier fit had, the same object, gives what comes next; another one begins anew.

        Args:
            num_episodes: rounds of collecting and learning.
            num_collect_steps: batches of prompts in each.
            num_update_steps: passes over what was collected; with `sample_buffer`, batches drawn from it.
            prompt_dataloader: batches of {"input_ids", "attention_mask"}, [B P], padded on the left, and optional
                lists "gt_answer", "key" and "entry", None where a row has none; begins anew when it ends. Each rank has
                prompts of its own.
            pretrain_dataloader: batches of {"input_ids", "attention_mask", optional "labels"}, [B S]; with ptx_coef.
            log_dir: where metrics go; None drops them.
            use_wandb: send them to Weights & Biases, or to trackio, too.
        """
        self._check_counts(num_episodes, num_collect_steps, num_update_steps)
        self._before_fit(prompt_dataloader, pretrain_dataloader, log_dir, use_wandb)
        if self._loop.episode >= num_episodes:
            logger.warning("%s done already; give fit more to go on", counted(num_episodes, "episode"))
        self._num_collect_steps = num_collect_steps
        try:
            with tell_at_the_end(self.callbacks, "on_fit_end"):
                self._tell("on_fit_start")
                self._loop.run(num_episodes, num_update_steps)
                self._finish_fit()
        finally:
            self._after_fit()

    def _check_counts(self, num_episodes: int, num_collect_steps: int, num_update_steps: int) -> None:
        names = ("num_episodes", "num_collect_steps", "num_update_steps")
        for name, count in zip(names, (num_episodes, num_collect_steps, num_update_steps), strict=True):
            if count < 1:
                raise ConfigError(f"{name} must be at least 1, got {count}")
        position = self._loop.learner.position
        if position.passes not in {0, num_update_steps}:
            raise ConfigError(
                f"episode {ordinal(position.episode)} was begun with num_update_steps {position.passes}, but "
                f"this fit has {num_update_steps}; end it with the same, or go on from the end of an episode"
            )

    @abstractmethod
    def _before_fit(
        self, prompts: Batches, demonstrations: Batches | None, log_dir: str | Path | None, use_wandb: bool
    ) -> None:
        """See that everything is there, before anything is spent."""

    @abstractmethod
    def _finish_fit(self) -> None:
        """Keep what was learnt."""

    @abstractmethod
    def _after_fit(self) -> None:
        """Close what `_before_fit` opened, also after an error."""

    @contextmanager
    def _episode_told(self, episode: int) -> Iterator[None]:
        self._tell("on_episode_start", episode)
        with tell_at_the_end(self.callbacks, "on_episode_end", episode):
            yield

    def _tell(self, hook: str, *arguments: Any) -> None:
        tell(self.callbacks, hook, *arguments)
