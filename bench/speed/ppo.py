"""One whole PPO step, our trainer's against TRL's: 16 responses are drawn, scored by four models, and learnt.

Each side works in processes of its own, one a round, which hold all four models; `ppo_sides.py` is what they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from bench.speed import peers
from bench.speed.measure import Found, Run, in_turns
from bench.speed.models import directory, load
from bench.speed.products import Products
from infra.settings import CHECKOUT

Dtype = Literal["bfloat16", "float32"]
TIMEOUT_S = 1800
MODULE = "bench.speed.ppo_sides"
MARK = "RESULT "
"""Before the line that a side prints for us: TRL prints others."""


class Sizes(NamedTuple):
    """Of the step."""

    rows: int
    prompt: int
    response: int


class Sides(NamedTuple):
    """What both sides took, TRL's None where there is no TRL."""

    seconds: tuple[float, float | None]
    megabytes: tuple[float, float | None]


def seconds(run: Run, dtype: Dtype, *, adapters: bool = False) -> Found:
    """Measure the time of a step."""
    return Found(*_sides(run, dtype, adapters).seconds, _floor(run, dtype, adapters), _told(run, dtype, adapters))


def megabytes(run: Run) -> Found:
    """Measure the most that a process holds in a step with adapters."""
    told = _told(run, "bfloat16", adapters=True) | {"limit": "none: what must be held depends on how it is written"}
    return Found(*_sides(run, "bfloat16", adapters=True).megabytes, settings=told)


@cache
def _sides(run: Run, dtype: Dtype, adapters: bool) -> Sides:
    given = {"directory": str(directory(run)), "dtype": dtype, "adapters": adapters, **_sizes(run)._asdict()}
    found: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    for _ in range(run.rounds):
        found["ours"].append(_side("ours", given))
        if peers.trl_path() is not None:
            found["trl"].append(_side("trl", given))

    def least(name: str) -> tuple[float, float | None]:
        ours, trl = ([each[name] for each in found[side]] for side in ("ours", "trl"))
        return min(ours), min(trl, default=None)

    return Sides(least("seconds"), least("megabytes"))


def _side(name: str, given: dict[str, Any]) -> dict[str, float]:
    """Let one side take its steps in a new process."""
    paths = [str(CHECKOUT), *([str(peers.trl_path())] if name == "trl" else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", MODULE, name, json.dumps(given)],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"the side {name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    result: dict[str, float] = json.loads(lines[0].removeprefix(MARK))
    return result


def _sizes(run: Run) -> Sizes:
    return Sizes(4, 8, 6) if run.tiny else Sizes(16, 64, 48)


def _told(run: Run, dtype: Dtype, adapters: bool) -> dict[str, Any]:
    rows, prompt, response = _sizes(run)
    tokens = rows * (prompt + response)
    return {
        "dtype": dtype, "adapters": adapters, "rows": rows, "tokens": tokens, "trl": peers.trl_version(),
        "limit": "products alone, those of adapters left out",
    }  # fmt: skip


def _floor(run: Run, dtype: Dtype, adapters: bool) -> float:
    """Return the least that drawing, scoring by four models and learning by two multiply."""
    products = Products.of(load(run, dtype), getattr(torch, dtype))
    rows, prompt, response = _sizes(run)
    tokens, scored = rows * (prompt + response), rows * response

    def step() -> None:
        products.generate(rows * prompt, torch.full((rows,), response))
        for seen in (scored, scored, 0, 0):  # by actor and initial model; by critic and reward model, without a head
            products.forward(tokens, seen)
        for seen in (scored, 0):
            products.learn(tokens, seen, learns_weights=not adapters)

    with torch.inference_mode():
        return in_turns(run.rounds, step)[0]
