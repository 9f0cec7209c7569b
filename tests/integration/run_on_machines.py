"""A PPO run, driven from the head of a cluster of several machines: `python -m tests.integration.run_on_machines`.

It tells the test, which waits outside of all machines, what it needs to know, one JSON document a line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors

from rlhf_core.config import PipelineConfig
from tasks.clusters import end_cluster
from tasks.failures import passes, sentence
from tasks.ppo import next_episode, ppo_episode, publish_policy
from tasks.ppo_group import TRAINER
from tests.integration.ppo_runs import Run

ATTEMPTS = 3
"""Of each task, as Prefect makes them."""
RETRY_DELAY_S = 2


def tell(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def places() -> dict[str, str]:
    """Return the address of the machine that each trainer and maker is on."""
    living = {entry["Name"]: entry["Address"]["IPAddress"] for entry in actors().values() if entry["State"] == "ALIVE"}
    return {name: place for name, place in living.items() if name.startswith((TRAINER, "maker"))}


def machine_of(victim: str) -> str:
    """Return the machine that an actor is on; for `maker`, that of one which is neither the head nor the trainer's."""
    found = places()
    if victim != "maker":
        return found[victim]
    spared = {ray.util.get_node_ip_address(), found[TRAINER]}
    return next(place for name, place in found.items() if name.startswith("maker") and place not in spared)


def strike_when(doing: str, victim: str) -> None:
    """Name the victim's machine to the test while the trainer says that it is doing something."""
    while True:
        try:
            if ray.get(ray.get_actor(TRAINER).progress.remote(), timeout=60).startswith(doing):
                tell(strike=machine_of(victim))
                return
        except (ValueError, LookupError, StopIteration, ray.exceptions.RayError):
            pass  # a group that is being built
        time.sleep(0.01)


def again_and_again(step: Callable[..., Any], *arguments: Any) -> None:
    """Do one task of the flow as Prefect does it: what may pass is tried again."""
    for attempt in range(1, ATTEMPTS + 1):
        started = time.monotonic()
        try:
            step(*arguments)
        except Exception as error:
            mendable = passes(error)
            tell(
                failed=sentence(error), kind=type(error).__name__, mendable=mendable, after_s=time.monotonic() - started
            )
            if attempt == ATTEMPTS or not mendable:
                raise
            time.sleep(RETRY_DELAY_S)
        else:
            return


def play(run: Run, doing: str, victim: str) -> None:
    """Run all episodes; from the second on it is told when the trainer does that, if there is a victim."""
    for episode in range(next_episode(run.plan), run.config.ppo.episodes):
        if episode == 1:
            tell(places=places())
            if victim:
                threading.Thread(target=strike_when, args=(doing, victim), daemon=True).start()
        again_and_again(ppo_episode.fn, run.plan, episode)
    again_and_again(publish_policy.fn, run.plan)
    tell(places=places(), weights=run.weights(), numbers=run.numbers())


def main(config: str, folder: str, doing: str = "", victim: str = "") -> None:
    os.environ.update(RLHF_HOME=f"{folder}/home", RLHF_STORE_URL=f"file://{folder}/store")
    run = Run(PipelineConfig.model_validate_json(Path(config).read_bytes()), Path(folder))
    try:
        play(run, doing, victim)
    except Exception as error:
        tell(ended=sentence(error), kind=type(error).__name__)
    finally:
        end_cluster(run.plan.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
