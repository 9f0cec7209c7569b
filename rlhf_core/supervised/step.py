"""Learning from demonstrations or preference pairs: what they teach, one optimizer step, and the epochs of a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlhf_core.config import RewardModelConfig, SFTConfig
from rlhf_core.errors import DataError
from rlhf_core.functional.logprobs import logprobs_from_logits
from rlhf_core.functional.losses import lm_loss, pairwise_loss
from rlhf_core.models.attention import attend_by_flash
from rlhf_core.models.compiled_layers import CompiledLayers
from rlhf_core.models.head_slices import read_logits
from rlhf_core.models.token_tree import TokenTree, read_columns, tree_of
from rlhf_core.models.trunk import (
    autocast,
    checkpoint_gradients,
    device_of,
    forward_takes,
    position_ids,
    unwrapped,
    vocabulary_part,
)
from rlhf_core.ppo.order import minibatch_order
from rlhf_core.strategy.booster import OwnBooster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.supervised.batches import PairBatch, TokenBatch
from rlhf_core.training.boosted import held_back, passes, strategy_booster
from rlhf_core.training.micro_batches import FEW_PASSES, PassCost, of_like_length
from rlhf_core.training.modes import check_passes, training_mode, undisturbed
from rlhf_core.training.optim import Metrics, OnStep, Trained, make_trained, take_step, warmup_then_decay

Micro = TypeVar("Micro")
"""A micro-batch."""
StageConfig = SFTConfig | RewardModelConfig
PairLoss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of chosen and rejected scores, [B] each."""


class Objective(Protocol[Micro]):
    """What a minibatch teaches."""

    what: str
    """The model, for messages."""
    unit: str
    """What is counted and averaged over: tokens or pairs."""
    reported: tuple[str, ...]
    """Names of the means that come with the loss."""

    def count(self, micro: Micro) -> int:
        """Return how many units a micro-batch has."""

    def loss(self, model: nn.Module, micro: Micro, *, denominator: float) -> tuple[Tensor, ...]:
        """Return the micro-batch's loss, then what is reported: sums over the micro-batch, over `denominator`."""

    def idle(self) -> Micro:
        """Return the smallest micro-batch that goes through all of the model; what it says is dropped."""


def stage_booster(config: StageConfig, *, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> OwnBooster:
    """Return a new booster for a stage's model.

    Raises:
        ConfigError: if the stage's strategy cannot be had here.
    """
    return strategy_booster(
        config.strategy, dtype=dtype, max_norm=config.grad_clip, device=device, ranks=ranks,
        accumulates=config.batch_size > config.micro_batch_size,
    )  # fmt: skip


def boosted_for_stage(
    model: nn.Module,
    booster: OwnBooster,
    config: StageConfig,
    *,
    samples: int,
    ranks: Ranks,
    other_lrs: Mapping[str, float] | None = None,
) -> Trained:
    """Return a stage's model with its optimizer, and its schedule over all steps of the stage.

    Args:
        model: as for `make_trained`.
        booster: from `stage_booster`.
        config: of the stage.
        samples: of all ranks, in one epoch.
        ranks: who trains together.
        other_lrs: as for `make_trained`.

    Raises:
        ModelError: if the model, or its device, cannot compute as the configuration says.
    """
    check_passes(config, device_of(model))
    if config.flash_attention:
        attend_by_flash(model)
    steps = config.epochs * -(-samples // (config.batch_size * ranks.world_size))
    return make_trained(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        schedule=warmup_then_decay(config.warmup_steps, steps),
        other_lrs=other_lrs,
        booster=booster,
    )


def train_epochs(
    trained: Trained,
    objective: Objective[Micro],
    config: StageConfig,
    *,
    samples: int,
    micros: Callable[[Iterable[int]], Sequence[Micro]],
    seed: int,
    ranks: Ranks,
    on_step: OnStep | None = None,
    at_epoch_end: Callable[[], Metrics] | None = None,
) -> list[Metrics]:
    """Go through a stage's samples `config.epochs` times, each time in another order; return each step's metrics.

    Args:
        trained: from `boosted_for_stage`; its model comes out in evaluation mode.
        objective: what is to be learnt.
        config: of the stage.
        samples: of all ranks, in one epoch.
        micros: makes this rank's micro-batches of the samples at these places.
        seed: of the order and of dropout.
        ranks: who trains together.
        on_step: told the metrics of each step as it ends.
        at_epoch_end: measures what is added to the metrics of an epoch's last step.

    Raises:
        TrainingError: if a loss or gradient is not finite.
    """
    batch_size = config.batch_size * ranks.world_size
    history: list[Metrics] = []
    with (
        gradients_checkpointed(trained.model) if config.gradient_checkpointing else nullcontext(),
        CompiledLayers(trained.model).in_use() if config.compile_layers else nullcontext(),
        training_mode(
            trained.model,
            seed=seed + ranks.rank,  # ranks must not drop the same units
        ),
    ):
        for epoch in range(1, config.epochs + 1):  # from 1: the first pass is permuted too
            order = minibatch_order(seed=seed, episode=0, epoch=epoch, samples=samples, batch_size=batch_size)
            for number, places in enumerate(order, start=1):
                mine = micros(places[ranks.rank :: ranks.world_size])
                metrics = {"step": float(len(history) + 1)} | supervised_step(trained, objective, mine, ranks=ranks)
                if at_epoch_end is not None and number == len(order):
                    metrics |= at_epoch_end()
                history.append(metrics)
                if on_step is not None:
                    on_step(metrics)
    return history


def supervised_step(
    trained: Trained,
    objective: Objective[Micro],
    micros: Sequence[Micro],
    *,
    ranks: Ranks,
) -> Metrics:
    """Take one optimizer step from the micro-batches of all ranks.

    The loss is a mean over all units of all ranks: neither the cut into micro-batches nor the one into ranks changes
    it. A rank may come with fewer micro-batches than others, or with none, as long as another has some: where backward
    passes wait for all ranks it makes idle ones, which change nothing.

    Args:
        trained: the model, in the mode in which it is to be trained.
        objective: what is to be learnt.
        micros: this rank's.
        ranks: who trains together.

    Returns:
        Loss and reported means over all ranks, lr, grad_norm, and the number of units under their name.

    Raises:
        DataError: on all ranks, if there is nothing to learn on any.
        TrainingError: on all ranks, if a loss or gradient is not finite.
    """
    micros = [micro for micro in micros if objective.count(micro)]
    mine = sum(objective.count(micro) for micro in micros)
    units = ranks.sum(torch.tensor(mine)).item()
    if not units:
        raise DataError(f"a minibatch has no {objective.unit} to learn from; look at its masks and labels")
    lr = trained.scheduler.get_last_lr()[0]
    sums = torch.zeros(1 + len(objective.reported))
    count = passes(trained.booster, len(micros), ranks)
    with _drawing_apart(ranks):
        for number in range(count):
            with held_back(trained.booster, trained.model, trained.optimizer, is_last=number == count - 1):
                if number >= len(micros):
                    _idle_pass(trained, objective)
                    continue
                # Gradients are averaged over ranks, not added: hence the number of ranks.
                loss, *reported = objective.loss(trained.model, micros[number], denominator=units / ranks.world_size)
                trained.booster.backward(loss, trained.optimizer)
                sums = sums.to(loss.device) + torch.stack([loss, *reported]).detach()
    means = ranks.sum(sums) / ranks.world_size
    taken = take_step(trained, loss=means[0], what=objective.what, ranks=ranks)
    named = dict(zip(("loss", *objective.reported), means.tolist(), strict=True))
    return named | {"lr": float(lr), "grad_norm": taken.norm, objective.unit: float(units)}


@contextmanager
def _drawing_apart(ranks: Ranks) -> Iterator[None]:
    """Let the stages and columns of one model drop by themselves, and come out with equal random states.

    Loaders draw from these, and a checkpoint has those of one process.
    """
    if ranks.shards.world_size == ranks.tensor.world_size:
        yield
        return
    seed = int(torch.randint(1 << 62, ()))
    with undisturbed():
        torch.manual_seed(seed + ranks.shards.rank // ranks.tensor.world_size)
        yield


def _idle_pass(trained: Trained, objective: Objective[Micro]) -> None:
    """Go forward and backward for the other ranks' sake: gradients of zero, and no dropout drawn from what is next."""
    with undisturbed():
        loss, *_ = objective.loss(trained.model, objective.idle(), denominator=1.0)
        trained.booster.backward(0.0 * loss, trained.optimizer)


@contextmanager
def gradients_checkpointed(model: nn.Module) -> Iterator[None]:
    """Run the block with activations computed again in the backward pass; then keep them again.

    Args:
        model: a language model or a model on a trunk, maybe wrapped by a booster.

    Raises:
        ModelError: if the architecture cannot.
    """
    inner: Any = unwrapped(model)
    inner = getattr(inner, "trunk", inner)
    checkpoint_gradients(inner)
    try:
        yield
    finally:
        inner.gradient_checkpointing_disable()


class TokenObjective:
    """Likelihood of the tokens to learn: a mean over the tokens of the minibatch, long responses weigh more.

    Args:
        device: of the model.
        autocast_dtype: arithmetic of the forward pass.
    """

    what = "language model"
    unit = "tokens"
    reported: tuple[str, ...] = ()

    def __init__(self, device: torch.device, autocast_dtype: torch.dtype) -> None:
        self.device = device
        self.autocast_dtype = autocast_dtype

    def count(self, micro: TokenBatch) -> int:
        """Return the number of tokens to learn."""
        return micro.tokens

    def loss(self, model: nn.Module, micro: TokenBatch, *, denominator: float) -> tuple[Tensor]:
        """Return the negative log-likelihood over `denominator`."""
        loss = token_loss(model, micro, denominator=denominator, device=self.device, autocast_dtype=self.autocast_dtype)
        return (loss,)

    def idle(self) -> TokenBatch:
        """Return one row of two tokens."""
        places = torch.arange(2)[None]
        return TokenBatch(torch.zeros_like(places), torch.ones(1, 2, dtype=torch.bool), places, places > 0)


def token_loss(
    model: nn.Module, batch: TokenBatch, *, denominator: float, device: torch.device, autocast_dtype: torch.dtype
) -> Tensor:
    """Return the negative log-likelihood of the tokens to learn, over `denominator`.

    Args:
        model: a causal language model, maybe wrapped by a booster.
        batch: in host memory.
        denominator: tokens to learn in the minibatch of all ranks, over the number of ranks.
        device: of the model.
        autocast_dtype: arithmetic of the forward pass.
    """
    # The token at position t is predicted at t - 1; where no row learns anything, no logits are computed.
    kept = batch.loss_mask.any(dim=0).nonzero().squeeze(1) - 1
    tokens, mask = (tensor[:, kept + 1].to(device) for tensor in (batch.input_ids, batch.loss_mask))

    part = vocabulary_part(model)

    def read(logits: Tensor, wanted: Tensor) -> tuple[Tensor]:
        return (logprobs_from_logits(logits, wanted, temperature=1.0, part=part),)

    with autocast(device, autocast_dtype):
        if (tree := _tree_of(model, batch)) is not None:
            (logprobs,) = read_columns(model, tree, kept, tokens, read)
        else:
            (logprobs,) = read_logits(model, partial(kept_logits, model, batch, kept, device), tokens, read)
    return lm_loss(logprobs=logprobs, mask=mask, denominator=denominator)


def _tree_of(model: nn.Module, batch: TokenBatch) -> TokenTree | None:
    """Return the rows as a tree; None where each may not attend to all that is before it, or is not counted from 0."""
    mask = batch.attention_mask
    if mask.dim() != batch.input_ids.dim() or not torch.equal(batch.position_ids, position_ids(mask)):
        return None
    return tree_of(model, batch.input_ids, mask)


def kept_logits(model: nn.Module, batch: TokenBatch, kept: Tensor, device: torch.device) -> Tensor:
    """Return the logits at the positions `kept` of every row, [B K V]; the head is applied there only.

    Args:
        model: a causal language model, maybe wrapped by a booster.
        batch: in host memory.
        kept: [K], positions.
        device: of the model.
    """
    mask = batch.attention_mask.to(device)
    if mask.dim() == batch.input_ids.dim():
        mask = mask.long()
    elif getattr(unwrapped(model).config, "_attn_implementation", None) == "eager":  # adds it to the scores
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids.to(device), "attention_mask": mask, "use_cache": False}
    if forward_takes(model, "position_ids"):
        inputs["position_ids"] = batch.position_ids.to(device)
    kept = kept.to(device)
    if not forward_takes(model, "logits_to_keep"):
        every: Tensor = model(**inputs).logits
        return every[:, kept]
    logits: Tensor = model(**inputs, logits_to_keep=kept).logits
    return logits


class PairObjective:
    """The chosen response's score above the rejected one's, by the pair's margin: a mean over the minibatch's pairs.

    Args:
        device: of the model.
        autocast_dtype: arithmetic of the trunk's forward pass; scores and losses are float32.
        loss: `log_sigmoid` or `log_exp`; or a function that returns the mean loss of chosen and rejected scores, from
            whose first argument margins are subtracted.
        centring: weight of the squared sum of a pair's scores; nothing for a function.
        cost: of the passes that a micro-batch is read in.
    """

    what = "reward model"
    unit = "pairs"
    reported: tuple[str, ...] = ("accuracy",)

    def __init__(
        self,
        device: torch.device,
        autocast_dtype: torch.dtype,
        *,
        loss: Literal["log_sigmoid", "log_exp"] | PairLoss = "log_sigmoid",
        centring: float = 0.0,
        cost: PassCost = PassCost(FEW_PASSES),  # noqa: B008 - nothing changes it
    ) -> None:
        self.device = device
        self.autocast_dtype = autocast_dtype
        self._loss = loss
        self._centring = centring
        self._cost = cost

    def count(self, micro: PairBatch) -> int:
        """Return the number of pairs."""
        return micro.pairs

    def scores(self, model: nn.Module, micro: PairBatch) -> tuple[Tensor, Tensor]:
        """Return the scores of chosen and rejected sequences, [B] each."""
        width = micro.attention_mask.shape[1]
        used = (width - micro.attention_mask.long().flip(1).argmax(dim=1)).tolist()  # columns up to a row's last token
        found, order = [], []
        for places in of_like_length(used, len(used), self._cost):
            rows = [tensor[places, : used[places[-1]]].to(self.device) for tensor in micro[:2]]
            with autocast(self.device, self.autocast_dtype):
                found.append(model(*rows).flatten().float())
            order += places
        chosen, rejected = torch.cat(found)[torch.tensor(order).argsort()].chunk(2)
        return chosen, rejected

    def loss(self, model: nn.Module, micro: PairBatch, *, denominator: float) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of pairs in which the chosen response scores strictly higher."""
        chosen, rejected = self.scores(model, micro)
        margin = None if micro.margin is None else micro.margin.to(self.device)
        if callable(self._loss):
            mean = self._loss(chosen if margin is None else chosen - margin, rejected)
            loss = mean * (micro.pairs / denominator)
        else:
            loss = pairwise_loss(
                chosen=chosen,
                rejected=rejected,
                denominator=denominator,
                margin=margin,
                centring=self._centring,
                form=self._loss,
            )
        return loss, (chosen > rejected).sum() / denominator

    def idle(self) -> PairBatch:
        """Return a pair of two tokens each."""
        ids = torch.zeros(2, 2, dtype=torch.long)
        return PairBatch(ids, torch.ones_like(ids, dtype=torch.bool), None)
