"""Low-rank adapters, and a model's weights by name with or without them.

Adapters are injected into the model itself, which keeps its class: the code that calls the model does not change.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config import LoRAConfig
from rlhf_core.counting import counted
from rlhf_core.errors import ModelError
from rlhf_core.models.adapted_linear import AdaptedLinear
from rlhf_core.models.saving import SHARD_SIZE, quiet

_ADAPTER = "default"
_BELOW = "below"
"""Frozen adapters under those that are trained: what earlier stages learnt over the same base."""
_ADAPTER_MARK = ".lora_"
FROZEN_MARK = f".{_BELOW}."
"""In the names of frozen adapters' weights."""
_BASE_MARK = ".base_layer"
_CONFIG = "lora_config"  # attribute of each adapted layer: what it was made by


class MergedWeight(NamedTuple):
    """A weight of a model whose adapters are merged."""

    name: str
    weight: Tensor
    is_sum: bool
    """Whether an adapter was added to it; it is float32 then."""


def attach_lora(model: PreTrainedModel, config: LoRAConfig, *, seed: int) -> None:
    """Put adapters on the model's linear layers, in place, and freeze everything else in it.

    Adapters are float32 whatever the model is in; at first they change nothing, as one factor is zero (or, with
    `init` pissa, up to rounding, as what they hold is taken out of the weights below). Frozen adapters stay below them.

    Args:
        model: a causal language model or a trunk, in any dtype.
        config: rank, scale, dropout and target layers.
        seed: of the random factor; the global random state is left as it was.

    Raises:
        ModelError: if the model has adapters that are trained, or none of its layers has a target's name.
    """
    if _having(model, _ADAPTER):
        raise ModelError(
            "this model has adapters already; merge them (save_merged) and load the result first, or freeze them"
        )
    targets: str | list[str] = (
        config.target_modules if isinstance(config.target_modules, str) else [*config.target_modules]
    )
    if targets == "all-linear" and _adapted_layers(model):  # peft would take the layers of adapters for the model's own
        targets = _linear_layers(model)
    settings = LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        init_lora_weights=True if config.init == "kaiming_uniform" else config.init,
        bias=config.bias,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            _inject(model, settings, _ADAPTER)
        except ValueError as error:
            raise ModelError(
                f"{type(model).__name__} has no layer named like {config.target_modules!r}; name some of its linear "
                "layers as target_modules, or say 'all-linear'"
            ) from error
    for layer in _having(model, _ADAPTER).values():
        setattr(layer, _CONFIG, config)


def freeze_adapters(model: PreTrainedModel) -> None:
    """Make the model's adapters frozen ones, in place, over which others may be trained; joined with those below them.

    Ranks are joined: the product of the joined factors is the sum of the products. The model answers as before, up to
    the order of sums.

    Raises:
        ModelError: if the adapters have changed the weights below them, or biases.
    """
    config = adapter_config(model)
    if config is None:
        return
    if not config.keeps_base:
        raise ModelError(
            f"adapters of lora.init {config.init} and lora.bias {config.bias} have changed the weights that they are "
            "on, which others share; merge them (save_merged) and load the result"
        )
    joined = _joined(model)
    for name, layer in _adapted_layers(model).items():
        model.set_submodule(name, layer.get_base_layer())
    _forget_peft(model)
    put_below(model, joined)


class Adapters(NamedTuple):
    """Adapters apart from their model."""

    rank: int
    alpha: float
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """A [rank I] and B [O rank] by the name of their layer."""


def join_adapters(*parts: Adapters) -> Adapters:
    """Return one set of adapters that adds what these add together, by joining ranks.

    Factors of the first part's scale stay as they are; those of another are rescaled.
    """
    first, *others = parts
    scale = first.alpha / first.rank
    joined = dict(first.factors)
    rank = first.rank
    for part in others:
        factor = part.alpha / part.rank / scale
        both = {}
        for layer in joined.keys() | part.factors.keys():
            a, b = part.factors.get(layer) or _nothing(joined[layer], part.rank)
            below_a, below_b = joined.get(layer) or _nothing(part.factors[layer], rank)
            both[layer] = torch.cat([below_a, a]), torch.cat([below_b, b * factor], dim=1)
        joined, rank = both, rank + part.rank
    return Adapters(rank, scale * rank, dict(sorted(joined.items())))


def put_below(model: PreTrainedModel, adapters: Adapters) -> None:
    """Put frozen adapters on a model that has none, in place.

    Raises:
        ModelError: if the model lacks a layer of theirs, or has it in another shape.
    """
    settings = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=sorted(adapters.factors))
    with torch.random.fork_rng():
        try:
            _inject(model, settings, _BELOW)
        except ValueError as error:
            raise _other_model(model, min(adapters.factors)) from error
    layers = _having(model, _BELOW)
    with torch.no_grad():
        for name, (a, b) in adapters.factors.items():
            if name not in layers:
                raise _other_model(model, name)
            own = layers[name].lora_A[_BELOW].weight, layers[name].lora_B[_BELOW].weight
            if (own[0].shape, own[1].shape) != (a.shape, b.shape):
                raise _other_model(model, name)
            layer = name.removeprefix(f"{model.base_model_prefix}.")
            for mine, given, which in zip(own, (a, b), "AB", strict=True):
                mine.copy_(given)
                _share(mine, f"{layer} {which}")


_frozen: WeakValueDictionary[tuple[str, torch.Size, int], nn.Parameter] = WeakValueDictionary()
"""Frozen factors of this process, by place, shape and a checksum."""


def _share(factor: nn.Parameter, place: str) -> None:
    """Let equal frozen factors of several models share memory: policy, critic and reward model have those of SFT.

    Args:
        factor: of one model.
        place: where it is in each of them; equal factors of one model stay apart, or they could not be stored.
    """
    found = place, factor.shape, zlib.adler32(factor.detach().cpu().numpy().data)
    known = _frozen.get(found)
    if known is not None and known.device == factor.device and known.dtype == factor.dtype and known.equal(factor):
        factor.data = known.data
    else:
        _frozen[found] = factor


def _other_model(model: nn.Module, layer: str) -> ModelError:
    return ModelError(
        f"adapters for {layer} do not fit this {type(model).__name__}, which has no such layer, or of another shape; "
        "give the model that they were trained on"
    )


def _held(model: nn.Module, adapter: str) -> Adapters:
    """Return one set of a model's adapters; the tensors are the model's own."""
    layers = _having(model, adapter)
    one = next(iter(layers.values()))
    factors = {
        name: (layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach())
        for name, layer in layers.items()
    }
    return Adapters(one.r[adapter], one.lora_alpha[adapter], factors)


def _joined(model: nn.Module) -> Adapters:
    return join_adapters(*(_held(model, name) for name in (_BELOW, _ADAPTER) if _having(model, name)))


def addable_adapters(model: nn.Module) -> Adapters | None:
    """Return all adapters of a model as one set, which added to `weights_below` gives the model.

    None if there are none, or they were not made here (`attach_lora`), or have changed the weights below them.
    """
    if not any(_having(model, name) for name in (_BELOW, _ADAPTER)):
        return None
    made = [getattr(layer, _CONFIG, None) for layer in _having(model, _ADAPTER).values()]
    return _joined(model) if all(config is not None and config.keeps_base for config in made) else None


def weights_below(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that adapters are on, and all others, by the names they have without adapters."""
    for name, parameter in model.named_parameters():
        if _ADAPTER_MARK not in name:
            yield name.replace(_BASE_MARK, ""), parameter.detach()


def frozen_adapters(model: nn.Module) -> Adapters | None:
    """Return the frozen adapters below those that are trained; None if there are none."""
    return _held(model, _BELOW) if _having(model, _BELOW) else None


def _nothing(like: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return factors that add nothing, for the layer of others."""
    a, b = like
    return a.new_zeros(rank, a.shape[1]), b.new_zeros(b.shape[0], rank)


def _inject(model: PreTrainedModel, settings: LoraConfig, adapter: str) -> None:
    """Have peft put adapters on a model, all of which are active then; `default` alone is trained.

    Raises:
        ValueError: if no layer has a target's name.
    """
    with warnings.catch_warnings():
        # GPT-2 keeps its weights transposed; peft sees it, says so, and does the right thing.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        inject_adapter_in_model(settings, model, adapter_name=adapter)
    for layer in _adapted_layers(model).values():
        layer._active_adapter = [name for name in (_BELOW, _ADAPTER) if name in layer.lora_A]  # set_adapter trains both
        if type(layer) is lora.Linear:
            layer.__class__ = AdaptedLinear
    for name, parameter in model.named_parameters():
        if _ADAPTER_MARK in name:
            parameter.requires_grad_(f".{_ADAPTER}." in name)
            parameter.data = parameter.data.float()
    model.train(model.training)  # the new layers come in training mode, whatever the model is in


def adapter_config(model: nn.Module) -> LoRAConfig | None:
    """Return what the model's trained adapters were made by; None if it has none."""
    configs = {getattr(layer, _CONFIG) for layer in _having(model, _ADAPTER).values()}
    return configs.pop() if configs else None


def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights below them, in place, and take them out: a plain model, ready for new ones.

    The weights are those that `save_merged` writes, to the bit.
    """
    with torch.no_grad():
        for name, layer in _adapted_layers(model).items():
            base = layer.get_base_layer()
            base.weight.copy_(_sum(base.weight, layer))
            model.set_submodule(name, base)
    model.requires_grad_(requires_grad=True)
    _forget_peft(model)


def _forget_peft(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "peft_config"):  # peft's note that there are adapters
            del module.peft_config


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies, in host memory, of what training changes: adapters and heads, or else all weights."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in trainable_parameters(model).items()}


def load_trainable_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `trainable_state` returned, all of it or nothing.

    Raises:
        ModelError: if names or shapes differ from the model's.
    """
    check_trainable_state(model, state)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            parameter.copy_(state[name])


def check_trainable_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Check that a state has the names and shapes of the model's trainable weights.

    Raises:
        ModelError: if it has not.
    """
    own = trainable_parameters(model)
    unlike = {name for name in own.keys() & state.keys() if own[name].shape != state[name].shape}
    wrong = sorted((own.keys() ^ state.keys()) | unlike)
    if wrong:
        raise ModelError(
            f"the state does not fit the model: they disagree on {counted(len(wrong), 'tensor')} (missing, unknown or "
            f"of another shape), first {wrong[0]!r}; build the model with the configuration of the stored state"
        )


def merged_parameters(model: nn.Module, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return all weights by the names they have without adapters, adapters added in; changes nothing.

    The sum is in float32 and rounded once. Tied weights come once, under the name of `named_parameters`.

    Args:
        model: any module, with or without adapters inside.
        dtype: of the result; None keeps each weight's own. Weights are copied only if summed or cast.
    """
    merged = {}
    own = {name.replace(_BASE_MARK, ""): parameter.dtype for name, parameter in model.named_parameters()}
    for name, weight, is_sum in each_merged(model):
        target = dtype if dtype is not None else own[name] if is_sum else None
        merged[name] = weight if target is None else weight.to(target)
    return merged


def each_merged(model: nn.Module) -> Iterator[MergedWeight]:
    """Yield all weights by the names they have without adapters, one at a time: sums in float32, others as they are."""
    layers = _adapted_layers(model)
    for name, parameter in model.named_parameters():
        if _ADAPTER_MARK in name:
            continue
        weight = parameter.detach()
        layer_name, _, leaf = name.rpartition(_BASE_MARK + ".")
        is_sum = leaf == "weight" and layer_name in layers
        if is_sum:
            weight = _sum(weight, layers[layer_name]).detach()
        yield MergedWeight(name.replace(_BASE_MARK, ""), weight, is_sum)


def save_merged(
    model: PreTrainedModel,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = SHARD_SIZE,
) -> None:
    """Write the model with its adapters merged, as `from_pretrained` loads it: safetensors shards and config.

    Args:
        model: a causal language model or a trunk; stays as it is.
        directory: made if absent.
        dtype: of the weights written; None keeps the model's.
        max_shard_size: shards are cut at the borders of tensors, in the model's order.
    """
    # save_pretrained empties the mapping that it is given: this one is its own.
    state = {name: tensor.contiguous() for name, tensor in merged_parameters(model, dtype=dtype).items()}
    with quiet():
        model.save_pretrained(directory, state_dict=state, max_shard_size=max_shard_size)
    if dtype is not None:
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        config.save_pretrained(directory)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run the block with the trained adapters switched off: the model is then what it was before training.

    Raises:
        ModelError: if the model has no adapters, or they changed more than themselves (the base by pissa, biases
            by training), as the block would then silently use other weights.
    """
    layers = _having(model, _ADAPTER)
    config = adapter_config(model)
    if config is None:
        raise ModelError("this model has no adapters to switch off; give an initial_model of its own")
    if not config.keeps_base:
        raise ModelError(
            f"with lora.init {config.init} and lora.bias {config.bias}, the model without its adapters is not what "
            "it was before training; give an initial_model of its own"
        )
    for layer in layers.values():
        layer._active_adapter = [name for name in (_BELOW,) if name in layer.lora_A]  # set_adapter would train them
    try:
        yield
    finally:
        for layer in layers.values():
            layer._active_adapter = [name for name in (_BELOW, _ADAPTER) if name in layer.lora_A]


def set_adapter_dropout(model: nn.Module, *, active: bool) -> None:
    """Switch the adapters' dropout, and no other part of the model, to training or evaluation."""
    for layer in _adapted_layers(model).values():
        layer.lora_dropout.train(active)


def _adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _having(model: nn.Module, adapter: str) -> dict[str, LoraLayer]:
    return {name: layer for name, layer in _adapted_layers(model).items() if adapter in layer.lora_A}


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers of a model that has adapters, as peft counts them in one that has none."""
    adapted, head = _adapted_layers(model), model.get_output_embeddings()
    inside = tuple(f"{name}." for name in adapted)
    return [
        name
        for name, module in model.named_modules()
        if name in adapted
        or (isinstance(module, (nn.Linear, Conv1D)) and module is not head and not name.startswith(inside))
    ]


def _sum(weight: Tensor, layer: LoraLayer) -> Tensor:
    """Return a layer's weight with its adapters added in, in float32."""
    total = weight.float()
    for adapter in (_BELOW, _ADAPTER):
        if adapter in layer.lora_A:
            total = total + layer.get_delta_weight(adapter).float()
    return total
