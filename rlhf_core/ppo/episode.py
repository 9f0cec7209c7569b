"""An episode is learnt: its rows are restated by the learner, and each window of them is one optimizer step.

All learn through this file: `PPOTrainer`, the trainer of the flow, coati's detached trainer and the role groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from rlhf_core.counting import counted, ordinal
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.ppo.failed_batch import KeepBatch, check_finite, write_failed_batch
from rlhf_core.ppo.learner import PPOLearner, check_demonstrations, check_same
from rlhf_core.ppo.metrics import PPOStats
from rlhf_core.ppo.order import Rows, Window, episode_windows, minibatch_order
from rlhf_core.rewards.abstaining import check_share
from rlhf_core.strategy.ranks import together
from rlhf_core.training.padding import PaddedBatch
from rlhf_core.types import Experience, Sample

NextDemonstrations = Callable[[int], PaddedBatch | None]
"""Given a number of training batches, returns this rank's next demonstrations for as many; None if none are learnt."""


@dataclass
class Position:
    """Where a run stands."""

    episode: int = 0
    """The one that is under way, or due next."""
    windows: int = 0
    """Optimizer steps taken in it; above 0 only while it is being learnt from."""
    step: int = 0
    """Optimizer steps taken altogether."""
    passes: int = 0
    """Over the episode that is being learnt from, which decides its minibatches; 0 between two."""


class Learning(NamedTuple):
    """What an episode is learnt from."""

    collected: Experience
    """Its rows, in their order."""
    learnt: Experience
    """The same as the learner restated them before its first step."""


class Hooks:
    """What is told of an episode while it is learnt; each does nothing until it is overridden."""

    def on_pass_start(self, number: int) -> None:
        """Before the step that holds a pass's first batch."""

    def on_step_start(self) -> None:
        """Before each optimizer step."""

    def on_step_end(self, stats: PPOStats, experience: Experience) -> None:
        """After each optimizer step, with this rank's rows; the position counts the step already."""

    def on_pass_end(self, number: int) -> None:
        """After the step that holds a pass's last batch."""

    def on_window_end(self, *, is_last: bool) -> None:
        """After all of that: the state may be kept."""


class EpisodeLearner:
    """Learns one episode after another, and knows at any time which of the steps are taken.

    With several ranks every method is called by all of them. After an error, `learn` goes on with the step that failed.

    Args:
        learner: takes the steps.
        seed: with the episode it decides the order of the minibatches.
        train_batch_size: rows of a training batch on one rank.
        accumulation_steps: training batches of an optimizer step.
        sample_buffer: each pass is one batch, drawn at random, instead of all rows.
        is_shared: every rank is given all rows of an episode, and learns its share of each minibatch; otherwise each
            rank has rows of its own.
        own_makers: whether makers have their weights from this learner alone, and a row's `policy_version` is the
            number of episodes that these have learnt.
        demonstrations: of the steps; None takes the learner's own.
        keep: keeps a batch that could not be learnt from; None keeps none.
        decode: returns the text of token ids, for a batch that is kept.
        hooks: are told what happens.

    Raises:
        ConfigError: if the learner's own demonstrations are to be learnt, and it has none.
    """

    def __init__(
        self,
        learner: PPOLearner,
        *,
        seed: int,
        train_batch_size: int,
        accumulation_steps: int = 1,
        sample_buffer: bool = False,
        is_shared: bool = False,
        own_makers: bool = False,
        demonstrations: NextDemonstrations | None = None,
        keep: KeepBatch | None = None,
        decode: Callable[[list[int]], str] = lambda ids: " ".join(map(str, ids)),
        hooks: Hooks | None = None,
    ) -> None:
        self.learner, self.is_shared, self.keep = learner, is_shared, keep
        self._own_makers = own_makers
        self._seed, self._accumulation_steps, self._sample_buffer = seed, accumulation_steps, sample_buffer
        self._train_batch_size = train_batch_size
        if demonstrations is None:
            check_demonstrations(learner.config, has_some=learner.ptx is not None)
        self._demonstrations = demonstrations or (lambda _batches: learner.demonstrations())
        self._decode, self._hooks = decode, hooks or Hooks()
        self.position = Position()
        self.learning: Learning | None = None
        """From the end of collecting to the end of the episode."""
        self._samples: list[Sample] = []

    @property
    def has_begun(self) -> bool:
        """Whether an episode's rows are taken in, and the episode is not finished."""
        return self.learning is not None

    def check(self, experience: Experience, samples: Sequence[Sample]) -> None:
        """See that what was made has finite numbers, before anything is learnt.

        Raises:
            TrainingError: on all ranks, if that of any has not; it says where the batch is kept.
        """
        what = "score its responses by finite numbers"
        try:
            together(self.learner.ranks, lambda: check_finite(experience, samples), what=what)
        except TrainingError as error:
            raise self._kept(error, experience, samples) from error

    def begin(self, collected: Experience, samples: Sequence[Sample] = ()) -> None:
        """Take in an episode's rows and restate them: from here on, an error loses nothing of the episode.

        Args:
            collected: all rows of this rank, in the order of their samples' keys; the same on every rank if shared.
            samples: the same rows as text, in any order; may be empty.

        Raises:
            TrainingError: on all ranks, if there are no rows, not the same on each where they are shared, a number is
                not finite, or too many samples of all ranks abstain.
        """
        if self.is_shared:
            check_same(collected, self.learner.ranks.everyone)
        ordered = sorted(samples, key=lambda sample: (sample.key, sample.index))
        self._samples = ordered if len(ordered) == len(collected) else []
        self.check(collected, self._samples)
        self._check_abstained(collected, samples)
        self.learning = Learning(collected, self._restated(collected))

    def learn(self, passes: int) -> list[PPOStats]:
        """Take the episode's steps that are still due; return their numbers.

        Args:
            passes: over the rows, or batches that are drawn from them.

        Raises:
            TrainingError: on all ranks, if a loss or gradient is not finite; it says where the batch is kept.
            ConfigError: if the episode was begun with another number of passes.
        """
        assert self.learning is not None
        if self.position.passes not in {0, passes}:
            begun = counted(self.position.passes, "pass", "passes")
            raise ConfigError(
                f"episode {ordinal(self.position.episode)} was begun with {begun} over its experience, but is to be "
                f"ended with {passes}; end it with the same number"
            )
        self.position.passes = passes
        windows = episode_windows(
            seed=self._seed, episode=self.position.episode, passes=passes, samples=len(self.learning.collected),
            batch_size=self._batch_size, accumulation_steps=self._accumulation_steps, sampled=self._sample_buffer,
        )  # fmt: skip
        taken = []
        for place in range(self.position.windows, len(windows)):
            window = windows[place]
            if self.learner.config.correction == "decoupled" and any(number > 0 for number in window.begins):
                # The trust region moves along with each pass; the values stay as the first call restated them.
                learnt = self._restated(self.learning.learnt, number=max(window.begins))
                self.learning = self.learning._replace(learnt=learnt)
            for number in window.begins:
                self._hooks.on_pass_start(number)
            taken.append(self._take(window))
            for number in window.ends:
                self._hooks.on_pass_end(number)
            self._hooks.on_window_end(is_last=place == len(windows) - 1)
        return taken

    def finish(self) -> None:
        """Forget the episode that is learnt, and go on to the next one."""
        self.forget()
        self.position = Position(self.position.episode + 1, 0, self.position.step)

    def forget(self) -> None:
        """Forget what the episode is learnt from."""
        self.learning, self._samples = None, []

    def _check_abstained(self, collected: Experience, samples: Sequence[Sample]) -> None:
        judged = collected.action_mask.any(dim=1).sum().cpu()
        counts = torch.stack([torch.tensor(len(collected)), len(collected) - judged])
        of, abstained = counts if self.is_shared else self.learner.ranks.sum(counts)
        try:
            check_share(
                [sample.failures for sample in samples if sample.abstains],
                abstained=int(abstained), of=int(of), most=self.learner.config.max_abstained,
                what=f"samples of episode {ordinal(self.position.episode)}",
            )  # fmt: skip
        except TrainingError as error:
            raise self._kept(error, collected, self._samples) from error

    def _take(self, window: Window) -> PPOStats:
        assert self.learning is not None
        rows = self._own(window.rows)
        experience = self.learning.learnt.select(rows)
        self._hooks.on_step_start()
        try:
            stats = self.learner.training_step(experience, self._demonstrations(window.batches))
        except TrainingError as error:
            samples = [self._samples[row] for row in rows] if self._samples else []
            raise self._kept(error, experience, samples) from error
        self.position.step = self.learner.steps
        self.position.windows += 1  # before anything else can fail: this step must not be taken again
        self._hooks.on_step_end(stats, experience)
        return stats

    def _restated(self, experience: Experience, *, number: int = 0) -> Experience:
        """Return the rows as the learner sees them before a pass, cut as that pass is."""
        is_own = self._own_makers and number == 0
        if is_own:
            is_other = bool((experience.policy_version != self.position.episode).any())
            is_own = not self.learner.ranks.any(is_other)
        batches = minibatch_order(
            seed=self._seed, episode=self.position.episode, epoch=number, samples=len(experience),
            batch_size=self._batch_size * self._accumulation_steps,
        )  # fmt: skip
        return self.learner.recompute(experience, batches, shared=self.is_shared, is_own=is_own)

    @property
    def _batch_size(self) -> int:
        """Rows of a training batch: of all ranks that share the rows, so that several learn what one does with more."""
        return self._train_batch_size * (self.learner.ranks.world_size if self.is_shared else 1)

    def _own(self, rows: Rows) -> Rows:
        """Return this rank's part of the rows of a step."""
        ranks = self.learner.ranks
        return rows[ranks.rank :: ranks.world_size] if self.is_shared else rows

    def _kept(self, error: TrainingError, experience: Experience, samples: Sequence[Sample]) -> TrainingError:
        """Keep a batch for whoever looks for the reason; return the error, which says where it is."""
        if self.keep is None:
            return error

        def write(directory: Path) -> None:
            write_failed_batch(directory, str(error), experience, samples, decode=self._decode)

        try:
            told = self.keep(write)
        except Exception as failure:  # the reason of the error counts more than where its batch is
            told = f"the batch could not be kept ({failure})"
        return TrainingError(f"{error}; {told}", ends_as=error.ends_as)


def learn_episode(
    learner: PPOLearner,
    experience: Experience,
    samples: Sequence[Sample] = (),
    *,
    seed: int,
    episode: int,
    keep: KeepBatch | None = None,
) -> list[PPOStats]:
    """Learn an episode from beginning to end, by the learner's configuration; return the numbers of each step.

    Args:
        learner: takes the steps, with its own demonstrations.
        experience: all of the episode, in the order of the samples' keys; the same on every rank.
        samples: the same rows as text, in any order; may be empty.
        seed: of the run.
        episode: from 0; with the seed it decides the order of passes after the first. Rows of this `policy_version` are
            taken for the learner's own.
        keep: keeps a batch that could not be learnt from.

    Raises:
        TrainingError: on all ranks, if there are no rows, not the same on each, or a number is not finite.
    """
    learning = EpisodeLearner(
        learner, seed=seed, train_batch_size=learner.config.train_batch_size, is_shared=True, own_makers=True, keep=keep
    )
    learning.position.episode = episode
    learning.begin(experience, samples)
    return learning.learn(learner.config.max_epochs)
