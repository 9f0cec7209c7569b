"""Exceptions of the ground we run on: each message is one sentence for the person who can mend it."""


class InfraError(Exception):
    """A service, store or cluster is not as it should be, told in one sentence; shown without a traceback."""


class SettingsError(InfraError):
    """A setting (environment variable) is missing or wrong."""


class StoreError(InfraError):
    """The artifact store cannot be reached, refuses, or does not hold what was asked for."""


class ReferenceNotFoundError(StoreError):
    """A reference names nothing in the store."""


class VersionExistsError(StoreError):
    """A manifest of this version is already there: somebody else committed it."""


class LockLostError(StoreError):
    """Another process has taken over a lock that this one held: it was silent for too long."""


class ServiceError(InfraError):
    """A service of the local stack did not start, or is not there."""


class ClusterError(InfraError):
    """A Ray cluster did not start, or does not answer."""
