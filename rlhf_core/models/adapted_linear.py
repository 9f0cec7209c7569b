"""A linear layer with its adapters as one product: y = x W^T + b + (x A^T) B^T.

A [r I] and B [O r] hold all sets of adapters, frozen and trained, joined by rank; B has their scales. peft adds one set
after the other, and casts, scales and copies for each. What is trained stays apart, in float32, as peft made it: it is
joined when it is used.

A set that is switched off has a B of zeros here, and not another shape; where all are off, nothing is added. So a model
whose new adapters change nothing gives the bits of its reference. Under dropout each set has an input of its own, and
the pass is peft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners import lora
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_core.models.base import is_widened, wide_gradient, wide_product

JOINED, IN_TURN = "joined by rank", "one after the other"
"""How sets of adapters are computed, in words: training states note it."""


class AdaptedLinear(lora.Linear):  # type: ignore[misc]  # peft is not typed
    """peft's layer, with a forward pass of ours."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output, [... O] from [... I]."""
        dropouts = [self.lora_dropout[name] for name in self.active_adapters]  # of no dropout, an identity
        drops = any(each.training and getattr(each, "p", 0.0) > 0 for each in dropouts)
        if drops or self.disable_adapters or self.merged or args or kwargs:
            theirs: Tensor = super().forward(x, *args, **kwargs)
            return theirs
        base = self.get_base_layer()
        weight = base.weight.T if isinstance(base, Conv1D) else base.weight
        factors = [each[name].weight for name in self.lora_A for each in (self.lora_A, self.lora_B)]
        scales = tuple(self.scaling[name] if name in self.active_adapters else 0.0 for name in self.lora_A)
        rows = x.reshape(-1, x.shape[-1])
        given = (rows, weight, base.bias, is_widened(base), scales)
        shape = (*x.shape[:-1], len(weight))
        if not torch.is_grad_enabled():  # there torch.compile would pass the function its context instead of `x`
            return _products(*given, factors).out.view(shape)
        out: Tensor = _Adapted.apply(*given, *factors)  # type: ignore[no-untyped-call]
        return out.view(shape)


class _Adapted(torch.autograd.Function):
    """Of rows [N I]; factors are A and B of each set in turn, and a set of scale 0 adds nothing."""

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
        made = _products(x, weight, bias, wide, scales, factors)
        is_trained = any(ctx.needs_input_grad[5:])
        ctx.save_for_backward(made.weight, *((made.rows, made.low) if is_trained else (None, None)), *factors)
        ctx.of = (x.dtype, made.out.dtype, wide, scales)
        return made.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, low, *factors = ctx.saved_tensors
        x_dtype, dtype, wide, scales = ctx.of
        needed = ctx.needs_input_grad
        with torch.autocast(gradient.device.type, enabled=False):
            gradient = gradient.to(dtype)
            x = bias = None
            if needed[0]:
                x = wide_gradient(gradient, weight) if wide else gradient @ weight
            if needed[2]:
                bias = gradient.sum(dim=0, dtype=torch.float32)
            of_factors: list[Tensor | None] = [None] * len(factors)
            if any(scales):
                a, b = _joined(factors, scales, dtype)  # again: what was cast for each layer would wait here
                back = gradient @ b
                if x is not None:
                    x.addmm_(back, a)
                at = 0
                for number, scale in enumerate(scales):
                    part = slice(at, at + len(factors[2 * number]))
                    at = part.stop
                    if needed[5 + 2 * number]:
                        of_factors[2 * number] = (back[:, part].T @ rows).float()
                        of_factors[2 * number + 1] = (gradient.T @ low[:, part]).float() * scale
        return None if x is None else x.to(x_dtype), None, bias, None, None, *of_factors


class _Products(NamedTuple):
    """What the forward pass makes, all of one dtype."""

    out: Tensor
    rows: Tensor
    """[N I], the input."""
    weight: Tensor
    """Where it is widened, as it was."""
    low: Tensor | None
    """[N r], what A makes of the input; None where no set adds anything."""


def _products(
    x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool, scales: tuple[float, ...], factors: Sequence[Tensor]
) -> _Products:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if wide:
        dtype = torch.float32
    else:
        weight = weight.to(dtype)
    with torch.autocast(device, enabled=False):
        rows = x.to(dtype)
        if wide:
            out = wide_product(rows, weight)
            out = out if bias is None else out + bias
        else:
            out = nn.functional.linear(rows, weight, None if bias is None else bias.to(dtype))
        low = None
        if any(scales):
            a, b = _joined(factors, scales, dtype)
            low = rows @ a.T
            out.addmm_(low, b.T)
    return _Products(out, rows, weight, low)


def _joined(factors: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A [r I] and B [O r] of all sets, B with their scales."""
    scaled = [each * scale for each, scale in zip(factors[1::2], scales, strict=True)]
    return _side_by_side(factors[::2], dim=0).to(dtype), _side_by_side(scaled, dim=1).to(dtype)


def _side_by_side(tensors: Sequence[Tensor], *, dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)
