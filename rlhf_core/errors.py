"""Exceptions that a caller catches: each message is one sentence for the person who can mend it."""


class RlhfError(Exception):
    """A mistake of the user's or a limit of the machine, told in one sentence; shown without a traceback."""


class ConfigError(RlhfError):
    """A preset, key or value in a configuration is not what it should be."""


class DataError(RlhfError):
    """A data file is missing, malformed, empty or of an unknown form."""


class ModelError(RlhfError):
    """A model cannot be found, read, or held by this machine."""


class TrainingError(RlhfError):
    """Training cannot go on: a loss or gradient is not a finite number, or there is nothing to learn from."""


class LostRankError(TrainingError):
    """A process of a group that trains one model together is gone; a new group can go on from what was stored."""
