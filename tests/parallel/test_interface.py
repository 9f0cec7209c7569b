"""coati's `Strategy` on two ranks: each strategy is torch on one process, and what one saved another loads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallel.interface_cases import MAX_NORM, OPTIONS, ROWS, SHARD_MB
from tests.parallel.ranks import Found, run_on_ranks
from tests.tiny_llama import tiny_llama

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

NAMES = ("plain", "ddp", "colossalai_zero2", "zero2_cpu", "gemini")
MOVES = ("zero2:gemini:shard", "gemini:ddp:file", "plain:zero2_cpu:shard")
REFUSED = {
    "zero2": "strategy zero2 gives its optimizer flat pieces of weights, and takes Adam, AdamW or HybridAdam, not Ada",
    "gemini": "strategy gemini takes ColossalAI's HybridAdam, not Adagrad",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    cases = [f"trained:{name}" for name in NAMES] + [f"moved:{move}" for move in MOVES]
    cases += [f"{case}:{name}" for case in ("untrained", "adagrad") for name in REFUSED]
    return run_on_ranks("tests.parallel.interface_cases", cases, tmp_path_factory.mktemp("interface"))


@pytest.fixture(scope="module")
def alone() -> tuple[nn.Module, dict[str, float]]:
    """Four steps of torch's own on all rows of each: of 0, 2, 1, 3, and of 4, 6, 5, 7; then the same again."""
    model = tiny_llama(initializer_range=0.2, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    numbers = {}
    for step in range(4):
        ids = ROWS[4 * (step % 2) : 4 * (step % 2) + 4]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        numbers[f"{step}.norm"] = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        numbers[f"{step}.loss"] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            halfway = tiny_llama(seed=1)
            halfway.load_state_dict(model.state_dict())
    return halfway, numbers


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_trains_as_torch_does_on_one_process(
    two: list[dict[str, Found]], alone: tuple[nn.Module, dict[str, float]], name: str
) -> None:
    for found in two:
        numbers = {key: value for key, value in found[f"trained:{name}"].numbers.items() if "." in key}
        assert numbers == pytest.approx({key: alone[1][key] for key in numbers}, rel=1e-5)
        assert len(numbers) == 4


@pytest.mark.parametrize("name", NAMES)
def test_what_is_published_is_whole_and_comes_from_the_first_rank_alone(
    two: list[dict[str, Found]], alone: tuple[nn.Module, dict[str, float]], name: str
) -> None:
    first, second = (found[f"trained:{name}"] for found in two)
    expected = dict(alone[0].named_parameters())
    assert first.tensors.keys() == expected.keys()
    assert (first.numbers["tensors"], first.numbers["names"]) == (len(expected), len(expected))
    size = sum(tensor.nbytes for tensor in expected.values())
    assert 1 < first.numbers["shards"] <= -(-size // int(SHARD_MB * 2**20))
    for key, tensor in expected.items():
        # two steps along the sign of Adam's ratio, of which the noise of a vanishing gradient decides
        torch.testing.assert_close(first.tensors[key], tensor.detach(), rtol=0, atol=2 * OPTIONS["lr"])
    assert second.numbers["shards"] == 0
    assert not second.tensors


@pytest.mark.parametrize("move", MOVES)
def test_what_one_strategy_saved_another_goes_on_from(
    two: list[dict[str, Found]], alone: tuple[nn.Module, dict[str, float]], move: str
) -> None:
    for found in two:
        numbers = dict(found[f"moved:{move}"].numbers)
        assert numbers.pop("pickled") == 0
        expected = {f"{step}.{name}": alone[1][f"{step + 2}.{name}"] for step in (0, 1) for name in ("norm", "loss")}
        assert numbers == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_a_strategy_does_not_take_is_refused_on_all_ranks(
    two: list[dict[str, Found]], name: str
) -> None:
    assert all(found[f"adagrad:{name}"].sentence.startswith(REFUSED[name]) for found in two)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_trained_stays_as_it_is_with_the_first_ranks_weights(
    two: list[dict[str, Found]], name: str
) -> None:
    expected = dict(tiny_llama(seed=0).named_parameters())
    for found in two:
        assert found[f"untrained:{name}"].numbers == {"is_plain": 1.0}
        for key, tensor in found[f"untrained:{name}"].tensors.items():
            assert torch.equal(tensor, expected[key])
