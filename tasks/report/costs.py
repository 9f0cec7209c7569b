"""What a run cost, by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config.budget import HOUR_S

if TYPE_CHECKING:
    from rlhf_core.config import BudgetConfig
    from tasks.results import StageResult

REST, WHOLE = "starting processes, storing, waiting", "this run"


class Machine(NamedTuple):
    """What a run holds while it works."""

    cores: int
    gpus: int


def costs_of(
    stages: Sequence[StageResult],
    evaluations: Mapping[str, StageResult],
    *,
    stored: Mapping[str, int],
    wall_s: float,
    machine: Machine,
    budget: BudgetConfig,
) -> list[dict[str, Any]]:
    """Return a row for each stage and evaluation, for what no stage took, and for the whole run.

    Hours of cores and GPUs are those for which the run held them, idle or not: what a machine is paid for.

    Args:
        stages: in order.
        evaluations: by role.
        stored: bytes of each artifact by reference, as far as they are known.
        wall_s: seconds since the run began.
        machine: cores and GPUs that the run holds.
        budget: its prices are the rate.

    Returns:
        Rows with `stage`, `seconds`, `core_hours`, `gpu_hours`, `bytes`, `money` (0 without a price) and `reused`: such
        a row tells what making it took another night, and costs nothing in this one.
    """

    def row(stage: str, seconds: float, size: int = 0, *, reused: bool = False) -> dict[str, Any]:
        hours = 0.0 if reused else seconds / HOUR_S
        return {
            "stage": stage,
            "seconds": seconds,
            "core_hours": hours * machine.cores,
            "gpu_hours": hours * machine.gpus,
            "bytes": size,
            "money": budget.cost(hours * HOUR_S, machine.gpus),
            "reused": reused,
        }

    named = [*((each.stage, each) for each in stages)]
    named += [(f"evaluate {role}", each) for role, each in evaluations.items()]
    rows = [row(name, each.seconds, stored.get(each.uri, 0), reused=each.reused) for name, each in named]
    worked = sum(each.seconds for _, each in named if not each.reused)
    rows.append(row(REST, max(0.0, wall_s - worked)))
    new = {each.uri for _, each in named if not each.reused}
    return [*rows, row(WHOLE, wall_s, sum(stored.get(uri, 0) for uri in new))]
