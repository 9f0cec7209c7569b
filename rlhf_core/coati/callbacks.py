"""Callbacks of a trainer's loop: coati's hooks, which do nothing until they are overridden, and its evaluators.

The evaluators say how fast a run goes. Arithmetic is counted, not measured: 2 x parameters x tokens for a forward pass,
three times that for a training step, four times with gradient checkpointing, whose forward pass is done twice. Tokens
are those of the padded batch, which is what goes through the models. Sampling passes each token through the actor once,
as a key-value cache has it; coati counts the whole prefix again for every token, so its figures for sampling are higher
by a factor of about half the sequence's length.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rlhf_core.strategy.ranks import current_ranks
from rlhf_core.types import Experience

logger = logging.getLogger(__name__)


def tell(callbacks: Sequence[Any], hook: str, *arguments: Any) -> None:
    """Call one hook of all callbacks, in their order."""
    for callback in callbacks:
        getattr(callback, hook)(*arguments)


@contextmanager
def tell_at_the_end(callbacks: Sequence[Any], hook: str, *arguments: Any) -> Iterator[None]:
    """Run the block, then call one hook of all callbacks; an error of the block is not hidden by one of theirs."""
    try:
        yield
    except BaseException:
        tell_all(callbacks, hook, *arguments)
        raise
    errors = tell_all(callbacks, hook, *arguments)
    if errors:
        raise errors[0]


def tell_all(callbacks: Sequence[Any], hook: str, *arguments: Any) -> list[Exception]:
    """Call one hook of every callback, whatever the others do with it; log and return what they raised."""
    errors = []
    for callback in callbacks:
        try:
            getattr(callback, hook)(*arguments)
        except Exception as error:
            logger.warning("%s.%s failed: %s", type(callback).__name__, hook, error, exc_info=error)
            errors.append(error)
    return errors


class Callback:
    """Hooks of `PPOTrainer`; the ends of the fit and of an episode are called even when an error ended them."""

    def on_fit_start(self) -> None:
        """Before the first episode."""

    def on_fit_end(self) -> None:
        """After the last episode, or after the error that ended the run."""

    def on_episode_start(self, episode: int) -> None:
        """Before anything is collected; an episode that is resumed in its middle starts again."""

    def on_episode_end(self, episode: int) -> None:
        """After the buffer is cleared, or after an error."""

    def on_make_experience_start(self) -> None:
        """Before one batch of prompts is sampled."""

    def on_make_experience_end(self, experience: Experience) -> None:
        """After it is scored."""

    def on_learn_epoch_start(self, epoch: int) -> None:
        """Before the optimizer step that holds a pass's first batch."""

    def on_learn_epoch_end(self, epoch: int) -> None:
        """After the optimizer step that holds a pass's last batch."""

    def on_learn_batch_start(self) -> None:
        """Before each optimizer step."""

    def on_learn_batch_end(self, experience: Experience) -> None:
        """After each optimizer step, with what it learnt from."""


class TrainerCallback:
    """Hooks of a detached trainer; the ends of the fit and of an episode are called even when an error ended them."""

    def on_fit_start(self) -> None:
        """Before the first episode."""

    def on_fit_end(self) -> None:
        """After the last one."""

    def on_episode_start(self, episode: int) -> None:
        """Before an episode."""

    def on_episode_end(self, episode: int) -> None:
        """After an episode."""

    def on_epoch_start(self, epoch: int) -> None:
        """Before a pass over an episode's experience."""

    def on_epoch_end(self, epoch: int) -> None:
        """After it."""

    def on_batch_start(self) -> None:
        """Before an optimizer step."""

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """After it, with its metrics and what it learnt from."""

    def on_update_start(self) -> None:
        """Before weights are sent to the makers."""

    def on_update_end(self) -> None:
        """After it."""


class MakerCallback:
    """Hooks of a detached experience maker."""

    def on_loop_start(self) -> None:
        """Before the first batch."""

    def on_loop_end(self) -> None:
        """After the last one."""

    def on_make_experience_start(self) -> None:
        """Before a batch is sampled."""

    def on_make_experience_end(self, experience: Experience) -> None:
        """After it is scored."""

    def on_send_start(self) -> None:
        """Before experience is sent to a trainer."""

    def on_send_end(self) -> None:
        """After it."""

    def on_batch_start(self) -> None:
        """Before a batch of prompts is worked on: sampled, scored and sent."""

    def on_batch_end(self) -> None:
        """After it."""


Clock = Callable[[], float]


class Performance(NamedTuple):
    """One kind of work in numbers: those of this process.

    Nothing is asked of other ranks: the figures are wanted after an error too, when those may be elsewhere.
    """

    samples: float
    seconds: float
    samples_per_second: float
    """Of all ranks together, which have equal work."""
    tflops: float
    """10^12 floating-point operations per second and process."""
    split: dict[str, float]
    """Seconds by part of the work."""


class _Meter:
    """Adds up samples, operations and seconds of one kind of work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples = 0
        self._operations = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._started: dict[str, float] = {}

    def start(self, part: str) -> None:
        self._started[part] = self._now()

    def end(self, part: str) -> None:
        self._seconds[part] += self._now() - self._started.pop(part)

    def count(self, samples: int, operations: float) -> None:
        self._samples += samples
        self._operations += operations

    def _now(self) -> float:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # kernels run on after their call has returned
        return self._clock()

    def performance(self, *, main: str) -> Performance:
        """Return the figures; `main` is the part whose seconds the operations took."""
        split = dict(self._seconds)
        total, working = sum(split.values()), split.get(main, 0.0)
        return Performance(
            samples=float(self._samples),
            seconds=total,
            samples_per_second=self._samples * current_ranks().world_size / total if total else 0.0,
            tflops=self._operations / working / 1e12 if working else 0.0,
            split=split,
        )


def _report(what: str, performance: Performance) -> None:
    if current_ranks().is_first:
        split = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in performance.split.items())
        logger.info(
            "%s: %.2f samples/s, %.3f TFLOPS per process (%s)",
            what,
            performance.samples_per_second,
            performance.tflops,
            split,
        )


class PerformanceEvaluator(Callback):
    """Measures `PPOTrainer`: making experience and learning apart; logs both on rank 0 when the fit ends.

    Args:
        actor_num_params: parameters of the actor.
        critic_num_params: of the critic; 0 without one.
        initial_model_num_params: of the initial model; the actor's if it is the actor without its adapters.
        reward_model_num_params: of the reward model; 0 if functions score.
        enable_grad_checkpoint: whether learning does the forward pass twice.
        ignore_episodes: episodes at the beginning, slow for reasons of their own, that do not count.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_episodes: int = 0,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._sampling = actor_num_params
        self._scoring = actor_num_params + critic_num_params + initial_model_num_params + reward_model_num_params
        self._learning = (actor_num_params + critic_num_params) * (4 if enable_grad_checkpoint else 3)
        self._ignored = ignore_episodes
        self._counts = True
        self._make, self._learn = _Meter(clock), _Meter(clock)

    def on_episode_start(self, episode: int) -> None:
        """Decide whether this episode counts."""
        self._counts = episode >= self._ignored

    def on_make_experience_start(self) -> None:
        """Take the time."""
        if self._counts:
            self._make.start("make")

    def on_make_experience_end(self, experience: Experience) -> None:
        """Count one pass of sampling, and one of each model over the whole sequences."""
        if self._counts:
            self._make.end("make")
            operations = 2 * experience.sequences.numel() * (self._sampling + self._scoring)
            self._make.count(len(experience), operations)

    def on_learn_batch_start(self) -> None:
        """Take the time."""
        if self._counts:
            self._learn.start("learn")

    def on_learn_batch_end(self, experience: Experience) -> None:
        """Count a training step of actor and critic."""
        if self._counts:
            self._learn.end("learn")
            self._learn.count(len(experience), 2 * experience.sequences.numel() * self._learning)

    def on_fit_end(self) -> None:
        """Log what was measured."""
        making, learning = self.performance()
        _report("making experience", making)
        _report("learning", learning)

    def performance(self) -> tuple[Performance, Performance]:
        """Return the figures of making experience and of learning."""
        return self._make.performance(main="make"), self._learn.performance(main="learn")


class TrainerPerformanceEvaluator(TrainerCallback):
    """Measures a detached trainer: learning, and sending weights.

    Args:
        actor_num_params: parameters of the actor.
        critic_num_params: of the critic; 0 without one.
        enable_grad_checkpoint: whether learning does the forward pass twice.
        ignore_first_episodes: episodes that do not count; the first one waits for the makers to start.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_first_episodes: int = 1,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._learning = (actor_num_params + critic_num_params) * (4 if enable_grad_checkpoint else 3)
        self._ignored = ignore_first_episodes
        self._counts = True
        self._meter = _Meter(clock)

    def on_episode_start(self, episode: int) -> None:
        """Decide whether this episode counts."""
        self._counts = episode >= self._ignored

    def on_batch_start(self) -> None:
        """Take the time."""
        if self._counts:
            self._meter.start("train")

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:  # noqa: ARG002
        """Count a training step of actor and critic."""
        if self._counts:
            self._meter.end("train")
            self._meter.count(len(experience), 2 * experience.sequences.numel() * self._learning)

    def on_update_start(self) -> None:
        """Take the time."""
        if self._counts:
            self._meter.start("update")

    def on_update_end(self) -> None:
        """Add it."""
        if self._counts:
            self._meter.end("update")

    def on_fit_end(self) -> None:
        """Log what was measured."""
        _report("learning", self.performance())

    def performance(self) -> Performance:
        """Return the figures; operations per second are of learning alone, samples per second of all."""
        return self._meter.performance(main="train")


class ExperienceMakerPerformanceEvaluator(MakerCallback):
    """Measures a detached experience maker: making, sending, and what else a batch takes.

    Args:
        actor_num_params: parameters of the actor.
        critic_num_params: of the critic; 0 without one.
        initial_model_num_params: of the initial model.
        reward_model_num_params: of the reward model; 0 if functions score.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._sampling = actor_num_params
        self._scoring = actor_num_params + critic_num_params + initial_model_num_params + reward_model_num_params
        self._meter = _Meter(clock)

    def on_make_experience_start(self) -> None:
        """Take the time."""
        self._meter.start("make")

    def on_make_experience_end(self, experience: Experience) -> None:
        """Count one pass of sampling, and one of each model over the whole sequences."""
        self._meter.end("make")
        operations = 2 * experience.sequences.numel() * (self._sampling + self._scoring)
        self._meter.count(len(experience), operations)

    def on_send_start(self) -> None:
        """Take the time."""
        self._meter.start("send")

    def on_send_end(self) -> None:
        """Add it."""
        self._meter.end("send")

    def on_loop_end(self) -> None:
        """Log what was measured."""
        _report("making experience", self.performance())

    def performance(self) -> Performance:
        """Return the figures; operations per second are of making alone, samples per second of all."""
        return self._meter.performance(main="make")
