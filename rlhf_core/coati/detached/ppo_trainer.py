"""coati's `DetachedPPOTrainer`: PPO as an actor, or as several that train one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from rlhf_core.coati.callbacks import TrainerCallback, TrainerPerformanceEvaluator, tell
from rlhf_core.coati.detached.building import LearningOptions, build_learner
from rlhf_core.coati.detached.factories import get_model_numel, set_dist_env
from rlhf_core.coati.detached.holders import find_actor
from rlhf_core.coati.detached.ranks import (
    Found,
    RankFacts,
    Shelf,
    agreed_plan,
    all_holders,
    demonstrations_loader,
    next_demonstrations,
    tell_each_other,
)
from rlhf_core.coati.detached.registration import MakerFacts, Production, check_like_trainer
from rlhf_core.coati.detached.scheduled_fit import DealingOptions
from rlhf_core.coati.detached.sources import FirstRanksExperience, ScheduledExperience, Source
from rlhf_core.coati.detached.trainer import DetachedTrainer
from rlhf_core.coati.detached.trainer_state import Stored, read_trainer_state, write_trainer_state
from rlhf_core.coati.detached.weight_sender import BUCKET_BYTES, WeightSender
from rlhf_core.coati.ppo_setup import rollout_config
from rlhf_core.coati.strategy import Strategy
from rlhf_core.config import PPOOptions
from rlhf_core.counting import ordinal
from rlhf_core.errors import ConfigError, ModelError, RlhfError
from rlhf_core.ppo.controls import ControlsByEpisode, RewardControls
from rlhf_core.ppo.episode import EpisodeLearner, Hooks
from rlhf_core.ppo.failed_batch import keep_in
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.loop import Collected
from rlhf_core.ppo.metrics import PPOStats, step_means
from rlhf_core.ppo.order import in_key_order
from rlhf_core.ppo.published_weights import published_weights, trained_weights
from rlhf_core.ppo.state import RolloutState, TrainingState
from rlhf_core.rollout.lease_queue import LeaseCounts
from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.training.loaders import Batches
from rlhf_core.types import EpisodeControls, Experience

logger = logging.getLogger(__name__)

GROUPS = {"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "model_io": 1, "compute": 1}


class _Steps(Hooks):
    """Tells the trainer's callbacks of each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_pass_start(self, number: int) -> None:
        tell(self._trainer.callbacks, "on_epoch_start", number)

    def on_step_start(self) -> None:
        tell(self._trainer.callbacks, "on_batch_start")

    def on_step_end(self, stats: PPOStats, experience: Experience) -> None:
        metrics = self._trainer._told(stats)
        if self._trainer.debug:
            logger.info("%s: %s", self._trainer._name, metrics)
        tell(self._trainer.callbacks, "on_batch_end", metrics, experience)

    def on_pass_end(self, number: int) -> None:
        tell(self._trainer.callbacks, "on_epoch_end", number)


@ray.remote(concurrency_groups=GROUPS)
class DetachedPPOTrainer(DetachedTrainer):
    """A shell around `PPOLearner`: learns whole episodes as `PPOTrainer` does, and sends the makers its weights.

    In lockstep (`max_staleness` 0) it takes the steps of a `PPOTrainer` whose `num_collect_steps` batches of prompts
    are this fit's `update_steps` x `train_batch_size` samples, and whose `num_update_steps` are its `train_epochs`.

    Several trainers, each with its own `env_info`, are the ranks of one group: they train one model, an episode has
    `update_steps` x `train_batch_size` samples for each (under strategy 3d for each group that holds a model), and the
    first leases for all. All methods but those of the buffer are then called on every one of them.

    Args:
        experience_maker_holder_name_list: names of the makers; may be empty.
        strategy_fn: builds the strategy, in this process.
        model_fn: builds actor and critic, in this process.
        env_info: rank, local_rank, world_size, master_port and master_addr, as texts; None trains alone.
        train_batch_size: samples that go through a model at once, in each trainer.
        buffer_limit: batches that may wait, in the buffer or made for later episodes; 0 sets no limit.
        eps_clip: half-width of the trust region on the ratio.
        value_clip: half-width of the trust region on values, in the unit of returns.
        dataloader_pin_memory: without effect: batches are moved whole.
        callbacks: are told of everything, in their order.
        eval_performance: measure, and log at the fit's end.
        debug: log every step.
        update_lora_weights: send adapters and heads alone, once all was sent; the makers have the same setting.
        dealing: how trainer and makers wait for each other, and the seed.
        learning: rates and weights of the losses.
        options: choices of the algorithm; the makers' too.
        pretrain_dataloader_fn: builds the loader of this rank's demonstrations; needed if `learning.ptx_coef` is above
            0.
        save_dir: where the whole state goes (`save_state`), each time over the one before; a batch that failed goes to
            `<save_dir>.failed` beside it. None keeps neither.
        save_interval: episodes between two states.
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy],
        model_fn: Callable[[], tuple[Any, Any]],
        env_info: Mapping[str, str] | None = None,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        eps_clip: float = 0.2,
        value_clip: float = 0.4,
        dataloader_pin_memory: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
        eval_performance: bool = False,
        debug: bool = False,
        update_lora_weights: bool = False,
        *,
        dealing: DealingOptions = DealingOptions(),  # noqa: B008 - frozen
        learning: LearningOptions = LearningOptions(),  # noqa: B008 - frozen
        options: PPOOptions = PPOOptions(),  # noqa: B008 - frozen
        pretrain_dataloader_fn: Callable[[], Batches] | None = None,
        save_dir: str | Path | None = None,
        save_interval: int = 1,
    ) -> None:
        super().__init__(
            experience_maker_holder_name_list, train_batch_size, buffer_limit, dataloader_pin_memory, callbacks, debug,
            dealing=dealing,
        )  # fmt: skip
        self._options, self._learning, self._update_lora_weights = options, learning, update_lora_weights
        self._save_dir, self._save_interval = None if save_dir is None else Path(save_dir), save_interval
        self._controls_by_episode: ControlsByEpisode | None = None
        self._restored: TrainingState | None = None
        """What was loaded: its controls wait until makers say which KL coefficient they start from."""
        self._shelf, self._stats = Shelf(), list[PPOStats]()
        self._eval_performance = eval_performance
        self._built: PPOLearner | None = None
        sizes = {"train_batch_size": train_batch_size, "eps_clip": eps_clip, "value_clip": value_clip}
        try:
            if self._trouble is None:
                self._build(strategy_fn, model_fn, env_info, pretrain_dataloader_fn, sizes)
        except Exception as error:
            self._trouble = error

    def _build(
        self,
        strategy_fn: Callable[[], Strategy],
        model_fn: Callable[[], tuple[Any, Any]],
        env_info: Mapping[str, str] | None,
        pretrain_dataloader_fn: Callable[[], Batches] | None,
        sizes: Mapping[str, Any],
    ) -> None:
        if self._save_interval < 1:
            raise ConfigError(f"expected a save_interval of at least 1 episode, got {self._save_interval}")
        if env_info is not None:
            set_dist_env(env_info)
        self.strategy = strategy_fn()
        self._ranks = self.strategy.ranks
        self._has_peers = self._ranks.everyone.world_size > 1
        own = RankFacts(self._name, self._holders.names, self.train_batch_size)
        with naming_lost_rank(self._ranks):  # where one cannot be built, the others do not wait for it
            self._group = tell_each_other(own, self._ranks)
            self._built = self._learner_of(model_fn, pretrain_dataloader_fn, sizes)
        self._name_makers(all_holders(self._group) if self._ranks.is_first else ())

    def _learner_of(
        self,
        model_fn: Callable[[], tuple[Any, Any]],
        pretrain_dataloader_fn: Callable[[], Batches] | None,
        sizes: Mapping[str, Any],
    ) -> PPOLearner:
        self._demonstrations = demonstrations_loader(pretrain_dataloader_fn, self._learning.ptx_coef)
        learner = build_learner(self.strategy, model_fn, self._learning, self._options, seed=self.dealing.seed, **sizes)
        self._next_demonstrations = partial(
            next_demonstrations, self._demonstrations, learner, self._ranks, only_labels=self._learning.apply_loss_mask
        )
        self._loop.learner = self._learning_episodes = EpisodeLearner(
            learner, seed=self.dealing.seed, train_batch_size=self.train_batch_size,
            accumulation_steps=self._learning.accumulation_steps, demonstrations=self._next_demonstrations,
            keep=self._keep_batch, hooks=_Steps(self),
        )  # fmt: skip
        self._weights_dtype = getattr(torch, learner.config.rollout_dtype)  # the makers', under the same strategy
        self._weights = WeightSender(transport=self.dealing.transport, dtype=self._weights_dtype)
        if self._eval_performance:
            actor, critic = (0 if each is None else get_model_numel(each) for each in (learner.actor, learner.critic))
            checkpointing = self._options.gradient_checkpointing
            self.callbacks = (*self.callbacks, TrainerPerformanceEvaluator(actor, critic, checkpointing))
        return learner

    @property
    def learner(self) -> PPOLearner:
        """The learner.

        Raises:
            Exception: that building it ended with.
        """
        if self._built is None:
            assert self._trouble is not None
            raise self._trouble
        return self._built

    def fit(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> None:
        """Learn `total_steps // update_steps` episodes, as `DetachedTrainer.fit`; called on all ranks.

        Raises:
            LostRankError: if another rank of this trainer is gone; it names it.
        """
        self._shelf.begin()
        with naming_lost_rank(self._ranks if self._built else ALONE):
            try:
                super().fit(total_steps, update_steps, train_epochs)
            except BaseException as error:
                self._shelf.fail(error)
                raise

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def training_step(self, experience: Experience) -> dict[str, float]:
        """Take one optimizer step on actor and critic from one minibatch; return their losses.

        Args:
            experience: this rank's rows, their `action_log_probs` by the learner's own weights.
        """
        batches = -(-len(experience) // self.train_batch_size)
        return self._told(self.learner.training_step(experience, self._next_demonstrations(batches)))

    def _told(self, stats: PPOStats) -> dict[str, float]:
        self._stats.append(stats)
        return {"actor_loss": stats.actor_loss, "critic_loss": stats.critic_loss}

    @ray.method(concurrency_group="model_io")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        """Send the makers this trainer's weights; called on all ranks.

        Args:
            fully_update: all of them; else, with `update_lora_weights`, adapters and heads.
            **config: `shard_size`, bytes of a bucket.
        """
        shard_size = int(config.pop("shard_size", BUCKET_BYTES))
        if config:
            raise ConfigError(f"weights are sent with shard_size, but not with {next(iter(config))!r}")
        learner, apart = self.learner, self._update_lora_weights
        sending = self._weights.begin(fully=fully_update or not apart)
        whole = partial(published_weights, learner, self._weights_dtype, merged=not apart)
        tensors = whole() if sending.fully else trained_weights(learner)
        with naming_lost_rank(self._ranks):
            if self._ranks.is_first:
                self._send(sending, tensors, shard_size)
            for _ in tensors:  # the others gather with the first; it has gone through them itself
                pass

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def first_trainer(self) -> str:
        """Return the name of the first rank's actor, which leases chunks for all of its group."""
        self._check()
        return self._group[0].name or self._name

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def gathered_episode(self, episode: int) -> Found:
        """Return, for another rank, the experience of an episode, if it has been gathered."""
        return self._shelf.look(episode)

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def figures(self) -> dict[str, float]:
        """Return what the base class knows, and the means of the last episode's optimizer steps by `PPOStats`."""
        return {**super().figures(), **step_means(list(self._stats))}

    def _collect(self, episode: int) -> Collected:
        """Wait for all of an episode, and return its rows in the order of their samples' keys."""
        assert self._source is not None
        batches = list(self._source.episode(episode, self._update_steps))
        self._stats, self._learning_episodes.is_shared = [], self._source.is_shared
        whole = in_key_order((batch.experience, batch.samples) for batch in batches)
        if self._source.is_shared and self._ranks.is_first:
            self._shelf.put(episode, whole.to_numpy)
        return Collected(whole, [sample for batch in batches for sample in batch.samples])

    def _publish(self, version: int) -> None:
        if self._controls_by_episode is not None:
            self._controls_by_episode.open(version)
        super()._publish(version)

    def _keep(self, episode: int, steps: Sequence[Any]) -> None:
        super()._keep(episode, steps)
        if self._save_dir is not None and (episode + 1) % self._save_interval == 0:
            self.save_state(self._save_dir)

    def _keep_batch(self, write: Callable[[Path], None]) -> str:
        place, state = self._loop.learner.position, self._save_dir
        # Not in it: each state replaces the whole directory.
        beside = None if state is None else state.absolute().with_name(f"{state.absolute().name}.failed")
        return keep_in(beside, f"episode-{place.episode}_step-{place.step}/rank-{self._ranks.everyone.rank}")(write)

    def _production(self, total_steps: int, update_steps: int, train_epochs: int) -> Production:
        found = super()._production(total_steps, update_steps, train_epochs)
        self.learner  # noqa: B018 - raises what building ended with
        agreed_plan(self._ranks, total_steps, update_steps, train_epochs, self._loop.episode)
        unsent = torch.tensor([int(self._loop.is_unpublished)])
        self._loop.is_unpublished = bool(self._ranks.everyone.gather(unsent).any())  # all of them send
        return found._replace(trainers=self._ranks.world_size)

    def _open_source(self, production: Production, began: int) -> Source:
        if self._ranks.is_first or not all_holders(self._group):
            return super()._open_source(production, began)
        name = self._group[0].name
        first = find_actor(name, self.dealing.start_timeout_s, what="the first rank's trainer")
        who = f"rank 0 of {self._ranks.everyone.world_size} ({name})"
        return FirstRanksExperience(first, who, self.dealing.start_timeout_s + self.dealing.experience_timeout_s)

    def _is_pushed(self) -> bool:
        return not self._has_peers and super()._is_pushed()

    def _check_makers(self, makers: Sequence[MakerFacts]) -> None:
        super()._check_makers(makers)
        for maker in makers:
            check_like_trainer(maker, self._name, **self._learning.expected_of(self._options, self.dealing.seed))
        if self._controls_by_episode is None:  # a coefficient that was steered since then is kept
            config = rollout_config(self._options, self._learning.generation, kl_coef=makers[0].kl_coef)
            current = RewardControls(config, ALONE)
            kept = {}
            if self._restored is not None and self._restored.controls is not None:
                current.load_state(self._restored.controls)
                kept = controls_kept(
                    self._restored, completed=self._loop.episode, max_staleness=self.dealing.max_staleness
                )
            self._controls_by_episode = ControlsByEpisode(
                current, max_staleness=self.dealing.max_staleness, completed=self._loop.episode, kept=kept
            )
            self._loop.controls = current

    def _controls(self, episode: int) -> EpisodeControls | None:
        return None if self._controls_by_episode is None else self._controls_by_episode.of(episode)

    def strategy_save_actor(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002 - one form for all
        """Write the actor's weights, to one file that any strategy loads; `only_rank0` is without effect."""
        model = self._model("actor")
        self.strategy.save_model(model, path)

    def strategy_save_critic(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002 - one form for all
        """Write the critic's weights, as `strategy_save_actor` does."""
        model = self._model("critic")
        self.strategy.save_model(model, path)

    def strategy_save_actor_optim(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002
        """Write the state of the actor's optimizer, to one file."""
        optimizer = self._optimizer("actor")
        self.strategy.save_optimizer(optimizer, path)

    def strategy_save_critic_optim(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002
        """Write the state of the critic's optimizer, to one file."""
        optimizer = self._optimizer("critic")
        self.strategy.save_optimizer(optimizer, path)

    def strategy_load_actor(self, path: str) -> None:
        """Put back what `strategy_save_actor` wrote; makers get it with the next weights that are sent."""
        model = self._model("actor")
        self.strategy.load_model(model, path)
        self._weights.learnt()

    def strategy_load_critic(self, path: str) -> None:
        """Put back what `strategy_save_critic` wrote."""
        model = self._model("critic")
        self.strategy.load_model(model, path)
        self._weights.learnt()

    def strategy_load_actor_optim(self, path: str) -> None:
        """Put back what `strategy_save_actor_optim` wrote."""
        optimizer = self._optimizer("actor")
        self.strategy.load_optimizer(optimizer, path)

    def strategy_load_critic_optim(self, path: str) -> None:
        """Put back what `strategy_save_critic_optim` wrote."""
        optimizer = self._optimizer("critic")
        self.strategy.load_optimizer(optimizer, path)

    def save_state(self, path: str | Path) -> None:
        """Write all that an exact continuation needs: learner, position, controls, counts, loaders and buffer.

        With a staleness above 0, what makers have made ahead is not in it: it is made again. What others push into the
        buffer later is not in it either.
        """
        self.learner  # noqa: B018 - raises what building ended with
        if self._loop.learner.has_begun:
            raise RlhfError(
                f"{self._name} has learnt episode {ordinal(self._loop.episode)} in part, but states are of whole ones; "
                "call fit again, which goes on with the step that failed"
            )
        with naming_lost_rank(self.strategy.ranks):
            self._save_state(Path(path))

    def _save_state(self, directory: Path) -> None:
        tensors, facts = self.learner.state()
        held, restored = self._controls_by_episode, self._restored
        before = restored.rollouts if restored is not None else RolloutState()
        state = TrainingState(
            position=self._loop.learner.position,
            learner=facts,
            controls=held.current.state() if held is not None else restored.controls if restored is not None else None,
            tensors=tensors,
            rollouts=RolloutState(
                counts=self._counts_now() or {},
                controls=held.known() if held is not None else before.controls,
                pushed=tuple(self._buffer.waiting()),
            ),
            front={
                "fit_began": self._fit_began, "version": self._weights.version,
                "train_batch_size": self.train_batch_size,
                "after": restored.front.get("after", []) if held is None and restored is not None else [],
            },
        )  # fmt: skip
        loader = self._demonstrations
        stored = Stored(state, None if loader is None else loader.state())
        write_trainer_state(directory, stored, self.strategy.ranks)

    def load_state(self, path: str | Path) -> None:
        """Go on from a state that `save_state` wrote, before a fit: the fit that was under way goes on where it stood.

        Makers are sent these weights by `sync_models_to_remote_makers`, and begin their loops anew.

        Raises:
            ModelError: if there is no whole state, or it is of other models; nothing was changed.
            ConfigError: if it is of another train_batch_size.
        """
        state, demonstrations = read_trainer_state(Path(path), self.strategy.ranks)
        try:
            batch, began, version = (state.front[name] for name in ("train_batch_size", "fit_began", "version"))
        except KeyError as error:
            raise ModelError(f"{path} holds no state of a detached trainer, but one without {error}") from error
        if batch != self.train_batch_size:
            raise ConfigError(
                f"the state in {path} was learnt with train_batch_size {batch}, but this trainer has "
                f"{self.train_batch_size}; give it the same"
            )
        self.learner.load_state(state.tensors, state.learner)
        self._buffer.restore(state.rollouts.pushed)
        self._restored = replace(state, tensors={}, rollouts=replace(state.rollouts, pushed=()))
        self._controls_by_episode = self._source = None
        self._loop.is_unpublished, self._loop.controls = False, None
        self._learning_episodes.forget()
        self._learning_episodes.position = state.position
        self._fit_began = began
        self._weights.restore(version)
        if self._demonstrations is not None and demonstrations is not None:
            self._demonstrations.load_state(*demonstrations)

    def _counts_now(self) -> Mapping[str, Any] | None:
        """Return the counts of what makers made for this trainer's fits, and for those before it."""
        if not isinstance(self._source, ScheduledExperience):
            return (self._restored.rollouts.counts or None) if self._restored is not None else None
        counts = LeaseCounts(**self._source.queue.facts())
        made_again = counts._replace(lost=counts.lost + counts.waiting, waiting=0)  # what is made ahead
        return made_again._asdict()

    def _model(self, role: Any) -> Any:
        return self._trained(role).model

    def _optimizer(self, role: Any) -> Any:
        return self._trained(role).optimizer

    def _trained(self, role: Any) -> Any:
        trained = self.learner.trained(role)
        if trained is None:
            raise ConfigError(f"this trainer has no {role}, as its advantage estimator needs none")
        return trained


def controls_kept(state: TrainingState, *, completed: int, max_staleness: int) -> dict[int, EpisodeControls]:
    """Return the episodes' controls of a state that was loaded.

    States of earlier releases name those of an episode that no chunk was leased of by the number of episodes that
    were learnt when makers might first begin it ("after").
    """
    of = dict(state.rollouts.controls)
    after = {int(key): EpisodeControls(*values) for key, *values in state.front.get("after", ())}
    for episode in range(completed, completed + max_staleness + 1):
        if after and episode not in of:
            before = [number for number in after if number <= episode - max_staleness]
            of[episode] = after[max(before) if before else min(after)]
    return of
