"""Processes forked from a server that has imported what any of them needs: importing torch and Ray takes seconds.

A process of pytest has one such server, and what it imports is settled by the first test that needs it; so all tests
take it from here.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

FORKED = get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "pytest",
        "safetensors.torch",
        "transformers",
        "rlhf_core.ppo.learner",
        "rlhf_core.weights",
        "rlhf_core.strategy.liveness",
        "rlhf_core.strategy.rendezvous",
        "infra.artifacts.s3",
    ]
)


def exit_of(work: Callable[..., object], *arguments: Any, timeout_s: float = 120.0) -> int | None:
    """Call a function in a process of its own, and return how that ended; None if it had not in time."""
    process = FORKED.Process(target=work, args=arguments)
    process.start()
    process.join(timeout_s)
    ended = process.exitcode
    process.kill()
    process.join()
    return ended
