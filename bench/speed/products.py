"""The floor of a pass: the products of a model's matrices alone, of the same shapes and dtype, ours for few rows.

Left out are those of attention's scores and of adapters, whatever lies between products, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.generation.decoder import product


def distinct(rows: Sequence[Sequence[int]]) -> int:
    """Return how many tokens of rows must be computed: what several begin with in common, once."""
    return len({tuple(row[: place + 1]) for row in rows for place in range(len(row))})


class Products(NamedTuple):
    """The matrices of a model."""

    layers: Sequence[Tensor]
    head: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> Self:
        """Return the matrices of a model of Llama's form without adapters, those of one input joined.

        Few large products are the fastest.
        """
        found = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for group in (
                (attention.q_proj, attention.k_proj, attention.v_proj),
                (attention.o_proj,),
                (mlp.gate_proj, mlp.up_proj),
                (mlp.down_proj,),
            ):
                found.append(torch.cat([linear.weight.detach() for linear in group]).to(dtype))
        return cls(found, model.lm_head.weight.detach().to(dtype))

    def forward(self, tokens: int, scored: int) -> None:
        """Multiply as a pass over so many tokens does, of which the head sees `scored`."""
        for weight, rows in self._with_rows(tokens, scored):
            product(weight.new_ones(rows, weight.shape[1]), weight)

    def backward(self, tokens: int, scored: int, *, learns_weights: bool) -> None:
        """Multiply as the way back does: gradients of inputs and, if the weights are learnt, of these."""
        for weight, rows in self._with_rows(tokens, scored):
            gradient = weight.new_ones(rows, weight.shape[0])
            torch.mm(gradient, weight)
            if learns_weights:
                torch.mm(gradient.T, weight.new_ones(rows, weight.shape[1]))

    def learn(self, tokens: int, scored: int, *, learns_weights: bool) -> None:
        """Multiply as a training step does."""
        self.forward(tokens, scored)
        self.backward(tokens, scored, learns_weights=learns_weights)

    def generate(self, prompts: int, prompt_tokens: int, lengths: Tensor) -> None:
        """Multiply as a rollout does that passes once over the prompts and leaves out rows that have ended.

        Args:
            prompts: different ones.
            prompt_tokens: of all of these together.
            lengths: [B], tokens of each response.
        """
        self.forward(prompt_tokens, prompts)
        for step in range(1, int(lengths.max())):
            rows = int((lengths > step).sum())
            self.forward(rows, rows)

    def _with_rows(self, tokens: int, scored: int) -> Iterator[tuple[Tensor, int]]:
        yield from ((weight, tokens) for weight in self.layers)
        if scored:
            yield self.head, scored
