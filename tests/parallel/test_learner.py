"""Two ranks are one rank with twice the batch, agree on every decision, and end together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import learner_cases
from tests.parallel.ranks import Findings, Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

EQUAL = (
    "whole", "adapters", "mixed", "sequence_mean", "constant_length", "from_reward_model", "no_tokens_here",
    "unequal_micro_batches", "controls", "bare_optimizer", "small_buckets", "sliced", "all_abstain",
)  # fmt: skip
EPISODES = ("episode", "uneven", "whole_from_reward_model", "checkpointed")
OTHERS = ("uneven_adapters", "agreement", "waiting")
STATES = ("checkpoint", "gone_on:plain:strict", "gone_on:strict:plain", "merged", "merged:strict", "random_states")
TROUBLES = (
    "exploding", "overflowing", "nan_advantage", "nan_gradient", "critic_gradient", "no_returns", "no_rows",
    "other_rows", "unjudged",
)  # fmt: skip
STRICT = (
    "whole", "mixed", "no_tokens_here", "unequal_micro_batches", "episode", "uneven", "uneven_adapters",
    "whole_from_reward_model", "from_reward_model", "checkpointed",
)  # fmt: skip
STRICT_TROUBLES = ("exploding", "nan_gradient", "critic_gradient")
STRATEGIES = ("ddp", "zero2", "gemini")
SHARED = [
    *(f"{case}:{strategy}" for strategy in STRATEGIES for case in ("whole", "mixed", "unequal_micro_batches")),
    *(f"{case}:{strategy}" for strategy in STRATEGIES for case in ("sliced", "from_reward_model")),
    "adapters:ddp", "adapters:zero2", "compiled:ddp",
]  # fmt: skip
SHARED_EPISODES = [f"{case}:{strategy}" for strategy in STRATEGIES for case in ("uneven", "checkpointed")]
GONE_ON = ("gone_on:plain:gemini", "gone_on:gemini:zero2", "gone_on:zero2:ddp", "gone_on:ddp:plain")
PUBLISHED = ("merged", "random_states")
LRS = {"actor": 1e-4, "critic": 1e-3}


def run_all(directory: Path, **cases: Sequence[str]) -> list[dict[str, Found]]:
    """Run the cases of several modules; return what each rank found in all of them."""
    ranks = [Findings() for _ in range(2)]
    for module, wanted in cases.items():
        for one, found in zip(ranks, run_on_ranks(f"tests.parallel.{module}", wanted, directory), strict=True):
            one.update(found)
            one.troubles |= found.troubles  # type: ignore[attr-defined]
    return list(ranks)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_all(
        tmp_path_factory.mktemp("ranks"),
        learner_cases=[*EQUAL, *EPISODES, *OTHERS, *(f"{case}:strict" for case in STRICT)],
        learner_trouble_cases=[*TROUBLES, *(f"{case}:strict" for case in STRICT_TROUBLES)],
        learner_state_cases=STATES,
    )


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What two ranks find under ColossalAI's strategies."""
    return run_all(
        tmp_path_factory.mktemp("strategies"),
        learner_cases=[*SHARED, *SHARED_EPISODES],
        learner_trouble_cases=[f"{case}:{strategy}" for strategy in STRATEGIES for case in STRICT_TROUBLES],
        learner_state_cases=[*GONE_ON, *(f"{case}:{strategy}" for strategy in STRATEGIES for case in PUBLISHED)],
    )


def assert_same(found: Found, alone: Found) -> None:
    """Numbers to 1e-5 relative, gradients to 1e-5 of the tensor's largest entry, weights to a step's length."""
    assert found.sentence == alone.sentence == ""
    assert found.numbers == pytest.approx(alone.numbers, rel=1e-5, abs=5e-7)  # terms of order 1 may cancel in a loss
    for name, tensor in found.tensors.items():  # the first rank has moments too
        expected, role = alone.tensors[name], name.split(".")[0]
        tolerance = 1e-5 * expected.abs().max().item()
        if ".exp_avg_sq." in name:
            tolerance *= 2  # of a square
        if ".weights." in name:
            tolerance = 2 * LRS[role]  # Adam's first step follows the sign of noise
        torch.testing.assert_close(tensor, expected, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_are_one_rank_with_twice_the_batch(two: list[dict[str, Found]], case: str) -> None:
    alone = getattr(learner_cases, case)(ALONE)
    for found in two:
        assert_same(found[case], alone)
    assert two[0][case].tensors.keys() == alone.tensors.keys()


def assert_near(found: Found, alone: Found) -> None:
    """The first step's numbers to 1e-5; Adam's steps follow the sign of noise where there is no gradient, and later
    ones feel it."""
    assert found.sentence == ""
    for name, value in alone.numbers.items():
        rel, near = (1e-5, 1e-6) if name.startswith("0.") else (2e-3, 1e-3)
        assert found.numbers[name] == pytest.approx(value, rel=rel, abs=near), name


@pytest.mark.parametrize("case", EPISODES)
def test_two_ranks_take_the_steps_of_one_with_twice_the_batch_through_an_episode(
    two: list[dict[str, Found]], case: str
) -> None:
    alone = getattr(learner_cases, case)(ALONE)
    for found in two:
        assert_near(found[case], alone)


@pytest.mark.parametrize("case", SHARED)
def test_two_ranks_of_any_strategy_are_one_plain_one_with_twice_the_batch(
    strategies: list[dict[str, Found]], case: str
) -> None:
    alone = getattr(learner_cases, case.split(":", maxsplit=1)[0])(ALONE)
    for found in strategies:
        assert_same(found[case], alone)
    assert strategies[0][case].tensors.keys() == alone.tensors.keys()


@pytest.mark.parametrize("case", SHARED_EPISODES)
def test_two_ranks_of_any_strategy_take_a_plain_ones_steps_through_an_episode(
    strategies: list[dict[str, Found]], case: str
) -> None:
    alone = getattr(learner_cases, case.split(":", maxsplit=1)[0])(ALONE)
    for found in strategies:
        assert_near(found[case], alone)


@pytest.mark.parametrize("case", [*STRICT, *STRICT_TROUBLES, "merged"])
def test_a_booster_whose_passes_must_be_equal_gives_the_numbers_of_a_plain_one(
    two: list[dict[str, Found]], case: str
) -> None:
    for found in two:
        plain, strict = found[case], found[f"{case}:strict"]
        assert strict.sentence == plain.sentence
        assert strict.numbers == plain.numbers
        assert strict.tensors.keys() == plain.tensors.keys()
        assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in strict.tensors.items())


@pytest.mark.parametrize("case", [*EQUAL, *EPISODES, "uneven_adapters", "exploding", "overflowing"])
def test_both_ranks_hold_the_same_bits(two: list[dict[str, Found]], case: str) -> None:
    first, second = (found[case] for found in two)
    assert first.numbers == second.numbers
    assert all(torch.equal(tensor, first.tensors[name]) for name, tensor in second.tensors.items())


@pytest.mark.parametrize("case", ["gone_on:plain:strict", "gone_on:strict:plain"])
def test_a_state_is_gone_on_with_to_the_bit_whatever_booster_it_came_from(
    two: list[dict[str, Found]], case: str
) -> None:
    for found in two:
        numbers, tensors = found[case].numbers, found[case].tensors
        after = [name for name in numbers if not name.startswith("straight.")]
        assert after
        assert all(numbers[name] == numbers[f"straight.{name}"] for name in after)
        kept = [name for name in tensors if not name.startswith("straight.")]
        assert all(torch.equal(tensors[name], tensors[f"straight.{name}"]) for name in kept)


@pytest.mark.parametrize("case", GONE_ON)
def test_a_state_of_one_strategy_is_gone_on_with_under_another(strategies: list[dict[str, Found]], case: str) -> None:
    for found in strategies:
        numbers = found[case].numbers
        straight = {name.removeprefix("straight."): value for name, value in numbers.items() if "straight." in name}
        assert "1.actor_loss" in straight
        assert_near(found[case], Found(straight))


@pytest.mark.parametrize("strategy", ["plain", *STRATEGIES])
def test_every_rank_keeps_its_random_state_and_one_that_is_new_begins_with_its_own(
    two: list[dict[str, Found]], strategies: list[dict[str, Found]], strategy: str
) -> None:
    case, ran = ("random_states", two) if strategy == "plain" else (f"random_states:{strategy}", strategies)
    assert [found[case].numbers for found in ran] == [
        {"back": 1.0, "fresh": 0.0, "first": 1.0}, {"back": 1.0, "fresh": 1.0, "first": 0.0},
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_published_by_the_first_rank_alone(
    two: list[dict[str, Found]], strategies: list[dict[str, Found]], strategy: str
) -> None:
    plain = two[0]["merged"]
    first, second = (found[f"merged:{strategy}"] for found in strategies)
    assert (first.numbers["count"], second.numbers["count"]) == (plain.numbers["count"], 0)
    assert {tensor.dtype for tensor in first.tensors.values()} == {torch.bfloat16}
    assert first.tensors.keys() == plain.tensors.keys()
    for name, tensor in first.tensors.items():  # steps of Adam apart, and rounded
        torch.testing.assert_close(tensor.float(), plain.tensors[name].float(), rtol=1e-2, atol=4e-3, msg=name)


def test_an_episode_of_several_passes_stays_together(two: list[dict[str, Found]]) -> None:
    numbers = two[0]["episode"].numbers
    assert (numbers["0.approx_kl"], numbers["0.max_ratio"]) == (0.0, 1.0)
    assert numbers["2.approx_kl"] > 0.0


@pytest.mark.parametrize("strategy", ["plain", *STRATEGIES])
def test_a_ratio_that_explodes_on_one_rank_skips_the_actor_on_both(
    two: list[dict[str, Found]], strategies: list[dict[str, Found]], strategy: str
) -> None:
    case, ran = ("exploding", two) if strategy == "plain" else (f"exploding:{strategy}", strategies)
    norm = learner_cases.whole_step(ALONE).numbers["0.actor_grad_norm"]
    for found in ran:
        numbers = found[case].numbers
        assert (numbers["0.skipped"], numbers["moved"], numbers["1.skipped"]) == (1.0, 0.0, 0.0)
        assert numbers["critic_moved"] > 0
        assert numbers["0.max_ratio"] > 1e15
        assert numbers["0.critic_grad_norm"] > 0
        assert numbers["1.actor_grad_norm"] == pytest.approx(norm, rel=1e-5)  # nothing of the step left out is in it


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("nan_advantage", "the actor's loss is nan"),
        ("nan_gradient", "its gradient's norm nan"),
        ("no_rows", "at least one response on every rank, got none"),
        ("no_returns", "but the experience has none"),
        ("unjudged", "3 of 8 samples of episode 1 could not be judged, more than ppo.max_abstained allows (0.25); rep"),
        ("other_rows", "expected all rows of the episode on every rank, got others on each"),
    ],
)
def test_what_is_wrong_on_one_rank_ends_both_with_a_sentence(
    two: list[dict[str, Found]], case: str, sentence: str
) -> None:
    for found in two:
        assert sentence in found[case].sentence


@pytest.mark.parametrize("strategy", ["plain", "strict", *STRATEGIES])
def test_a_gradient_of_the_critic_that_is_none_on_one_rank_leaves_both_models_on_both(
    two: list[dict[str, Found]], strategies: list[dict[str, Found]], strategy: str
) -> None:
    case = "critic_gradient" if strategy == "plain" else f"critic_gradient:{strategy}"
    norm = learner_cases.whole_step(ALONE).numbers["0.actor_grad_norm"]
    for found in strategies if strategy in STRATEGIES else two:
        numbers = found[case].numbers
        assert (numbers["refused"], numbers["moved"]) == (1.0, 0.0)
        assert numbers["norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_none_on_one_rank_ends_both_under_any_strategy(
    strategies: list[dict[str, Found]], strategy: str
) -> None:
    for found in strategies:
        assert "its gradient's norm nan" in found[f"nan_gradient:{strategy}"].sentence


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
