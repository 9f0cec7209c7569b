"""Adapters on disk, in peft's own format: `PeftModel.from_pretrained` loads what is written here.

Frozen adapters, below those that were trained, lie in a directory of their own beside them, `below`: the bytes of what
an earlier stage trained are the same in each later one, a reward model among them. `read_joined` makes one set of both.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.loading import SAFE, read_header
from rlhf_core.models.lora import (
    Adapters,
    adapter_config,
    attach_lora,
    frozen_adapters,
    join_adapters,
    load_trainable_state,
    put_below,
    trainable_state,
)
from rlhf_core.models.saving import SHARD_BYTES, in_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BELOW = "below"
"""Directory of the frozen adapters."""
_LANGUAGE_MODEL = "CAUSAL_LM"
_PREFIX = "base_model.model."  # where the model is inside peft's wrapper
_FACTORS = ("lora_A", "lora_B")
# what peft can do and we cannot: a directory that asks for it is refused
_UNKNOWN = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
)


def is_adapter_directory(directory: Path) -> bool:
    """Return whether a directory holds adapters, and not a whole model."""
    return (directory / CONFIG_FILE).is_file()


def save_adapters(model: PreTrainedModel, directory: Path, *, base: str | None = None) -> None:
    """Write a model's adapters as peft does: `adapter_config.json`, and the factors in safetensors; so the frozen ones.

    Args:
        model: a causal language model or a trunk with adapters.
        directory: made if absent.
        base: path or name of what they were trained on; None takes the name that the model was loaded by.

    Raises:
        ModelError: if there are no adapters, or they have changed the weights below them.
    """
    config = adapter_config(model)
    if config is None:
        raise ModelError("this model has no adapters to save; use save_merged for its weights")
    if config.init == "pissa":
        raise ModelError("adapters of lora.init pissa are of no use without the weights that they changed; save merged")
    settings: dict[str, Any] = {
        "fan_in_fan_out": any(layer.fan_in_fan_out for layer in _layers(model)),  # GPT-2 keeps weights transposed
        "task_type": None if model.get_output_embeddings() is None else _LANGUAGE_MODEL,
        "base_model_name_or_path": base or model.name_or_path or None,
    }
    own = {_peft_name(name): tensor for name, tensor in trainable_state(model).items()}
    layers = {name.removeprefix(_PREFIX).rpartition(f".{_FACTORS[0]}.")[0] for name in own if _FACTORS[0] in name}
    _write(
        directory, own, r=config.r, lora_alpha=config.alpha, lora_dropout=config.dropout, bias=config.bias,
        target_modules=sorted(layers), **settings,
    )  # fmt: skip
    if (below := frozen_adapters(model)) is not None:
        if settings["task_type"] is None:  # as the policy's own file has them, in which a transformer has a name
            prefix, settings["task_type"] = f"{model.base_model_prefix}.", _LANGUAGE_MODEL
            below = below._replace(factors={prefix + layer: both for layer, both in below.factors.items()})
        write_adapters(below, directory / BELOW, **settings)


def write_adapters(adapters: Adapters, directory: Path, **settings: Any) -> None:
    """Write adapters apart from their model.

    Args:
        adapters: what is written.
        directory: made if absent.
        **settings: further ones of peft's configuration.
    """
    tensors = {
        f"{_PREFIX}{layer}.{factor}.weight": tensor
        for layer, both in adapters.factors.items()
        for factor, tensor in zip(_FACTORS, both, strict=True)
    }
    _write(
        directory, tensors, r=adapters.rank, lora_alpha=adapters.alpha, target_modules=sorted(adapters.factors),
        **settings,
    )  # fmt: skip


def _write(directory: Path, tensors: Mapping[str, Tensor], **settings: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    LoraConfig(inference_mode=True, **settings).save_pretrained(directory)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(state, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def read_adapters(directory: Path) -> Adapters:
    """Return stored adapters apart from their model, those below them not among them.

    Raises:
        ModelError: if the directory holds none, or some of a kind that we do not know, or with biases.
    """
    tensors = _read_weights(directory / WEIGHTS_FILE)
    config = _read_config(directory / CONFIG_FILE, ())
    if config.bias != "none":
        raise ModelError(f"{directory} holds adapters with biases, which cannot be frozen below others; merge them")
    factors = {
        name.removeprefix(_PREFIX).rpartition(f".{_FACTORS[0]}.")[0]: (tensor, tensors[_partner(name)])
        for name, tensor in tensors.items()
        if f".{_FACTORS[0]}." in name and _partner(name) in tensors
    }
    if 2 * len(factors) != len(tensors):
        raise ModelError(f"{directory / WEIGHTS_FILE} holds tensors that are not pairs of low-rank factors")
    return Adapters(config.r, config.alpha, dict(sorted(factors.items())))


def _partner(name: str) -> str:
    return name.replace(f".{_FACTORS[0]}.", f".{_FACTORS[1]}.")


def read_joined(directory: Path) -> Adapters:
    """Return stored adapters and those below them as one set; raises what `read_adapters` raises."""
    return join_adapters(*_read_below(directory), read_adapters(directory))


def _read_below(directory: Path) -> list[Adapters]:
    """Return the frozen adapters below those of a directory, if there are any, under the names that those have."""
    if not is_adapter_directory(directory / BELOW):
        return []
    below = read_adapters(directory / BELOW)
    of_below, own = (
        json.loads((each / CONFIG_FILE).read_bytes()).get("task_type") for each in (directory / BELOW, directory)
    )
    if of_below == own:  # earlier releases wrote a reward model's under its own names, too
        return [below]
    return [below._replace(factors={layer.partition(".")[2]: both for layer, both in below.factors.items()})]


def write_merged(source: Path, adapters: Adapters, directory: Path, *, transposed: bool = False) -> None:
    """Write a model with adapters merged, from the model's files, a shard at a time: it is never in memory as a whole.

    Args:
        source: the model, as `save_pretrained` writes it; of a transformer alone, or with its head.
        adapters: of the model.
        directory: is made if it is not there; gets weights and configuration in the source's dtype.
        transposed: whether the model's layers keep their weights transposed, as GPT-2's do.

    Raises:
        ModelError: if the adapters are of another model, or a file is damaged.
    """
    stored = [
        (name, file, entry["data_offsets"][1] - entry["data_offsets"][0])
        for file in sorted(source.glob(f"*{SAFE}"))
        for name, entry in read_header(file).items()
        if name != "__metadata__"
    ]
    layers = {name: _layer_of(name, adapters) for name, _, _ in stored}
    if missing := sorted(adapters.factors.keys() - set(layers.values())):
        raise ModelError(f"adapters for {missing[0]} do not fit {source}, which has no such layer")
    directory.mkdir(parents=True, exist_ok=True)
    shards = in_shards(stored, lambda entry: entry[2], most=SHARD_BYTES)
    held: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        shard = f"model-{number:05d}-of-{len(shards):05d}{SAFE}" if len(shards) > 1 else f"model{SAFE}"
        tensors = {
            name: _merged(tensor, adapters, layers[name], transposed=transposed) for name, tensor in _read(names)
        }
        save_file(tensors, directory / shard, metadata={"format": "pt"})
        held |= dict.fromkeys(tensors, shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(size for _, _, size in stored)}, "weight_map": held}
        (directory / f"model{SAFE}.index.json").write_text(json.dumps(index, indent=2))
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            copyfile(source / name, directory / name)


_Stored = tuple[str, Path, int]  # a tensor's name, its file and its bytes


def _read(stored: Sequence[_Stored]) -> Iterator[tuple[str, Tensor]]:
    for name, file, _ in stored:
        with safe_open(file, "pt") as opened:
            yield name, opened.get_tensor(name)


def _merged(tensor: Tensor, adapters: Adapters, layer: str | None, *, transposed: bool) -> Tensor:
    """Return a weight with a layer's adapters added in float32, rounded once."""
    if layer is None:
        return tensor
    a, b = adapters.factors[layer]
    product = adapters.alpha / adapters.rank * (b @ a)
    return (tensor.float() + (product.T if transposed else product)).to(tensor.dtype).contiguous()


def _layer_of(name: str, adapters: Adapters) -> str | None:
    """Return the layer whose weight a tensor of a model's file is; a transformer's layers have names without prefix."""
    layer, _, leaf = name.rpartition(".")
    if leaf != "weight":
        return None
    longer = [name for name in adapters.factors if name.endswith(f".{layer}")]  # a file may have no prefix, as GPT-2's
    while layer and layer not in adapters.factors:
        _, _, layer = layer.partition(".")
    return layer or (longer[0] if len(longer) == 1 else None)


def load_adapters(model: PreTrainedModel, directory: Path) -> None:
    """Put stored adapters on a model, in place, or their weights into the adapters that it has.

    Frozen adapters beside them go below them.

    Args:
        model: what they were trained on, without adapters or with those that are stored.
        directory: written by `save_adapters`, or by peft.

    Raises:
        ModelError: if the directory holds no LoRA adapters of this model, or some of a kind that we do not know.
    """
    tensors = _read_weights(directory / WEIGHTS_FILE)
    targets = {name.rpartition(f".{_FACTORS[0]}.")[0].removeprefix(_PREFIX) for name in tensors if _FACTORS[0] in name}
    stored = _read_config(directory / CONFIG_FILE, tuple(sorted(targets)))
    own = adapter_config(model)
    if own is None:
        for below in _read_below(directory) if frozen_adapters(model) is None else ():
            put_below(model, below)
        attach_lora(model, stored, seed=0)
    elif (own.r, own.alpha, own.bias) != (stored.r, stored.alpha, stored.bias):
        raise ModelError(
            f"{directory} holds adapters of rank {stored.r} and alpha {stored.alpha:g}, bias {stored.bias}, but the "
            f"model's have {own.r}, {own.alpha:g} and {own.bias}; build the model with the stored configuration"
        )
    load_trainable_state(model, {_own_name(name): tensor for name, tensor in tensors.items()})


def _layers(model: PreTrainedModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _read_config(file: Path, targets: tuple[str, ...]) -> LoRAConfig:
    try:
        stored: dict[str, Any] = json.loads(file.read_text())
        config = LoRAConfig(
            r=stored["r"],
            alpha=stored["lora_alpha"],
            dropout=stored.get("lora_dropout", 0.0),
            bias=stored.get("bias", "none"),
            target_modules=targets,
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise ModelError(f"{file} is not the configuration of LoRA adapters: {type(error).__name__}") from error
    unknown = [name for name in _UNKNOWN if stored.get(name)]
    if stored.get("init_lora_weights") not in (True, False, "gaussian", None):
        unknown.append(f"init_lora_weights {stored['init_lora_weights']}")
    if stored.get("peft_type") != "LORA":
        unknown.append(f"peft_type {stored.get('peft_type')}")
    if unknown:
        raise ModelError(
            f"{file} describes adapters of a kind that is not known here ({', '.join(unknown)}); merge them into "
            "their model with peft, and give the merged model"
        )
    return config


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read as the weights of adapters; it is missing or truncated") from error
    return {name: tensor.to(torch.float32) if "lora_" in name else tensor for name, tensor in tensors.items()}


def _peft_name(name: str) -> str:
    for factor in _FACTORS:
        name = name.replace(f".{factor}.default.", f".{factor}.")
    return _PREFIX + name


def _own_name(name: str) -> str:
    for factor in _FACTORS:
        name = name.replace(f".{factor}.", f".{factor}.default.")
    return name.removeprefix(_PREFIX)
