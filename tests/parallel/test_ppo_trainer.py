"""PPOTrainer on two ranks is PPOTrainer on one with both their prompts; what ends one rank ends both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import trainer_cases
from tests.parallel.ranks import Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

CASES = (
    "episode", "adapters", "unequal", "padding_on_one", "spoilt_on_one", "resumed", "full_disk_on_first",
    "full_disk_on_second", "episode:strict", "adapters:strict", "resumed:strict",
)  # fmt: skip
STRATEGIES = ("ddp", "zero2", "gemini")
SHARED = [*(f"episode:{strategy}" for strategy in STRATEGIES), "adapters:ddp", "adapters:zero2"]
PROMPT = len("1 plus 1")
"""Tokens of each prompt: one for each letter."""
RESUMED = [f"resumed:{strategy}" for strategy in (*STRATEGIES, "3d-tp2", "3d-pp2")]
IN_PARTS = [f"{case}:{strategy}" for strategy in ("3d-tp2", "3d-pp2", "3d-sp2") for case in ("episode", "adapters")]


def run(cases: Sequence[str], directory: Path, *, world_size: int = 2) -> list[dict[str, Found]]:
    return list(run_on_ranks("tests.parallel.trainer_cases", cases, directory, world_size=world_size))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run([*SHARED, *IN_PARTS, *RESUMED], tmp_path_factory.mktemp("strategies"))


def rows_of(found: Sequence[Found], step: int) -> list[tuple[int, ...]]:
    """Return what all ranks learnt from in a step, without an order; what is padded differs."""
    rows = [row for each in found for row in each.tensors[f"rows.{step}"].tolist()]
    return sorted(tuple(token for token in row if token) for row in rows)


def prompts_of(found: Sequence[Found], step: int) -> list[tuple[int, ...]]:
    """Return the prompts of a step's rows, which all have as many tokens, without an order."""
    return sorted(row[:PROMPT] for row in rows_of(found, step))


def assert_draws_and_learns_the_same(found: Sequence[Found], alone: Found) -> None:
    assert rows_of(found, 0) == rows_of([alone], 0)
    assert_near(found, alone)


def assert_near(found: Sequence[Found], alone: Found) -> None:
    """The first step's numbers to 1e-5; Adam's steps follow the sign of noise where there is no gradient, and later
    ones feel it."""
    for each in found:
        assert each.sentence == ""
        for name, value in alone.numbers.items():
            rel, near = (1e-5, 1e-6) if name.startswith("0.") else (5e-3, 2e-3)
            assert each.numbers[name] == pytest.approx(value, rel=rel, abs=near), name


@pytest.mark.parametrize("case", ["episode", "adapters"])
def test_two_ranks_draw_and_learn_what_one_with_both_their_prompts_does(two: list[dict[str, Found]], case: str) -> None:
    alone = getattr(trainer_cases, case)(ALONE)
    drawn = [found[case] for found in two]
    assert_draws_and_learns_the_same(drawn, alone)
    assert len(set(rows_of(drawn, 0))) == 4  # the prompt that both have is answered differently


@pytest.mark.parametrize("case", SHARED)
def test_two_ranks_of_any_strategy_draw_and_learn_what_a_plain_one_does(
    strategies: list[dict[str, Found]], case: str
) -> None:
    alone = getattr(trainer_cases, case.split(":", maxsplit=1)[0])(ALONE)
    assert_draws_and_learns_the_same([found[case] for found in strategies], alone)


@pytest.mark.parametrize("case", IN_PARTS)
def test_two_ranks_that_hold_one_model_draw_and_learn_what_one_does(
    strategies: list[dict[str, Found]], case: str
) -> None:
    first, second = (found[case] for found in strategies)
    assert_draws_and_learns_the_same([first], getattr(trainer_cases, case.split(":", maxsplit=1)[0])(ALONE))
    assert second.numbers == first.numbers
    assert torch.equal(second.tensors["rows.0"], first.tensors["rows.0"])


@pytest.mark.parametrize("case", ["episode", "adapters"])
def test_a_booster_whose_weights_are_hidden_gives_the_numbers_of_a_plain_one(
    two: list[dict[str, Found]], case: str
) -> None:
    for found in two:
        plain, strict = found[case], found[f"{case}:strict"]
        assert strict.sentence == ""
        assert strict.numbers == plain.numbers
        assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in strict.tensors.items())


def test_both_ranks_hold_the_same_weights_after_two_episodes(two: list[dict[str, Found]]) -> None:
    first, second = (found["episode"].tensors for found in two)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items() if not name.startswith("rows"))


# Of three episodes with two steps each, the end of the first, and the middle of the second.
@pytest.mark.parametrize(("name", "episode"), [("epoch-0_step-2", 1), ("epoch-1_step-3", 2)])
@pytest.mark.parametrize(("wrote", "reads"), [("plain", "strict"), ("gemini", "zero2"), ("zero2", "plain")])
def test_one_rank_goes_on_where_two_of_another_strategy_stood(
    wrote: str, reads: str, name: str, episode: int, tmp_path: Path
) -> None:
    ran = run([saved := f"saved:{wrote}:{tmp_path / 'run'}"], tmp_path)
    [found] = run([case := f"gone_on:{reads}:{tmp_path / 'run'}:{name}"], tmp_path, world_size=1)
    assert_goes_on([found[case]], [each[saved] for each in ran], episode)


@pytest.mark.parametrize(("name", "episode"), [("epoch-0_step-2", 1), ("epoch-1_step-3", 2)])
@pytest.mark.parametrize(("wrote", "reads"), [("plain", "plain"), ("plain", "gemini"), ("plain", "ddp")])
def test_two_ranks_go_on_where_one_of_another_strategy_stood(
    wrote: str, reads: str, name: str, episode: int, tmp_path: Path
) -> None:
    whole = trainer_cases.saved(ALONE, wrote, str(tmp_path / "run"))
    ran = run([case := f"gone_on:{reads}:{tmp_path / 'run'}:{name}"], tmp_path)
    assert_goes_on([found[case] for found in ran], [whole], episode)


def assert_goes_on(found: Sequence[Found], whole: Sequence[Found], episode: int) -> None:
    """From an episode's border the same is drawn and learnt; from its middle, the next episode is collected."""
    at_border = episode == 1
    for each in found:
        assert each.sentence == ""
        assert (each.numbers.pop("episode"), each.numbers.pop("step")) == (episode, 2 if at_border else 3)
        assert len([name for name in each.numbers if name.endswith(".actor_loss")]) == 2 * (3 - episode)
    if at_border:
        numbers = [(*name.split("."), value) for name, value in whole[0].numbers.items()]
        later = {f"{int(step) - 2}.{figure}": value for step, figure, value in numbers if int(step) >= 2}
        kept = [Found(later, {f"rows.{step - 2}": each.tensors[f"rows.{step}"] for step in (2, 4)}) for each in whole]
        assert rows_of(found, 0) == rows_of(kept, 0)
        assert_near(found, kept[0])
    assert prompts_of(found, 0) == prompts_of(whole, 2 * episode)


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


@pytest.mark.parametrize("case", ["resumed", "resumed:strict", *RESUMED])
def test_two_ranks_go_on_from_the_middle_of_an_episode_to_the_bit(
    two: list[dict[str, Found]], strategies: list[dict[str, Found]], case: str
) -> None:
    ran = strategies if case in RESUMED else two
    assert [found[case].numbers for found in ran] == [{"equal": 1.0, "step": 4.0}] * 2


@pytest.mark.parametrize("case", ["full_disk_on_first", "full_disk_on_second"])
def test_a_disk_that_is_full_for_one_rank_leaves_the_last_checkpoint_to_both(
    two: list[dict[str, Found]], case: str
) -> None:
    for found in two:
        assert "epoch-0_step-2 could not be written" in found[case].sentence
        assert found[case].numbers["step"] == 1.0
