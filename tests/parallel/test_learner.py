"""Two ranks are one rank with twice the batch, agree on every decision, and end together."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import learner_cases
from tests.parallel.ranks import Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

EQUAL = (
    "whole", "adapters", "mixed", "sequence_mean", "constant_length", "from_reward_model", "no_tokens_here",
    "controls", "bare_optimizer", "small_buckets",
)  # fmt: skip
OTHERS = (
    "episode", "exploding", "overflowing", "nan_advantage", "nan_gradient", "critic_gradient", "no_returns", "no_rows",
    "agreement", "waiting", "checkpoint",
)  # fmt: skip
LRS = {"actor": 1e-4, "critic": 1e-3}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    directory = tmp_path_factory.mktemp("ranks")
    return run_on_ranks("tests.parallel.learner_cases", [*EQUAL, *OTHERS], directory)


def assert_same(found: Found, alone: Found) -> None:
    """Numbers to 1e-5 relative, gradients to 1e-5 of the tensor's largest entry, weights to a step's length."""
    assert found.sentence == alone.sentence == ""
    assert found.numbers == pytest.approx(alone.numbers, rel=1e-5, abs=1e-7)
    for name, expected in alone.tensors.items():
        role = name.split(".")[0]
        tolerance = 1e-5 * expected.abs().max().item()
        if ".exp_avg_sq." in name:
            tolerance *= 2  # of a square
        if ".weights." in name:
            tolerance = 2 * LRS[role]  # Adam's first step follows the sign of noise
        torch.testing.assert_close(found.tensors[name], expected, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_are_one_rank_with_twice_the_batch(two: list[dict[str, Found]], case: str) -> None:
    alone = getattr(learner_cases, case)(ALONE)
    for found in two:
        assert_same(found[case], alone)


@pytest.mark.parametrize("case", [*EQUAL, "episode", "exploding", "overflowing"])
def test_both_ranks_hold_the_same_bits(two: list[dict[str, Found]], case: str) -> None:
    first, second = (found[case] for found in two)
    assert first.numbers == second.numbers
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def test_an_episode_of_several_passes_stays_together(two: list[dict[str, Found]]) -> None:
    numbers = two[0]["episode"].numbers
    assert numbers["0.approx_kl"] == 0.0
    assert numbers["2.approx_kl"] > 0.0


def test_a_ratio_that_explodes_on_one_rank_skips_the_actor_on_both(two: list[dict[str, Found]]) -> None:
    for found in two:
        numbers = found["exploding"].numbers
        assert (numbers["0.skipped"], numbers["moved"], numbers["1.skipped"]) == (1.0, 0.0, 0.0)
        assert numbers["0.max_ratio"] > 1e15
        assert numbers["0.critic_grad_norm"] > 0
        assert numbers["1.actor_grad_norm"] > 0


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("nan_advantage", "the actor's loss is nan"),
        ("nan_gradient", "its gradient's norm nan"),
        ("no_rows", "at least one response on every rank, got none"),
        ("no_returns", "but the experience has none"),
    ],
)
def test_what_is_wrong_on_one_rank_ends_both_with_a_sentence(
    two: list[dict[str, Found]], case: str, sentence: str
) -> None:
    for found in two:
        assert sentence in found[case].sentence


def test_a_gradient_of_the_critic_that_is_none_on_one_rank_leaves_both_models_on_both(
    two: list[dict[str, Found]],
) -> None:
    assert [found["critic_gradient"].numbers for found in two] == [{"refused": 1.0, "moved": 0.0}] * 2


def test_ranks_agree(two: list[dict[str, Found]]) -> None:
    for found in two:
        numbers, tensors = found["agreement"].numbers, found["agreement"].tensors
        assert numbers == {"any": True, "none": False, "said": 1.0}
        assert tensors["sum"].tolist() == [3.0, 30.0]
        assert tensors["added"].tolist() == [3.0, 30.0]
        assert tensors["max"].tolist() == [2.0, 20.0]
        assert tensors["rows"].tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert two[0]["agreement"].tensors["mine"].tolist() == [1.0, 10.0]


def test_a_barrier_waits_for_the_last(two: list[dict[str, Found]]) -> None:
    assert [found["waiting"].numbers["seen"] for found in two] == [1.0, 1.0]


def test_a_gradient_that_overflows_on_one_rank_leaves_out_the_actors_step_on_both(
    two: list[dict[str, Found]],
) -> None:
    for found in two:
        numbers = found["overflowing"].numbers
        assert (numbers["0.actor_overflowed"], numbers["0.actor_grad_norm"], numbers["moved"]) == (1.0, 0.0, 0.0)
        assert (numbers["0.critic_overflowed"], numbers["actor"], numbers["critic"]) == (0.0, 32768.0, 65536.0)
        assert numbers["0.critic_grad_norm"] > 0


def test_a_checkpoint_of_one_rank_is_read_by_both(two: list[dict[str, Found]]) -> None:
    assert [found["checkpoint"].numbers["equal"] for found in two] == [1.0, 1.0]
