"""One function over several rows: what fails costs its row a zero. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rlhf_core.rewards.process import RewardFunctionError, RewardProcess
from rlhf_core.rewards.resolve import RewardFunction

_log = logging.getLogger(__name__)


def call_each(
    process: RewardProcess, function: RewardFunction, arguments: Sequence[tuple[Any, ...]], *, names: Sequence[str]
) -> list[float]:
    """Return the function's raw value for each row.

    A row for which the function gives no number gets 0 and a warning that names function, row and reason.

    Args:
        process: where the function runs.
        function: what is called.
        arguments: of each call.
        names: of the rows, for warnings.
    """
    values = []
    for row, name in zip(arguments, names, strict=True):
        try:
            values.append(process.call(function, *row))
        except RewardFunctionError as error:
            _log.warning("reward function %s: %s; %s gets 0 from it", function.name, error, name)
            values.append(0.0)
    return values
