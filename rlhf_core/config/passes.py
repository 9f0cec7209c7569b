"""How the trainer goes through a model while it learns."""

from __future__ import annotations

from typing import ClassVar

from rlhf_core.config.base import Config, Dtype


class PassConfig(Config):
    """Passes forward and backward."""

    STAGE: ClassVar[str]
    """Section of the configuration, for messages."""
    dtype: Dtype = "bfloat16"
    """Arithmetic of the forward pass (autocast over float32 trainable weights)."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile_layers: bool = False
    """Have PyTorch compile the transformer's layers, some ten seconds once for each process; for long runs on GPUs
    (untried). A resumed run then agrees within rounding, not to the bit."""
    flash_attention: bool = False
    """Attend by the library flash_attn, which leaves out padding; on GPUs only, with a dtype of 16 bits (untried)."""
