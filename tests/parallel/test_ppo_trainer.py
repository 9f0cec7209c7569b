"""PPOTrainer on two ranks is PPOTrainer on one with both their prompts; what ends one rank ends both."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import trainer_cases
from tests.parallel.ranks import Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

CASES = (
    "episode", "unequal", "padding_on_one", "spoilt_on_one", "resumed", "full_disk_on_first", "full_disk_on_second",
)  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_on_ranks("tests.parallel.trainer_cases", CASES, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_draw_and_learn_what_one_with_both_their_prompts_does(two: list[dict[str, Found]]) -> None:
    alone = trainer_cases.episode(ALONE)
    drawn = [tuple(row) for found in two for row in found["episode"].tensors["rows"].tolist()]
    assert sorted(drawn) == sorted(tuple(row) for row in alone.tensors["rows"].tolist())
    assert len(set(drawn)) == 4  # the prompt that both have is answered differently
    for found in two:
        assert found["episode"].numbers == pytest.approx(alone.numbers, rel=1e-5, abs=1e-6)


def test_both_ranks_hold_the_same_weights_after_two_episodes(two: list[dict[str, Found]]) -> None:
    first, second = (found["episode"].tensors for found in two)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items() if name != "rows")


@pytest.mark.parametrize(
    ("case", "own", "others"),
    [
        ("unequal", "between 1 and 2 prompts", "between 1 and 2 prompts"),
        ("padding_on_one", "is all padding", "another rank could not read its prompts"),
        ("spoilt_on_one", "is not a finite number", "another rank could not score its responses"),
        ("full_disk_on_second", "No space left", "another rank could not write its part of the checkpoint"),
    ],
)
def test_what_ends_one_rank_ends_both_in_a_sentence(
    two: list[dict[str, Found]], case: str, own: str, others: str
) -> None:
    assert others in two[0][case].sentence
    assert own in two[1][case].sentence


def test_each_rank_keeps_its_share_of_a_batch_that_failed(two: list[dict[str, Found]]) -> None:
    assert [found["spoilt_on_one"].numbers["kept"] for found in two] == [2.0, 2.0]


def test_two_ranks_go_on_from_the_middle_of_an_episode_to_the_bit(two: list[dict[str, Found]]) -> None:
    assert [found["resumed"].numbers for found in two] == [{"equal": 1.0, "step": 4.0}] * 2


@pytest.mark.parametrize("case", ["full_disk_on_first", "full_disk_on_second"])
def test_a_disk_that_is_full_for_one_rank_leaves_the_last_checkpoint_to_both(
    two: list[dict[str, Found]], case: str
) -> None:
    for found in two:
        assert "epoch-0_step-2 could not be written" in found[case].sentence
        assert found[case].numbers["step"] == 1.0
