"""What `PPOTrainer` does in an episode: the steps of `OLTrainer.fit`, and what is left of them after an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_core.coati.buffer import NaiveExperienceBuffer
from rlhf_core.coati.offloading import Resting
from rlhf_core.coati.ol_trainer import OLTrainer, Position
from rlhf_core.coati.ppo_checkpoint import PPOCheckpoints
from rlhf_core.coati.ppo_checkpoint_files import Learning
from rlhf_core.coati.prompt_batches import Feed, Places, PromptNumbers
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.models.compatibility import vocabulary_size
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.failed_batch import FailurePlace, check_finite, keep_failed_batch
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.metrics import PPOLog
from rlhf_core.ppo.order import episode_windows
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.rollout.samples import MadeExperience
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.callbacks import Callback
from rlhf_core.training.loaders import Batches
from rlhf_core.types import Experience, Sample


class PPOLoop(OLTrainer):
    """Collects, restates and learns, and knows at any time what of that is done; `PPOTrainer` builds its parts.

    Args:
        callbacks: as for `OLTrainer`.
    """

    ranks: Ranks
    device: torch.device
    tokenizer: Any
    seed: int
    save_dir: Path | None
    train_batch_size: int
    accumulation_steps: int
    sample_buffer: bool
    apply_loss_mask: bool
    ptx_coef: float
    buffer: NaiveExperienceBuffer
    experience_maker: ExperienceMaker
    learner: PPOLearner
    controls: RewardControls
    checkpoints: PPOCheckpoints
    _log: PPOLog
    _resting: Resting
    _numbers: PromptNumbers

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(callbacks)
        self._samples: list[Sample] = []
        self._learning: Learning | None = None
        """From the end of collecting to the end of the episode."""
        self._feed: Feed | None = None
        self._places: Places | None = None
        """Where the feed's loaders stood when the episode began."""

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
        self._log.open(log_dir, use_wandb)
        try:
            if self._places is not None and self._learning is None:  # an error may have ended the collecting
                feed.go_back(self._places)
            self.checkpoints.resume(feed.loaders)
            places = feed.places()
        except BaseException:
            self._log.close()
            raise
        self._feed, self._places = feed, places  # together, and last: a fit that could not begin has changed neither

    def _has_collected(self) -> bool:
        return self._learning is not None

    def _collect(self, episode: int) -> None:
        self._tell("on_make_experience_start")
        made = self._make_experience(episode)
        if not self.buffer.cpu_offload:
            made.experience.to_device(self.device)
        self.buffer.append(made.experience, made.samples)
        self._samples += made.samples
        self._tell("on_make_experience_end", made.experience)

    def _make_experience(self, episode: int) -> MadeExperience:
        prompts, samples = self._numbers.number(self._fed.prompts())
        with self._resting.awake(), self.learner.awake():
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
        samples, controls = self._samples, self.controls.current()
        collected = self.buffer.collect()
        learnt = self.learner.recompute(collected)
        self.controls.update(
            kl_per_sample=torch.tensor([sample.kl for sample in samples]),
            scores=torch.tensor([sample.score for sample in samples]),
        )
        self._learning = Learning(collected, learnt)  # from here on, an error loses nothing of the episode
        self._forget_samples()
        self._log.collected(samples, controls, self.position.step)

    def _learn(self, episode: int, num_update_steps: int) -> None:
        assert self._learning is not None
        learning = self._learning
        self.position.passes = num_update_steps
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
            if self.position.windows < len(windows):  # after the last one, the end of the episode is written
                self._save_if_due()

    def _training_step(self, experience: Experience, batches: int) -> None:
        """Take one optimizer step from as many training batches as a window has."""
        self._tell("on_learn_batch_start")
        try:
            stats = self.learner.training_step(experience, self._fed.demonstrations(batches))
        except TrainingError as error:
            raise self._kept(error, experience, ()) from error
        self.position.step = self.learner.steps
        self.position.windows += 1  # before anything else can fail: this step must not be taken again
        self._log.stepped(stats, experience, self.position.step)
        self._tell("on_learn_batch_end", experience)

    def _clear(self) -> None:
        self._log.learnt(self.position.step)
        self._forget_episode()
        self.position = Position(self.position.episode + 1, 0, self.position.step)
        self._places = self._fed.places()
        self._save_if_due()

    def _save_if_due(self) -> None:
        if self.checkpoints.is_due(self.position.step):
            self.checkpoints.save(self.position, self._fed.loaders, self._learning)

    def _finish_fit(self) -> None:
        self.checkpoints.save(self.position, self._fed.loaders)

    def _after_fit(self) -> None:
        self._log.close()
        self.experience_maker.close()
        if self._learning is None:  # an error ended the collecting, which another fit begins anew
            self._forget_episode()

    def _forget_episode(self) -> None:
        self.buffer.clear()
        self._learning = None
        self._forget_samples()

    def _forget_samples(self) -> None:
        self._samples = []
        self._numbers.begin_episode()

    @property
    def _fed(self) -> Feed:
        assert self._feed is not None
        return self._feed

    def _kept(self, error: TrainingError, experience: Experience, samples: Sequence[Sample]) -> TrainingError:
        place = FailurePlace(self.save_dir, f"epoch-{self.position.episode}_step-{self.position.step}", self.ranks)
        return keep_failed_batch(place, error, experience, samples, decode=self.tokenizer.decode)
