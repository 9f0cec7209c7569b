"""Norms, gates and rotary angles of Llama's form on CPUs, there and back in one pass over memory each.

transformers' own take seven passes for a norm and five for an angle, and keep what each of them needs for the way back;
these keep their inputs. transformers is given them in place of its own, in every model of a process, as it is given our
attention: what two fronts compute is then the same to the bit. They have one derivative, and none for `torch.func`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2

from rlhf_core.kernels.compiled import call, has_kernels

_SILU = type(ACT2FN["silu"])


class _Norm(Function):
    """x [N H] over the root of its mean square, times a weight [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        call("norm", x.dtype, x, None, weight, out, x.numel() // len(weight), len(weight), eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient, to_x = gradient.contiguous(), torch.empty_like(x)
        to_weight = x.new_empty(len(weight), dtype=torch.float32) if ctx.needs_input_grad[1] else None
        size = (x.numel() // len(weight), len(weight), ctx.eps)
        call("norm_back", x.dtype, gradient, x, weight, to_x, to_weight, *size)
        return to_x, None if to_weight is None else to_weight.to(weight.dtype), None


class _Gate(Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out, width = torch.empty_like(gate), gate.shape[-1]
        call("gate", gate.dtype, gate, up, out, gate.numel() // width, width, width)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate, to_up, width = torch.empty_like(gate), torch.empty_like(up), gate.shape[-1]
        sizes = (gate.numel() // width, width)
        call("gate_back", gate.dtype, gradient.contiguous(), gate, up, to_gate, to_up, *sizes)
        return to_gate, to_up


class _Rotate(Function):
    """Heads [B H S D] turned by the angles of their tokens, [B S D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(x, cosines, sines, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(gradient, cosines, sines, -1.0), None, None


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor, sign: float) -> Tensor:
    by_token = x.transpose(1, 2).contiguous()  # as a projection left it: no copy
    out = torch.empty_like(by_token)
    rows, length, heads, size = by_token.shape
    call("rotate", x.dtype, by_token, cosines, sines, out, rows * length, heads, size, sign)
    return out.transpose(1, 2)


def _put_in_place(modeling: Any, norm: type[nn.Module], mlp: type[nn.Module]) -> None:
    """Give transformers ours, which fall back on its own where there are no kernels for their inputs."""
    their_norm, their_mlp, their_rotation = norm.forward, mlp.forward, modeling.apply_rotary_pos_emb

    def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight
        x = hidden_states
        if not has_kernels(x, weight) or x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
            return their_norm(self, hidden_states)  # type: ignore[no-any-return]
        return _Norm.apply(x, weight, self.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]

    def mlp_forward(self: Any, x: Tensor) -> Tensor:
        if type(self.act_fn) is not _SILU or not has_kernels(x):
            return their_mlp(self, x)  # type: ignore[no-any-return]
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not has_kernels(gate, up) or gate.dtype != up.dtype or gate.shape != up.shape:
            return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]
        return self.down_proj(_Gate.apply(gate, up))  # type: ignore[no-any-return, no-untyped-call]

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        size = q.shape[-1]
        is_known = unsqueeze_dim == 1 and cos.shape[1:] == sin.shape[1:] == (q.shape[2], size) and size % 2 == 0
        if not is_known or not has_kernels(q, k, cos, sin):
            return their_rotation(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]
        # Under autocast angles are float32, and what they turn becomes so.
        wider = torch.promote_types(q.dtype, cos.dtype)
        angles = [each.to(wider).expand(len(q), -1, -1).contiguous() for each in (cos, sin)]
        return _Rotate.apply(q.to(wider), *angles), _Rotate.apply(k.to(wider), *angles)  # type: ignore[no-untyped-call]

    norm.forward, mlp.forward, modeling.apply_rotary_pos_emb = norm_forward, mlp_forward, rotation


_put_in_place(modeling_llama, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP)
_put_in_place(modeling_mistral, modeling_mistral.MistralRMSNorm, modeling_mistral.MistralMLP)
_put_in_place(modeling_qwen2, modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.Qwen2MLP)
