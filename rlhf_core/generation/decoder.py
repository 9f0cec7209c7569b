"""The next token of each row, without transformers' layers: for models of Llama's form (Llama, Mistral, Qwen2).

transformers has some forty calls for a layer and token, most of them for little: q, k and v are three products, gate
and up two, norms and rotary angles ten passes each, and attention reads its heads repeated. Here a layer is four
products, and what lies between them is one pass over memory each: a kernel's where there are kernels, else PyTorch's.
On CPUs products of few rows in float32 are a kernel's, too.

Keys are kept with the tokens last, so that a query's products with them run along memory. Prompts go through
transformers' own layers, and what these kept is taken over; kernels read it once for all samples of a prompt.

On CUDA a token's hundreds of kernels can be recorded as a graph, once for each number of rows, and launched as one: of
a small model they take longer to launch than to run. Its shapes are fixed, so attention goes over all that may come.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from peft.tuners import lora
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM
from transformers.activations import ACT2FN

from rlhf_core.kernels.compiled import call, has_kernels
from rlhf_core.models.adapted_linear import AdaptedLinear
from rlhf_core.models.base import is_widened, wide_product
from rlhf_core.models.trunk import unwrapped

_FORMS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
_SILU = type(ACT2FN["silu"])
FIXED_ANGLES = ("default", "linear", "llama3")
"""Kinds of rotary angles that do not depend on how long a pass is."""
FEW_ROWS = {torch.float32: range(4, 225), torch.bfloat16: range(4, 129)}
"""How many rows of float32 our kernel multiplies faster than PyTorch, by the weights' dtype; measured with AVX."""
_HAS_VECTORS = torch.backends.cpu.get_cpu_capability().startswith("AVX")
VECTOR = 16
"""Numbers that our kernels read at once, at most."""
WORTH_A_GRAPH = 16
"""Tokens to come, at least: to record one is more work than to draw one."""


def can_decode(model: Any) -> bool:
    """Return whether a model is of the form that `Decoder` is for, and nobody changed or watches what it does."""
    inner = unwrapped(model)
    if type(inner) not in _FORMS or getattr(inner.config, "sliding_window", None) is not None:
        return False
    if any(type(each) is not nn.Parameter for each in inner.parameters()):  # shards, say, that are gathered when used
        return False
    if any("forward" in vars(each) or each._forward_hooks or each._forward_pre_hooks for each in inner.modules()):
        return False
    parts = [inner.model, inner.model.norm, inner.model.rotary_emb]
    linear = [inner.lm_head]
    for layer in inner.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        parts += [layer, attention, mlp, layer.input_layernorm, layer.post_attention_layernorm]
        linear += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if type(mlp.act_fn) is not _SILU:
            return False
    return all(type(each).__module__ == type(inner).__module__ for each in parts) and all(map(_is_known, linear))


def _is_known(linear: Any) -> bool:
    if isinstance(linear, lora.LoraLayer):
        return type(linear) is AdaptedLinear and not linear.merged
    return type(linear) is nn.Linear or is_widened(linear)


class PromptPass(NamedTuple):
    """What a model's own layers kept of some prompts, which they read together."""

    rows: Int[Tensor, " R"]
    """Their places among all prompts."""
    cache: DynamicCache
    padding: Int[Tensor, " R"]
    """How many tokens of it each row has, between the shared beginning and its own."""


class Decoder:
    """Reads a model's weights, and keeps keys and values of rows that grow by a token at a time.

    Under autocast weights of another dtype are cast once, when it is made. Make one for each batch: weights must not
    change while it is used.

    Args:
        model: what `can_decode` says yes to, in evaluation mode.
        passes: all prompts, as its own passes kept them; keys and values are taken out of them.
        length: tokens of a row at most, padding included.
        shared: how many tokens all prompts begin with.
        graphs: record steps on CUDA.
    """

    def __init__(
        self,
        model: Any,
        passes: Sequence[PromptPass],
        length: int,
        *,
        shared: int = 0,
        graphs: bool = False,
    ) -> None:
        inner = unwrapped(model)
        one = passes[0].cache.layers[0].keys
        dtype = _arithmetic(inner, one)
        self._model, firsts = inner.model, one.new_empty(sum(len(each.rows) for each in passes), dtype=torch.long)
        self._may_record = graphs and _can_record(one) and inner.model.rotary_emb.rope_type in FIXED_ANGLES
        self._graph: _Graph | None = None
        self._layers = [_Layer.of(layer, dtype) for layer in inner.model.layers]
        self._norm, self._head = _Norm.of(inner.model.norm, dtype), _Product([inner.lm_head], dtype)
        widths = [each.cache.get_seq_length() for each in passes]
        self.length = max(widths)
        """Tokens that are kept of each row."""
        for each, width in zip(passes, widths, strict=True):
            firsts[each.rows] = each.padding + (self.length - width)
        apart = self.length if has_kernels(one.new_empty(0, dtype=dtype)) else 0
        self._rows, self._most = _Rows(torch.arange(len(firsts), device=one.device), firsts, apart), length - apart
        self._kept = []
        for number in range(len(self._layers)):
            prompts, own = (_Kept.room(one, len(firsts), each, dtype) for each in (apart, self._most))
            for each, width in zip(passes, widths, strict=True):
                layer, places = each.cache.layers[number], slice(self.length - width, self.length)
                keys, values = (_without_gap(kept, each.padding, shared) for kept in (layer.keys, layer.values))
                (prompts if apart else own).write(each.rows, places, keys, values)
                layer.keys = layer.values = None
            self._kept.append((prompts, own))

    def keep(self, rows: Int[Tensor, " N"]) -> None:
        """Keep these rows, each as often as it is named; prompts that are kept apart stay."""
        self._rows, self._graph = self._rows.of(rows), None
        for number, (prompts, own) in enumerate(self._kept):  # one at a time: all of them twice may not fit
            self._kept[number] = prompts, own.of(rows)

    def next_logits(self, tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Take in a token of each row, and return the scores of the next."""
        at = self.length - self._rows.apart
        self.length += 1
        with torch.autocast(tokens.device.type, enabled=False):
            if self._graph is None and self._may_record and self._most - at >= WORTH_A_GRAPH:
                self._graph = _Graph(self._step, tokens, positions, torch.tensor([at], device=tokens.device))
            if self._graph is None:
                return self._step(tokens, positions, at)
            return self._graph(tokens, positions, at)

    def _step(self, tokens: Tensor, positions: Tensor, at: int | Tensor) -> Tensor:
        x = self._model.embed_tokens(tokens).to(self._norm.weight.dtype)
        angles = [each[:, 0].contiguous() for each in self._model.rotary_emb(x, positions[:, None])]
        added = None
        for layer, kept in zip(self._layers, self._kept, strict=True):
            attended = layer.attend(layer.before(x, added), angles, kept, self._rows, at)
            added = layer.down(_gate(layer.gate_up(layer.after(x, layer.out(attended)))))
        return self._head(self._norm(x, added))


class _Rows(NamedTuple):
    """What is known of the rows beside their keys and values."""

    prompt: Int[Tensor, " R"]
    """Of each, among those that are kept apart."""
    firsts: Int[Tensor, " R"]
    """The first place that each attends to, of those of its prompt and then its own."""
    apart: int
    """Places of prompts that are kept apart, which kernels read; 0 where they are kept with the rows."""

    def of(self, rows: Tensor) -> _Rows:
        """Return the same of these rows."""
        return _Rows(self.prompt[rows], self.firsts[rows], self.apart)


class _Kept(NamedTuple):
    """Keys and values of a layer, of prompts or of rows."""

    keys: Float[Tensor, "R K D L"]
    values: Float[Tensor, "R K L D"]

    @classmethod
    def room(cls, like: Tensor, rows: int, length: int, dtype: torch.dtype) -> _Kept:
        """Return zeros for heads as those of a pass [R K W D], at so many places."""
        _, heads, _, size = like.shape
        values = like.new_zeros(rows, heads, length, size, dtype=dtype)
        return cls(_with_room_behind(values, (rows, heads, size, length)).zero_(), values)

    def write(self, rows: Tensor, places: slice, keys: Tensor, values: Tensor) -> None:
        """Take over what a pass kept of some rows, [R K W D]."""
        self.keys[rows, :, :, places] = keys.transpose(2, 3).to(self.keys.dtype)
        self.values[rows, :, places] = values.to(self.values.dtype)

    def of(self, rows: Tensor) -> _Kept:
        """Return a copy of these rows."""
        keys = _with_room_behind(self.keys, (len(rows), *self.keys.shape[1:]))
        torch.index_select(self.keys, 0, rows, out=keys)
        return _Kept(keys, self.values.index_select(0, rows))


def _with_room_behind(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor, behind whose last number kernels may read a vector."""
    return like.new_empty(math.prod(shape) + VECTOR)[:-VECTOR].view(shape)


def _can_record(tensor: Tensor) -> bool:
    return tensor.is_cuda


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that a device's graphs are recorded on: libraries keep memory for each one they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Graph:
    """A step's kernels, recorded: they read and write the same memory each time.

    Args:
        step: what is recorded; it must not wait for the GPU. What it keeps at a place is written twice.
        inputs: of it, which are copied.
    """

    def __init__(self, step: Callable[..., Tensor], *inputs: Tensor) -> None:
        device = inputs[0].device
        self._inputs, self._graph = [each.clone() for each in inputs], torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(device), _side_stream(device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                step(*self._inputs)  # libraries make their workspaces on the first call, which cannot be recorded
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):  # weights may come
                self._output = step(*self._inputs)
        finally:
            current.wait_stream(side)

    def __call__(self, *inputs: Tensor | int) -> Tensor:
        """Return the step's result for other inputs of the same shapes; it is overwritten by the next call."""
        for held, each in zip(self._inputs, inputs, strict=True):
            held.copy_(each) if isinstance(each, Tensor) else held.fill_(each)
        self._graph.replay()
        return self._output


def _without_gap(kept: Tensor, padding: Tensor, shared: int) -> Tensor:
    """Return keys or values [R K W D] in which a row's padding stands in front of the tokens that all share."""
    if not shared:
        return kept
    places = torch.arange(kept.shape[2], device=kept.device)
    moved = (places - padding[:, None]).clamp(min=0)
    source = torch.where(places < shared + padding[:, None], moved, places)
    return kept.gather(2, source[:, None, :, None].expand(-1, kept.shape[1], -1, kept.shape[3]))


def _arithmetic(model: Any, kept: Tensor) -> torch.dtype:
    """Return the dtype of the products: the base's own, or autocast's, or that of what the prompts' pass kept."""
    if is_widened(_base_of(model.lm_head)):
        return torch.float32
    kind = kept.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else kept.dtype


def _base_of(layer: Any) -> Any:
    return layer.get_base_layer() if isinstance(layer, lora.LoraLayer) else layer


class _Norm(NamedTuple):
    """An RMS norm, of a sum."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, norm: Any, dtype: torch.dtype) -> _Norm:
        return cls(norm.weight.to(dtype).contiguous(), norm.variance_epsilon)

    def __call__(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Add to x, in place, and return its norm."""
        if has_kernels(x):
            out = torch.empty_like(x)
            call("norm", x.dtype, x, added, self.weight, out, *x.shape, self.eps)
            return out
        if added is not None:
            x += added
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


class _Product:
    """Linear layers of one input as one product, adapters included: x W^T + b + (x A^T) B^T.

    Weights that lie side by side in memory, as a shared base's do, are one matrix without a copy.
    """

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        bases = [_base_of(each) for each in layers]
        is_wide = is_widened(bases[0])
        weights = [base.weight.detach() if is_wide else base.weight.detach().to(dtype) for base in bases]
        self._held, self._weights = weights, _side_by_side(weights)  # the memory is the first ones'
        self._bias = None
        if any(base.bias is not None for base in bases):
            self._bias = torch.cat([
                weight.new_zeros(len(weight), dtype=dtype) if base.bias is None else base.bias.detach().to(dtype)
                for base, weight in zip(bases, weights, strict=True)
            ])  # fmt: skip
        self._factors = _Factors.of(layers, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N O] from [N I]."""
        out = product(x, *self._weights)
        if self._bias is not None:
            out += self._bias
        if self._factors is not None:
            self._factors.add(x, out)
        return out


class _Factors(NamedTuple):
    """The adapters of layers of one input, all sets of each joined by rank."""

    a: Tensor
    """A of all layers, [R I]."""
    parts: list[tuple[slice, slice, Tensor]]
    """Of each layer that has adapters: its ranks in R, its outputs in O, and B with scales."""

    @classmethod
    def of(cls, layers: Sequence[Any], dtype: torch.dtype) -> _Factors | None:
        """Return the active adapters; None if there are none."""
        every_a, parts = [], []
        rank = begin = 0
        for layer in layers:
            active = layer.active_adapters if isinstance(layer, lora.LoraLayer) and not layer.disable_adapters else ()
            names = [name for name in active if name in layer.lora_A]
            if names:
                every_a += [layer.lora_A[name].weight.detach() for name in names]
                b = torch.cat([layer.lora_B[name].weight.detach() * layer.scaling[name] for name in names], dim=1)
                ranks = slice(rank, rank := rank + b.shape[1])
                parts.append((ranks, slice(begin, begin + len(b)), b.to(dtype)))
            begin += layer.out_features
        return cls(torch.cat(every_a).to(dtype), parts) if parts else None

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add what the adapters do with an input to its product, in place."""
        low = product(x, self.a)
        for ranks, outputs, b in self.parts:
            if _has_product(x, b):
                _multiply(low[:, ranks], b, out[:, outputs], adds=True)
            else:
                out[:, outputs].addmm_(low[:, ranks], b.T)


def product(x: Float[Tensor, "N I"], *weights: Float[Tensor, "_ I"]) -> Float[Tensor, "N O"]:
    """Return x W^T of weights one below the other, in the dtype of x.

    It is our kernel's or PyTorch's, whichever takes less time.
    """
    if not all(_has_product(x, each) for each in weights):
        parts = [nn.functional.linear(x, each) if x.dtype == each.dtype else wide_product(x, each) for each in weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    ends = list(accumulate(each.shape[0] for each in weights))
    out = x.new_empty(x.shape[0], ends[-1])
    for end, each in zip(ends, weights, strict=True):
        _multiply(x, each, out[:, end - each.shape[0] : end])
    return out


def _has_product(x: Tensor, weight: Tensor) -> bool:
    is_fast = _HAS_VECTORS and x.shape[0] in FEW_ROWS.get(weight.dtype, ())
    is_plain = x.dtype == torch.float32 and x.stride(1) == 1 and weight.is_contiguous()
    return is_fast and is_plain and has_kernels(weight)


def _multiply(x: Tensor, weight: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write x W^T to `out`, or add it to what is there."""
    call("multiply", weight.dtype, x, weight, out, x.stride(0), out.stride(0), x.shape[0], *weight.shape, adds)


def _side_by_side(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices as one where each begins at the end of the one before; it is valid as long as they are."""
    first, end = weights[0], weights[0].data_ptr()
    if len(weights) == 1:
        return [first]
    for each in weights:
        if each.device.type != "cpu" or each.data_ptr() != end or not each.is_contiguous():
            return list(weights)
        end += each.nbytes
    memory = (ctypes.c_char * (end - first.data_ptr())).from_address(first.data_ptr())
    return [torch.frombuffer(memory, dtype=first.dtype).view(-1, first.shape[1])]


class _Layer(NamedTuple):
    """A layer's weights, and its attention."""

    before: _Norm
    qkv: _Product
    out: _Product
    after: _Norm
    gate_up: _Product
    down: _Product
    heads: int
    scaling: float

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            before=_Norm.of(layer.input_layernorm, dtype),
            qkv=_Product([attention.q_proj, attention.k_proj, attention.v_proj], dtype),
            out=_Product([attention.o_proj], dtype),
            after=_Norm.of(layer.post_attention_layernorm, dtype),
            gate_up=_Product([mlp.gate_proj, mlp.up_proj], dtype),
            down=_Product([mlp.down_proj], dtype),
            heads=attention.config.num_attention_heads,
            scaling=attention.scaling,
        )

    def attend(
        self, x: Tensor, angles: Sequence[Tensor], kept: tuple[_Kept, _Kept], of: _Rows, at: int | Tensor
    ) -> Tensor:
        """Keep the new tokens' keys and values at a place, and return what each attends to, [R H D] as [R HD].

        The place is one of a row's own; a tensor in a graph, where all places are gone over.
        """
        qkv, (prompts, (keys, values)), (cosines, sines) = self.qkv(x), kept, angles
        (rows, shared, size, length), heads = keys.shape, self.heads
        if has_kernels(qkv):
            form, out = (heads, shared, size, length), qkv.new_empty(rows, heads * size)
            call("turn", qkv.dtype, qkv, cosines, sines, keys, values, rows, at, *form)
            apart = (*prompts, of.prompt, of.apart, prompts.keys.shape[3])
            call("attend", qkv.dtype, qkv, *apart, keys, values, of.firsts, out, rows, at + 1, self.scaling, *form)
            return out
        q, k, v = torch.split(qkv.view(rows, -1, size), [heads, shared, shared], dim=1)
        q, k = (_turned(each, cosines[:, None], sines[:, None]) for each in (q, k))
        if isinstance(at, int):
            keys[..., at], values[:, :, at] = k, v
            keys, values = keys[..., : at + 1], values[:, :, : at + 1]
        else:
            keys.index_copy_(3, at, k[..., None])
            values.index_copy_(2, at, v[:, :, None])
        scores = (q.reshape(rows, shared, -1, size) @ keys).float() * self.scaling
        places = torch.arange(keys.shape[3], device=x.device)
        unseen = (places < of.firsts[:, None]) | (places > at)
        weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1).to(x.dtype)
        return (weights @ values).reshape(rows, heads * size)


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines


def _gate(both: Tensor) -> Tensor:
    """Return silu(gate) * up, [R F] from [R 2F]."""
    width = both.shape[-1] // 2
    if has_kernels(both):
        out = both.new_empty(both.shape[0], width)
        call("gate", both.dtype, both, out, *out.shape)
        return out
    gate, up = both.chunk(2, dim=-1)
    gated: Tensor = nn.functional.silu(gate) * up
    return gated
