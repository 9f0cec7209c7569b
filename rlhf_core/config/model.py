"""Which model a run starts from, and the adapters that may be trained on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config.base import Config, Positive


class ModelConfig(Config):
    """The pretrained model that a chain starts from."""

    path: str = "smollm2-135m-instruct"
    """Name of a packaged model, a local directory, or a hub name, perhaps with a revision: `org/name@revision`."""
    num_parameters: int | None = Field(None, ge=1)
    """Size for the memory check while the model is not on this machine; read from its configuration and files when it
    is."""


class LoRAConfig(Config):
    """Low-rank adapters on the linear layers."""

    r: Positive = 16
    """Rank."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter."""
    init: Literal["kaiming_uniform", "pissa"] = "kaiming_uniform"
    """Adapters that change nothing at first, or (pissa) the base's leading singular vectors, taken out of the base:
    then the adapters switched off are not the reference, which has to be a model of its own."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained beside the adapters; with any, too, the reference has to be a model of its own."""

    @property
    def keeps_base(self) -> bool:
        """Whether a model with its adapters switched off is what it was before."""
        return self.init != "pissa" and self.bias == "none"
