"""SFT and reward model on two ranks are those on one with twice the batch; what stops one rank stops both."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import supervised_cases
from tests.parallel.ranks import Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

STEPS = ("sft", "sft_packed_adapters", "sft_with_nothing_for_the_second_rank", "reward_model")
RUNS = ("sft_trainer", "reward_model_trainer")
ENDS = {
    "one_rank_ends_early": "ended on 1 of 2 ranks before the others",
    "a_bad_batch_on_one_rank": "batch",
    "a_loader_that_fails_on_one_rank": "another rank could not read its batches",
    "an_evaluation_that_fails_on_one_rank": "another rank could not measure its evaluation data",
    "nan_on_one_rank": "the reward model's loss is nan",
    "an_evaluation_prompt_of_one_rank_is_learnt_on_the_other": "a training pair has the prompt of an evaluation pair",
}
LR = 1e-2


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    cases = [*STEPS, *RUNS, *ENDS, "resumed"]
    return run_on_ranks("tests.parallel.supervised_cases", cases, tmp_path_factory.mktemp("supervised"))


@pytest.mark.parametrize("case", [*STEPS, *RUNS])
def test_two_ranks_are_one_rank_with_twice_the_batch(two: list[dict[str, Found]], case: str) -> None:
    alone = getattr(supervised_cases, case)(ALONE)
    for found in two:
        assert found[case].sentence == ""
        expected = dict(alone.numbers)
        numbers = dict(found[case].numbers)
        for name in [name for name in expected if name.endswith("heldout_loss")]:  # after a step of Adam
            assert numbers.pop(name) == pytest.approx(expected.pop(name), rel=1e-3)
        assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-7)
        for name, tensor in alone.tensors.items():
            tolerance = max(1e-5 * tensor.abs().max().item(), 1e-7)  # the head's bias has no gradient but noise,
            if case in STEPS:
                tolerance = 2 * LR  # whose sign Adam's first step follows
            torch.testing.assert_close(found[case].tensors[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", [*STEPS, *RUNS, "resumed"])
def test_both_ranks_hold_the_same_bits(two: list[dict[str, Found]], case: str) -> None:
    first, second = (found[case] for found in two)
    assert first.sentence == second.sentence == ""
    assert first.numbers == second.numbers
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


@pytest.mark.parametrize("case", ENDS)
def test_what_stops_one_rank_stops_both(two: list[dict[str, Found]], case: str) -> None:
    sentences = [found[case].sentence for found in two]
    assert all(sentences)
    assert any(ENDS[case] in sentence for sentence in sentences), sentences
