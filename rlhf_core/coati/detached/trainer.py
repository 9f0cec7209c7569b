"""coati's `DetachedTrainer`: a trainer whose experience is made by other actors, over the one loop of PPO."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from torch import nn

from rlhf_core.coati.callbacks import TrainerCallback, tell, tell_at_the_end
from rlhf_core.coati.detached.holders import Holders, own_actor_name
from rlhf_core.coati.detached.loader_line import LoaderChunk
from rlhf_core.coati.detached.registration import (
    LoopState,
    MakerFacts,
    Production,
    Registry,
    check_needs_no_weights,
    production_of,
    units_per_episode,
)
from rlhf_core.coati.detached.replay_buffer import DetachedReplayBuffer
from rlhf_core.coati.detached.scheduled_fit import DealingOptions, ScheduledFit, scheduled
from rlhf_core.coati.detached.sources import PushedExperience, ScheduledExperience, Source
from rlhf_core.coati.detached.weight_sender import BUCKET_BYTES, WeightSender, weights_of
from rlhf_core.counting import counted, ordinal
from rlhf_core.errors import RlhfError
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.loop import Collected, Loop
from rlhf_core.ppo.order import minibatch_order
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.rollout.scheduler import Scheduler
from rlhf_core.types import EpisodeControls, Experience, Sample

logger = logging.getLogger(__name__)


class StepLearner:
    """Learns episodes by a trainer's `training_step`: first the batches as they come, then the same in other orders.

    Args:
        trainer: a `DetachedTrainer`.
    """

    has_begun = False  # steps of another algorithm cannot be gone on with: `is_in_midst` says so

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.position = Position()
        self.is_in_midst = False
        """Some steps of an episode are taken, and not all."""
        self._coming: Iterable[Experience] = ()

    def begin(self, collected: Iterable[Experience], _samples: Sequence[Sample]) -> None:
        """Take in the episode's batches, which may be still to come."""
        self._coming = collected

    def learn(self, passes: int) -> list[dict[str, Any]]:
        """Take the episode's steps, and return the metrics of each."""
        tell, metrics = self._trainer._tell, []
        batches: list[Experience] = []
        for epoch in range(passes):
            tell("on_epoch_start", epoch)
            for batch in self._coming if epoch == 0 else self._in_another_order(batches, epoch):
                if epoch == 0:
                    batches.append(batch)
                metrics.append(self._step(batch))
            tell("on_epoch_end", epoch)
        return metrics

    def finish(self) -> None:
        """Go on to the next episode."""
        self._coming, self.is_in_midst = (), False
        self.position = Position(self.position.episode + 1)

    def _in_another_order(self, batches: Sequence[Experience], epoch: int) -> list[Experience]:
        order = minibatch_order(
            seed=self._trainer.dealing.seed, episode=self.position.episode, epoch=epoch, samples=len(batches),
            batch_size=1,
        )  # fmt: skip
        return [batches[number] for (number,) in order]

    def _step(self, experience: Experience) -> dict[str, Any]:
        self.is_in_midst = True
        self._trainer._tell("on_batch_start")
        metrics: dict[str, Any] = self._trainer.training_step(experience)
        if self._trainer.debug:
            logger.info("%s: %s", self._trainer._name, metrics)
        self._trainer._tell("on_batch_end", metrics, experience)
        return metrics


class DetachedTrainer(ABC):
    """Learns from what experience makers, actors of their own, send; a subclass says how, and sends them weights.

    A subclass is a Ray actor with the concurrency groups `buffer_length`, `buffer_append`, `buffer_sample` and
    `compute`, one thread each, and has a name by which makers find it.

    Each batch that the makers' loaders give is made once, by whichever maker is free; a maker that dies loses nothing.
    With no maker named, or when somebody pushes experience (`buffer_append`), the fit learns what is in the buffer.

    Args:
        experience_maker_holder_name_list: names of the makers; may be empty.
        train_batch_size: rows of a batch.
        buffer_limit: batches that may wait, in the buffer or made for later episodes; 0 sets no limit.
        dataloader_pin_memory: without effect: batches are moved whole.
        callbacks: are told of everything, in their order.
        debug: log every step.
        dealing: how trainer and makers wait for each other.
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        dataloader_pin_memory: bool = True,  # noqa: ARG002 - coati's
        callbacks: Sequence[TrainerCallback] = (),
        debug: bool = False,
        *,
        dealing: DealingOptions = DealingOptions(),  # noqa: B008 - frozen
    ) -> None:
        self.train_batch_size, self.buffer_limit = train_batch_size, buffer_limit
        self.callbacks, self.debug, self.dealing = tuple(callbacks), debug, dealing
        self._name = own_actor_name() or type(self).__name__
        self._has_peers = False
        """Other trainers learn from the same experience."""
        self._trouble: Exception | None = None
        """What is wrong with the arguments: Ray would hide it in a page of its own, so that later calls raise it."""
        try:
            self._buffer = DetachedReplayBuffer(train_batch_size, buffer_limit, timeout_s=dealing.experience_timeout_s)
            self._name_makers(experience_maker_holder_name_list)
        except RlhfError as error:
            self._trouble = error
            self._buffer = DetachedReplayBuffer(1)
            self._name_makers(())
        self._weights = WeightSender(transport=dealing.transport, dtype=getattr(torch, dealing.rollout_dtype))
        self._source: Source | None = None
        self._scheduler: Scheduler[LoaderChunk, MadeChunk] | None = None
        self._update_steps = 0
        """Batches of an episode of this fit."""
        self._fit_began: int | None = None
        """First episode of a fit that is not at its end."""
        self._steps = StepLearner(self)
        self._loop = Loop(
            self._steps,
            collect=self._collect,
            publish=self._publish,
            keep=self._keep,
            peers=self._weights_learn,
            around=self._episode_told,
        )

    @abstractmethod
    def training_step(self, experience: Experience) -> dict[str, Any]:
        """Learn from one batch; return its metrics."""

    @abstractmethod
    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        """Send weights to the makers, if they are to follow: `send_models` does it."""

    def fit(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> None:
        """Learn `total_steps // update_steps` episodes; weights are sent after each.

        After an error, or on a state that was loaded, goes on with the episode that was due; one that was learnt in
        part is not learnt again.

        Args:
            total_steps: batches to learn from, each once in every epoch.
            update_steps: batches of an episode.
            train_epochs: passes over an episode.

        Raises:
            ConfigError: if that is not what the makers' loops make.
            RlhfError: if makers do not begin, or die, or weights were never sent to those that wait for them, or an
                earlier fit ended in the midst of an episode's steps.
        """
        self._check()
        production = self._production(total_steps, update_steps, train_epochs)
        began = self._loop.episode if self._fit_began is None else self._fit_began
        self._fit_began, self._update_steps = began, update_steps
        if self._loop.episode >= began + production.episodes:
            logger.warning("this fit has nothing left to do: %s done already", counted(production.episodes, "episode"))
        self._loop.publish_if_due()
        try:
            self._source = source = self._open_source(production, began)
            try:
                with tell_at_the_end(self.callbacks, "on_fit_end"):
                    self._tell("on_fit_start")
                    self._loop.run(began + production.episodes, train_epochs)
                    if self._scheduler is not None and self._weights.last is not None:
                        self._scheduler.await_taken(self._weights.version, self.dealing.start_timeout_s)
            finally:
                source.close()
        finally:
            self._scheduler = None
            self._registry.end()
        self._fit_began = None

    def sync_models_to_remote_makers(self, **kwargs: Any) -> None:
        """Send all weights to the makers, which begin with them if they are told to wait (`sync_models_from_trainers`).

        Args:
            **kwargs: as `_update_remote_makers` takes them.
        """
        self._check()
        self._update_remote_makers(fully_update=True, **kwargs)

    def send_models(
        self, models: Mapping[str, nn.Module], *, fully_update: bool = False, shard_size: int = BUCKET_BYTES
    ) -> None:
        """Publish models' weights, by the role that they have on the makers, and have the makers take them.

        Args:
            models: `actor`, and `critic` if the makers have one; built as theirs.
            fully_update: all weights; else what is trained, once all were sent.
            shard_size: bytes of a bucket.
        """
        sending = self._weights.begin(fully=fully_update)
        self._send(sending, weights_of(models, fully=sending.fully), shard_size)

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def buffer_get_length(self) -> int:
        """Return the number of batches, not of rows, in the buffer."""
        return self._buffer.get_length()

    @ray.method(concurrency_group="buffer_append")  # type: ignore[untyped-decorator]
    def buffer_append(self, experience: Experience) -> None:
        """Put rows into the buffer, as soon as there is room."""
        self._check()
        self._buffer.append(experience)

    @ray.method(concurrency_group="buffer_append")  # type: ignore[untyped-decorator]
    def buffer_extend(self, items: Sequence[Experience]) -> None:
        """Put several into the buffer, as soon as there is room."""
        self._check()
        self._buffer.extend(items)

    @ray.method(concurrency_group="buffer_sample")  # type: ignore[untyped-decorator]
    def _buffer_sample(self) -> Experience:
        """Return the batch that has waited longest, and forget it; wait while there is none."""
        self._check()
        return self._buffer.sample()

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def register_maker(self, facts: MakerFacts, dataloader_fn: Callable[[], Any]) -> int:
        """Take in a maker whose loop begins; return the loop's number."""
        return self._registry.register(facts, dataloader_fn)

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def maker_loop(self, name: str, ticket: int) -> LoopState:
        """Return what has become of a maker's loop."""
        return self._registry.state_of(name, ticket)

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def loader_of(self, name: str) -> Callable[[], Any] | None:
        """Return what builds a maker's loader, for its next process."""
        return self._registry.loader_of(name)

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def first_trainer(self) -> str:
        """Return the name of the trainer that leases chunks for this one: its own, or its group's first."""
        self._check()
        return self._name

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def figures(self) -> dict[str, float]:
        """Return what is known of queue, staleness and idle times, and the version that was sent last."""
        own = {"version": float(self._weights.version), "episode": float(self._loop.episode)}
        return {**(self._source.figures() if self._source else {}), **own}

    @contextmanager
    def _episode_told(self, episode: int) -> Iterator[None]:
        with tell_at_the_end(self.callbacks, "on_episode_end", episode):
            self._tell("on_episode_start", episode)
            yield

    def _tell(self, hook: str, *arguments: Any) -> None:
        tell(self.callbacks, hook, *arguments)

    def _check(self) -> None:
        """Raise what is wrong with this trainer."""
        if self._trouble is not None:
            raise self._trouble
        if self._steps.is_in_midst:
            raise RlhfError(
                f"{self._name} took some steps of episode {ordinal(self._loop.episode)} and failed in it, so that it "
                "would learn them twice; create the trainer anew, with its last state if it keeps one"
            )

    def _collect(self, episode: int) -> Collected:
        """Return the episode's batches, which come while they are learnt from; a subclass may wait for all of it."""
        assert self._source is not None
        return Collected(self._batches(self._source.episode(episode, self._update_steps)), [])

    def _batches(self, parts: Iterator[Any]) -> Iterator[Experience]:
        """Yield rows that come in any number as batches of this trainer's."""
        cutter = DetachedReplayBuffer(self.train_batch_size, timeout_s=0)
        for part in parts:
            cutter.append(part.experience)
            while cutter.get_length():
                yield cutter.sample()

    @contextmanager
    def _weights_learn(self, _episode: int) -> Iterator[None]:
        yield
        self._weights.learnt()  # once: weights that could not be sent are sent again as the same version

    def _publish(self, _version: int) -> None:
        self._tell("on_update_start")
        self._update_remote_makers()
        self._tell("on_update_end")

    def _keep(self, episode: int, _steps: Sequence[Any]) -> None:
        assert self._source is not None
        self._source.learnt(episode)

    def _production(self, total_steps: int, update_steps: int, train_epochs: int) -> Production:
        return production_of(total_steps, update_steps, train_epochs, self.train_batch_size)

    def _open_source(self, production: Production, began: int) -> Source:
        """Return where this fit's experience comes from, once it is known."""
        makers = self._registry.await_makers(self.dealing.start_timeout_s, unless=self._is_pushed)
        if not makers:
            return PushedExperience(self._buffer, self.dealing.experience_timeout_s)
        self._check_makers(makers)
        return self._scheduled(production, began, makers)

    def _is_pushed(self) -> bool:
        """Return whether somebody has put experience into the buffer."""
        return not self._buffer.is_empty

    def _check_makers(self, makers: Sequence[MakerFacts]) -> None:
        """See that makers fit this trainer; a subclass knows more of what must agree."""
        if self._weights.last is None:
            check_needs_no_weights(makers, self._weights.version)

    def _counts_now(self) -> Mapping[str, Any] | None:
        """Return the counts to go on with; a subclass that keeps its state has some."""
        return None

    def _controls(self, episode: int) -> EpisodeControls | None:  # noqa: ARG002 - for a subclass
        """Return what an episode's rewards are made with; None leaves it to the makers."""
        return None

    def _scheduled(self, production: Production, began: int, makers: Sequence[MakerFacts]) -> ScheduledExperience:
        fit = ScheduledFit(
            first_episode=began,
            completed=self._loop.episode,
            episodes=began + production.episodes,
            units=units_per_episode(makers, production),
            rows=makers[0].rows,
            limit=self.buffer_limit * self.train_batch_size * production.trainers,
            counts=self._counts_now(),
        )
        source = scheduled(
            fit, self._holders.handles(), self.dealing, controls=self._controls, weights=self._weights,
            is_shared=self._has_peers,
        )  # fmt: skip
        self._scheduler = source.scheduler
        return source

    def _send(self, sending: Any, tensors: Any, shard_size: int) -> None:
        """Publish weights; while makers work, they take them before what they make next, else now."""
        holders = self._holders
        if not holders.names:
            return
        if self._scheduler is not None:
            self._scheduler.await_up(
                self.dealing.start_timeout_s
            )  # no transport is chosen for a maker somewhere unknown
        at = holders.nodes() if self._scheduler is None else self._scheduler.nodes
        sent = self._weights.send(sending, tensors, nodes=at, bucket_bytes=shard_size)
        if self._scheduler is not None:
            self._scheduler.publish(sent, completed=None)
            self._weights.retire(self._scheduler.held_versions.values())
        else:
            holders.send(sent)
            self._weights.retire(())

    def _name_makers(self, names: Sequence[str]) -> None:
        self._holders = Holders(names, self.dealing.start_timeout_s)
        self._registry = Registry(self._name, self._holders.names)
