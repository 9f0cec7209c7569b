"""One model in parts: each process has some rows or columns of every matrix, and some words of the vocabulary.

Of a matrix that leads into attention's heads or the wide layer, a process has the rows of its own heads or units; of
the one that leads back, the columns. What comes back is a sum over processes, so they talk twice in a layer, and twice
again for gradients (Shoeybi et al. 2019, arXiv:1909.08053). Which matrix is which, transformers says of each
architecture itself (`base_model_tp_plan`); of its layers nothing is replaced: hooks do the talking.

All processes have the same rows of a batch, and all that is not cut is the same on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.functional.logprobs import VocabularyPart
from rlhf_core.models.base import is_shared
from rlhf_core.models.trunk import PART_MARK
from rlhf_core.strategy.ranks import Ranks

FORMS = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
"""What was tried against one process; an architecture may do with its heads what its plan does not say."""
_INTO, _BACK, _OVER_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"


def check_form(config: PreTrainedConfig, tp: int) -> None:
    """Check, before anything is loaded, that a model can be cut into so many parts.

    Raises:
        ConfigError: if it cannot; one sentence.
    """
    if type(config) not in FORMS:
        names = ", ".join(form.__name__.removesuffix("Config") for form in FORMS)
        raise ConfigError(
            f"strategy 3d cuts models of the forms {names}, not {type(config).__name__.removesuffix('Config')}; take "
            "gemini or zero2"
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "heads of keys and values": config.num_key_value_heads,
        "units of the wide layer": config.intermediate_size,
    }
    for what, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"tp is {tp}, which does not divide the model's {size} {what}; choose a divisor of "
                f"{config.num_attention_heads} and {config.num_key_value_heads}, or gemini or zero2"
            )


def check_parts_of(directory: Path, tp: int) -> None:
    """As `check_form`, of a model in a directory; what is wrong with the directory, whoever loads it says.

    Raises:
        ConfigError: if it cannot be cut; one sentence.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:  # a configuration may hold anything
        return
    check_form(config, tp)


class Cut(NamedTuple):
    """Which part of a weight this process has."""

    dim: int
    start: int
    stop: int
    whole: int
    """Size of that dimension."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a whole weight, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


class Division:
    """How one model is cut.

    Args:
        model: a causal language model, critic or reward model, on this process whole; it is cut by `cut_model`.
        shards: this process among those that hold it together.

    Raises:
        ConfigError: if it cannot be cut.
    """

    def __init__(self, model: nn.Module, shards: Ranks) -> None:
        self.shards = shards
        self.cuts: dict[str, Cut] = {}
        """By the weight's name; what is not in it, every process has whole."""
        self.summed: set[str] = set()
        """Weights that every process has whole, but of whose gradient each knows its own heads' or units' share."""
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._layers: dict[str, tuple[nn.Module, str]] = {}
        within = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
        if within is None:
            raise ConfigError(f"strategy 3d cuts models of transformers, and {type(model).__name__} has none inside")
        trunk = within.base_model
        check_form(trunk.config, shards.world_size)
        plan: Mapping[str, str] = trunk.config.base_model_tp_plan
        for name, layer in trunk.named_modules():
            if (style := plan.get(_pattern(name))) is not None:
                self._layers[name] = layer, style
                self._plan_layer(layer, style)
        self._words = trunk.get_input_embeddings()
        self._head = within.get_output_embeddings()
        self._words_cut = self._plan_words(self._words)
        self._head_cut = self._words_cut if self._head is None else self._plan_words(self._head)

    def _plan_layer(self, layer: nn.Module, style: str) -> None:
        if style not in {_INTO, _BACK, _OVER_HEADS}:
            raise ConfigError(f"strategy 3d does not know how transformers wants {style} cut; take gemini or zero2")
        for name, parameter in layer.named_parameters():
            is_low, is_bias = "lora_A" in name, name.endswith("bias")
            if style == _INTO:
                self._plan(parameter, None if is_low else 0)
            elif style == _OVER_HEADS or "lora_B" in name:
                self._plan(parameter, None)
            elif not is_bias:  # one is added to the sum, as a whole
                self._plan(parameter, 1)

    def _plan_words(self, layer: nn.Module) -> Cut:
        if isinstance(layer, BaseTunerLayer):
            raise ConfigError(
                "strategy 3d cuts the vocabulary, and trains no adapters on embeddings or the head; leave them out of "
                "lora.target_modules, or take zero2, ddp or plain"
            )
        for parameter in layer.parameters():
            self._plan(parameter, 0)
        weight: Any = layer.weight
        return self.cuts[self._names[weight]]

    def _plan(self, parameter: nn.Parameter, dim: int | None) -> None:
        name, number, rank = self._names[parameter], self.shards.world_size, self.shards.rank
        if dim is None:
            self.summed.add(name)
            return
        size = parameter.shape[dim]
        self.cuts[name] = Cut(dim, size * rank // number, size * (rank + 1) // number, size)

    def cut_model(self, model: nn.Module) -> None:
        """Leave this process its parts, in place, and have the layers talk."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and (cut := self.cuts.get(self._names[parameter])) is not None:
                    if parameter not in made:
                        made[parameter] = _part_of(parameter, cut)
                    module._parameters[key] = made[parameter]
        self._names.clear()  # of whole weights, which nobody else may have
        inputs: dict[str, _SharedInput] = {}
        for name, (layer, style) in self._layers.items():
            shared = inputs.setdefault(name.rpartition(".")[0], _SharedInput(self.shards))
            if style == _INTO:
                layer.register_forward_pre_hook(shared.enter)
            elif style == _BACK:
                _sum_outputs(layer, shared)
        _look_up_own(self._words, self._words_cut, self.shards)
        if self._head is not None:
            self._head.register_forward_pre_hook(lambda _, given: (_enter(given[0], self.shards), *given[1:]))
            setattr(self._head, PART_MARK, VocabularyPart(self._head_cut.start, self.shards.stack))

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a weight, or of its gradient or moment, of which each process gives its part."""
        cut = self.cuts.get(name)
        if cut is None:
            return part.detach()
        rows = part.detach().transpose(0, cut.dim)
        even = cut.whole % self.shards.world_size == 0
        found = self.shards.stack(rows).flatten(0, 1) if even else self.shards.gather(rows)
        return found.transpose(0, cut.dim).contiguous()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's part of a whole weight or moment, as a view."""
        cut = self.cuts.get(name)
        return whole if cut is None else cut.of(whole)

    def own(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights of the cut model of which this process has a part alone, and no view of a whole one."""
        for name, parameter in model.named_parameters():
            if name in self.cuts and not is_shared(parameter):
                yield name, parameter


def _part_of(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Return this process's part: of a weight that is trained, the same object, as its optimizer knows it.

    Of a frozen one, which other models may have, another; of a base that is mapped a view, whatever part is used.
    """
    part = cut.of(parameter.detach())
    if not is_shared(parameter):
        part = part.clone(memory_format=torch.contiguous_format)
    if parameter.requires_grad:
        parameter.data = part
        return parameter
    made = nn.Parameter(part, requires_grad=False)
    vars(made).update(vars(parameter))  # that it is a base's
    return made


def _pattern(name: str) -> str:
    """Return a layer's name as plans have it, with a star for its number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class _SharedInput:
    """What goes into several matrices at once (queries, keys and values): its gradient is summed over all of them once.

    Args:
        shards: who sums.
    """

    def __init__(self, shards: Ranks) -> None:
        self.shards = shards
        self._given: Tensor | None = None
        self._entered: Tensor | None = None

    def enter(self, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the input, whose gradient is a sum over processes."""
        if self._given is not given[0] or self._entered is None:
            self._given, self._entered = given[0], _enter(given[0], self.shards)
        return (self._entered, *given[1:])

    def forget(self) -> None:
        """Let it go, once the last matrix has had it."""
        self._given = self._entered = None


def _sum_outputs(layer: nn.Module, shared: _SharedInput) -> None:
    """Have the layer's outputs, of its own columns, summed over processes, and a bias added to the sum."""
    holder: Any = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    own = layer.forward

    def forward(*given: Any, **options: Any) -> Tensor:
        shared.forget()
        bias, holder._parameters["bias"] = holder._parameters["bias"], None
        try:
            found = own(*given, **options)
        finally:  # a pass that is made again for its gradients ends in here, by an exception
            holder._parameters["bias"] = bias
        total = _leave(found, shared.shards)
        return total if bias is None else total + bias.to(total.dtype)

    layer.forward = forward


def _look_up_own(words: nn.Embedding, cut: Cut, shards: Ranks) -> None:
    """Have a vocabulary of embeddings look up its own words, and zeros for others, and sum over processes."""
    absent: list[Tensor] = []
    if (padding := words.padding_idx) is not None:  # a word that gets no gradient
        words.padding_idx = padding - cut.start if cut.start <= padding < cut.stop else None

    def before(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        (ids,) = given
        _check_same(ids, shards)
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < cut.whole:
            raise IndexError(
                f"expected tokens from 0 to {cut.whole - 1}, the vocabulary's, got {int(ids.min())} to {int(ids.max())}"
            )
        absent.append((ids < cut.start) | (ids >= cut.stop))
        return (torch.where(absent[-1], 0, ids - cut.start),)

    def after(_: nn.Module, __: object, found: Tensor) -> Tensor:
        return _leave(found.masked_fill(absent.pop()[..., None], 0.0), shards)

    words.register_forward_pre_hook(before)
    words.register_forward_hook(after)


def _check_same(ids: Tensor, shards: Ranks) -> None:
    """Check that all parts of a model are given the same rows; else sums would be of nothing, or wait for ever.

    Raises:
        TrainingError: on all of them, if not.
    """
    places = torch.arange(1, ids.numel() + 1, device=ids.device)
    code = torch.stack([(ids.flatten() * places).sum(), *map(places.new_tensor, ids.shape[-2:])])
    codes = shards.stack(code)
    if not bool((codes == code).all()):
        raise TrainingError(
            "the processes that hold one model's parts were given different rows; let the strategy make the sampler "
            "(setup_sampler), or give loaders its `ranks`"
        )


class _Entering(torch.autograd.Function):
    """The same there; back, the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Ranks) -> Tensor:
        ctx.shards = shards
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.sum(gradients[0]), None


class _Leaving(torch.autograd.Function):
    """The sum over processes there; back, the same, as each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Ranks) -> Tensor:  # noqa: ARG004 - PyTorch's
        return shards.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None


_enter: Callable[[Tensor, Ranks], Tensor] = _Entering.apply
_leave: Callable[[Tensor, Ranks], Tensor] = _Leaving.apply
