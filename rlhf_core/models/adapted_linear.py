"""A linear layer with its adapters as one product: y = x W^T + b + (x A^T) B^T.

A [r I] and B [O r] hold all sets of adapters, frozen and trained, joined by rank; B has their scales. peft adds one set
after the other, and casts, scales and copies for each. What is trained stays apart, in float32, as peft made it: it is
joined when it is used.

A set that is switched off has a B of zeros here, and not another shape: so a model whose new adapters change nothing
gives the bits of its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rlhf_core.models.base import is_widened, wide_gradient, wide_product

JOINED = "joined by rank"
"""How sets of adapters are computed, in words: training states note it."""


class AdaptedLinear(lora.Linear):  # type: ignore[misc]  # peft is not typed
    """peft's layer, with a forward pass of ours."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output, [... O] from [... I]."""
        active = self.active_adapters
        if not active or any(self.lora_dropout[name].training and self._drops(name) for name in active):
            out: Tensor = super().forward(x, *args, **kwargs)  # dropout gives each set an input of its own
            return out
        base = self.get_base_layer()
        weight = base.weight.T if isinstance(base, Conv1D) else base.weight
        factors = [each[name].weight for name in self.lora_A for each in (self.lora_A, self.lora_B)]
        scales = tuple(self.scaling[name] if name in active else 0.0 for name in self.lora_A)
        product: Tensor = _Adapted.apply(x, weight, base.bias, is_widened(base), scales, *factors)  # type: ignore[no-untyped-call]
        return product

    def _drops(self, name: str) -> bool:
        return getattr(self.lora_dropout[name], "p", 0.0) > 0


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wide: bool,
        scales: tuple[float, ...],
        *factors: Tensor,
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if wide:
            dtype = torch.float32
        else:
            weight = weight.to(dtype)
        with torch.autocast(device, enabled=False):
            rows = x.to(dtype).reshape(-1, x.shape[-1])
            a = _side_by_side(factors[::2], dim=0).to(dtype)
            scaled = [each * scale for each, scale in zip(factors[1::2], scales, strict=True)]
            b = _side_by_side(scaled, dim=1).to(dtype)
            low = rows @ a.T
            out = wide_product(rows, weight) if wide else rows @ weight.T
            if bias is not None:
                out += bias
            out.addmm_(low, b.T)
        ctx.save_for_backward(rows, weight, a, b, low)
        ctx.of = (x.shape, x.dtype, wide, scales, [each.shape[0] for each in factors[::2]])
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a, b, low = ctx.saved_tensors
        shape, x_dtype, wide, scales, ranks = ctx.of
        needed = ctx.needs_input_grad
        with torch.autocast(rows.device.type, enabled=False):
            gradient = gradient.reshape(-1, gradient.shape[-1]).to(rows.dtype)
            back = gradient @ b
            x = bias = None
            if needed[0]:
                x = wide_gradient(gradient, weight) if wide else gradient @ weight
                x = x.addmm_(back, a).view(shape).to(x_dtype)
            if needed[2]:
                bias = gradient.sum(dim=0, dtype=torch.float32)
            of_factors: list[Tensor | None] = []
            at = 0
            for rank, scale, trained in zip(ranks, scales, needed[5::2], strict=True):
                part = slice(at, at + rank)
                at += rank
                of_factors += [
                    (back[:, part].T @ rows).float() if trained else None,
                    (gradient.T @ low[:, part]).float() * scale if trained else None,
                ]
        return x, None, bias, None, None, *of_factors


def _side_by_side(tensors: Sequence[Tensor], *, dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)
