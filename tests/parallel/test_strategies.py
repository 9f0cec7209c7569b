"""Every strategy trains every stage as plain does on one rank with the whole batch, and as PyTorch written out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import strategy_reference as reference
from tests.parallel import strategy_stages as stages
from tests.parallel.closeness import assert_bf16, assert_fp32
from tests.parallel.ranks import Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

STRATEGIES = ("plain", "ddp", "zero2", "zero2_cpu", "gemini")
ROUNDED = ("zero2", "zero2_cpu", "gemini")
"""In bfloat16 their weights are too."""
WITH_ADAPTERS = ("plain", "ddp", "zero2", "zero2_cpu")
IN_PARTS = {2: ("3d-tp2", "3d-pp2", "3d-sp2", "3d-tp2-sg2"), 4: ("3d-tp2", "3d-pp2", "3d-tp2-pp2", "3d-pp2-sp2")}


def runs_of(strategies: Sequence[str], with_adapters: Sequence[str]) -> list[str]:
    return [f"steps:{stage}:{strategy}" for stage in stages.STAGES for strategy in strategies] + [
        f"adapter_steps:{stage}:{strategy}" for stage in ("sft", "ppo") for strategy in with_adapters
    ]


RUNS = {
    2: runs_of((*STRATEGIES, *IN_PARTS[2]), (*WITH_ADAPTERS, *IN_PARTS[2])),
    3: runs_of(STRATEGIES, WITH_ADAPTERS),
    4: runs_of(IN_PARTS[4], IN_PARTS[4]),
}
"""By the number of ranks. Three have shares that no weight divides into evenly, and rows of which the last step has 3,
3 and 2; four hold one model, or two with rows of their own."""
EACH = [(world_size, run) for world_size, runs in RUNS.items() for run in runs]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Found]]]:
    return {
        world_size: run_on_ranks(
            "tests.parallel.strategy_cases",
            [f"{run}:{precision}" for run in runs for precision in ("fp32", "bf16")],
            tmp_path_factory.mktemp("strategies"),
            world_size=world_size,
        )
        for world_size, runs in RUNS.items()
    }


@cache
def alone(kind: str, stage: str) -> Found:
    """Return what one plain rank finds in float32."""
    options: dict[str, Any] = {"lora": stages.LORA} if kind == "adapter_steps" else {}
    return stages.STAGES[stage](ALONE, "plain", "fp32", **options)


@cache
def written(kind: str, stage: str, arithmetic: reference.Arithmetic) -> Found:
    """Return what PyTorch alone finds."""
    return reference.trained(stage, arithmetic, adapters=kind == "adapter_steps")


@pytest.mark.parametrize(("kind", "stage"), sorted({tuple(run.split(":")[:2]) for _, run in EACH}))
def test_plain_is_pytorch_written_out(kind: str, stage: str) -> None:
    assert_fp32(alone(kind, stage), written(kind, stage, "fp32"))


@pytest.mark.parametrize(("world_size", "run"), EACH)
def test_five_steps_are_those_of_one_rank(found: dict[int, list[dict[str, Found]]], world_size: int, run: str) -> None:
    kind, stage, _ = run.split(":")
    first, *others = (each[f"{run}:fp32"] for each in found[world_size])
    assert first.numbers.keys() == alone(kind, stage).numbers.keys()
    assert_fp32(first, alone(kind, stage))
    assert_fp32(first, written(kind, stage, "fp32"))
    for other in others:
        assert other.numbers == first.numbers


@pytest.mark.parametrize(("world_size", "run"), EACH)
def test_five_steps_in_bfloat16_are_no_farther_off_than_plain_ones(
    found: dict[int, list[dict[str, Found]]], world_size: int, run: str
) -> None:
    kind, stage, strategy = run.split(":")
    first, *others = (each[f"{run}:bf16"] for each in found[world_size])
    arithmetic: reference.Arithmetic = "weights" if strategy in ROUNDED else "autocast"
    rounded, exact = (written(kind, stage, which) for which in (arithmetic, "fp32"))
    # sums of parts are rounded before they are added
    times = 2.0 if kind == "adapter_steps" else 1.5 if strategy.startswith("3d") else 1.0
    assert_bf16(first, rounded, exact, times=times)
    for other in others:
        assert other.numbers == first.numbers


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_the_matrix_measures_what_clipping_and_padding_do(stage: str) -> None:
    """Else a strategy that left them out would pass."""
    plain = alone("steps", stage)
    norms = [value for name, value in plain.numbers.items() if name.endswith("grad_norm")]
    assert min(norms) > 2 * stages.CLIP
    assert any(each.numel() % 3 for each in plain.tensors.values())
