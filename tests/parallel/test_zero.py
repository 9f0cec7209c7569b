"""DDP and ZeRO-2 on two ranks do what plain torch does on one, hold their share of it, and read each other's files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import ALONE, join_alone, leave
from tests.parallel import zero_cases
from tests.parallel.ranks import Found, run_on_ranks
from tests.parallel.zero_model import (
    BETAS,
    CLIP,
    MICRO,
    OTHER_LR,
    STEPS,
    assorted,
    boosted,
    gradient_pass,
    groups,
    rows,
)

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.parallel,
    # pytest undoes, before each test, what `upstream` did about it.
    pytest.mark.filterwarnings("ignore:.*torch.distributed.(reduce_scatter|all_gather_into)_tensor:FutureWarning"),
]

STRATEGIES = ("ddp", "zero2", "zero2_cpu")
STEP_CASES = [f"steps:{name}:fp32:{what}" for name in STRATEGIES for what in ("whole", "lora")]
STEP_CASES.append("steps:zero2:fp32:buckets")
BF16_CASES = ["steps:ddp:bf16", "steps:zero2:bf16", "steps:zero2_cpu:bf16"]
OTHERS = [
    "exploding:ddp", "exploding:zero2", "held:ddp:fp32", "held:zero2:fp32", "held:zero2:bf16", "views:ddp:fp32",
    "views:zero2:fp32", "views:zero2:bf16", "waiting", "collectives",
]  # fmt: skip
Ranked = list[dict[str, Found]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranked:
    directory = tmp_path_factory.mktemp("ranks")
    return run_on_ranks("tests.parallel.zero_cases", [*STEP_CASES, *BF16_CASES, *OTHERS], directory)


@pytest.fixture(scope="module")
def alone() -> Found:
    """Five steps of plain torch on one rank."""
    return zero_cases.steps(ALONE, "plain", "fp32")


def part(found: Found, name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in found.tensors.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("case", STEP_CASES)
def test_two_ranks_take_the_steps_of_one(two: Ranked, case: str) -> None:
    first, second = (found[case] for found in two)
    expected = zero_cases.steps(ALONE, "plain", "fp32", case.rsplit(":", maxsplit=1)[-1])
    assert first.numbers == second.numbers == pytest.approx(expected.numbers, rel=1e-5)
    assert expected.tensors.keys() == first.tensors.keys()
    for name, gradient in part(expected, "first").items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(part(first, "first")[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)
    for name, weight in part(expected, "weight").items():
        torch.testing.assert_close(part(first, "weight")[name], weight, rtol=0, atol=OTHER_LR * STEPS, msg=name)
        assert torch.equal(part(first, "working")[name], part(second, "working")[name]), name
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        assert part(expected, moment).keys() == part(first, moment).keys()


def test_a_weight_that_no_rank_used_is_not_moved_by_its_decay(two: Ranked) -> None:
    for case in STEP_CASES:
        first = two[0][case]
        assert torch.equal(first.tensors["weight/of_none"], torch.ones(5, 3)), case
        assert "exp_avg/of_none" not in first.tensors
        assert first.tensors["step/of_even_rows"] == STEPS, case  # which one rank used


@pytest.mark.parametrize("case", BF16_CASES)
def test_two_ranks_are_as_near_to_bfloat16_as_that_is_to_float32(two: Ranked, alone: Found, case: str) -> None:
    """Plain bfloat16 is autocast for DDP, rounded weights for ZeRO; its own distance is the largest of five steps."""
    exact = alone
    plain = zero_cases.steps(ALONE, "plain", "bf16") if "ddp" in case else rounded()
    ours = two[0][case]
    for kind in ("loss", "norm"):
        own = max(abs(plain.numbers[f"{step}.{kind}"] / exact.numbers[f"{step}.{kind}"] - 1) for step in range(STEPS))
        assert own < 0.02
        for step in range(STEPS):
            name = f"{step}.{kind}"
            assert ours.numbers[name] == pytest.approx(plain.numbers[name], rel=own), name
    names = part(exact, "first")
    theirs, found, true = (flat(part(each, "first"), list(names)) for each in (plain, ours, exact))
    assert (found - theirs).norm() < (theirs - true).norm()


def flat(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def rounded() -> Found:
    """Five steps of plain torch on one rank with bfloat16 weights and gradients, float32 masters and buffers."""
    model = assorted(ALONE)
    masters = {parameter: parameter.detach().clone().requires_grad_() for parameter in model.parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    made = [group | {"params": [masters[each] for each in group["params"]]} for group in groups(model)]
    optimizer = torch.optim.AdamW(made, betas=BETAS)
    model.to(torch.bfloat16)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    booster = PlainBooster("bf16", ranks=ALONE)
    numbers, first = {}, {}
    for step in range(STEPS):
        loss = sum(gradient_pass(booster, model, None, ids)[0] for ids in rows(step, ALONE).split(MICRO))
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(masters.values(), CLIP).item()
        if step == 0:
            first = {f"first/{name}": masters[each].grad for name, each in model.named_parameters()}
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
        numbers |= {f"{step}.loss": loss, f"{step}.norm": norm}
    return Found(numbers, {name: tensor.clone() for name, tensor in first.items() if tensor is not None})


@pytest.mark.parametrize(("case", "size"), [("held:zero2:fp32", 4), ("held:zero2:bf16", 2)])
def test_zero_holds_its_share(two: Ranked, case: str, size: int) -> None:
    model = assorted(ALONE)
    halves = sum(-(-parameter.numel() // 2) for parameter in model.parameters())
    spare = -(-model.of_none.numel() // 2)  # has no moments
    for found in two:
        numbers = found[case].numbers
        # Whole weights, filled up to an even number of elements, and half of the float32 masters.
        assert numbers["weights"] == 2 * halves * size + halves * 4
        assert numbers["gradients"] == halves * size
        steps = 4 * (len(list(model.parameters())) - 1)
        assert numbers["moments"] == 2 * 4 * (halves - spare) + steps


def test_ddp_holds_everything_and_each_gradient_once(two: Ranked) -> None:
    size = 4 * sum(parameter.numel() for parameter in assorted(ALONE).parameters())
    for found in two:
        numbers = found["held:ddp:fp32"].numbers
        assert numbers["weights"] == numbers["gradients"] == size
        assert numbers["buckets"] <= 2  # in which DDP sends them, and which no object of Python's holds otherwise


def test_what_stands_for_gloos_collectives_gives_the_same_for_less(two: Ranked) -> None:
    for found in (found["collectives"] for found in two):
        for name in ("sum", "gather"):
            assert torch.equal(found.tensors[f"ours.{name}"], found.tensors[f"torch.{name}"])
        seconds = found.numbers
        assert seconds["ours.sum"] + seconds["ours.gather"] < seconds["torch.sum"] + seconds["torch.gather"]


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_gradient_that_is_nan_on_one_rank_is_refused_on_both_and_forgotten(
    two: Ranked, alone: Found, strategy: str
) -> None:
    for found in two:
        numbers = dict(found[f"exploding:{strategy}"].numbers)
        assert (numbers.pop("refused"), numbers.pop("changed")) == (1, 0)
        assert numbers == pytest.approx(alone.numbers, rel=1e-5)
    assert torch.equal(two[0][f"exploding:{strategy}"].tensors["step/odd"], torch.tensor(float(STEPS)))


def test_gradients_stay_apart_under_no_sync_until_the_pass_after(two: Ranked) -> None:
    first, second = (found["waiting"] for found in two)
    booster = PlainBooster(ranks=ALONE)
    model, optimizer = boosted(booster, assorted(ALONE))
    for name in ("odd", "llama.model.layers.0.self_attn.q_proj.weight"):
        assert not torch.allclose(first.tensors[f"own/{name}"], second.tensors[f"own/{name}"], rtol=1e-2)
    gradient_pass(booster, model, optimizer, rows(0, ALONE))
    for name, parameter in zero_cases.used(booster, model):
        for found in (first, second):
            largest = parameter.grad.abs().max().item()
            torch.testing.assert_close(found.tensors[f"mean/{name}"], parameter.grad, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("case", ["views:ddp:fp32", "views:zero2:fp32", "views:zero2:bf16"])
def test_weights_are_shown_and_taken_in_float32(two: Ranked, case: str) -> None:
    first, second = (found[case] for found in two)
    assert (second.numbers["all"], second.numbers["exact"]) == (0, 0)
    everything, exact = part(first, "all"), part(first, "exact")
    names = {name for name, _ in assorted(ALONE).named_parameters()}
    assert everything.keys() == names
    assert first.numbers["float32"] == 1
    assert all(torch.equal(tensor, exact[name]) for name, tensor in everything.items())
    dtype = torch.bfloat16 if case.endswith("bf16") else torch.float32
    for found in (first, second):
        for name, tensor in part(found, "named").items():
            assert torch.equal(tensor, everything[name])
            assert torch.equal(part(found, "after")[name], tensor + 1 / 3)
            assert torch.equal(part(found, "working")[name], (tensor + 1 / 3).to(dtype))
        assert torch.equal(found.tensors["angles"], assorted(ALONE).angles)  # the first rank's, in float32


SAVED = ["ddp:fp32:file", "zero2:fp32:file", "zero2:fp32:shard", "zero2_cpu:bf16:file", "zero2:bf16:shard"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def saved(stored: Path) -> dict[str, Found]:
    """What the first of two ranks held when it saved, and the third step that followed."""
    orders = {}
    for name in SAVED:
        strategy, precision, kind = name.split(":")
        orders[name] = f"save:{strategy}:{precision}:{stored / name.replace(':', '-')}:{kind}"
    first, _ = run_on_ranks("tests.parallel.zero_cases", list(orders.values()), stored)
    plain = zero_cases.save(ALONE, "plain", "fp32", str(stored / "plain-fp32-shard"), "shard")
    return {name: first[order] for name, order in orders.items()} | {"plain:fp32:shard": plain}


@pytest.fixture
def group_of_one() -> Iterator[None]:
    join_alone()
    yield
    leave()


def assert_went_on(found: Found, before: Found, *, rel: float) -> None:
    for name, tensor in before.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
    assert found.numbers == pytest.approx(before.numbers, rel=rel)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", SAVED)
def test_what_two_ranks_saved_goes_on_on_one(saved: dict[str, Found], stored: Path, name: str) -> None:
    directory = str(stored / name.replace(":", "-"))
    rel = 1e-5 if "fp32" in name else 0.02  # the weights are exact, the arithmetic of the step is another
    assert_went_on(zero_cases.resume(ALONE, "plain", "fp32", directory), saved[name], rel=rel)
    precision = name.split(":")[1]
    rel = 1e-5 if precision == "fp32" else 5e-3  # gradients are added up in another order
    assert_went_on(zero_cases.resume(ALONE, "zero2", precision, directory), saved[name], rel=rel)


def test_two_ranks_go_on_from_any_checkpoint(saved: dict[str, Found], stored: Path, tmp_path: Path) -> None:
    pairs = [
        ("plain:fp32:shard", "zero2:fp32", 1e-5),
        ("plain:fp32:shard", "ddp:fp32", 1e-5),
        ("zero2:fp32:file", "ddp:fp32", 1e-5),
        ("ddp:fp32:file", "zero2_cpu:fp32", 1e-5),
        ("zero2:fp32:shard", "zero2:fp32", 0),
        ("zero2:bf16:shard", "zero2_cpu:bf16", 0),
    ]
    orders = [f"resume:{reader}:{stored / name.replace(':', '-')}" for name, reader, _ in pairs]
    first, _ = run_on_ranks("tests.parallel.zero_cases", orders, tmp_path)
    for order, (name, _, rel) in zip(orders, pairs, strict=True):
        assert_went_on(first[order], saved[name], rel=rel)


def test_a_checkpoint_that_cannot_be_used_changes_nothing(
    saved: dict[str, Found], stored: Path, tmp_path: Path
) -> None:
    whole = stored / SAVED[1].replace(":", "-")
    assert saved[SAVED[1]].numbers
    for name in ("cut", "other"):
        shutil.copytree(whole, tmp_path / name)
    for path in (tmp_path / "cut").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    for path, tensor in ((tmp_path / "other/model", "odd"), (tmp_path / "other/optimizer", "3.exp_avg")):
        alter(path, tensor)
    orders = [f"unreadable:{strategy}:{tmp_path}" for strategy in ("ddp", "zero2")]
    for found in run_on_ranks("tests.parallel.zero_cases", orders, tmp_path):
        for order in orders:
            assert found[order].numbers == {"refused": 4, "changed": 0}


def alter(path: Path, tensor: str) -> None:
    """Give one tensor of a file another shape."""
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    tensors[tensor] = tensors[tensor].flatten()[:-1].clone()
    save_file(tensors, path, metadata=facts)
