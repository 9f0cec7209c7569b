"""A trainer's weights on their way to the makers: which version they are, and what a maker takes that comes up late."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.weights import Publication, Publisher, Subscriber

BUCKET_BYTES = 64 << 20
Transport = Literal["auto", "shared_memory", "objects", "nccl"]


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """Stands for the weights that makers were built with, where no trainer has sent any."""

    version: int = 0


@dataclass(frozen=True, slots=True)
class SentWeights:
    """What a maker takes: all weights, and an update of a part of them if there is a newer one."""

    full: Publication
    update: Publication | None = None

    @property
    def version(self) -> int:
        """Of the newest."""
        return self.full.version if self.update is None else self.update.version


def take_weights(subscriber: Subscriber, sent: SentWeights, timeout_s: float) -> int:
    """Have a maker's models hold what was sent; return the version that they hold.

    A maker that holds no full publication of this sender, as one that came up again, takes that first.

    Args:
        subscriber: of the maker's models.
        sent: by its trainer.
        timeout_s: longest wait for the weights.
    """
    held = subscriber.version if subscriber.incarnation == sent.full.incarnation else None
    if sent.update is None or held is None or held < sent.full.version:
        subscriber.take(sent.full, timeout_s)
    if sent.update is not None:
        subscriber.take(sent.update, timeout_s)
    assert subscriber.version is not None
    return subscriber.version


class Sending(NamedTuple):
    """What is to be sent; the same on every rank."""

    version: int
    fully: bool
    """All weights: what is asked for, and whatever is sent first."""


class WeightSender:
    """Counts versions: one more whenever weights are sent that have learnt since they were sent last.

    Args:
        transport: as `Publisher` takes it.
        dtype: that weights are cast to: the makers' `rollout_dtype`.
    """

    def __init__(self, *, transport: Transport = "auto", dtype: torch.dtype) -> None:
        self.version = 0
        self.last: SentWeights | None = None
        """What was sent last; None if nothing was, and on all ranks but the first."""
        self._transport, self._dtype = transport, dtype
        self._publishers: dict[int, Publisher] = {}
        """By the size of their buckets."""
        self._has_learnt = self._has_sent = False

    def learnt(self) -> None:
        """Take note that the weights are no longer those that were sent."""
        self._has_learnt = True

    def restore(self, version: int) -> None:
        """Go on from the version of a training state: its weights are sent under that number, all of them."""
        self.version, self.last = version, None
        while self._publishers:
            self._publishers.popitem()[1].close()  # makers take a lower version from another publisher alone
        self._has_learnt = self._has_sent = False

    def begin(self, *, fully: bool) -> Sending:
        """Return what is sent next, and count it as sent; called by every rank."""
        self.version += self._has_learnt
        fully = fully or not self._has_sent
        self._has_learnt, self._has_sent = False, True
        return Sending(self.version, fully)

    def send(
        self,
        sending: Sending,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        nodes: Iterable[str],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> SentWeights:
        """Publish weights; return what makers are to be told.

        Args:
            sending: as `begin` returned it.
            tensors: names (`actor.x`, `critic.x`) and weights: all of them, or only those that are trained.
            nodes: Ray's ids of the makers' nodes.
            bucket_bytes: of one message.
        """
        if bucket_bytes not in self._publishers:
            self._publishers[bucket_bytes] = Publisher(
                transport=self._transport, bucket_bytes=bucket_bytes, dtype=self._dtype
            )
        publisher = self._publishers[bucket_bytes]
        found = publisher.publish(tensors, version=sending.version, fully=sending.fully, nodes=set(nodes))
        self.last = SentWeights(found) if sending.fully or self.last is None else SentWeights(self.last.full, found)
        return self.last

    def retire(self, held: Collection[int]) -> None:
        """Free what nobody needs any more.

        Args:
            held: versions that makers hold; one may be taking any that is newer.
        """
        if self.last is not None:
            oldest = min(held, default=self.last.version)
            needed = {self.last.full.version, *range(oldest, self.last.version + 1)}
            for publisher in self._publishers.values():
                publisher.retire(needed)


def weights_of(models: Mapping[str, nn.Module], *, fully: bool) -> Iterable[tuple[str, Tensor]]:
    """Yield weights by role and name, tied ones once.

    Args:
        models: by role.
        fully: all of them; else what is trained.
    """
    for role, model in models.items():
        for name, parameter in model.named_parameters():
            if fully or parameter.requires_grad:
                yield f"{role}.{name}", parameter.detach()
