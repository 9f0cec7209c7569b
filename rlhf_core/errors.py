"""Exceptions that a caller catches: each message is one sentence for the person who can correct the mistake."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple


class RlhfError(Exception):
    """A mistake of the user's or a limit of the machine, told in one sentence; shown without a traceback."""

    passes: ClassVar[bool] = False
    """Whether the same attempt may go well later, although nobody has repaired anything."""
    ends_as: str = "Failed"
    """What a run that it ends is called: `Refused: ` or `Failed: ` and a few words, at most 40 characters in all."""

    def __init__(self, *told: str, ends_as: str | None = None) -> None:
        super().__init__(*told)
        if ends_as is not None:
            self.ends_as = ends_as


class ConfigError(RlhfError):
    """A preset, key or value in a configuration is not what it should be."""

    ends_as = "Refused: configuration"


class DataError(RlhfError):
    """A data file is missing, malformed, empty or of an unknown form."""

    ends_as = "Refused: data"


class DataAwayError(DataError):
    """The server that has a data file does not answer."""

    passes = True
    ends_as = "Failed: data out of reach"


class TooFewRowsError(DataError):
    """There are fewer rows than the stages of a run need."""


class ModelError(RlhfError):
    """A model cannot be found, read, or held by this machine."""

    ends_as = "Refused: model"


class BaseChangedError(ModelError):
    """The file of a base was changed while models were mapped from it; it is copied anew, and nothing is lost."""

    passes = True
    ends_as = "Failed: base model changed"


class TrainingError(RlhfError):
    """Training cannot go on: a loss or gradient is not a finite number, or there is nothing to learn from."""

    ends_as = "Failed: training"


class LostRankError(TrainingError):
    """A process of a group that trains one model together is gone; a new group can go on from what was stored."""

    passes = True
    ends_as = "Failed: lost a process"


class NoRoomError(RlhfError):
    """A Ray cluster has no room for what is asked for, or has not given room back in time; it may have room later."""

    passes = True
    ends_as = "Failed: no room in the Ray cluster"


class Fault(NamedTuple):
    """One of several things that stand in the way of a run."""

    sentence: str
    overrides: Mapping[str, Any]
    """By dotted key, what puts it right; empty if no override does."""


def refuse_together(faults: Sequence[Fault], error: type[RlhfError] = ConfigError, *, opening: str = "") -> None:
    """Raise one error for all faults, with the overrides that put them right; do nothing if there is no fault.

    Args:
        faults: what is wrong.
        error: to raise.
        opening: what all of it is about, such as "preset 'x' cannot run".

    Raises:
        RlhfError: of the given type.
    """
    if not faults:
        return
    sentences = list(dict.fromkeys(fault.sentence for fault in faults))
    if len(sentences) == 1:
        told = f"{opening}: {sentences[0]}" if opening else sentences[0]
    else:
        listed = "; ".join(f"({number}) {sentence}" for number, sentence in enumerate(sentences, start=1))
        count = f"{len(sentences)} reasons" if opening else f"{len(sentences)} things stand in the way"
        told = f"{opening}, for {count}: {listed}" if opening else f"{count}: {listed}"
    together: dict[str, Any] = {}
    for fault in faults:
        together |= fault.overrides
    if together:
        rest = "" if all(fault.overrides for fault in faults) else " (where overrides can mend it)"
        told += f"; with these overrides it works{rest}: {json.dumps(together)}"
    raise error(told)
