"""Training on demonstrations and on preferences."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Positive
from rlhf_core.config.strategy import AdapterTrainersConfig


class SFTConfig(AdapterTrainersConfig):
    """Supervised fine-tuning on demonstrations."""

    STAGE: ClassVar[str] = "sft"
    epochs: Positive = 1
    batch_size: Positive = 16
    """Sequences per optimizer step of one trainer process."""
    micro_batch_size: Positive = 16
    """Sequences that go through the model at once, at most; with packing, rows of up to `max_length` tokens."""
    lr: float = Field(5e-5, gt=0)
    warmup_steps: int = Field(2, ge=0)
    """Linear warm-up, then linear decay to zero."""
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    max_length: Positive = 256
    """Tokens of prompt and response together; a longer demonstration is an error."""
    packing: bool = False
    """Put several demonstrations of a batch into one row of `max_length` tokens; none of them sees another."""

    @model_validator(mode="after")
    def _packs_with_a_mask(self) -> Self:
        if self.packing and self.flash_attention:
            raise ValueError(
                "sft.packing keeps demonstrations apart by a mask that sft.flash_attention does not take; set one of "
                "them to false"
            )
        return self


class RewardModelConfig(AdapterTrainersConfig):
    """Bradley-Terry training on preference pairs."""

    STAGE: ClassVar[str] = "reward_model"
    samples_per_prompt: int = Field(4, ge=2)
    """Responses sampled per prompt when pairs come from the SFT model's own samples."""
    max_new_tokens: Positive = 20
    """Length of those samples."""
    pairs: Positive | None = 192
    """Most pairs used, held-out ones included; None uses all that there are, as one with a set of pairs will want: the
    default is a number that a processor trains on in minutes."""
    heldout_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of prompts whose pairs are kept for measuring accuracy and calibration; prompts of which one continues the
    other stay together."""
    epochs: Positive = 1
    batch_size: Positive = 16
    """Pairs per optimizer step of one trainer process."""
    micro_batch_size: Positive = 8
    lr: float = Field(3e-5, gt=0)
    head_lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(2, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    loss: Literal["log_sigmoid", "log_exp"] = "log_sigmoid"
    """The same number computed in two ways, as coati offers both."""
    centring: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps their mean near zero."""
    max_length: Positive = 512
    """Tokens of prompt and response together; a longer pair is dropped and counted."""
