"""One model in parts: each process has some rows or columns of a layer's matrices, and some words of the vocabulary.

Of a matrix that leads into attention's heads or the wide layer, a process has the rows of its own heads or units; of
the one that leads back, the columns. What comes back is a sum over processes, so they talk twice in a layer, and twice
again for gradients (Shoeybi et al. 2019, arXiv:1909.08053). Which matrix is which, transformers says of each
architecture itself (`base_model_tp_plan`); of its layers nothing is replaced: hooks do the talking.

All processes have the same rows of a batch, and all that is not cut is the same on each. Layers may be in stages
(`pipeline`), of which each process has one; words are cut over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
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

from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.functional.logprobs import VocabularyPart
from rlhf_core.models.base import is_shared
from rlhf_core.models.trunk import PART_MARK
from rlhf_core.strategy.parts import Parts
from rlhf_core.strategy.pipeline import Pipeline, stage_of
from rlhf_core.strategy.ranks import ALONE, Ranks
from rlhf_core.strategy.sequence_parallel import Columns

FORMS = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
"""What was tried against one process; an architecture may do with its heads what its plan does not say."""
_INTO, _BACK, _OVER_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"


def check_form(config: PreTrainedConfig, parts: Parts) -> None:
    """Check, before anything is loaded, that a model can be cut into such parts.

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
    over_heads = "tp x sp" if parts.copies > 1 else "tp"
    for what, size in sizes.items():
        number = parts.tp * (parts.copies if "heads" in what else 1)
        if size % number:
            raise ConfigError(
                f"{over_heads if 'heads' in what else 'tp'} is {number}, which does not divide the model's {size} "
                f"{what}; choose a divisor of {config.num_attention_heads} and {config.num_key_value_heads}, or gemini "
                "or zero2"
            )
    if parts.pp > config.num_hidden_layers:
        raise ConfigError(
            f"pp is {parts.pp}, but the model has {counted(config.num_hidden_layers, 'layer')}, and each stage needs "
            "one; lower pp"
        )


def check_parts_of(directory: Path, parts: Parts) -> None:
    """As `check_form`, of a model in a directory; what is wrong with the directory, whoever loads it says.

    Raises:
        ConfigError: if it cannot be cut; one sentence.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:  # a configuration may hold anything
        return
    check_form(config, parts)


class Cut(NamedTuple):
    """Which part of a weight this process has."""

    shape: torch.Size
    """Of the whole."""
    stage: int | None
    """Which alone has any of it; None: all stages."""
    is_here: bool
    """Whether this process does; else its part is empty."""
    among: Ranks
    """Who has a part, in order; one process: all of it."""
    dim: int = 0

    @property
    def start(self) -> int:
        """Where in that dimension the part begins."""
        return self.shape[self.dim] * self.among.rank // self.among.world_size

    def of(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a whole weight, as a view."""
        if not self.is_here:
            return tensor[:0]
        stop = self.shape[self.dim] * (self.among.rank + 1) // self.among.world_size
        return tensor.narrow(self.dim, self.start, stop - self.start)


class Division:
    """How one model is cut.

    Args:
        model: a causal language model, critic or reward model, on this process whole; it is cut by `cut_model`.
        ranks: this process, laid out.

    Raises:
        ConfigError: if it cannot be cut.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.shards, self.tensor, self.stages = ranks.shards, ranks.tensor, ranks.stages
        self._columns = Columns(ranks.sequence)
        self._gathers = ranks.parts.gathers
        self.copies = ALONE if self._gathers else ranks.sequence
        """Who has the same parts of layers, of whose gradients each knows its own tokens' share."""
        self.cuts: dict[str, Cut] = {}
        """By the weight's name; what is not in it, every process has whole."""
        self.summed: set[str] = set()
        """Of what is whole in a layer: of whose gradient each process knows its own heads', units' or tokens' share."""
        self.pipeline: Pipeline | None = None
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._layers: dict[str, tuple[nn.Module, str]] = {}
        within = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
        if within is None:
            raise ConfigError(f"strategy 3d cuts models of transformers, and {type(model).__name__} has none inside")
        self._trunk = trunk = within.base_model
        check_form(trunk.config, ranks.parts)
        if self.copies.world_size > 1 and trunk.config._attn_implementation != "sdpa":
            raise ConfigError(
                f"sp_mode all_to_all exchanges heads in sdpa, not in {trunk.config._attn_implementation}; load the "
                "model with attn_implementation sdpa, or take split_gather"
            )
        for number, layer in enumerate(trunk.layers):
            stage = stage_of(number, len(trunk.layers), self.stages.world_size)
            for parameter in layer.parameters():
                self._cut(parameter, stage=stage, among=ALONE)
                if self._gathers:  # each has its own tokens' share, or its own heads'
                    self.summed.add(self._names[parameter])
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
            self._cut(parameter, stage=None, among=self.shards)
        weight: Any = layer.weight
        return self.cuts[self._names[weight]]

    def _plan(self, parameter: nn.Parameter, dim: int | None) -> None:
        name = self._names[parameter]
        if dim is None:
            self.summed.add(name)
        else:
            self._cut(parameter, stage=self.cuts[name].stage, among=self.tensor, dim=dim)

    def _cut(self, parameter: nn.Parameter, *, stage: int | None, among: Ranks, dim: int = 0) -> None:
        is_here = stage is None or stage == self.stages.rank
        self.cuts[self._names[parameter]] = Cut(parameter.shape, stage, is_here, among, dim)

    def cut_model(self, model: nn.Module) -> None:
        """Leave this process its parts, in place, and have the layers talk."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and (cut := self.cuts.get(self._names[parameter])) is not None:
                    if parameter not in made:
                        made[parameter] = _part_of(parameter, cut)
                    module._parameters[key] = made[parameter]
        if self.stages.world_size * self._columns.ranks.world_size > 1:
            self.pipeline = Pipeline(self._trunk, self.stages, self._columns, by_heads=not self._gathers)
        self._names.clear()  # of whole weights, which nobody else may have
        self._have_layers_talk()
        _look_up_own(self._words, self._words_cut, self.shards)
        if self._head is not None:
            self._head.register_forward_pre_hook(lambda _, given: (_enter(given[0], self.shards), *given[1:]))
            setattr(self._head, PART_MARK, VocabularyPart(self._head_cut.start, self.shards.stack))

    def _have_layers_talk(self) -> None:
        """Have the inputs of matrices enter, and their outputs leave, what is in parts."""
        inputs: dict[str, _SharedInput] = {}
        for name, (layer, style) in self._layers.items():
            of = name.rpartition(".")[0]
            if self._gathers and of not in inputs:
                self._trunk.get_submodule(of).register_forward_pre_hook(self._put_together, with_kwargs=True)
            shared = inputs.setdefault(of, _SharedInput(self.tensor))
            if style == _INTO and not self._gathers:
                layer.register_forward_pre_hook(shared.enter)
            elif style == _BACK:
                _sum_outputs(layer, shared, self._columns.summed if self._gathers else partial(_leave, self.tensor))

    def _put_together(
        self, _: nn.Module, given: tuple[Tensor, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Give attention, or the wide layer, all columns."""
        if given:
            return (self._columns.put_together(given[0]), *given[1:]), options
        return given, options | {"hidden_states": self._columns.put_together(options["hidden_states"])}

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a weight, or of its gradient or moment, of which each process gives its part."""
        cut, found = self.cuts.get(name), part.detach()
        if cut is None:
            return found
        if cut.is_here and cut.among.world_size > 1:
            rows = found.transpose(0, cut.dim)
            even = cut.shape[cut.dim] % cut.among.world_size == 0
            found = (cut.among.stack(rows).flatten(0, 1) if even else cut.among.gather(rows)).transpose(0, cut.dim)
        found = found.contiguous() if cut.is_here else found.new_empty(cut.shape)
        if cut.stage is not None:
            self.stages.broadcast_from(found, cut.stage)
        return found

    def counts(self, name: str) -> bool:
        """Return whether this process is the one of those with the same part that speaks for it."""
        cut = self.cuts.get(name)
        if cut is None:
            return self.shards.rank == 0
        if cut.stage is None:
            return True
        return self.in_layer(name) and self.copies.rank == 0 and (cut.among.world_size > 1 or self.tensor.rank == 0)

    def in_layer(self, name: str) -> bool:
        """Return whether this process has a layer that the weight, or its part, is in."""
        cut = self.cuts.get(name)
        return cut is not None and cut.stage is not None and cut.is_here

    def alike(self, name: str) -> Ranks | None:
        """Return who has the same of a weight as this process; None: nobody."""
        cut = self.cuts.get(name)
        if cut is None:
            return self.shards
        return self.tensor if self.in_layer(name) and cut.among.world_size == 1 else None

    def shape(self, name: str, part: Tensor) -> torch.Size:
        """Return the shape of the whole of a weight."""
        cut = self.cuts.get(name)
        return part.shape if cut is None else cut.shape

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


def _sum_outputs(layer: nn.Module, shared: _SharedInput, summed: Callable[[Tensor], Tensor]) -> None:
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
        total = summed(found)
        return total if bias is None else total + bias.to(total.dtype)

    layer.forward = forward


def _look_up_own(words: nn.Embedding, cut: Cut, shards: Ranks) -> None:
    """Have a vocabulary of embeddings look up its own words, and zeros for others, and sum over processes."""
    absent: list[Tensor] = []
    if (padding := words.padding_idx) is not None:  # a word that gets no gradient
        words.padding_idx = padding - cut.start if 0 <= padding - cut.start < len(words.weight) else None

    def before(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        (ids,) = given
        _check_same(ids, shards)
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < cut.shape[0]:
            raise IndexError(
                f"expected tokens from 0 to {cut.shape[0] - 1}, the vocabulary's, got {int(ids.min())} to "
                f"{int(ids.max())}"
            )
        here = ids - cut.start
        absent.append((here < 0) | (here >= len(words.weight)))
        return (torch.where(absent[-1], 0, here),)

    def after(_: nn.Module, __: object, found: Tensor) -> Tensor:
        return _leave(shards, found.masked_fill(absent.pop()[..., None], 0.0))

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
    def forward(ctx: Any, shards: Ranks, x: Tensor) -> Tensor:  # noqa: ARG004 - PyTorch's
        return shards.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, gradients[0]


_enter: Callable[[Tensor, Ranks], Tensor] = _Entering.apply
_leave: Callable[[Ranks, Tensor], Tensor] = _Leaving.apply
