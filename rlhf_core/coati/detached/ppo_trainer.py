"""coati's `DetachedPPOTrainer`: PPO as an actor, or as several that train one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import torch

from rlhf_core.coati.buffer import NaiveExperienceBuffer
from rlhf_core.coati.detached.controls_of_episodes import EpisodesControls
from rlhf_core.coati.detached.factories import get_model_numel, set_dist_env
from rlhf_core.coati.detached.fit_dealing import DealingOptions
from rlhf_core.coati.detached.holders import find_actor
from rlhf_core.coati.detached.learner_building import LearningOptions, build_learner
from rlhf_core.coati.detached.rank_share import RankShare, agreed_plan, demonstrations_loader, next_demonstrations
from rlhf_core.coati.detached.registration import MakerFacts, Production, check_like_trainer
from rlhf_core.coati.detached.sources import FirstRanksExperience, Source
from rlhf_core.coati.detached.trainer import DetachedTrainer
from rlhf_core.coati.detached.trainer_files import TrainerFiles
from rlhf_core.coati.detached.trainer_ranks import Found, RankFacts, Shelf, all_holders, tell_each_other
from rlhf_core.coati.detached.weight_sender import BUCKET_BYTES, WeightSender
from rlhf_core.config import PPOOptions
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.failed_batch import check_finite
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.order import episode_windows
from rlhf_core.ppo.stats import PPOStats
from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.strategy.strategy import Strategy
from rlhf_core.training.callbacks import TrainerCallback, TrainerPerformanceEvaluator
from rlhf_core.training.loaders import Batches
from rlhf_core.types import EpisodeControls, Experience, Sample
from rlhf_core.weights.learners import published_weights, trained_weights

GROUPS = {"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "model_io": 1, "compute": 1}


@ray.remote(concurrency_groups=GROUPS)
class DetachedPPOTrainer(TrainerFiles, DetachedTrainer):
    """A shell around `PPOLearner`: learns whole episodes as `PPOTrainer` does, and sends the makers its weights.

    In lockstep (`max_staleness` 0) it takes the steps of a `PPOTrainer` whose `num_collect_steps` batches of prompts
    are this fit's `update_steps` x `train_batch_size` samples, and whose `num_update_steps` are its `train_epochs`.

    Several trainers, each with its own `env_info`, are the ranks of one group: they train one model, an episode has
    `update_steps` x `train_batch_size` samples for each, and the first deals for all. All methods but those of the
    buffer are then called on every one of them.

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
        save_dir: where the whole state goes (`save_state`), each time over the one before; None keeps none.
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
        self._controls_kept = EpisodesControls(options, learning.generation, dealing.max_staleness)
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
        stats = self.learner.training_step(experience, self._next_demonstrations(batches))
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
        """Return the name of the first rank's actor, which deals for all of its group."""
        self._check()
        return self._group[0].name or self._name

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def gathered_episode(self, episode: int) -> Found:
        """Return, for another rank, the experience of an episode, if it has been gathered."""
        return self._shelf.look(episode)

    @ray.method(concurrency_group="buffer_length")  # type: ignore[untyped-decorator]
    def figures(self) -> dict[str, float]:
        """Return what the base class knows, and the means of the last episode's optimizer steps by `PPOStats`."""
        stats = list(self._stats)
        means = {name: fmean(float(getattr(each, name)) for each in stats) for name in PPOStats._fields if stats}
        return {**super().figures(), **means}

    def _learn(self, episode: int, source: Source, update_steps: int, train_epochs: int) -> None:
        """Gather all of an episode, restate it by the weights that it begins with, and take its steps."""
        whole, samples = self._gathered(episode, source, update_steps)
        share = RankShare(self._ranks if source.is_shared else ALONE, self.train_batch_size)
        learnt = share.restated(self.learner, whole)
        windows = episode_windows(
            seed=self.dealing.seed, episode=episode, passes=train_epochs, samples=len(whole),
            batch_size=share.batch_size, accumulation_steps=self._learning.accumulation_steps, sampled=False,
        )  # fmt: skip
        self._stats = []
        for window in windows:
            if self._options.correction == "decoupled" and any(number > 0 for number in window.begins):
                learnt = share.restated(self.learner, learnt)  # the trust region moves along with each pass
            for number in window.begins:
                self._tell("on_epoch_start", number)
            self._step(learnt.select(share.of(window.rows)))
            for number in window.ends:
                self._tell("on_epoch_end", number)
        if samples:
            self._controls_kept.learnt(episode, samples)

    def _gathered(self, episode: int, source: Source, update_steps: int) -> tuple[Experience, Sequence[Sample]]:
        """Return an episode's rows in the order of their samples' keys, and their texts where somebody sent them."""
        buffer, samples = NaiveExperienceBuffer(self.train_batch_size), list[Sample]()
        for batch in source.episode(episode, update_steps):
            buffer.append(batch.experience, batch.samples)
            samples += batch.samples
        whole = buffer.collect()
        check_finite(whole)
        if source.is_shared and self._ranks.is_first:
            self._shelf.put(episode, whole.to_numpy)
        return whole, samples

    def _finish_episode(self, episode: int) -> None:
        if self._save_dir is not None and (episode + 1) % self._save_interval == 0:
            self.save_state(self._save_dir)

    def _production(self, total_steps: int, update_steps: int, train_epochs: int) -> Production:
        found = super()._production(total_steps, update_steps, train_epochs)
        self.learner  # noqa: B018 - raises what building ended with
        agreed_plan(self._ranks, total_steps, update_steps, train_epochs, self._episode)
        self._is_unsent = bool(self._ranks.gather(torch.tensor([int(self._is_unsent)])).any())  # all of them send
        return found._replace(trainers=self._ranks.world_size)

    def _open_source(self, production: Production, began: int) -> Source:
        if self._ranks.is_first or not all_holders(self._group):
            return super()._open_source(production, began)
        name = self._group[0].name
        first = find_actor(name, self.dealing.start_timeout_s, what="the first rank's trainer")
        who = f"rank 0 of {self._ranks.world_size} ({name})"
        return FirstRanksExperience(first, who, self.dealing.start_timeout_s + self.dealing.experience_timeout_s)

    def _is_pushed(self) -> bool:
        return self._ranks.world_size == 1 and super()._is_pushed()

    def _check_makers(self, makers: Sequence[MakerFacts]) -> None:
        super()._check_makers(makers)
        for maker in makers:
            check_like_trainer(maker, self._name, **self._learning.expected_of(self._options, self.dealing.seed))
        self._controls_kept.begin(kl_coef=makers[0].kl_coef, completed=self._episode)

    def _controls(self, episode: int) -> EpisodeControls | None:
        return self._controls_kept.of(episode)
