"""Runs cases on several gloo ranks, each a process of its own, and brings back what each rank found."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from rlhf_core.errors import RlhfError
from rlhf_core.strategy.ranks import Ranks, join, leave

ROOT = Path(__file__).parents[2]
COLLECTIVE_S = 30.0
"""Longest wait of one rank for another: a case that hangs ends with an error."""


class Found(NamedTuple):
    """What one rank brings back from one case."""

    numbers: dict[str, float] = {}  # noqa: RUF012 - never changed
    tensors: dict[str, torch.Tensor] = {}  # noqa: RUF012
    sentence: str = ""
    """Of the error that ended the case; empty if none did."""


Case = Callable[[Ranks], Found]


def run_on_ranks(
    module: str, cases: Sequence[str], directory: Path, *, world_size: int = 2, device: str = "cpu"
) -> list[dict[str, Found]]:
    """Run the named functions of a module, in order, on `world_size` ranks started once; return each rank's findings.

    Every rank is killed, by its process, if they are not all done in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "CASES_DEVICE": device,
        }  # fmt: skip
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with (directory / f"rank-{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", "tests.parallel.ranks", module, str(directory), *cases]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    deadline = time.monotonic() + 60 + 10 * len(cases)
    try:
        codes = [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = [(directory / f"rank-{rank}.log").read_text() for rank in range(world_size)]
    assert codes == [0] * world_size, "\n".join(logs)
    return [{case: _read(directory, rank, case) for case in cases} for rank in range(world_size)]


def _read(directory: Path, rank: int, case: str) -> Found:
    facts = json.loads((directory / f"{case}-{rank}.json").read_text())
    return Found(facts["numbers"], load_file(directory / f"{case}-{rank}.safetensors"), facts["sentence"])


def _main(module: str, directory: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    ranks = join(timeout_s=COLLECTIVE_S)
    for case in cases:
        function: Case = getattr(importlib.import_module(module), case)
        try:
            found = function(ranks)
        except RlhfError as error:
            found = Found(sentence=str(error))
        save_file(
            {name: tensor.contiguous() for name, tensor in found.tensors.items()},
            directory / f"{case}-{ranks.rank}.safetensors",
        )
        facts = {"numbers": found.numbers, "sentence": found.sentence}
        (directory / f"{case}-{ranks.rank}.json").write_text(json.dumps(facts))
    leave()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
