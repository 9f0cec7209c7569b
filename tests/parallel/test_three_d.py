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
HELD = [
    f"held:{strategy}:{precision}:{what}"
    for strategy in ("3d-tp2", "3d-pp2", "3d-sp2") for precision in ("fp32", "bf16") for what in ("weights", "adapters")
]  # fmt: skip
LAYOUTS = {
    2: ("3d-tp2", "3d-pp2", "3d-sp2", "3d-tp2-sg2"),
    4: ("3d-tp2", "3d-tp4", "3d-tp2-pp2", "3d-tp2-sp2", "3d-tp2-pp2-sg2"),
}
"""By the number of processes."""
EACH = [f"{strategy} of {world_size}" for world_size, strategies in LAYOUTS.items() for strategy in strategies]
ROUNDED = [
    (name, layout) for layout in EACH for name in (three_d_cases.FORMS if layout.endswith("of 2") else ("llama",))
]
"""In bfloat16."""


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Found]]]:
    """Of each form, by how many processes it is cut over."""
    found = {}
    for layout in EACH:
        strategy, world_size = layout.split(" of ")
        cases = [f"steps:{name}:{strategy}:fp32" for name in three_d_cases.FORMS]
        cases += [f"steps:{name}:{strategy}:bf16" for name, where in ROUNDED if where == layout]
        found[layout] = run_on_ranks(CASES, cases, tmp_path_factory.mktemp("forms"), world_size=int(world_size))
    return found


@cache
def form_alone(name: str, precision: str) -> Found:
    return three_d_cases.steps(ALONE, name, "plain", precision)


@pytest.mark.parametrize("layout", EACH)
@pytest.mark.parametrize("name", three_d_cases.FORMS)
def test_twenty_steps_of_every_form(forms: dict[str, list[dict[str, Found]]], name: str, layout: str) -> None:
    strategy, plain = layout.split(maxsplit=1)[0], form_alone(name, "fp32")
    first, *others = (each[f"steps:{name}:{strategy}:fp32"] for each in forms[layout])
    assert_fp32(first, plain)
    for other in others:
        assert other.numbers == first.numbers


@pytest.mark.parametrize(("name", "layout"), ROUNDED)
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
    for run in HELD:
        # Vectors are whole on each; of adapters the formula knows half of the factors roughly, of sp not that words
        # are in parts.
        slack = 0.1 if run.endswith("adapters") else 0.05 if "sp" in run else 0.01
        assert_memory(found, run, slack=slack)


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
    (found, _) = (each["traffic:3d-tp2"].numbers for each in run_on_ranks(CASES, ["traffic:3d-tp2"], tmp_path))
    tokens, head_tokens, layers, width, size = 32, 30, 2, 64, 4
    assert found == {
        "there": (2 * layers + 1) * tokens * width * size,
        "back": (2 * layers * tokens + head_tokens) * width * size,
    }


def test_a_stage_has_its_own_layers_and_sends_its_rows_once_each_way(tmp_path: Path) -> None:
    """Of 5 rows of 16 tokens, 64 wide; a layer has 4 matrices of 64 x 64, 3 of 64 x 128 and 2 norms."""
    found = [each["stages_of_four_layers"].numbers for each in run_on_ranks(CASES, ["stages_of_four_layers"], tmp_path)]
    layers = 2 * 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    words, norm, states = 2 * 4 * 128 * 64, 4 * 64, 4 * 5 * 16 * 64
    for own, each in zip(((0, 1), (2, 3)), found, strict=True):
        assert {name for name in each if name.startswith("layer ")} == {f"layer {number}" for number in own}
        assert each["in layers"] == layers
        assert each["bytes"] == layers + words + norm
        assert each["moments"] == 2 * each["bytes"]
    first, last = found
    assert (first["there"], first["back"], first["messages"]) == (states, 0, 5)  # of as many rows as there are
    assert (last["there"], last["back"], last["messages"]) == (0, states, 5)


@pytest.mark.parametrize("what", ["weights", "adapters"])
@pytest.mark.parametrize(("strategy", "world_size"), [("3d-tp2", 2), ("3d-pp2", 4), ("3d-tp2-pp2", 4), ("3d-sp2", 2)])
def test_what_each_writes_for_makers_is_to_the_bit_what_one_gathers(
    strategy: str, world_size: int, what: str, tmp_path: Path
) -> None:
    case = f"published:{strategy}:{what}"
    first, *others = (each[case] for each in run_on_ranks(CASES, [case], tmp_path, world_size=world_size))
    assert first.numbers["same"] == 1.0
    assert first.numbers["buckets"] >= 1
    assert all(each.numbers["pieces"] == first.numbers["pieces"] > 10 for each in others)
    assert all(each.numbers["written"] == 1.0 for each in (first, *others))


def test_differences_are_gathered_by_all_in_step(tmp_path: Path) -> None:
    case = "published:3d-tp2:differences"
    for each in run_on_ranks(CASES, [case], tmp_path):
        assert each[case].numbers["written"] == 0.0
        assert each[case].numbers["pieces"] > 10


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("3d-sp2", {"layer": (5, 4, 64), "queries": (5, 4, 64), "attention": (5, 2, 7, 16)}),
        ("3d-tp2-sg2", {"layer": (5, 4, 64), "queries": (5, 7, 64), "attention": (5, 2, 7, 16)}),
    ],
)
def test_layers_have_some_columns_and_attention_all_tokens_of_some_heads(
    strategy: str, expected: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    for each in run_on_ranks(CASES, [f"columns:{strategy}"], tmp_path):
        assert each[f"columns:{strategy}"].numbers == {
            f"{what}.{dim}": size for what, shape in expected.items() for dim, size in enumerate(shape)
        }


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "world",
            "a model in tp 3 needs groups of 3, into which 2 processes cannot be cut; start a multiple of 3",
        ),
        ("heads", "tp is 2, which does not divide the model's 1 heads of keys and values; choose a divisor of 4 and 1"),
        ("sp", "tp x sp is 2, which does not divide the model's 1 heads of keys and values; choose a divisor of 4 and"),
        ("layers", "pp is 2, but the model has 1 layer, and each stage needs one; lower pp"),
        ("cache", "a model in stages, or with rows in parts, takes tokens of whole rows"),
        ("split_gather", "sp is 2, but split_gather cuts rows over the 1 that have the parts of matrices; set sp to"),
        ("eager", "sp_mode all_to_all exchanges heads in sdpa, not in eager; load the model with attn_implementation"),
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


@pytest.mark.parametrize("strategy", LAYOUTS[2])
def test_activations_that_are_computed_again_change_nothing(strategy: str, tmp_path: Path) -> None:
    """With biases behind the sums, which a pass that is broken off must leave in the model."""
    case = f"steps:llama_biased:{strategy}:fp32:checkpointing"
    (first, _) = (each[case] for each in run_on_ranks(CASES, [case], tmp_path))
    assert_fp32(first, form_alone("llama_biased", "fp32"))


@pytest.mark.parametrize("strategy", LAYOUTS[2])
def test_passes_of_several_widths_are_computed_again_each_with_its_own(strategy: str, tmp_path: Path) -> None:
    case = f"widths:{strategy}"
    (first, _) = (each[case] for each in run_on_ranks(CASES, [case], tmp_path))
    expected = three_d_cases.widths(ALONE, "plain")
    assert first.numbers["loss"] == pytest.approx(expected.numbers["loss"], abs=1e-5)
    for name, tensor in first.tensors.items():
        largest = expected.tensors[name].abs().max().item()
        torch.testing.assert_close(tensor, expected.tensors[name], rtol=0, atol=1e-5 * largest + 1e-9)


@pytest.mark.parametrize("strategy", LAYOUTS[2])
def test_packed_rows_do_not_see_each_other(strategy: str, tmp_path: Path) -> None:
    case = f"steps:llama:{strategy}:fp32:packing"
    (first, _) = (each[case] for each in run_on_ranks(CASES, [case], tmp_path))
    assert_fp32(first, three_d_cases.steps(ALONE, "llama", "plain", "fp32", "packing"))


def test_nobody_waits_longer_in_a_part_of_the_group(tmp_path: Path) -> None:
    """Parts of matrices drop alike, stages and columns by themselves."""
    for rank, each in enumerate(run_on_ranks(CASES, ["waits"], tmp_path, world_size=4)):
        waits = dict.fromkeys(("all", "shards", "rank", "stages", "columns"), COLLECTIVE_S)
        assert each["waits"].numbers == waits | {"draws": rank // 2, "draws of four": rank}
