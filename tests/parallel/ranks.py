"""Runs cases on several ranks, each a process of its own that is started once, and brings back what each found.

A case is a function of a module, `case(ranks, *words) -> Found`; it is asked for by its name, with words for its
further arguments after colons: `steps:zero2:fp32`. The ranks of one number and device stay until the session ends, so
that torch, transformers and ColossalAI are imported once by each, whichever modules' cases they run.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from rlhf_core.errors import RlhfError
from rlhf_core.strategy.ranks import Ranks, join, leave
from tests.parallel.processes import RankProcesses, TroubleError

COLLECTIVE_S = 60.0
"""Longest wait of one rank for another: a case that hangs ends with an error."""
CASE_S = 150.0
"""Longest case, after which its ranks are killed."""


class Found(NamedTuple):
    """What one rank brings back from one case."""

    numbers: dict[str, float] = {}  # noqa: RUF012 - never changed
    tensors: dict[str, torch.Tensor] = {}  # noqa: RUF012
    sentence: str = ""
    """Of the error that ended the case; empty if none did."""


Case = Callable[..., Found]


class Findings(dict[str, Found]):
    """What one rank brought back, by case; one that failed says so where it is asked for, and spoils no other."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles: dict[str, str] = {}

    def __missing__(self, case: str) -> Found:
        raise AssertionError(self.troubles.get(case, f"the case {case} was not run"))


class RankSet:
    """Ranks that stay for several cases.

    Args:
        world_size: how many.
        device: cpu or cuda; with cpu, ranks see no GPU.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        environment = {"CASES_DEVICE": device} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
        self._processes = RankProcesses(world_size, "from tests.parallel.ranks import serve; serve()", environment)

    def run(
        self, module: str, case: str, directory: Path, *, may_die: bool = False, limit_s: float | None = None
    ) -> list[Any]:
        """Run one case; return what each rank found, with `may_die` None for those that died.

        Args:
            module: of the case.
            case: by name, with its words.
            directory: for what is found.
            may_die: whether ranks may end without an answer.
            limit_s: longest wait; None takes `CASE_S`.

        Raises:
            TroubleError: if a rank fails, dies or keeps silent; none is left then.
        """
        order = {"module": module, "case": case, "directory": str(directory)}
        answers = self._processes.run(order, limit_s=limit_s or CASE_S, may_die=may_die)
        return [None if answer is None else _read(answer) for answer in answers]

    def end(self) -> None:
        """Let them leave the group and end."""
        self._processes.close()


_standing: dict[tuple[int, str], RankSet] = {}
"""Ranks that wait for their next case, by number and device."""


def run_on_ranks(
    module: str, cases: Sequence[str], directory: Path, *, world_size: int = 2, device: str = "cpu"
) -> list[dict[str, Found]]:
    """Run cases of a module, in order, on `world_size` ranks; return what each rank found.

    A case that fails otherwise than with an error of ours ends its ranks; the next runs on new ones.
    """
    found = [Findings() for _ in range(world_size)]
    for case in cases:
        if (world_size, device) not in _standing:
            _standing[world_size, device] = RankSet(world_size, device)
        try:
            answers = _standing[world_size, device].run(module, case, directory)
        except TroubleError as error:
            del _standing[world_size, device]
            for each in found:
                each.troubles[case] = f"{module}: {case} on {world_size} ranks: {error}"
            continue
        for each, answer in zip(found, answers, strict=True):
            each[case] = answer
    return list(found)


def run_and_lose(module: str, case: str, directory: Path, *, world_size: int = 2) -> list[Found | None]:
    """Run a case in which ranks die, on ranks of its own; return what each found, and None for those that died."""
    ranks = RankSet(world_size)
    try:
        return ranks.run(module, case, directory, may_die=True)
    finally:
        ranks.end()


def end_ranks() -> None:
    """End all ranks that wait."""
    while _standing:
        _standing.popitem()[1].end()


atexit.register(end_ranks)


def _read(answer: dict[str, Any]) -> Found:
    return Found(answer["numbers"], load_file(answer["tensors"]), answer["sentence"])


def _answer(order: dict[str, str], ranks: Ranks) -> dict[str, Any]:
    """Run one case on this rank; tell what it found, or its trouble."""
    name, *words = order["case"].split(":")
    try:
        function: Case = getattr(importlib.import_module(order["module"]), name)
        found = function(ranks, *words)
    except RlhfError as error:
        found = Found(sentence=str(error))
    except Exception:  # whatever it is, who started the ranks tells it
        return {"trouble": traceback.format_exc()}
    finally:
        gc.collect()
    path = Path(order["directory"]) / f"{order['case'].replace('/', '-')}-{ranks.rank}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in found.tensors.items()}, path)
    return {"numbers": found.numbers, "sentence": found.sentence, "tensors": str(path)}


def serve() -> None:
    """Run cases as they are asked for, until nobody is there to ask: what each rank's process does."""
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print goes to the log, not among the answers
        ranks = join(timeout_s=COLLECTIVE_S)
        answers.write(json.dumps({"rank": ranks.rank}) + "\n")
        answers.flush()
        for order in sys.stdin:
            answers.write(json.dumps(_answer(json.loads(order), ranks)) + "\n")
            answers.flush()
        leave()
