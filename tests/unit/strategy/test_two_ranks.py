"""A sample of tests/parallel that every run of the tests takes: two ranks, started once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import learner_cases
from tests.parallel import strategy_reference as reference
from tests.parallel.closeness import assert_fp32
from tests.parallel.ranks import Found, run_on_ranks
from tests.parallel.test_strategy_memory import assert_memory

pytestmark = pytest.mark.integration  # processes of their own

torch.set_num_threads(1)

STRATEGIES = ("ddp", "zero2", "gemini")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    cases = [f"steps:sft:{strategy}:fp32" for strategy in STRATEGIES] + [
        f"held:{strategy}:bf16:weights" for strategy in STRATEGIES
    ]
    return run_on_ranks("tests.parallel.strategy_cases", cases, tmp_path_factory.mktemp("strategies"))


def test_two_ranks_take_the_step_of_one_and_leave_out_the_same_one(tmp_path: Path) -> None:
    first, second = (found["mixed"] for found in run_on_ranks("tests.parallel.learner_cases", ["mixed"], tmp_path))
    alone = learner_cases.mixed(ALONE)
    assert first.numbers == pytest.approx(alone.numbers, rel=1e-5, abs=1e-7)
    assert first.tensors.keys() == alone.tensors.keys()
    for name, expected in alone.tensors.items():
        if ".exp_avg." in name:  # a tenth of the gradient
            tolerance = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(first.tensors[name], expected, rtol=0, atol=tolerance)
    assert second.tensors
    assert all(torch.equal(first.tensors[name], weight) for name, weight in second.tensors.items())
    exploded = run_on_ranks("tests.parallel.learner_trouble_cases", ["exploding"], tmp_path)
    assert [found["exploding"].numbers["0.skipped"] for found in exploded] == [1.0, 1.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_takes_the_steps_of_pytorch_written_out(two: list[dict[str, Found]], strategy: str) -> None:
    written = reference.trained("sft", "fp32")
    assert_fp32(two[0][f"steps:sft:{strategy}:fp32"], written)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_holds_its_share(two: list[dict[str, Found]], strategy: str) -> None:
    assert_memory(two, f"held:{strategy}:bf16:weights")


def test_what_one_strategy_wrote_another_reads_on_one_rank(tmp_path: Path) -> None:
    module, place = "tests.parallel.strategy_checkpoint_cases", tmp_path / "written"
    write, read = f"write:zero2:bf16:{place / 'zero2'}", f"read:gemini:fp32:{place}"
    (written, *_) = run_on_ranks(module, [write], tmp_path)
    assert written[write].sentence == ""
    (found, *_) = run_on_ranks(module, [read], tmp_path, world_size=1)
    unlike = {name: value for name, value in found[read].numbers.items() if name.endswith("unlike")}
    assert unlike == {"zero2.file.unlike": 0.0, "zero2.directory.unlike": 0.0}
