"""Bradley-Terry training of a reward model; it is measured on prompts that it has not learnt."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.config import RewardModelConfig
from rlhf_core.counting import counted
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.models.compatibility import check_vocabulary, vocabulary_size
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import device_of, evaluating
from rlhf_core.strategy.booster import Booster
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.supervised.batches import PairBatch, pair_batch, pair_batch_of
from rlhf_core.supervised.measures import PairMeasurement, measurement
from rlhf_core.supervised.step import PairLoss, PairObjective, boosted_for_stage, stage_booster, train_epochs
from rlhf_core.supervised.trainer import SupervisedTrainer
from rlhf_core.training.boosted import pass_cost, ranks_of
from rlhf_core.training.checkpoint import write_json
from rlhf_core.training.micro_batches import FEW_PASSES, PassCost, of_like_length
from rlhf_core.training.optim import Metrics, OnStep, Trained

logger = logging.getLogger(__name__)


class HeldoutPrompts:
    """Knows the evaluation pairs' prompts, those of all ranks."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._all: frozenset[int] = frozenset()
        self._warned = False

    def begin(self) -> None:
        """Forget this rank's prompts of an earlier fit."""
        self._own.clear()

    def add(self, micro: PairBatch) -> None:
        """Take in a batch of evaluation pairs."""
        self._warn_of_guesses(micro)
        self._own |= {_digest(prompt) for prompt in micro.prompts if prompt}

    def agree(self, ranks: Ranks) -> None:
        """Tell all ranks of each one's prompts; called by all together."""
        digests = torch.tensor(sorted(self._own), dtype=torch.long)
        self._all = frozenset(ranks.gather(digests).tolist())

    def refuse(self, micro: PairBatch) -> None:
        """Check that a batch of training pairs has no such prompt.

        Raises:
            DataError: if it has one.
        """
        if not self._all:
            return
        self._warn_of_guesses(micro)
        if any(_digest(prompt) in self._all for prompt in micro.prompts if prompt):
            raise DataError(
                "a training pair has the prompt of an evaluation pair, and a reward model is measured on prompts that "
                "it never saw; leave such prompts out of one of the two"
            )

    def _warn_of_guesses(self, micro: PairBatch) -> None:
        if micro.guessed and not self._warned:
            self._warned = True
            logger.warning(
                "batches of pairs do not say where their prompts end, so what both sequences begin with is taken for "
                "it, and a prompt that is learnt and measured too may go unnoticed; give chosen_loss_mask or "
                "prompt_length, as DataCollatorForPreferenceDataset does"
            )


def _digest(prompt: tuple[int, ...]) -> int:
    """Return a number of 63 bits that stands for a prompt's token ids, the same in every process."""
    body = hashlib.sha256(repr(prompt).encode()).digest()
    return int.from_bytes(body[:8], "big") >> 1


class RewardModelTraining(NamedTuple):
    """What came of the training."""

    history: list[Metrics]
    """Of each step: step, loss, accuracy, lr, grad_norm, pairs."""
    dropped: int
    """Pairs that were too long."""
    trained: Trained
    """The model with its booster, whose `exact` gives the weights, wherever the strategy keeps them."""


def train_reward_model(
    reward_model: RewardModel,
    pairs: Sequence[EncodedPair],
    config: RewardModelConfig,
    *,
    seed: int,
    autocast_dtype: torch.dtype,
    on_step: OnStep | None = None,
    ranks: Ranks | None = None,
) -> RewardModelTraining:
    """Train a reward model to score the chosen sequence above the rejected; in place, unless weights are sharded.

    Args:
        reward_model: on its device, what is trained of it in float32. Whoever needs it afterwards takes it from the
            result's booster.
        pairs: token ids, and by how much the scores should differ; the same on every rank.
        config: epochs, batch sizes (of one rank), learning rates of trunk and head, form of the loss.
        seed: of the order and of dropout.
        autocast_dtype: arithmetic of the trunk's forward pass.
        on_step: told the metrics of each step as it ends.
        ranks: who trains together; None takes torch.distributed's default group.

    Returns:
        The history, how many pairs were dropped as longer than `config.max_length`, and the trained model.

    Raises:
        DataError: before any training, if no pair is left, or one has a token that the model does not know.
        ConfigError: before any training, if the strategy cannot be had here.
        TrainingError: if a loss or gradient is not finite.
    """
    ranks = ranks_of(config, ranks)
    kept = _checked(pairs, config.max_length, reward_model)
    device = device_of(reward_model)
    booster = stage_booster(config, dtype=autocast_dtype, device=device, ranks=ranks)
    trained = boosted_for_stage(
        reward_model, booster, config, samples=len(kept), ranks=ranks, other_lrs={"head.": config.head_lr}
    )

    cost = pass_cost(trained.booster, trained.model, device)

    def micros(places: Iterable[int]) -> list[PairBatch]:
        mine = [kept[place] for place in places]
        few = PassCost(FEW_PASSES, most=cost.most)
        cut = of_like_length([2 * pair.longest for pair in mine], config.micro_batch_size, few)
        return [pair_batch([mine[place] for place in each]) for each in cut]

    own_cost = PassCost(FEW_PASSES) if cost.is_tree else cost  # for the prompt that both responses of a pair follow
    history = train_epochs(
        trained,
        PairObjective(device, autocast_dtype, loss=config.loss, centring=config.centring, cost=own_cost),
        config,
        samples=len(kept),
        micros=micros,
        seed=seed,
        ranks=ranks,
        on_step=on_step,
    )
    return RewardModelTraining(history, len(pairs) - len(kept), trained)


def _checked(pairs: Sequence[EncodedPair], max_length: int, model: RewardModel) -> list[EncodedPair]:
    kept = [pair for pair in pairs if pair.longest <= max_length]
    if not kept:
        raise DataError(
            f"expected at least one preference pair within {max_length} tokens, got {counted(len(pairs), 'pair')}, "
            "none short enough; raise reward_model.max_length or give more pairs"
        )
    size = vocabulary_size(model)
    for number, pair in enumerate(kept, start=1):
        ids = torch.tensor([*pair.chosen, *pair.rejected])
        check_vocabulary(ids, size, what=f"the tokens of pair {number} of {len(kept)}")
        if not (pair.chosen and pair.rejected):
            raise DataError(f"pair {number} of {len(kept)} has an empty sequence")
    return kept


class RewardModelTrainer(SupervisedTrainer[PairBatch]):
    """coati's trainer on preference pairs; the arithmetic is `train_reward_model`'s.

    Args:
        model: gives one score per sequence, as `RewardModel`; as `booster.boost` returned it.
        booster: of the protocol `Booster`; it clips gradients, and says in which precision the model runs.
        optimizer: boosted.
        plugin: the booster's; without a meaning here.
        lr_scheduler: stepped once per optimizer step.
        tokenizer: of the pairs; the model must know all of its tokens. None is not looked at.
        loss_fn: mean loss of chosen and rejected scores, as `LogSigLoss()` or `LogExpLoss()`; None is the former.
        max_epochs: passes over the training data.
        beta: nothing; must be 0 without a `loss_fn`, as coati's own default loss takes no such number and fails.
        accumulation_steps: batches per optimizer step.
        start_epoch: the first pass's number, from 0.
        save_interval: optimizer steps between checkpoints; None or 0 writes one before each measurement and at the end.
        save_dir: of the checkpoints, and of the measurements on the evaluation data; None writes none.
        coordinator: without a meaning here.
        centring: weight of the squared sum of a pair's scores, at least 0; with the default loss only.
    """

    name = "reward-model"

    def __init__(
        self,
        model: nn.Module,
        booster: Booster,
        optimizer: Any,
        plugin: Any,  # noqa: ARG002 - coati's
        lr_scheduler: Any,
        tokenizer: Any,
        loss_fn: PairLoss | None = None,
        max_epochs: int = 1,
        beta: float = 0.0,
        accumulation_steps: int = 1,
        start_epoch: int = 0,
        save_interval: int | None = 0,
        save_dir: str | Path | None = None,
        coordinator: Any = None,  # noqa: ARG002
        *,
        centring: float = 0.0,
    ) -> None:
        super().__init__(
            model,
            booster,
            optimizer,
            lr_scheduler,
            max_epochs=max_epochs,
            accumulation_steps=accumulation_steps,
            start_epoch=start_epoch,
            save_interval=save_interval,
            save_dir=save_dir,
        )
        if beta and loss_fn is None:
            raise ConfigError(f"beta is {beta}, but the Bradley-Terry loss has no such number; leave it at 0")
        if centring < 0 or (centring and loss_fn is not None):
            raise ConfigError(
                f"centring is {centring}{' beside a loss_fn' if loss_fn is not None else ''}, but it must be at least "
                "0, and belongs to the default loss; leave it at 0 with another"
            )
        if tokenizer is not None and self.vocabulary is not None and len(tokenizer) > self.vocabulary:
            raise ModelError(
                f"the tokenizer has {len(tokenizer)} tokens, but the reward model's vocabulary only {self.vocabulary}; "
                "give the tokenizer that the model was made with"
            )
        self.loss_fn = loss_fn
        self.centring = centring
        self.evaluation: PairMeasurement | None = None
        """The last measurement on the evaluation data."""
        self._heldout = HeldoutPrompts()

    def _objective(self) -> PairObjective:
        loss: PairLoss | Literal["log_sigmoid"] = self.loss_fn or "log_sigmoid"
        return PairObjective(self.device, self.autocast_dtype, loss=loss, centring=self.centring)

    def _read(self, batch: Mapping[str, Any], *, training: bool) -> PairBatch:
        micro = pair_batch_of(batch)
        check_vocabulary(micro.input_ids, self.vocabulary, what="a batch's pairs")
        if training:
            self._heldout.refuse(micro)
        return micro

    def _before_fit(self, loader: Iterable[Mapping[str, Any]]) -> None:
        super()._before_fit(loader)
        self._heldout.agree(self.ranks)

    def _look_at(self, loader: Iterable[Mapping[str, Any]]) -> bool:
        found = False
        self._heldout.begin()
        for batch in loader:
            self._heldout.add(self._read(batch, training=False))
            found = True
        return found

    def _score(self, micros: Iterable[PairBatch | None]) -> tuple[Tensor, ...]:
        objective, sides = self._objective(), ([torch.zeros(0)], [torch.zeros(0)])
        with evaluating(self.trained.model), torch.no_grad():
            for micro in micros:
                found = objective.scores(self.trained.model, objective.idle() if micro is None else micro)
                if micro is None:
                    continue
                for side, scores in zip(sides, found, strict=True):
                    side.append(scores.cpu())
        return torch.cat(sides[0]), torch.cat(sides[1])

    def _figures(self, scores: tuple[Tensor, ...], epoch: int) -> Metrics:
        chosen, rejected = scores
        found = self.evaluation = measurement(chosen=chosen, rejected=rejected, ranks=self.ranks)

        def keep() -> None:
            if self.save_dir is not None and self.ranks.is_first:
                write_json(self.save_dir / f"evaluation-epoch-{epoch}.json", found.facts())

        together(self.ranks, keep, what="keep the evaluation")
        names = ("accuracy", "loss", "calibration_error", "brier", "pairs")
        return {name: float(getattr(found, name)) for name in names}
