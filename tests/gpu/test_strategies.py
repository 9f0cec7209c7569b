"""Strategies on CUDA with NCCL, a GPU for each rank: plain PyTorch's numbers, and nothing active that is for CPUs.

With several GPUs on two ranks, with one on one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.parallel import strategy_reference as reference
from tests.parallel import strategy_stages as stages
from tests.parallel.closeness import assert_bf16, assert_fp32
from tests.parallel.ranks import Found, run_on_ranks
from tests.parallel.test_strategies import ROUNDED
from tests.parallel.test_strategy_memory import assert_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("colossalai") is None, reason="ColossalAI is not installed"),
]

RANKS = min(2, torch.cuda.device_count()) or 1
IN_PARTS = ("3d-tp2", "3d-pp2", "3d-sp2", "3d-tp2-sg2")
STRATEGIES = ("plain", "ddp", "zero2", "zero2_cpu", "gemini", *(IN_PARTS if RANKS == 2 else ()))
RUNS = [f"steps:{stage}:{strategy}" for stage in stages.STAGES for strategy in STRATEGIES]
HELD = [f"held:{strategy}:bf16:weights" for strategy in STRATEGIES]
REL = 1e-4
"""In float32: kernels of a GPU add in orders of their own."""


def run(module: str, cases: list[str], directory: Path) -> list[dict[str, Found]]:
    return run_on_ranks(module, cases, directory, world_size=RANKS, device="cuda")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    cases = [f"{each}:{precision}" for each in RUNS for precision in ("fp32", "bf16")]
    return run("tests.parallel.strategy_cases", [*cases, *HELD], tmp_path_factory.mktemp("cuda"))


def of(found: list[dict[str, Found]], case: str) -> Found:
    """Return what the first rank found, all having found the same; leave the test out where a kernel lacks nvcc."""
    first, *others = (each[case] for each in found)
    if "nvcc" in first.sentence:
        pytest.skip(first.sentence)
    assert first.sentence == ""
    if case.startswith("steps:"):
        assert all(other.numbers == first.numbers for other in others)
    return first


@pytest.mark.parametrize("case", RUNS)
def test_five_steps_are_those_of_pytorch_on_one_gpu(
    found: list[dict[str, Found]], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of(found, f"{case}:fp32")
    monkeypatch.setattr(stages, "DEVICE", "cuda")
    assert_fp32(first, reference.trained(case.split(":")[1], "fp32"), rel=REL)


@pytest.mark.parametrize("case", RUNS)
def test_five_steps_in_bfloat16_are_no_farther_off_than_plain_ones(
    found: list[dict[str, Found]], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of(found, f"{case}:bf16")
    _, stage, strategy = case.split(":")
    monkeypatch.setattr(stages, "DEVICE", "cuda")
    arithmetic: reference.Arithmetic = "weights" if strategy in ROUNDED else "autocast"
    assert_bf16(first, reference.trained(stage, arithmetic), reference.trained(stage, "fp32"), times=2.0)


@pytest.mark.parametrize("case", HELD)
def test_each_rank_holds_what_the_formula_says(found: list[dict[str, Found]], case: str) -> None:
    of(found, case)
    assert_memory(found, case, slack=0.05)


@pytest.mark.parametrize("writer", ["ddp", "zero2", "gemini"])
@pytest.mark.parametrize("reader", ["plain", "zero2_cpu", "gemini"])
def test_what_one_strategy_wrote_another_reads_to_the_bit(tmp_path: Path, writer: str, reader: str) -> None:
    module, place = "tests.parallel.strategy_checkpoint_cases", tmp_path / "written"
    write, read = f"write:{writer}:bf16:{place / writer}", f"read:{reader}:fp32:{place}"
    of(run(module, [write], tmp_path), write)
    numbers = of(run(module, [read], tmp_path), read).numbers
    assert numbers[f"{writer}.file.unlike"] == numbers[f"{writer}.directory.unlike"] == 0.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float16_leaves_out_a_step_that_overflows_on_one_rank(tmp_path: Path, strategy: str) -> None:
    module, case = "tests.gpu.strategy_gpu_cases", f"half:{strategy}"
    found = run(module, [case], tmp_path)
    of(found, case)
    for each in found:
        numbers = each[case].numbers
        assert (numbers["skipped"], numbers["halved"]) == (1.0, 0.5)
        assert numbers["second"] < numbers["first"]
        assert numbers["third"] == pytest.approx(numbers["second"], rel=1e-3)  # nothing was learnt in between


def test_gemini_auto_learns(tmp_path: Path) -> None:
    numbers = of(run("tests.gpu.strategy_gpu_cases", ["auto"], tmp_path), "auto").numbers
    assert numbers["3.loss"] < numbers["2.loss"] < numbers["1.loss"] < numbers["0.loss"]


def test_nothing_that_is_for_a_cpu_is_active(found: list[dict[str, Found]], tmp_path: Path) -> None:
    """In the processes that have trained under every strategy."""
    of(found, "steps:sft:zero2:bf16")
    for each in run("tests.gpu.strategy_gpu_cases", ["inert"], tmp_path):
        assert each["inert"].numbers == dict.fromkeys(each["inert"].numbers, 1.0)
        assert len(each["inert"].numbers) == 7
