"""coati's tools for sending adapters without the weights below them, and for putting them on at the other end.

Between this library's own trainers and makers weights travel as `Publication`s. These tools are for scripts that send
state dicts themselves: `filter_state_dict_lora` and `extract_lora_config` where adapters are trained,
`reconstruct_increase` and `load_state_dict_increase` where a model without any takes them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rlhf_core.errors import ModelError

_PAIRS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
_FACTORS = (*_PAIRS, *_PAIRS.values())


@dataclass(frozen=True, slots=True)
class LoRALayerConfig:
    """How one layer's factors make up its increase; plain numbers."""

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    fan_in_fan_out: bool = False
    """The layer keeps its weight transposed, as GPT-2's do."""

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.lora_alpha / self.r


class LoRAConstructor:
    """Makes a plain model equal to one with adapters, update after update.

    Each update *replaces* the one before: a weight is what it was when its first increase came, plus the last increase.
    (coati added every update to the sum of those before it.) The factors of a layer may come in different pieces of a
    state dict: the first to come waits for the other.
    """

    def __init__(self) -> None:
        self.lora_config_dict: dict[str, LoRALayerConfig] = {}
        self._waiting: dict[str, Tensor] = {}
        self._base: dict[str, Tensor] = {}

    def register_lora_config(self, lora_config_dict: Mapping[str, LoRALayerConfig]) -> None:
        """Keep how each layer's factors make up its increase, by the layer's name in the model without adapters."""
        self.lora_config_dict = dict(lora_config_dict)

    def reconstruct_increase(
        self, state_dict_lora: Mapping[str, Tensor], lora_config_dict: Mapping[str, LoRALayerConfig] | None = None
    ) -> dict[str, Tensor]:
        """Return the increase of each weight whose two factors have now come, by its name in a model without adapters.

            increase = alpha / r * B A    (transposed where the layer keeps its weight so)

        Args:
            state_dict_lora: factors, all of them or a piece of them.
            lora_config_dict: as for `register_lora_config`; None takes what is registered.

        Raises:
            ModelError: if a name is no factor's, or a layer is unknown.
        """
        if lora_config_dict is not None:
            self.register_lora_config(lora_config_dict)
        for name, factor in state_dict_lora.items():
            _layer_and_factor(name)
            self._waiting[_without_adapter(name)] = factor
        increases = {}
        for name in list(self._waiting):
            layer, kind = _layer_and_factor(name)
            other = f"{layer}.{_PAIRS[kind]}" if kind in _PAIRS else ""
            if other in self._waiting:
                config = self._config_of(layer)
                first, second = self._waiting.pop(name), self._waiting.pop(other)
                increases[f"{layer}.weight"] = _increase(first, second, config, is_embedding=kind != "lora_A")
        return increases

    @torch.no_grad()
    def load_state_dict_increase(self, model: nn.Module, state_dict_increase: Mapping[str, Tensor]) -> None:
        """Set weights of a model, in place, to what they were before the first increase plus the given one.

        Args:
            model: without adapters.
            state_dict_increase: as `reconstruct_increase` returned it; weights that it does not name stay.

        Raises:
            ModelError: if a name or shape is not the model's; nothing was changed.
        """
        own = dict(model.named_parameters(remove_duplicate=False))
        wrong = sorted(
            name for name, tensor in state_dict_increase.items() if name not in own or own[name].shape != tensor.shape
        )
        if wrong:
            raise ModelError(
                f"the increase of {wrong[0]} does not fit the model, nor do others ({len(wrong) - 1}); build sender "
                "and receiver from one configuration"
            )
        for name, increase in state_dict_increase.items():
            weight = own[name]
            base = self._base.setdefault(name, weight.detach().clone())
            weight.copy_(base.float() + increase.to(weight.device).float())

    def forget_base(self) -> None:
        """Take the weights that the model has from now on for those without an increase: whole ones were loaded."""
        self._base.clear()
        self._waiting.clear()

    @staticmethod
    def filter_state_dict_lora(
        state_dict: Mapping[str, Tensor], keep_non_lora: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the adapters' factors of a state dict, and the rest of it if that is to be kept.

        Args:
            state_dict: of a model with adapters, whole or a shard of it.
            keep_non_lora: whether the second is everything else, by the names of the model without adapters; else it is
                empty.
        """
        factors = {name: tensor for name, tensor in state_dict.items() if _is_factor(name)}
        if not keep_non_lora:
            return factors, {}
        rest = {name.replace(".base_layer.", "."): tensor for name, tensor in state_dict.items() if name not in factors}
        return factors, rest

    @staticmethod
    def extract_lora_config(model: nn.Module) -> dict[str, LoRALayerConfig]:
        """Return how the factors of each layer with an adapter make up its increase, by the layer's name."""
        found = {}
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                (adapter,) = layer.r
                dropout = dict(layer.lora_dropout.items()).get(adapter)
                found[name] = LoRALayerConfig(
                    r=layer.r[adapter],
                    lora_alpha=layer.scaling[adapter] * layer.r[adapter],  # whatever scaled it
                    lora_dropout=float(getattr(dropout, "p", 0.0)),
                    fan_in_fan_out=bool(getattr(layer, "fan_in_fan_out", False)),
                )
        return found

    def _config_of(self, layer: str) -> LoRALayerConfig:
        if layer not in self.lora_config_dict:
            raise ModelError(
                f"factors came for the layer {layer}, of which nothing is known; register what extract_lora_config "
                "returned on the other side"
            )
        return self.lora_config_dict[layer]


def state_dict_to(
    state_dict: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = torch.device("cpu"),  # noqa: B008 - coati's default, and immutable
) -> dict[str, Tensor]:
    """Return the tensors on another device and, those of floating-point numbers, in another dtype.

    float16, coati's default, holds nothing above 65504: give bfloat16 for weights that are trained in it.
    """
    return {
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in state_dict.items()
    }


def _is_factor(name: str) -> bool:
    return any(part in _FACTORS for part in name.split("."))


def _without_adapter(name: str) -> str:
    """Return `<layer>.<factor>`, whatever peft calls the adapter."""
    layer, factor = _layer_and_factor(name)
    return f"{layer}.{factor}"


def _layer_and_factor(name: str) -> tuple[str, str]:
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part in _FACTORS), None)
    if place is None:
        raise ModelError(
            f"{name} is no factor of an adapter; send what filter_state_dict_lora returned first, and load the rest "
            "apart"
        )
    return ".".join(parts[:place]), parts[place]


def _increase(first: Tensor, second: Tensor, config: LoRALayerConfig, *, is_embedding: bool) -> Tensor:
    product = second.float() @ first.float()
    if is_embedding or config.fan_in_fan_out:  # an embedding's weight is [V H], where B A is [H V]
        product = product.T
    return product * config.scale
