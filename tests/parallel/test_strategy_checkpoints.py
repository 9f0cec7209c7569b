"""What every strategy wrote on two ranks, sharded and not, every strategy reads on one, two and three, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found, run_on_ranks

pytestmark = pytest.mark.parallel

CASES = "tests.parallel.strategy_checkpoint_cases"
STRATEGIES = ("plain", "ddp", "zero2", "zero2_cpu", "gemini", "3d-tp2", "3d-pp2")
WITH_ADAPTERS = ("plain", "ddp", "zero2", "zero2_cpu", "3d-tp2", "3d-pp2")
READERS = [
    *((strategy, world_size) for strategy in STRATEGIES[:5] for world_size in (1, 2, 3)),
    *(("3d-tp2", 2), ("3d-tp2", 4), ("3d-pp2", 2), ("3d-tp2-pp2", 4), ("3d-pp2-sp2", 4)),
]
"""By how many processes each reads."""
FORMS = ("file", "directory")
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2}
"""Of the next step's figures, which the reader computes in its own arithmetic."""


class Written(NamedTuple):
    """Checkpoints, and what their writers say of them."""

    root: Path
    first: dict[str, Found]
    """Of rank 0, by strategy."""


def _write(root: Path, kind: str, strategies: tuple[str, ...], precision: str) -> Written:
    places = {strategy: root / precision / strategy for strategy in strategies}
    cases = {strategy: f"{kind}:{strategy}:{precision}:{place}" for strategy, place in places.items()}
    found = run_on_ranks(CASES, list(cases.values()), root)
    return Written(root / precision, {strategy: found[0][case] for strategy, case in cases.items()})


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return _write(tmp_path_factory.mktemp("written"), "write", STRATEGIES, request.param)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return _write(tmp_path_factory.mktemp("adapters"), "write_adapters", WITH_ADAPTERS, request.param)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_holds_the_state_to_the_bit(written: Written, strategy: str) -> None:
    """Read by safetensors alone."""
    state, place = written.first[strategy].tensors, written.root / strategy
    weights = {name: each for name, each in state.items() if name.startswith("weights.")}
    assert all(each.dtype == torch.float32 for each in state.values())
    sharded: dict[str, Tensor] = {}
    shards = sorted((place / "directory" / "model").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        sharded |= load_file(shard)
    for found in (load_file(place / "file" / "model"), sharded):
        assert {f"weights.{name}" for name in found} == weights.keys()
        assert [name for name, each in found.items() if not torch.equal(each, weights[f"weights.{name}"])] == []
    moments = [name for name in state if not name.startswith("weights.")]
    assert len(moments) == 3 * len(weights)
    assert all(state[name].item() == 2.0 for name in moments if name.startswith("step."))


@pytest.mark.parametrize(("reader", "world_size"), READERS)
def test_every_strategy_reads_what_every_other_wrote(
    written: Written, tmp_path: Path, reader: str, world_size: int
) -> None:
    case = f"read:{reader}:{written.root.name}:{written.root}"
    (found, *_) = (each[case] for each in run_on_ranks(CASES, [case], tmp_path, world_size=world_size))
    assert found.sentence == ""
    for writer, theirs in written.first.items():
        for form in FORMS:
            numbers = {name: found.numbers[f"{writer}.{form}.{name}"] for name in ("loss", "grad_norm", "lr")}
            assert found.numbers[f"{writer}.{form}.unlike"] == 0.0, (writer, form)
            wanted = {name: theirs.numbers[name] for name in numbers}
            assert numbers == pytest.approx(wanted, rel=ROUNDING[written.root.name]), (writer, form)
            assert found.numbers[f"{writer}.{form}.length"] == pytest.approx(theirs.numbers["length"], rel=1e-2)


@pytest.mark.parametrize("reader", STRATEGIES)
def test_another_precision_reads_the_same_bits(written: Written, tmp_path: Path, reader: str) -> None:
    other = {"fp32": "bf16", "bf16": "fp32"}[written.root.name]
    case = f"read:{reader}:{other}:{written.root}"
    (found, *_) = (each[case] for each in run_on_ranks(CASES, [case], tmp_path))
    unlike = {name: value for name, value in found.numbers.items() if name.endswith("unlike")}
    assert unlike == dict.fromkeys((f"{writer}.{form}.unlike" for writer in STRATEGIES for form in FORMS), 0.0)


@pytest.mark.parametrize("strategy", WITH_ADAPTERS)
def test_only_adapters_are_in_the_optimizer_and_only_they_move(adapters: Written, strategy: str) -> None:
    found = adapters.first[strategy]
    trained = sum(each.numel() for name, each in found.tensors.items() if name.startswith("weights."))
    assert found.numbers["moved"] == 0.0
    assert found.numbers["frozen"] > 0
    held = found.numbers["members"]
    if strategy in {"plain", "ddp"}:
        assert held == 2 * trained  # each of two ranks has all of them
    elif strategy == "3d-tp2":
        assert trained < held < 2 * trained  # each of two has all of the side that no head or unit is on
    elif strategy == "3d-pp2":
        assert held == trained  # of which each of two has its own layers'
    else:
        assert trained <= held <= trained + found.numbers["tensors"]  # shares are filled up to the same length
    moments = {name.partition(".")[2] for name in found.tensors if name.startswith("exp_avg.")}
    assert moments == {name.partition(".")[2] for name in found.tensors if name.startswith("weights.")}
    assert all("lora_" in name for name in moments)


@pytest.mark.parametrize("strategy", WITH_ADAPTERS)
def test_a_directory_has_adapters_merged_and_beside_it_apart(adapters: Written, strategy: str) -> None:
    tensors, place = adapters.first[strategy].tensors, adapters.root / strategy / "directory" / "model"
    merged: dict[str, Tensor] = {}
    for shard in place.glob("model*.safetensors"):
        merged |= load_file(shard)
    apart = load_file(place / "exact.safetensors")
    assert {name for name in apart if "lora_" in name} == {
        name.partition(".")[2] for name in tensors if name.startswith("weights.")
    }
    base = {name.partition(".")[2]: each for name, each in tensors.items() if name.startswith("base.")}
    scaled = stages.LORA.alpha / stages.LORA.r
    adapted = 0
    for name, each in base.items():
        plain = name.replace(".base_layer", "")
        layer = name.removesuffix(".base_layer.weight")
        delta = torch.zeros(())
        if plain != name:
            down, up = (tensors[f"weights.{layer}.lora_{side}.default.weight"] for side in "AB")
            delta = scaled * (up @ down)
            adapted += 1
        torch.testing.assert_close(merged[plain].float(), each.float() + delta, rtol=1e-5, atol=1e-6, msg=name)
    assert adapted > 0
    assert merged.keys() == {name.replace(".base_layer", "") for name in base}


@pytest.mark.parametrize(("reader", "world_size"), [each for each in READERS if each[0] in WITH_ADAPTERS])
def test_adapters_come_back_under_any_strategy(adapters: Written, tmp_path: Path, reader: str, world_size: int) -> None:
    for writer, theirs in adapters.first.items():
        case = f"read_adapters:{reader}:{adapters.root.name}:{adapters.root / writer}"
        (found, *_) = (each[case] for each in run_on_ranks(CASES, [case], tmp_path, world_size=world_size))
        for form in FORMS:
            numbers = {name: found.numbers[f"{form}.{name}"] for name in ("loss", "grad_norm", "lr")}
            wanted = {name: theirs.numbers[name] for name in numbers}
            assert found.numbers[f"{form}.unlike"] == 0.0, (writer, form)
            assert numbers == pytest.approx(wanted, rel=ROUNDING[adapters.root.name]), (writer, form)
