"""The loop of PPO: collect, learn, publish the next version of the policy, keep the state; under every front.

`PPOTrainer`, the trainer of the flow, coati's detached trainers and its role groups run it. Each says what the phases
are for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.episode import Position
from rlhf_core.types import Sample


class Collected(NamedTuple):
    """What an episode is learnt from."""

    experience: Any
    """As the learner's `begin` takes it: for PPO, an `Experience` of all rows of this rank."""
    samples: list[Sample]
    """The same rows as text; none where nobody sent them."""


class Learner(Protocol):
    """Learns one episode after another: `EpisodeLearner`, or another algorithm."""

    position: Position

    @property
    def has_begun(self) -> bool:
        """Whether an episode's rows are taken in, and not all of its steps are done."""

    def begin(self, collected: Any, samples: Sequence[Sample], /) -> None:
        """Take in an episode's rows."""

    def learn(self, passes: int) -> Sequence[Any]:
        """Take the steps that are still due, and return what each came to."""

    def finish(self) -> None:
        """Forget the episode, and go on to the next one."""


class Loop:
    """Runs episodes, and knows at any time which phase is due.

    With several ranks every method is called by all of them. After an error `run` goes on with what failed: an episode
    that is learnt in part is not collected again, and one that is learnt is published before anything else.

    Args:
        learner: learns from what is collected; its position is the loop's.
        collect: the source of experience; is given the episode, from 0.
        publish: gives the weights to who samples with them; is given their version, which is the number of episodes
            that they have learnt.
        keep: the sink of states; is given the episode, and what each of its steps came to that this call took.
        peers: held while an episode is learnt, given its number: other ranks that are called take part in it.
        around: held around an episode, given its number: who follows the run is told.
        controls: take note of each episode's samples; None where no rewards are set here.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        collect: Callable[[int], Collected],
        publish: Callable[[int], None] = lambda _version: None,
        keep: Callable[[int, Sequence[Any]], None] = lambda _episode, _steps: None,
        peers: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        controls: RewardControls | None = None,
    ) -> None:
        self.learner, self.controls = learner, controls
        self._collect, self._publish, self._keep = collect, publish, keep
        self._peers, self._around = peers, around
        self.is_unpublished = False
        """An episode is learnt, and its weights may not have been given to anybody."""

    @property
    def episode(self) -> int:
        """The episode that is under way, or due next."""
        return self.learner.position.episode

    def run(self, until: int, passes: int) -> None:
        """Run the episodes that are due before the episode `until`, each with so many passes over its rows."""
        self.publish_if_due()
        while self.episode < until:
            self.run_episode(passes)

    def run_episode(self, passes: int) -> None:
        """Run the episode that is due, or what is left of it."""
        episode = self.episode
        with self._around(episode):
            collected = None if self.learner.has_begun else self._collect(episode)
            with self._peers(episode):
                if collected is not None:
                    self.learner.begin(collected.experience, collected.samples)
                    self._take_note(collected.samples)
                steps = self.learner.learn(passes)
            self.learner.finish()  # whatever fails from here on, nothing is learnt twice
            self.is_unpublished = True
            self.publish_if_due()
            self._keep(episode, steps)

    def publish_if_due(self) -> None:
        """Publish what was learnt, if that was not done."""
        if self.is_unpublished:
            self._publish(self.episode)
            self.is_unpublished = False

    def _take_note(self, samples: Sequence[Sample]) -> None:
        """Let an episode's samples set the rewards of later ones, as soon as no error can have it collected again."""
        if self.controls is not None and samples:
            judged = [sample for sample in samples if not sample.abstains]
            self.controls.update(
                kl_per_sample=torch.tensor([sample.kl for sample in judged]),
                scores=torch.tensor([sample.score for sample in judged]),
            )
