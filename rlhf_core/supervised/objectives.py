"""What demonstrations and preference pairs teach: the objectives of `supervised_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from rlhf_core.functional.losses import pairwise_loss
from rlhf_core.models.device import autocast
from rlhf_core.supervised.batches import PairBatch, TokenBatch
from rlhf_core.supervised.forward import token_loss

PairLoss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of chosen and rejected scores, [B] each."""


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


class PairObjective:
    """The chosen response's score above the rejected one's, by the pair's margin: a mean over the minibatch's pairs.

    Args:
        device: of the model.
        autocast_dtype: arithmetic of the trunk's forward pass; scores and losses are float32.
        loss: `log_sigmoid` or `log_exp`; or a function that returns the mean loss of chosen and rejected scores, from
            whose first argument margins are subtracted.
        centring: weight of the squared sum of a pair's scores; nothing for a function.
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
    ) -> None:
        self.device = device
        self.autocast_dtype = autocast_dtype
        self._loss = loss
        self._centring = centring

    def count(self, micro: PairBatch) -> int:
        """Return the number of pairs."""
        return micro.pairs

    def scores(self, model: nn.Module, micro: PairBatch) -> tuple[Tensor, Tensor]:
        """Return the scores of chosen and rejected sequences, [B] each, from one forward pass."""
        with autocast(self.device, self.autocast_dtype):
            scores = model(micro.input_ids.to(self.device), micro.attention_mask.to(self.device))
        chosen, rejected = scores.flatten().float().chunk(2)
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
