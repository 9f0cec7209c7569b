"""Exceptions of infra: each message is one sentence for the person who can fix it."""

from __future__ import annotations

import errno
import ssl
from typing import ClassVar

AWAY_ERRNOS = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ESTALE,  # a file system over the network whose server has restarted
        errno.ETIMEDOUT,
    }
)
"""What an operating system says of a network that is away. A disk that is full (ENOSPC) or broken (EIO) is not among
them: it stays so until a person fixes it."""


def is_untrusted(error: BaseException) -> bool:
    """Return whether a server's certificate was refused: libraries call that a connection that failed.

    That does not pass: somebody has to trust the certificate, or to renew it.

    Args:
        error: what came of a request; the refusal is behind it, as cause, context or reason.
    """
    found = [error]
    for each in found:
        if isinstance(each, ssl.SSLCertVerificationError):
            return True
        behind = (each.__cause__, each.__context__, getattr(each, "reason", None))
        found += [one for one in behind if isinstance(one, BaseException) and one not in found]
    return False


class InfraError(Exception):
    """A service, store or cluster is not as it should be, told in one sentence; shown without a traceback."""

    passes: ClassVar[bool] = False
    """Whether the same attempt may succeed later, although nobody fixes anything."""
    ends_as: ClassVar[str] = "Failed"
    """What a run that it ends is called: `Refused: ` or `Failed: ` and a few words, at most 40 characters in all."""


class SettingsError(InfraError):
    """A setting (environment variable) is missing or wrong."""

    ends_as = "Refused: settings"


class StoreError(InfraError):
    """The artifact store cannot be reached, refuses, or does not hold what was asked for."""

    ends_as = "Failed: artifact store"


class StoreAwayError(StoreError):
    """The server of the artifact store was asked again and again until a deadline, and did not answer."""

    passes = True
    ends_as = "Failed: artifact store out of reach"


class StoreNotReadyError(StoreError):
    """The artifact store cannot do it just now: others use it, its file system is away, or a clock is wrong."""

    passes = True


class ReferenceNotFoundError(StoreError):
    """A reference names nothing in the store."""

    ends_as = "Refused: unknown reference"


class VersionExistsError(StoreError):
    """A manifest of this version is already there: somebody else committed it."""


class LockLostError(StoreError):
    """Another process has taken over a lock that this one held: it was silent for too long."""


class ServiceError(InfraError):
    """A service of the local stack did not start, or is not there."""

    ends_as = "Failed: local stack"


class ClusterError(InfraError):
    """A Ray cluster did not start, or does not answer."""

    ends_as = "Failed: Ray cluster"


class ClusterNotReadyError(ClusterError):
    """A Ray cluster is slow, silent, without room or lost a process; it may be there later, or another one may."""

    passes = True
