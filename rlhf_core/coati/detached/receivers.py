"""Which receivers each of several senders has, when both are numbered."""

from __future__ import annotations

from rlhf_core.errors import ConfigError


def get_receivers_per_sender(
    sender_idx: int, num_senders: int, num_receivers: int, allow_idle_sender: bool
) -> list[int]:
    """Return the numbers of the receivers that one sender has.

        senders <= receivers, or idle ones allowed: receiver i has one sender, i mod senders
        else:                                       sender i has one receiver, i mod receivers

    Makers may be wired to all trainers here, and need none of this; it is for scripts of coati's that do.

    Args:
        sender_idx: of the sender, from 0.
        num_senders: how many there are.
        num_receivers: how many there are.
        allow_idle_sender: whether a sender may have no receiver at all.

    Raises:
        ConfigError: if there is no sender or receiver, or no such sender.

    Example:
        >>> [get_receivers_per_sender(sender, 2, 3, allow_idle_sender=False) for sender in range(2)]
        [[0, 2], [1]]
        >>> [get_receivers_per_sender(sender, 3, 2, allow_idle_sender=False) for sender in range(3)]
        [[0], [1], [0]]
        >>> [get_receivers_per_sender(sender, 3, 2, allow_idle_sender=True) for sender in range(3)]
        [[0], [1], []]
    """
    if num_senders < 1 or num_receivers < 1 or not 0 <= sender_idx < num_senders:
        raise ConfigError(
            f"expected a sender below the number of senders, and at least one receiver, got sender {sender_idx} of "
            f"{num_senders} and {num_receivers} receivers"
        )
    if num_senders <= num_receivers or allow_idle_sender:
        return list(range(sender_idx, num_receivers, num_senders))
    return [sender_idx % num_receivers]
