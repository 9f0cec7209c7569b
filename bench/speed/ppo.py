"""One whole PPO step, our trainer's against TRL's: 16 responses are drawn, scored by four models, and learnt.

Each side works in processes of its own, one a round, which hold all four models; `ppo_sides.py` is what they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import torch

from bench.speed import peers, ppo_sides
from bench.speed.measure import Found, Run, in_turns
from bench.speed.models import ARITHMETIC, directory, load
from bench.speed.ppo_sides import Given
from bench.speed.products import Products
from infra.settings import CHECKOUT

TIMEOUT_S = 1800


def seconds(run: Run, dtype: str, *, adapters: bool = False) -> Found:
    """Measure the time of a step."""
    given = _given(run, dtype, adapters)
    told = _told(given) | {"limit": "products alone, those of adapters left out"}
    return Found(*_least("seconds", run, given), _floor(run, given), told)


def megabytes(run: Run) -> Found:
    """Measure the most that a process holds in a step with adapters, what Python and its modules take included."""
    given = _given(run, ARITHMETIC, adapters=True)
    told = _told(given) | {"modules": round(_least("modules", run, given)[0])}
    told["limit"] = "none: what must be held depends on how it is written"
    return Found(*_least("megabytes", run, given), settings=told)


def _given(run: Run, dtype: str, adapters: bool) -> Given:
    rows, prompt, response = (4, 8, 6) if run.tiny else (16, 64, 48)
    return Given(str(directory(run)), dtype, adapters, rows, prompt, response)


def _told(given: Given) -> dict[str, Any]:
    facts = given._asdict()
    del facts["directory"]
    return facts | {"tokens": given.rows * (given.prompt + given.response), "trl": peers.trl_version()}


def _least(figure: str, run: Run, given: Given) -> tuple[float, float | None]:
    """Return our side's least figure of all rounds and TRL's, None where there is no TRL."""
    rounds = _sides(run.rounds, given)
    ours, trl = ([each[side][figure] for each in rounds if side in each] for side in ("ours", "trl"))
    return min(ours), min(trl, default=None)


@cache
def _sides(rounds: int, given: Given) -> list[dict[str, dict[str, float]]]:
    """Return the figures of each side, by round."""
    names = ["ours", "trl"] if peers.trl_path() is not None else ["ours"]
    return [{name: _side(name, given) for name in names} for _ in range(rounds)]


def _side(name: str, given: Given) -> dict[str, float]:
    """Let one side take its updates in a new process."""
    paths = [str(CHECKOUT), *([str(peers.trl_path())] if name == "trl" else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRL_EXPERIMENTAL_SILENCE": "1"}
    if given.dtype == "bfloat16":  # TRL's loop does not tell accelerate of its flag
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    done = subprocess.run(
        [sys.executable, "-m", ppo_sides.__name__, name, json.dumps(given._asdict())],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(ppo_sides.MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"the side {name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    result: dict[str, float] = json.loads(lines[0].removeprefix(ppo_sides.MARK))
    return result


def _floor(run: Run, given: Given) -> float:
    """Return the least that drawing, scoring by four models and learning by two multiply."""
    products = Products.of(load(run, given.dtype), getattr(torch, given.dtype))
    tokens, scored = given.rows * (given.prompt + given.response), given.rows * given.response
    readers = 1 if given.dtype == "float32" else 2  # in float32 the actor need not read

    def step() -> None:
        products.generate(given.rows, given.rows * given.prompt, torch.full((given.rows,), given.response))
        for seen in (*[scored] * readers, 0, 0):  # critic and reward model have no head
            products.forward(tokens, seen)
        for seen in (scored, 0):
            products.learn(tokens, seen, learns_weights=not given.adapters)

    with torch.inference_mode():
        return in_turns(run.rounds, step)[0]
