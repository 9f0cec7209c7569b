"""The one-number head that reward model and critic put on a transformer, and the files of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from rlhf_core.errors import ModelError
from rlhf_core.models.loading import load_whole
from rlhf_core.models.lora import save_merged

HEAD_FILE = "head.safetensors"


class TrunkAndHead(NamedTuple):
    """What `load_with_head` found in a directory."""

    trunk: PreTrainedModel
    head: nn.Linear
    extra: dict[str, Tensor]


def random_head(trunk: PreTrainedModel) -> nn.Linear:
    """Return a head with weights of standard deviation 1/(H + 1), so that first scores are of order one."""
    head = zero_head(trunk)
    nn.init.normal_(head.weight, std=1 / (head.in_features + 1))
    return head


def zero_head(trunk: PreTrainedModel) -> nn.Linear:
    """Return a head that says 0 everywhere, in float32 whatever the trunk is in."""
    head = nn.Linear(trunk.config.hidden_size, 1, device=trunk.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def apply_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return the head's output in float32, [...] from [... H], also under autocast and from rounded weights.

    Scores and values are compared with others in their third digit, which bfloat16 does not have.
    """
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        output = nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())
    return output.squeeze(-1)


def save_with_head(
    trunk: PreTrainedModel, head: nn.Linear, extra: Mapping[str, Tensor], directory: Path, max_shard_size: str
) -> None:
    """Write the trunk (adapters merged) as transformers does, and the head with `extra` tensors beside it."""
    save_merged(trunk, directory, max_shard_size=max_shard_size)
    save_head(head, extra, directory)


def save_head(head: nn.Linear, extra: Mapping[str, Tensor], directory: Path) -> None:
    """Write the head with `extra` tensors."""
    named = {"weight": head.weight, "bias": head.bias, **extra}
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in named.items()}
    save_file(tensors, directory / HEAD_FILE)


def load_with_head(
    directory: Path, dtype: torch.dtype, *, kind: str, extra: Mapping[str, Tensor] = MappingProxyType({})
) -> TrunkAndHead:
    """Return what `save_with_head` wrote, the trunk in `dtype` and the head in float32.

    Args:
        directory: holds both.
        dtype: of the trunk.
        kind: what is wanted, in words, for messages.
        extra: tensors that must stand beside the head, by name, to tell their shapes.

    Raises:
        ModelError: if there is no head, it is another's, a file is damaged, or weights are missing.
    """
    tensors = _read_head(directory, kind)
    trunk = load_whole(AutoModel, directory, dtype, what="transformer").eval()
    return TrunkAndHead(trunk, *_fitted(tensors, trunk, extra, directory, kind))


def load_head(
    directory: Path, trunk: PreTrainedModel, *, kind: str, extra: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[nn.Linear, dict[str, Tensor]]:
    """Return the head that `save_head` wrote, in float32, and what stands beside it.

    Args:
        directory: holds it.
        trunk: what it is for.
        kind: what is wanted, in words, for messages.
        extra: tensors that must stand beside the head, by name, to tell their shapes.

    Raises:
        ModelError: if there is no head, it is another's, or the file is damaged.
    """
    return _fitted(_read_head(directory, kind), trunk, extra, directory, kind)


def _fitted(
    tensors: dict[str, Tensor], trunk: PreTrainedModel, extra: Mapping[str, Tensor], directory: Path, kind: str
) -> tuple[nn.Linear, dict[str, Tensor]]:
    head = zero_head(trunk)
    wanted = {"weight": head.weight, "bias": head.bias, **extra}
    wrong = [name for name, like in wanted.items() if name not in tensors or tensors[name].shape != like.shape]
    if wrong:
        raise ModelError(
            f"{directory} holds no {kind}, as its {HEAD_FILE} has no {wrong[0]} of the right shape; give the directory "
            f"of a stored {kind}"
        )
    head.load_state_dict({name: tensors.pop(name) for name in ("weight", "bias")})
    return head, tensors


def _read_head(directory: Path, kind: str) -> dict[str, Tensor]:
    if not (directory / HEAD_FILE).is_file():
        raise ModelError(
            f"{directory} holds no {kind}, as it has no {HEAD_FILE}; give the directory of a stored {kind}"
        )
    try:
        return dict(load_file(directory / HEAD_FILE))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory / HEAD_FILE} cannot be read; it is truncated or no safetensors file") from error
