"""Sparse weights: a bit for each value that says whether it changed since the last version, and the new values.

At the learning rates of PPO most values of a version are, rounded to bfloat16, those of the version before. What the
makers hold afterwards is compared with checksums of the whole tensors, not of the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.weights.buckets import Difference, Publication, dtype_of, xxh3

_CHANGED, _VALUES = "#changed", "#values"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numbers of as many bytes: compared by their bits, a NaN is itself and 0 is not -0."""
WORTHWHILE = 0.5
"""Largest share of a full publication's bytes."""


class Change(NamedTuple):
    """Of one tensor."""

    changed: Tensor
    """A bit for each value, eight in a byte."""
    values: Tensor
    """As integers of the same bits."""


def cast(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of weights, as they travel, in host memory."""
    return {
        name: tensor.detach().to("cpu", dtype_of(name, tensor.dtype, dtype), copy=True).contiguous()
        for name, tensor in tensors
    }


def changes(former: Mapping[str, Tensor], latter: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return what to send of one version to those who hold another; None if it is not worth it, or not the same form.

    Args:
        former: all weights, as `cast` returned them.
        latter: as well.
    """
    forms = [{name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()} for weights in (former, latter)]
    if forms[0] != forms[1]:
        return None
    found: dict[str, Tensor] = {}
    left = WORTHWHILE * sum(tensor.nbytes for tensor in latter.values())
    for name, tensor in latter.items():
        old, new = _bits(former[name]), _bits(tensor)
        mask = old != new
        found[name + _CHANGED] = torch.from_numpy(np.packbits(mask.numpy()))
        found[name + _VALUES] = new[mask]
        left -= found[name + _CHANGED].nbytes + found[name + _VALUES].nbytes
        if left < 0:
            return None
    return found


def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor."""
    return {name: _checksum(tensor) for name, tensor in weights.items()}


def by_name(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Change]]:
    """Yield the changes that were sent, by the names of the tensors that they are of."""
    for name in [name.removesuffix(_CHANGED) for name in tensors if name.endswith(_CHANGED)]:
        yield name, Change(tensors[name + _CHANGED], tensors[name + _VALUES])


def applies_to(publication: Publication, own: Mapping[str, Tensor]) -> bool:
    """Return whether a maker's weights are of the very dtypes that were published: then their bits can be changed."""
    return all(
        str(own[slot.name].dtype) == f"torch.{slot.dtype}" and own[slot.name].is_contiguous()
        for slot in publication.slots
    )


def apply(difference: Difference, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Change a maker's weights in place; return whether they are now what was published. If not, they are as before.

    Args:
        difference: the checksums that must come out.
        own: the maker's weights.
        tensors: what was sent, by name.
    """
    undo: dict[str, tuple[Tensor, Tensor]] = {}
    is_right = False
    try:
        for name, change in by_name(tensors):
            bits = _bits(own[name].detach())
            mask = _booleans(change.changed, bits.numel()).to(bits.device)
            undo[name] = mask, bits[mask]
            bits[mask] = change.values.to(bits.device)
        is_right = all(_checksum(own[name].detach()) == total for name, total in difference.checksums.items())
    finally:
        if not is_right:
            for name, (mask, values) in undo.items():
                _bits(own[name].detach())[mask] = values
    return is_right


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(_BITS[tensor.itemsize])


def _checksum(tensor: Tensor) -> int:
    return xxh3(tensor.to("cpu").reshape(-1).view(torch.uint8))


def _booleans(changed: Tensor, count: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(changed.cpu().numpy(), count=count).view(np.bool_))
