"""coati's `PPOTrainer`: PPO in this process, or in as many as torchrun started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.coati.buffer import NaiveExperienceBuffer
from rlhf_core.coati.callbacks import Callback, tell
from rlhf_core.coati.generate_kwargs import generation_settings_from_kwargs, is_greedy
from rlhf_core.coati.ol_trainer import OLTrainer
from rlhf_core.coati.ppo_checkpoint import Held, PPOCheckpoints
from rlhf_core.coati.ppo_setup import (
    check_models,
    check_run,
    learning_config,
    rollout_config,
    scorer_of,
    with_precision,
)
from rlhf_core.coati.prompt_batches import Feed, Places, PromptNumbers
from rlhf_core.config import PPOOptions, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.models.compatibility import vocabulary_size
from rlhf_core.models.critic import Critic
from rlhf_core.models.trunk import device_of, unwrapped
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.episode import EpisodeLearner, Hooks, Position
from rlhf_core.ppo.failed_batch import keep_in
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.loop import Collected, Loop
from rlhf_core.ppo.metrics import PPOLog, PPOStats
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rewards.sources import AnyRewardModel
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.rollout.samples import MadeExperience
from rlhf_core.strategy.booster import Booster
from rlhf_core.strategy.ranks import Ranks, SharedState, current_ranks, share_state, together
from rlhf_core.training.boosted import plain_model
from rlhf_core.training.loaders import Batches
from rlhf_core.training.optim import Trained
from rlhf_core.training.padding import PaddedBatch
from rlhf_core.types import Experience, Sample


class Resting:
    """Moves models to their device and, where they are to rest, away again.

    Args:
        models: what has no weights to move is left alone: None, and functions.
        device: where they work; on the CPU nothing ever moves.
        offload: whether they rest in host memory between two blocks.
    """

    def __init__(self, models: Sequence[Any], device: torch.device, *, offload: bool) -> None:
        self._models = [model for model in models if isinstance(model, torch.nn.Module)] if device.type != "cpu" else []
        self._device = device
        self._rest: torch.device | str = "cpu" if offload else device
        self._move(self._rest)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Run the block with the models on their device."""
        self._move(self._device)
        try:
            yield
        finally:
            self._move(self._rest)

    def _move(self, device: torch.device | str) -> None:
        for model in self._models:
            model.to(device)


_SHAPES_MINIBATCHES = ("seed", "train_batch_size", "accumulation_steps", "sample_buffer")


class _Steps(Hooks):
    """Around each optimizer step: the callbacks, the log, and a checkpoint where one is due."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def on_pass_start(self, number: int) -> None:
        tell(self._trainer.callbacks, "on_learn_epoch_start", number)

    def on_step_start(self) -> None:
        tell(self._trainer.callbacks, "on_learn_batch_start")

    def on_step_end(self, stats: PPOStats, experience: Experience) -> None:
        self._trainer.log.stepped(stats, experience, self._trainer.position.step)
        tell(self._trainer.callbacks, "on_learn_batch_end", experience)

    def on_pass_end(self, number: int) -> None:
        tell(self._trainer.callbacks, "on_learn_epoch_end", number)

    def on_window_end(self, *, is_last: bool) -> None:
        if not is_last:  # after the last one, the end of the episode is written
            self._trainer.save_if_due()


class PPOTrainer(OLTrainer):
    """Collects with an `ExperienceMaker`, learns with a `PPOLearner`, and throws away.

    One optimizer step learns from `accumulation_steps` training batches as from one batch of that size: all means are
    over all of them, on all ranks. Batches of several passes over the buffer stand in one line, so a step may end one
    pass and begin the next; the last step of an episode has what is left.

    Args:
        actor_booster: made the actor ready for training, and saves it.
        critic_booster: as for the actor.
        actor: the policy, as the booster returned it.
        critic: predicts returns; None, or left as it is, with an advantage estimator that needs none.
        reward_model: scores responses; an `RLVRRewardModel` does so by functions.
        initial_model: the KL penalty is measured from it; None takes the actor with its adapters switched off.
        actor_optim: as the booster returned it.
        critic_optim: None without a critic, as its schedule and booster.
        actor_lr_scheduler: stepped once per optimizer step.
        critic_lr_scheduler: as the actor's.
        tokenizer: of all models.
        kl_coef: weight of the KL penalty, per nat; where an adaptive coefficient starts.
        ptx_coef: weight of the demonstrations' loss, in [0, 1); the policy's gets what is left of 1.
        train_batch_size: samples that go through a model at once.
        buffer_limit: batches that the buffer keeps of an episode, the oldest being dropped; 0 keeps all.
        buffer_cpu_offload: keep experience in host memory until a step needs it.
        eps_clip: half-width of the trust region on the ratio.
        vf_coef: weight of the critic's loss.
        value_clip: half-width of the trust region on values, in the unit of returns.
        sample_buffer: each pass is one batch, drawn at random, instead of all samples.
        dataloader_pin_memory: without effect: batches are moved whole.
        offload_inference_models: reward model and initial model wait in host memory while the others learn.
        apply_loss_mask: learn those tokens of demonstrations that have labels; otherwise all of them. Responses are
            always learnt up to their end: behind it there is only padding.
        accumulation_steps: training batches of an optimizer step.
        save_interval: optimizer steps between checkpoints; 0 keeps only the one at the end of the fit.
        save_dir: of checkpoints and of batches that failed; None keeps none.
        use_tp: without effect: a booster knows whether it splits tensors.
        coordinator: without effect: torch.distributed knows the ranks.
        callbacks: are told of everything, in their order.
        options: choices of the algorithm that coati has no parameter for.
        scorer: judges responses instead of the reward model.
        seed: with episode, prompt and sample it decides every token drawn, and the order of minibatches.
        **generate_kwargs: how responses are drawn: max_new_tokens (256), max_length (2048), temperature, top_k, top_p,
            stop_token_ids and other names of coati's.

    Raises:
        ConfigError: if a value is out of range, or there is no such name.
        ModelError: if the models do not read the same tokens.
    """

    def __init__(
        self,
        actor_booster: Booster,
        critic_booster: Booster,
        actor: PreTrainedModel,
        critic: Critic | None,
        reward_model: AnyRewardModel | None,
        initial_model: PreTrainedModel | None,
        actor_optim: Optimizer,
        critic_optim: Optimizer | None,
        actor_lr_scheduler: LRScheduler,
        critic_lr_scheduler: LRScheduler | None,
        tokenizer: PreTrainedTokenizerBase,
        kl_coef: float = 0.1,
        ptx_coef: float = 0.9,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        buffer_cpu_offload: bool = True,
        eps_clip: float = 0.2,
        vf_coef: float = 1.0,
        value_clip: float = 0.2,
        sample_buffer: bool = False,
        dataloader_pin_memory: bool = True,  # noqa: ARG002 - coati's
        offload_inference_models: bool = True,
        apply_loss_mask: bool = True,
        accumulation_steps: int = 1,
        save_interval: int = 0,
        save_dir: str | Path | None = None,
        use_tp: bool = False,  # noqa: ARG002 - coati's
        coordinator: Any = None,  # noqa: ARG002 - coati's
        callbacks: Sequence[Callback] = (),
        *,
        options: PPOOptions = PPOOptions(lam=0.95),  # noqa: B008 - frozen
        scorer: Scorer | None = None,
        seed: int = 0,
        **generate_kwargs: Any,
    ) -> None:
        super().__init__(callbacks)
        others = {"critic": critic, "reward model": reward_model, "initial model": initial_model}
        check_models(actor, others, tokenizer)
        check_run(seed, buffer_limit, (critic, critic_optim, critic_lr_scheduler, critic_booster), options)
        options = with_precision(options, actor_booster)
        generation = generation_settings_from_kwargs(generate_kwargs, tokenizer)
        rollout = rollout_config(options, generation, kl_coef=kl_coef)
        learning = learning_config(
            options, generation, train_batch_size=train_batch_size, accumulation_steps=accumulation_steps,
            eps_clip=eps_clip, value_clip=value_clip, vf_coef=vf_coef, ptx_coef=ptx_coef,
        )  # fmt: skip
        self.ranks: Ranks = getattr(actor_booster, "ranks", None) or current_ranks()
        self.device = device_of(actor)
        self.tokenizer, self.seed, self.save_dir = tokenizer, seed, Path(save_dir) if save_dir is not None else None
        self.train_batch_size, self.accumulation_steps = train_batch_size, accumulation_steps
        self.sample_buffer, self.apply_loss_mask, self.ptx_coef = sample_buffer, apply_loss_mask, ptx_coef
        self.buffer = NaiveExperienceBuffer(train_batch_size, buffer_limit, buffer_cpu_offload, seed=seed)
        self.experience_maker = ExperienceMaker(
            plain_model(actor_booster, actor),
            None if critic is None else plain_model(critic_booster, critic),
            scorer or scorer_of(reward_model, scaled=not options.legacy),
            unwrapped(initial_model),
            config=rollout,
            template=PromptTemplate(tokenizer, TemplateConfig()),
            seed=seed,
            generation=generation,
            greedy=is_greedy(generate_kwargs),
        )
        roles = {"actor": Trained(actor, actor_optim, actor_lr_scheduler, actor_booster)}
        if critic is not None and critic_optim is not None:
            roles["critic"] = Trained(critic, critic_optim, critic_lr_scheduler, critic_booster)
        self.learner = PPOLearner(
            roles["actor"], roles.get("critic"), learning, device=self.device, ranks=self.ranks, seed=seed,
            max_new_tokens=generation.max_new_tokens,
        )  # fmt: skip
        self.controls, self.log = RewardControls(rollout, self.ranks), PPOLog(self.ranks)
        self.checkpoints = PPOCheckpoints(
            self.save_dir,
            save_interval,
            roles,
            Held(self.learner, self.controls, self.log.meter),
            settings={name: getattr(self, name) for name in _SHAPES_MINIBATCHES},
            ranks=self.ranks,
        )
        self._resting = Resting([initial_model, reward_model], self.device, offload=offload_inference_models)
        self._numbers = PromptNumbers(options.samples_per_prompt, self.ranks)
        self.episode = EpisodeLearner(
            self.learner, seed=seed, train_batch_size=train_batch_size, accumulation_steps=accumulation_steps,
            sample_buffer=sample_buffer, own_makers=True, demonstrations=self._demonstrations, keep=self._keep_batch,
            decode=tokenizer.decode, hooks=_Steps(self),
        )  # fmt: skip
        self._loop = Loop(
            self.episode, collect=self._collect, keep=self._keep, around=self._episode_told, controls=self.controls
        )
        self._samples: list[Sample] = []
        self._feed: Feed | None = None
        self._places: Places | None = None
        """Where the feed's loaders stood when the episode began."""

    def load_checkpoint(self, directory: str | Path) -> None:
        """Go on from a checkpoint: of a `save_dir` the latest whole one, or one step's own directory.

        What this trainer has collected, or taken from its loaders, is forgotten. Strategy and number of ranks may be
        others than those that wrote it; in the middle of an episode, other ranks leave out the rest of it.

        Raises:
            ModelError: if there is no whole checkpoint, or it is of other models, optimizers or schedules; nothing
                was changed.
            ConfigError: if it is of the middle of an episode under other settings.
        """
        position, learning = self.checkpoints.load(directory)
        self._forget_episode()
        self._feed, self._places = None, None
        self.episode.position, self.episode.learning = position, learning
        if learning is not None:
            self.buffer.append(learning.collected)

    @property
    def position(self) -> Position:
        """Where the run stands."""
        return self.episode.position

    def _before_fit(
        self, prompts: Batches, demonstrations: Batches | None, log_dir: str | Path | None, use_wandb: bool
    ) -> None:
        if self.ptx_coef > 0 and demonstrations is None:
            raise ConfigError(
                f"ptx_coef is {self.ptx_coef} (coati's default is 0.9), but there is no pretrain_dataloader to learn "
                "from; give fit one, or set ptx_coef to 0.0"
            )
        self.checkpoints.prepare()
        feed = Feed(
            prompts, demonstrations if self.ptx_coef > 0 else None, tokenizer=self.tokenizer, ranks=self.ranks,
            device=self.device, only_labels=self.apply_loss_mask, vocabulary=vocabulary_size(self.learner.actor),
            before=None if self._feed is None else self._feed.loaders,
        )  # fmt: skip
        self.log.open(log_dir, use_wandb)
        try:
            if self._places is not None and not self.episode.has_begun:  # an error may have ended the collecting
                feed.go_back(self._places)
            self.checkpoints.resume(feed.loaders)
            places = feed.places()
        except BaseException:
            self.log.close()
            raise
        self._feed, self._places = feed, places  # together, and last: a fit that could not begin has changed neither

    def _collect(self, episode: int) -> Collected:
        for _ in range(self._num_collect_steps):
            self._tell("on_make_experience_start")
            made = self._make_experience(episode)
            if not self.buffer.cpu_offload:
                made.experience.to_device(self.device)
            self.buffer.append(made.experience, made.samples)
            self._samples += made.samples
            self._tell("on_make_experience_end", made.experience)
        samples = self._samples
        self.log.collected(samples, self.controls.current(), self.position.step)
        self._forget_samples()
        return Collected(self.buffer.collect(), samples)

    def _make_experience(self, episode: int) -> MadeExperience:
        prompts, samples = self._numbers.number(self._fed.prompts())
        with self._resting.awake(), self.learner.awake():
            own = together(
                self.ranks,
                lambda: (
                    self.experience_maker.make_experience(
                        prompts, samples, episode=episode, policy_version=episode, controls=self.controls.current()
                    )
                    if self.ranks.speaks
                    else None
                ),
                what="make its experience",
            )
        made = of_first(own, self.ranks.shards)
        self.episode.check(made.experience, made.samples)
        return made

    def _keep(self, _episode: int, _steps: Sequence[PPOStats]) -> None:
        self.log.learnt(self.position.step)
        self.buffer.clear()
        self._places = self._fed.places()
        self.save_if_due()

    def save_if_due(self) -> None:
        """Write a checkpoint, if one is due after this optimizer step."""
        if self.checkpoints.is_due(self.position.step):
            self.checkpoints.save(self.position, self._fed.loaders, self.episode.learning)

    def _finish_fit(self) -> None:
        self.checkpoints.save(self.position, self._fed.loaders)

    def _after_fit(self) -> None:
        self.log.close()
        self.experience_maker.close()
        if not self.episode.has_begun:  # an error ended the collecting, which another fit begins anew
            self._forget_episode()

    def _forget_episode(self) -> None:
        self.buffer.clear()
        self.episode.forget()
        self._forget_samples()

    def _forget_samples(self) -> None:
        self._samples = []
        self._numbers.begin_episode()

    @property
    def _fed(self) -> Feed:
        assert self._feed is not None
        return self._feed

    def _demonstrations(self, batches: int) -> PaddedBatch | None:
        return self._fed.demonstrations(batches)

    def _keep_batch(self, write: Callable[[Path], None]) -> str:
        place = f"epoch-{self.position.episode}_step-{self.position.step}"
        return keep_in(self.save_dir, f"{place}/rank-{self.ranks.everyone.rank}")(write)


def of_first(made: MadeExperience | None, shards: Ranks) -> MadeExperience:
    """Return what the first of the processes that hold one model has made, on each of them."""
    if shards.world_size == 1:
        assert made is not None
        return made
    state = made and SharedState(made.experience.tensors(), {"samples": [asdict(sample) for sample in made.samples]})
    found = share_state(state, shards)
    assert found is not None
    tensors: dict[str, Any] = {"returns": None, **found.tensors}
    return MadeExperience(Experience(**tensors), [Sample(**sample) for sample in found.facts["samples"]])
