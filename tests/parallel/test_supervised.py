"""SFT and reward model on two ranks are those on one with twice the batch; what stops one rank stops both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import supervised_cases
from tests.parallel.ranks import Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

STEPS = ("sft", "sft_packed_adapters", "sft_with_nothing_for_the_second_rank", "reward_model")
RUNS = ("sft_trainer", "reward_model_trainer")
STRICT = (*STEPS, *RUNS, "sft_uneven_with_dropout", "sft_checkpointed", "resumed")
STRATEGIES = ("ddp", "zero2", "gemini")
IN_PARTS = ("3d-tp2", "3d-pp2", "3d-sp2")
SHARED = [
    f"{case}:{strategy}" for strategy in STRATEGIES
    for case in ("sft", "sft_checkpointed", "sft_with_nothing_for_the_second_rank", "reward_model")
] + ["sft_packed_adapters:ddp", "sft_packed_adapters:zero2", "sft_compiled:ddp"]  # fmt: skip
SHARED_RUNS = [f"{case}:{strategy}" for strategy in (*STRATEGIES, *IN_PARTS) for case in (*RUNS, "resumed")] + [
    f"resumed:{strategy}:0.3" for strategy in IN_PARTS
]
FAILS = [f"an_evaluation_that_fails_on_one_rank:{strategy}" for strategy in ("strict", *STRATEGIES)]
ENDS = {
    "one_rank_ends_early": "ended on 1 of 2 ranks before the others",
    "a_bad_batch_on_one_rank": "batch",
    "a_loader_that_fails_on_one_rank": "another rank could not read its batches",
    "an_evaluation_that_fails_on_one_rank": "another rank could not measure its evaluation data",
    "nan_on_one_rank": "the reward model's loss is nan",
    "an_evaluation_prompt_of_one_rank_is_learnt_on_the_other": "a training pair has the prompt of an evaluation pair",
} | dict.fromkeys(FAILS, "another rank could not measure its evaluation data")
LR = 1e-2


def run(cases: Sequence[str], directory: Path) -> list[dict[str, Found]]:
    return list(run_on_ranks("tests.parallel.supervised_cases", cases, directory))


def alone(case: str, *words: str) -> Found:
    found: Found = getattr(supervised_cases, case.split(":", maxsplit=1)[0])(ALONE, *words)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    cases = [*STEPS, *RUNS, *ENDS, "sft_uneven_with_dropout", "sft_checkpointed", "resumed"]
    return run([*cases, *(f"{case}:strict" for case in STRICT)], tmp_path_factory.mktemp("supervised"))


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run([*SHARED, *SHARED_RUNS], tmp_path_factory.mktemp("strategies"))


def assert_same(found: Found, expected: Found, *, atol: float, rel: float = 1e-5) -> None:
    assert found.sentence == ""
    numbers, known = dict(found.numbers), dict(expected.numbers)
    for name in [name for name in known if name.endswith("heldout_loss")]:  # after a step of Adam
        assert numbers.pop(name) == pytest.approx(known.pop(name), rel=1e-3)
    assert numbers == pytest.approx(known, rel=rel, abs=1e-7)
    for name, tensor in expected.tensors.items():
        tolerance = max(1e-5 * tensor.abs().max().item(), 1e-7, atol)
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", [*STEPS, *RUNS])
def test_two_ranks_are_one_rank_with_twice_the_batch(two: list[dict[str, Found]], case: str) -> None:
    expected = alone(case)
    for found in two:
        # The head's bias has no gradient but noise, whose sign Adam's first step follows.
        assert_same(found[case], expected, atol=2 * LR if case in STEPS else 0.0)


@pytest.mark.parametrize("case", STRICT)
def test_a_booster_whose_passes_must_be_equal_gives_the_numbers_of_a_plain_one(
    two: list[dict[str, Found]], case: str
) -> None:
    for found in two:
        plain, strict = found[case], found[f"{case}:strict"]
        assert strict.sentence == plain.sentence == ""
        assert strict.numbers == plain.numbers
        assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in strict.tensors.items())


@pytest.mark.parametrize("case", SHARED)
def test_two_ranks_of_any_strategy_are_one_plain_one_with_twice_the_batch(
    strategies: list[dict[str, Found]], case: str
) -> None:
    expected = alone(case)
    for found in strategies:
        assert_same(found[case], expected, atol=2 * LR)


@pytest.mark.parametrize("case", SHARED_RUNS)
def test_trainers_learn_measure_and_resume_under_any_strategy(strategies: list[dict[str, Found]], case: str) -> None:
    first, second = (found[case] for found in strategies)
    assert first.sentence == second.sentence == ""
    assert first.numbers == second.numbers
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


@pytest.mark.parametrize("strategy", IN_PARTS)
@pytest.mark.parametrize("case", RUNS)
def test_trainers_of_one_model_in_parts_are_one(strategies: list[dict[str, Found]], case: str, strategy: str) -> None:
    assert_same(strategies[0][f"{case}:{strategy}"], alone(case), atol=0.0)


@pytest.mark.parametrize("case", [*STEPS, *RUNS, "resumed"])
def test_both_ranks_hold_the_same_bits(two: list[dict[str, Found]], case: str) -> None:
    first, second = (found[case] for found in two)
    assert first.sentence == second.sentence == ""
    assert first.numbers == second.numbers
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(("wrote", "reads"), [("plain", "plain"), ("gemini", "zero2"), ("zero2", "plain")])
def test_one_rank_goes_on_where_two_of_another_strategy_stood(
    wrote: str, reads: str, step: int, tmp_path: Path
) -> None:
    """In the middle of a pass, at its end, and in the middle of the next: the same minibatches follow."""
    first, _ = run([f"saved:{wrote}:{tmp_path / 'run'}"], tmp_path)
    (whole,) = first.values()
    [found] = run_on_ranks(
        "tests.parallel.supervised_cases",
        [case := f"gone_on:{reads}:{tmp_path / 'run'}:{step}"],
        tmp_path,
        world_size=1,
    )
    assert_goes_on(found[case], whole, step)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("wrote", "reads"), [("plain", "plain"), ("plain", "gemini"), ("plain", "ddp")])
def test_two_ranks_go_on_where_one_of_another_strategy_stood(wrote: str, reads: str, step: int, tmp_path: Path) -> None:
    whole = alone("saved", wrote, str(tmp_path / "run"))
    for found in run([case := f"gone_on:{reads}:{tmp_path / 'run'}:{step}"], tmp_path):
        assert_goes_on(found[case], whole, step)


def assert_goes_on(found: Found, whole: Found, step: int) -> None:
    """The weights are those of the checkpoint, so the next step's numbers are the straight run's; later ones near."""
    assert found.sentence == ""
    assert len([name for name in found.numbers if name.endswith(".loss")]) == 4 - step
    for name, value in found.numbers.items():
        number, figure = name.split(".")
        expected = whole.numbers[f"{int(number) + step}.{figure}"]
        assert value == pytest.approx(expected, rel=1e-5 if number == "0" else 1e-3), name


@pytest.mark.parametrize("case", ENDS)
def test_what_stops_one_rank_stops_both(two: list[dict[str, Found]], case: str) -> None:
    sentences = [found[case].sentence for found in two]
    assert all(sentences)
    assert any(ENDS[case] in sentence for sentence in sentences), sentences
