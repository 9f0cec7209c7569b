"""Strategies on CUDA with NCCL, a GPU for each rank: the numbers of plain on one, and nothing of what is for CPUs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found, run_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("colossalai") is None, reason="ColossalAI is not installed"),
]

RANKS = min(2, torch.cuda.device_count()) or 1
STRATEGIES = ("plain", "ddp", "zero2", "zero2_cpu")
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2}
"""Of losses and norms: kernels of a GPU add in an order of their own."""
CASES = [f"steps:{stage}:{name}:{kind}" for stage in stages.STAGES for name in STRATEGIES for kind in TOLERANCES]
OF_GEMINI = [f"steps:{stage}:{name}:bf16" for stage in stages.STAGES for name in ("gemini", "gemini_auto")]

INERT = """
from colossalai.accelerator import get_accelerator
import torch
import torch.distributed as dist

record_stream, synchronize = torch.Tensor.record_stream, torch.cuda.synchronize
from rlhf_core.strategy.ranks import join_alone
from rlhf_core.strategy.making import make_booster

join_alone()
make_booster("zero2", precision="bf16")
from colossalai.zero.low_level import low_level_optim, _utils

assert get_accelerator().name == "cuda", get_accelerator().name
assert torch.Tensor.record_stream is record_stream and torch.cuda.synchronize is synchronize
assert low_level_optim.dist is dist and _utils.dist is dist
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    directory = tmp_path_factory.mktemp("cuda")
    return run_on_ranks("tests.parallel.strategy_cases", CASES, directory, world_size=RANKS, device="cuda")


def assert_near(rank: Found, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stage, _, precision = case.split(":")
    monkeypatch.setattr(stages, "DEVICE", "cuda")
    alone = stages.STAGES[stage](ALONE, "plain", precision)
    assert rank.sentence == ""
    numbers = {name: rank.numbers[name] for name in alone.numbers}
    assert numbers == pytest.approx(alone.numbers, rel=TOLERANCES[precision], abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_five_steps_are_those_of_plain_on_one_gpu(
    found: list[dict[str, Found]], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in found:
        assert_near(rank[case], case, monkeypatch)


@pytest.mark.parametrize("case", OF_GEMINI)
def test_five_steps_of_gemini_are_those_of_plain_or_it_says_what_its_kernel_lacks(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HybridAdam is compiled by the nvcc of torch's CUDA; a machine without one is told so in a sentence."""
    for rank in run_on_ranks("tests.parallel.strategy_cases", [case], tmp_path, world_size=RANKS, device="cuda"):
        if "nvcc" in rank[case].sentence:
            pytest.skip(rank[case].sentence)
        assert_near(rank[case], case, monkeypatch)


def test_nothing_that_is_for_a_cpu_is_active() -> None:
    done = subprocess.run([sys.executable, "-c", INERT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
