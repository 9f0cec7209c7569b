"""The stub with one safeguard left out, which the deployment's environment names: what a control runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tests.night.sites import LEFT_OUT_BY


def no_lock_of_the_run() -> None:
    """Let any number of processes work on a run."""
    import tasks.one_process

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    tasks.one_process.one_process = alone


def no_classes_of_failures() -> None:
    """Take every error for final."""
    import tasks.failures

    def final(_: BaseException) -> None:
        """Say that no further attempt is made."""

    tasks.failures.further_attempts = final


def no_plan() -> None:
    """Let each start of a run find out anew what it is to do."""
    import tasks.plan

    tasks.plan.asker_of = lambda _: None


LEFT_OUT: dict[str, Callable[[], None]] = {
    "lock of the run": no_lock_of_the_run,
    "plan": no_plan,
    "classes of failures": no_classes_of_failures,
}
for known in [*sys.modules]:
    if (known.partition(".")[0] in {"flows", "tasks"} and known != "tasks.source") or known == "tests.night.stages":
        del sys.modules[known]  # this process may be forked from one that has decorated them already
if left_out := os.environ.get(LEFT_OUT_BY):  # whoever deploys it stays whole
    LEFT_OUT[left_out]()

from tests.night.stages import stand_in  # noqa: E402 - what is left out must be so before anything is decorated

__all__ = ["pipeline"]

pipeline = stand_in()
