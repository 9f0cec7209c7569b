"""Where a run of the real pipeline is: at which of its flows, and in which process."""

from __future__ import annotations

import psutil

from infra.process_record import is_live
from tests.integration.local_stack import LocalStack, wait_for

EPISODES = 2
"""Of the runs that are asked."""
STAGES = ("sft", "reward-model", "ppo", "evaluate")
"""The flows that a pipeline calls, in order."""
STAGE_TIMEOUT_S = 600.0


def at_stage(stack: LocalStack, run: str, stage: str) -> None:
    """Wait until a run is at a stage, and in PPO until an episode is behind it."""

    def has_come() -> bool:
        come = len(stack.children(run)) > STAGES.index(stage)
        if come and stage == "ppo":
            come = any(f"episode 1/{EPISODES}" in line for line in stack.log(run))
        assert come or not stack.is_over(run), (stack.history(run), stack.message(run))
        return come

    wait_for(has_come, f"the run {run} to come to {stage}", timeout_s=STAGE_TIMEOUT_S)


def flow_process(stack: LocalStack, run: str) -> psutil.Process:
    """Return the process in which Prefect runs a run."""

    def look() -> psutil.Process | None:
        found = [each for each in stack.processes_of(run) if is_live(each) and "prefect.engine" in each.cmdline()]
        return found[0] if found else None

    return wait_for(look, f"a process of {run}", timeout_s=60)
