"""A maker's side: fetches a version, verifies all of it, and then replaces its weights; or changes nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf_core.models.lora import FROZEN_MARK
from rlhf_core.phases import reached
from rlhf_core.weights.buckets import HEAD, Difference, Publication, Received, WeightsError, verify, view
from rlhf_core.weights.difference import applies_to, apply, by_name
from rlhf_core.weights.nccl import NcclPlace, NcclReceiver
from rlhf_core.weights.object_store import ObjectStorePlace, ObjectStoreReceiver
from rlhf_core.weights.shared_memory import SharedMemoryPlace, SharedMemoryReceiver

logger = logging.getLogger(__name__)

_ADAPTER_MARK = ".lora_"
_SHARE_OF_DIFFERENCE = 0.5
"""Of the time for the buckets: the rest is left for all of the weights, if a difference does not come."""


class Receiver(Protocol):
    """A maker's end of one transport: fetches buckets."""

    def buckets(self, publication: Publication, timeout_s: float) -> Any:
        """Return the context of what has been `Received`; nobody writes the buckets while it lasts."""

    def close(self) -> None:
        """Free everything."""


class Subscriber:
    """Holds the version of the weights of a maker's models, in the maker's process.

    Args:
        models: returns plain modules by role, actor and critic: the tensor `actor.x` is parameter `x` of the actor.
    """

    def __init__(self, models: Callable[[], Mapping[str, nn.Module]]) -> None:
        self._models = models
        self.version: int | None = None
        """Of the weights that are held; None before the first."""
        self.incarnation: str | None = None
        """Of the publisher whose full publication was taken last; None before the first."""
        self._receivers: dict[type, Receiver] = {}
        self._lent: set[str] = set()
        """Weights that lie in a publication's own memory."""

    def take(self, publication: Publication, timeout_s: float) -> int:
        """Fetch a publication, verify every checksum, then replace weights: all of it or nothing.

        Every tensor replaces the one that is there, adapters too: nothing is added to anything. To be called between
        two uses of the models.

        Args:
            publication: what the publisher returned.
            timeout_s: longest wait for the buckets, those of a difference and of the whole together.

        Returns:
            The version that is held now.

        Raises:
            WeightsError: if it is damaged, gone, does not fit the models, or is older than what is held (a full one
                of another publisher is never older: that trainer goes on from where it was restored).
            TimeoutError: if the buckets do not come in time.
        """
        if (
            self.version is not None
            and publication.version < self.version
            and not (publication.fully and publication.incarnation != self.incarnation)
        ):
            raise WeightsError(
                f"weights of version {publication.version} came after those of version {self.version}; they are left"
            )
        own = _parameters(self._models())
        _check_fit(publication, own)
        until = time.monotonic() + timeout_s
        if not self._take_difference(publication, own, _SHARE_OF_DIFFERENCE * timeout_s):
            receiver = self._receiver(type(publication.place))
            with receiver.buckets(publication, max(0.0, until - time.monotonic())) as received:
                verify(publication, received.buckets)
                reached("swap")
                self._replace(publication, own, received)
        return publication.version

    def close(self) -> None:
        """Free all buckets; the models keep their weights."""
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()

    def _take_difference(self, publication: Publication, own: Mapping[str, Tensor], timeout_s: float) -> bool:
        """Take what changed, if the version before is held; return whether that gave what was published.

        Whatever it fails with, all of the weights are there as well.
        """
        difference = publication.difference
        if difference is None or difference.base != self.version or publication.incarnation != self.incarnation:
            return False
        if not applies_to(publication, own):
            return False
        try:
            return self._apply(difference, own, timeout_s)
        except Exception as error:
            logger.warning("a difference of weights was not taken (%s); all of them are fetched instead", error)
            return False

    def _apply(self, difference: Difference, own: Mapping[str, Tensor], timeout_s: float) -> bool:
        update = difference.update
        with self._receiver(type(update.place)).buckets(update, timeout_s) as (buckets, _):
            verify(update, buckets)
            reached("swap")
            changed = {slot.name: view(buckets, slot) for slot in update.slots}
            self._move_out(own, [name for name, change in by_name(changed) if change.values.numel()])
            self.version = None  # for good, if it cannot even be undone
            is_right = apply(difference, own, changed)
            self.version = update.version if is_right else difference.base
        return is_right

    def _replace(self, publication: Publication, own: Mapping[str, Tensor], received: Received) -> None:
        self.version = None  # should anything fail from here on, no version is held
        new = {slot.name: view(received.buckets, slot) for slot in publication.slots}
        # One file is kept: where an update leaves out weights that lie in the former one, it is copied.
        can_keep = received.keep is not None and self._lent <= new.keys()
        lent = {name for name in new if can_keep and _is_alike(own[name], new[name])}
        copied = [name for name in new if name not in lent]
        for name in lent:
            own[name].data = new[name]
        self._lent |= lent  # beside those that are in the former file still, and leave it now
        self._move_out(own, copied, keep_values=False)
        if received.keep is not None and lent:
            received.keep()
        with torch.no_grad():
            for name in copied:
                own[name].copy_(new[name])
        self.version = publication.version
        if publication.fully:  # an update says nothing about the weights that it leaves out
            self.incarnation = publication.incarnation

    def _move_out(self, own: Mapping[str, Tensor], names: Iterable[str], *, keep_values: bool = True) -> None:
        """Give weights that are to be written memory of their own, where they are in that of a publication."""
        for name in self._lent.intersection(names):
            own[name].data = own[name].clone() if keep_values else torch.empty_like(own[name])
            self._lent.discard(name)
        if not self._lent and isinstance(shared := self._receivers.get(SharedMemoryPlace), SharedMemoryReceiver):
            shared.release()

    def _receiver(self, place: type) -> Receiver:
        if place not in self._receivers:
            made: dict[type, Any] = {
                SharedMemoryPlace: SharedMemoryReceiver,
                ObjectStorePlace: ObjectStoreReceiver,
                NcclPlace: NcclReceiver,
            }
            self._receivers[place] = made[place]()
        return self._receivers[place]


def _parameters(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all weights by role and name; tied ones once."""
    return {
        f"{role}.{name}": parameter for role, model in models.items() for name, parameter in model.named_parameters()
    }


def _is_alike(weight: Tensor, received: Tensor) -> bool:
    """Return whether what arrived can stand in a weight's place, bit by bit."""
    return weight.dtype == received.dtype and weight.device == received.device and weight.is_contiguous()


def _is_trained(name: str) -> bool:
    return name.startswith(HEAD) or (_ADAPTER_MARK in name and FROZEN_MARK not in name)


def _check_fit(publication: Publication, own: Mapping[str, Tensor]) -> None:
    """Check that the models have all tensors that are published, in their shapes, and that none is missing.

    Of a publication that is not full at least adapters and heads must be there: half an adapter is another model.

    Raises:
        WeightsError: if it does not fit.
    """
    published = {slot.name: slot.shape for slot in publication.slots}
    due = own.keys() if publication.fully else {name for name in own if _is_trained(name)}
    unknown, missing = sorted(published.keys() - own.keys()), sorted(due - published.keys())
    reshaped = sorted(name for name in published.keys() & own.keys() if published[name] != tuple(own[name].shape))
    if unknown or missing or reshaped:
        raise WeightsError(
            f"weights of version {publication.version} do not fit the models: unknown {unknown[:3]}, missing "
            f"{missing[:3]}, of another shape {reshaped[:3]}; build trainer and makers from one configuration"
        )
