"""coati's `PPOTrainer`: PPO in this process, or in as many as torchrun started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.buffer.naive import NaiveExperienceBuffer
from rlhf_core.buffer.order import episode_windows
from rlhf_core.config import PPOOptions, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.experience_maker.generate_kwargs import generation_settings_from_kwargs, is_greedy
from rlhf_core.experience_maker.maker import ExperienceMaker
from rlhf_core.experience_maker.samples import MadeExperience
from rlhf_core.models.critic import Critic
from rlhf_core.models.device import device_of
from rlhf_core.models.trunk import unwrapped
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rewards.sources import AnyRewardModel
from rlhf_core.strategy.agreement import together
from rlhf_core.strategy.booster import Booster
from rlhf_core.strategy.ranks import current_ranks
from rlhf_core.trainer.callbacks import Callback
from rlhf_core.trainer.loaders import Batches
from rlhf_core.trainer.optim import Trained
from rlhf_core.trainer.ppo.checkpoint import Held, PPOCheckpoints
from rlhf_core.trainer.ppo.controls import RewardControls
from rlhf_core.trainer.ppo.failed_batch import FailurePlace, check_finite, keep_failed_batch
from rlhf_core.trainer.ppo.learner import PPOLearner
from rlhf_core.trainer.ppo.metrics import PPOLog
from rlhf_core.trainer.ppo.offloading import Resting
from rlhf_core.trainer.ppo.ol_trainer import OLTrainer, Position
from rlhf_core.trainer.ppo.prompt_batches import Feed, PromptNumbers
from rlhf_core.trainer.ppo.setup import check_models, learning_config, rollout_config, scorer_of, with_precision
from rlhf_core.trainer.ppo.state import Learning
from rlhf_core.types import Experience, Sample

_SHAPES_MINIBATCHES = ("seed", "train_batch_size", "accumulation_steps", "sample_buffer")


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
        options = with_precision(options, actor_booster)
        generation = generation_settings_from_kwargs(generate_kwargs, tokenizer)
        rollout = rollout_config(options, generation, kl_coef=kl_coef)
        learning = learning_config(
            options, generation, train_batch_size=train_batch_size, accumulation_steps=accumulation_steps,
            eps_clip=eps_clip, value_clip=value_clip, vf_coef=vf_coef, ptx_coef=ptx_coef,
        )  # fmt: skip
        self.ranks, self.device = current_ranks(), device_of(actor)
        self.tokenizer, self.seed, self.save_dir = tokenizer, seed, Path(save_dir) if save_dir is not None else None
        self.train_batch_size, self.accumulation_steps = train_batch_size, accumulation_steps
        self.sample_buffer, self.apply_loss_mask, self.ptx_coef = sample_buffer, apply_loss_mask, ptx_coef
        self.buffer = NaiveExperienceBuffer(train_batch_size, buffer_limit, buffer_cpu_offload, seed=seed)
        self.experience_maker = ExperienceMaker(
            unwrapped(actor),
            unwrapped(critic),
            scorer or scorer_of(reward_model, scaled=not options.legacy),
            unwrapped(initial_model),
            config=rollout,
            template=PromptTemplate(tokenizer, TemplateConfig()),
            seed=seed,
            generation=generation,
            greedy=is_greedy(generate_kwargs),
        )
        roles = {"actor": Trained(actor, actor_optim, actor_lr_scheduler, actor_booster)}
        if critic is not None:
            roles["critic"] = Trained(critic, critic_optim, critic_lr_scheduler, critic_booster)
        self.learner = PPOLearner(
            roles["actor"], roles.get("critic"), learning, device=self.device, ranks=self.ranks, seed=seed,
            max_new_tokens=generation.max_new_tokens,
        )  # fmt: skip
        self.controls, self._log = RewardControls(rollout, self.ranks), PPOLog(self.ranks)
        self.checkpoints = PPOCheckpoints(
            self.save_dir,
            save_interval,
            roles,
            Held(self.learner, self.controls, self._log.meter),
            settings={name: getattr(self, name) for name in _SHAPES_MINIBATCHES},
            ranks=self.ranks,
        )
        self._resting = Resting([initial_model, reward_model], self.device, offload=offload_inference_models)
        self._numbers = PromptNumbers(options.samples_per_prompt, self.ranks)
        self._samples: list[Sample] = []
        self._learning: Learning | None = None
        self._feed: Feed

    def load_checkpoint(self, directory: str | Path) -> None:
        """Go on from a checkpoint: of a `save_dir` the latest whole one, or one step's own directory.

        Raises:
            ModelError: if there is no whole checkpoint, or it is of other models; nothing was changed.
            ConfigError: if it is of more or fewer ranks, or of the middle of an episode under other settings.
        """
        position, learning = self.checkpoints.load(directory)
        self._forget_episode()
        self.position, self._learning = position, learning
        if self._learning is not None:
            self.buffer.append(self._learning.collected)

    def _before_fit(
        self, prompts: Batches, demonstrations: Batches | None, log_dir: str | Path | None, use_wandb: bool
    ) -> None:
        if self.ptx_coef > 0 and demonstrations is None:
            raise ConfigError(
                f"ptx_coef is {self.ptx_coef} (coati's default is 0.9), but there is no pretrain_dataloader to learn "
                "from; give fit one, or set ptx_coef to 0.0"
            )
        self.checkpoints.check_directory()
        self._feed = Feed(
            prompts, demonstrations if self.ptx_coef > 0 else None, tokenizer=self.tokenizer, ranks=self.ranks,
            device=self.device, only_labels=self.apply_loss_mask,
        )  # fmt: skip
        self._log.open(log_dir, use_wandb)
        self.checkpoints.resume(self._feed.loaders)

    def _collect(self, episode: int) -> None:
        self._tell("on_make_experience_start")
        made = self._make_experience(episode)
        if not self.buffer.cpu_offload:
            made.experience.to_device(self.device)
        self.buffer.append(made.experience, made.samples)
        self._samples += made.samples
        self._tell("on_make_experience_end", made.experience)

    def _make_experience(self, episode: int) -> MadeExperience:
        prompts, samples = self._numbers.number(self._feed.prompts())
        with self._resting.awake():
            made = together(
                self.ranks,
                lambda: self.experience_maker.make_experience(
                    prompts, samples, episode=episode, policy_version=episode, controls=self.controls.current()
                ),
                what="make its experience",
            )
        try:
            together(self.ranks, lambda: check_finite(made.experience), what="score its responses by finite numbers")
        except TrainingError as error:
            raise self._kept(error, made.experience, made.samples) from error
        return made

    def _finish_collecting(self, episode: int) -> None:  # noqa: ARG002 - the loop's
        self._log.collected(self._samples, self.controls.current(), self.position.step)
        self.controls.update(
            kl_per_sample=torch.tensor([sample.kl for sample in self._samples]),
            scores=torch.tensor([sample.score for sample in self._samples]),
        )
        self._samples = []
        self._numbers.begin_episode()

    def _learn(self, episode: int, num_update_steps: int) -> None:
        if self._learning is None:
            collected = self.buffer.collect()
            self._learning = Learning(collected, self.learner.recompute(collected))
        learning = self._learning
        windows = episode_windows(
            seed=self.seed, episode=episode, passes=num_update_steps, samples=len(learning.collected),
            batch_size=self.train_batch_size, accumulation_steps=self.accumulation_steps, sampled=self.sample_buffer,
        )  # fmt: skip
        for window in windows[self.position.windows :]:
            if self.learner.config.correction == "decoupled" and any(number > 0 for number in window.begins):
                # The trust region moves along with each pass; the values stay as the first call restated them.
                self._learning = learning = learning._replace(learnt=self.learner.recompute(learning.learnt))
            for number in window.begins:
                self._tell("on_learn_epoch_start", number)
            self._training_step(learning.learnt.select(window.rows), window.batches)
            for number in window.ends:
                self._tell("on_learn_epoch_end", number)
            self.position.windows += 1
            if self.checkpoints.is_due(self.position.step):
                self.checkpoints.save(self.position, self._feed.loaders, self._learning)

    def _training_step(self, experience: Experience, batches: int) -> None:
        """Take one optimizer step from as many training batches as a window has."""
        self._tell("on_learn_batch_start")
        try:
            stats = self.learner.training_step(experience, self._feed.demonstrations(batches))
        except TrainingError as error:
            raise self._kept(error, experience, ()) from error
        self.position.step = self.learner.steps
        self._log.stepped(stats, experience, self.position.step)
        self._tell("on_learn_batch_end", experience)

    def _clear(self) -> None:
        self._log.learnt(self.position.step)
        self._forget_episode()
        self.position = Position(self.position.episode + 1, 0, self.position.step)

    def _finish_fit(self) -> None:
        self.checkpoints.save(self.position, self._feed.loaders)

    def _after_fit(self) -> None:
        self._log.close()
        self.experience_maker.close()
        if not self.position.windows:  # an error ended the collecting, which another fit begins anew
            self._forget_episode()

    def _forget_episode(self) -> None:
        self.buffer.clear()
        self._learning = None
        self._samples = []
        self._numbers.begin_episode()

    def _kept(self, error: TrainingError, experience: Experience, samples: Sequence[Sample]) -> TrainingError:
        place = FailurePlace(self.save_dir, f"epoch-{self.position.episode}_step-{self.position.step}", self.ranks)
        return keep_failed_batch(place, error, experience, samples, decode=self.tokenizer.decode)
