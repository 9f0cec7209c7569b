"""Float32 arithmetic over weights of 16 bits, which stay as they are: a matrix is widened a piece at a time, when used.

A processor without fast bfloat16 computes in float32; a frozen base that was published in bfloat16 would be twice its
size there. The numbers are those of the model in float32, up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PIECE_BYTES = 1 << 22
"""Of a matrix, widened: small enough for a processor's cache, large enough for a product. For a matrix 11,008 wide this
takes 1.3 times as long as float32, a quarter of it 2.2 times."""


def compute_in_float32(model: nn.Module) -> None:
    """Have a frozen model of 16-bit weights compute in float32, in place.

    Linear layers and embeddings keep their weights. What else there is (norms, biases) is small, and is copied in
    float32.
    """
    for module in model.modules():
        kind = _WIDE.get(type(module))
        if kind is not None:
            module.__class__ = kind
        for name, parameter in module.named_parameters(recurse=False):
            if (kind is None or name != "weight") and parameter.dtype != torch.float32:
                setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))


class _Product(torch.autograd.Function):
    """x W^T in float32, [... O] from [... I], of a frozen matrix [O I] of 16 bits; a gradient for x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.cat([x @ piece.float().T for piece in _pieces(weight)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients
        pieces = _pieces(weight)
        parts = torch.split(gradient, [len(piece) for piece in pieces], dim=-1)
        result = parts[0] @ pieces[0].float()
        for part, piece in zip(parts[1:], pieces[1:], strict=True):
            result += part @ piece.float()
        return result, None


def _pieces(weight: Tensor) -> tuple[Tensor, ...]:
    rows = len(weight) if weight.is_cuda else max(1, PIECE_BYTES // (4 * weight.shape[1]))
    return torch.split(weight, rows)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(device_type=x.device.type, enabled=False):
        product: Tensor = _Product.apply(x.float(), weight)  # type: ignore[no-untyped-call]
    return product


class _WideLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = _product(input, self.weight)
        return product if self.bias is None else product + self.bias


class _WideConv1D(Conv1D):  # type: ignore[misc]  # transformers is not typed
    """GPT-2's layer, which keeps its weights transposed."""

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor = self.bias
        return _product(x, self.weight.T) + bias


class _WideEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


_WIDE: dict[type, type] = {nn.Linear: _WideLinear, Conv1D: _WideConv1D, nn.Embedding: _WideEmbedding}
