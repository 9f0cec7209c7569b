"""A model of the same form as one whose weights lie elsewhere: it has them while they are needed, for inference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Twin:
    """Has all weights of a model while it is awake; asleep, those that are kept elsewhere are not numbers.

    Args:
        model: with all of its weights; what is not kept elsewhere, both have in common from here on.
        elsewhere: names of its weights that are.
        dtype: of these in the twin; None: their own.
        device: of these in the twin; None: their own.
    """

    def __init__(
        self,
        model: nn.Module,
        elsewhere: Collection[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._absent = {
            name: torch.full((), torch.nan, dtype=dtype or each.dtype, device=device or each.device).expand(each.shape)
            for name, each in model.named_parameters()
            if name in elsewhere
        }
        """What stands for each: of its shape, but without its memory."""
        self.model = host_copy(model, self._absent.get)
        self._openings = 0

    @contextmanager
    def awake(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> Iterator[None]:
        """Return the context in which the twin has all weights; contexts may be inside each other.

        Args:
            weights: yields those that are kept elsewhere.
        """
        own = dict(self.model.named_parameters())
        if not self._openings:
            for name, tensor in weights():
                own[name].data = tensor
        self._openings += 1
        try:
            yield
        finally:
            self._openings -= 1
            if not self._openings:
                for name, tensor in self._absent.items():
                    own[name].data = tensor


def host_copy(model: nn.Module, tensor_for: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of the module whose weights and buffers are what `tensor_for` returns.

    Nothing of the model's is copied on its device.

    Args:
        model: without a booster around it; tied weights stay tied.
        tensor_for: given the name and the model's own tensor, returns the copy's, a tensor of its own.
    """
    made: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        made[id(parameter)] = nn.Parameter(tensor_for(name, parameter.detach()), requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        made[id(buffer)] = tensor_for(name, buffer.detach())
    return copy.deepcopy(model, memo=dict(made))
