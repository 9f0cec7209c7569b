"""Models in parts: every form, who holds what, what travels, what is refused; the stages are in test_strategies.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import three_d_cases
from tests.parallel.closeness import assert_bf16, assert_fp32
from tests.parallel.ranks import COLLECTIVE_S, Found, run_on_ranks
from tests.parallel.test_strategy_memory import assert_memory

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

CASES = "tests.parallel.three_d_cases"
HELD = [f"held:3d-2:{precision}:{what}" for precision in ("fp32", "bf16") for what in ("weights", "adapters")]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Found]]]:
    """Of each form, by how many processes it is cut over."""
    found = {}
    for strategy, world_size in (("3d-2", 2), ("3d-2", 4), ("3d-4", 4)):
        cases = [
            f"steps:{name}:{strategy}:{precision}" for name in three_d_cases.FORMS for precision in ("fp32", "bf16")
        ]
        directory = tmp_path_factory.mktemp("forms")
        found[f"{strategy} of {world_size}"] = run_on_ranks(CASES, cases, directory, world_size=world_size)
    return found


@cache
def form_alone(name: str, precision: str) -> Found:
    return three_d_cases.steps(ALONE, name, "plain", precision)


@pytest.mark.parametrize("layout", ["3d-2 of 2", "3d-2 of 4", "3d-4 of 4"])
@pytest.mark.parametrize("name", three_d_cases.FORMS)
def test_twenty_steps_of_every_form(forms: dict[str, list[dict[str, Found]]], name: str, layout: str) -> None:
    strategy, plain = layout.split(maxsplit=1)[0], form_alone(name, "fp32")
    first, *others = (each[f"steps:{name}:{strategy}:fp32"] for each in forms[layout])
    assert_fp32(first, plain)
    for other in others:
        assert other.numbers == first.numbers


@pytest.mark.parametrize("layout", ["3d-2 of 2", "3d-2 of 4", "3d-4 of 4"])
@pytest.mark.parametrize("name", three_d_cases.FORMS)
def test_twenty_steps_of_every_form_in_bfloat16_are_hardly_farther_off_than_plain_ones(
    forms: dict[str, list[dict[str, Found]]], name: str, layout: str
) -> None:
    """Weights apart, of which Adam moves some by the sign of roundings for as many steps."""
    runs = (
        forms[layout][0][f"steps:{name}:{layout.split(maxsplit=1)[0]}:bf16"],
        *(form_alone(name, precision) for precision in ("bf16", "fp32")),
    )
    found, rounded, exact = (
        run._replace(tensors={moment: each for moment, each in run.tensors.items() if moment.startswith("first.")})
        for run in runs
    )
    assert_bf16(found, rounded, exact, times=1.5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_process_holds_its_part(world_size: int, tmp_path: Path) -> None:
    found = run_on_ranks("tests.parallel.strategy_cases", HELD, tmp_path, world_size=world_size)
    for run in HELD:  # vectors are whole on each; of adapters the formula knows half of the factors roughly
        assert_memory(found, run, slack=0.1 if run.endswith("adapters") else 0.01)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kernels", ["yes", "no"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_words_in_parts_give_what_they_give_together(
    world_size: int, kernels: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    case = f"words:{dtype}:{kernels}"
    for each in run_on_ranks(CASES, [case], tmp_path, world_size=world_size):
        found = each[case].tensors
        torch.testing.assert_close(found["found"], found["whole"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["found.gradient"], found["whole.gradient"], rtol=tolerance, atol=tolerance)


def test_traffic_is_two_sums_a_layer_each_way(tmp_path: Path) -> None:
    """Of 2 rows of 16 tokens, 64 wide: there attention's and the wide layer's outputs and the words; back the inputs of
    attention, the wide layer and the head."""
    (found, _) = (each["traffic:3d-2"].numbers for each in run_on_ranks(CASES, ["traffic:3d-2"], tmp_path))
    tokens, head_tokens, layers, width, size = 32, 30, 2, 64, 4
    assert found == {
        "there": (2 * layers + 1) * tokens * width * size,
        "back": (2 * layers * tokens + head_tokens) * width * size,
    }


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "world",
            "tp is 3, but 2 processes cannot be cut into groups of 3 that hold a model each; start a multiple of 3",
        ),
        ("heads", "tp is 2, which does not divide the model's 1 heads of keys and values; choose a divisor of 4 and 1"),
        ("form", "strategy 3d cuts models of the forms Llama, Mistral, Qwen2, Qwen3, not GPT2; take gemini or zero2"),
        ("none inside", "strategy 3d cuts models of transformers, and Linear has none inside"),
        (
            "rows",
            "the processes that hold one model's parts were given different rows; let the strategy",
        ),
        ("adapters", "trains no adapters on embeddings or the head; leave them out of lora.target_modules"),
    ],
)
def test_what_cannot_be_cut_is_refused(what: str, sentence: str, tmp_path: Path) -> None:
    for each in run_on_ranks(CASES, [f"refused:{what}"], tmp_path):
        assert sentence in each[f"refused:{what}"].sentence


def test_activations_that_are_computed_again_change_nothing(tmp_path: Path) -> None:
    """With biases behind the sums, which a pass that is broken off must leave in the model."""
    case = "steps:llama_biased:3d-2:fp32:checkpointing"
    (first, _) = (each[case] for each in run_on_ranks(CASES, [case], tmp_path))
    assert_fp32(first, form_alone("llama_biased", "fp32"))


def test_nobody_waits_longer_in_a_part_of_the_group(tmp_path: Path) -> None:
    for each in run_on_ranks(CASES, ["waits"], tmp_path, world_size=4):
        assert each["waits"].numbers == dict.fromkeys(("all", "shards", "rank"), COLLECTIVE_S)
