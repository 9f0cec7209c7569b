"""What may hang on a trainer's loop: coati's hooks, each doing nothing until it is overridden."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
