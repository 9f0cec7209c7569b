"""What runs in an actor has no run of Prefect's: importing it there would cost each actor a second, and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration  # processes of their own

IN_ACTORS = {
    "ranks of SFT and reward model": ("rlhf_core.ray_tools.group", "tasks.sft", "tasks.reward_model"),
    "trainers and makers of PPO": (
        "rlhf_core.rollout.worker",
        "rlhf_core.detached.run",
        "tasks.ppo_keeper",
        "tasks.ppo_models",
    ),
}
TELLS = """
import sys
from tasks.progress import Progress, say, telling
from tasks.showing import warn
from tasks.taken_over import leave_if_taken_over

told = []
with telling(told.append):
    say("sft", "a line")
    Progress("sft", 1, "step").step(1, loss=object())
warn("a picture", ValueError("no"))
leave_if_taken_over()
assert told and "prefect" not in sys.modules, sorted(name for name in sys.modules if name.startswith("prefect"))
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("modules", IN_ACTORS.values(), ids=IN_ACTORS)
def test_an_actors_modules_import_no_prefect(modules: tuple[str, ...]) -> None:
    run(f"import sys, {', '.join(modules)}; assert 'prefect' not in sys.modules")


def test_an_actor_tells_lines_and_warns_without_prefect() -> None:
    run(TELLS)
