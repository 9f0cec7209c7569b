"""Two ranks under Gemini are plain PyTorch on one; each holds its share; what comes between steps leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.colossal.compat.gemini import chunk_elements, padded_elements
from rlhf_core.strategy.ranks import ALONE
from tests.parallel import gemini_cases as cases
from tests.parallel.ranks import Found, run_on_ranks

torch.set_num_threads(1)

pytestmark = pytest.mark.parallel

KINDS = ("lm", "critic", "reward_model")
PRECISIONS = ("fp32", "bf16")
BYTES = {"fp32": 4, "bf16": 2}
SLACK = 1024
"""Bytes of buffers, and of numbers that count."""
DISTURBANCES = (
    "nan_on_one_rank", "left_out", "ready_and_left_out", "broken_off", "broken_off_within", "never_backward",
    "evaluated", "looked_at", "no_gradients",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemini-files")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, files: Path) -> list[dict[str, Found]]:
    wanted = [f"steps:{kind}:{precision}" for kind in KINDS for precision in PRECISIONS]
    wanted += [f"{case}:{precision}" for case in ("held", "awake", "named", "clipped") for precision in PRECISIONS]
    wanted += [f"undisturbed:{what}:{precision}" for what in DISTURBANCES for precision in PRECISIONS]
    wanted += [f"saved:{precision}:{files / precision}" for precision in PRECISIONS]
    wanted += [f"through_zero:{precision}" for precision in PRECISIONS]
    wanted += ["zero_grad_between", "checkpointed:lm", "checkpointed:critic", "no_kernel_on_one_rank"]
    return run_on_ranks("tests.parallel.gemini_cases", wanted, tmp_path_factory.mktemp("gemini"))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_plain_torch_on_one(two: list[dict[str, Found]], kind: str) -> None:
    found, expected = two[0][f"steps:{kind}:fp32"], cases.alone(kind, "fp32")
    assert found.numbers == pytest.approx(expected.numbers, rel=1e-5)
    assert found.numbers == two[1][f"steps:{kind}:fp32"].numbers
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        difference = (found.tensors[name] - tensor).abs().max().item()
        if name.startswith("first.exp_avg."):  # a tenth of the first gradient
            assert difference <= 1e-5 * tensor.abs().max().item(), name
        elif name.startswith("last.weights."):
            assert difference <= (cases.HEAD_LR if "head" in name else cases.LR) * cases.STEPS, name
        elif name.startswith(("start.", "last.step.")):
            assert difference == 0, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["before", "loss", "norm"])
def test_bfloat16_is_as_far_from_float32_as_in_plain_torch(two: list[dict[str, Found]], kind: str, what: str) -> None:
    """The first step is a plain run's; the largest distance in five, relative to the number, at most four times its.

    The plain run computes the same without Gemini: `RoundedBooster`. Each step multiplies what the one before rounded
    otherwise, by more where a loss is small, and how matrices are summed in bfloat16 is a matter of the processor.
    """
    exact, plain = (cases.alone(kind, precision).numbers for precision in ("fp32", "bf16"))

    def distance(numbers: dict[str, float]) -> float:
        pairs = [(numbers[name], number) for name, number in exact.items() if name.endswith(what)]
        return max(abs(ours / number - 1) for ours, number in pairs)

    found = two[0][f"steps:{kind}:bf16"].numbers
    assert found[f"0.{what}"] == pytest.approx(plain[f"0.{what}"], rel=5e-4)
    assert 0 < distance(found) <= 4 * distance(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_exact_whatever_the_weights_are_rounded_to(two: list[dict[str, Found]], kind: str) -> None:
    found = two[0][f"steps:{kind}:bf16"].tensors
    for name, weight in cases.model_of(kind, seed=0).named_parameters():
        assert torch.equal(found[f"start.weights.{name}"], weight.detach()), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_rank_holds_its_share(two: list[dict[str, Found]], precision: str) -> None:
    sizes = [weight.numel() for weight in cases.model_of("reward_model", seed=0).parameters()]
    padded = padded_elements(sizes, 2, chunk_elements(sizes, 2))
    assert padded < 1.06 * sum(sizes)
    working = BYTES[precision]
    masters = 4 if precision == "bf16" else 0
    for found in two:
        numbers = found[f"held:{precision}"].numbers
        assert numbers["weights"] == pytest.approx(padded // 2 * (working + masters), abs=SLACK)
        assert numbers["gradients"] == pytest.approx(padded // 2 * working, abs=SLACK)
        assert numbers["moments"] <= padded // 2 * 8 + SLACK
        assert numbers["awake"] == pytest.approx(padded * working, abs=SLACK)
        assert numbers["asleep"] == numbers["afterwards"] == 0
    both = [found[f"held:{precision}"].numbers for found in two]
    assert sum(numbers["moments"] for numbers in both) == pytest.approx(8 * sum(sizes), abs=SLACK)  # padding has none
    assert both[0]["exact"] == pytest.approx(4 * sum(sizes), abs=SLACK)
    assert both[1]["exact"] == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_twin_says_what_the_model_says_while_it_is_awake(two: list[dict[str, Found]], precision: str) -> None:
    for found in two:
        assert found[f"awake:{precision}"].numbers == {"same": True, "asleep": True, "written": 7}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("what", DISTURBANCES)
def test_what_comes_between_two_steps_leaves_no_trace(two: list[dict[str, Found]], what: str, precision: str) -> None:
    for found in two:
        case = found[f"undisturbed:{what}:{precision}"]
        assert case.sentence == ""
        assert case.numbers == {"same": True}


def test_gradients_may_be_forgotten_after_the_forward_pass(two: list[dict[str, Found]]) -> None:
    assert two[0]["zero_grad_between"].numbers == {"same": True}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_norm_of_all_ranks_clips_to_the_last_digit(two: list[dict[str, Found]], precision: str) -> None:
    numbers, tensors, _ = two[0][f"clipped:{precision}"]
    assert numbers["clipped.norm"] == numbers["whole.norm"] > cases.CLIP
    factor = cases.CLIP / (numbers["whole.norm"] + 1e-6)
    squares = torch.zeros(())
    for name in [name for name in tensors if name.startswith("whole.")]:
        clipped = tensors[name.replace("whole.", "clipped.")]
        torch.testing.assert_close(clipped, tensors[name] * factor, rtol=1e-6, atol=0)
        squares += (clipped / 0.1).square().sum()
    assert squares.sqrt().item() == pytest.approx(cases.CLIP, rel=1e-5)


@pytest.mark.parametrize("kind", ["lm", "critic"])
def test_activations_may_be_computed_again(two: list[dict[str, Found]], kind: str) -> None:
    assert two[0][f"checkpointed:{kind}"].numbers == {"same": True, "equal": True}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_rank_reads_the_weights_that_it_names(two: list[dict[str, Found]], precision: str) -> None:
    first, second = (found[f"named:{precision}"] for found in two)
    assert first.numbers == {"turned": True, "all": 22, "read": True}
    assert second.numbers == {"turned": True, "all": 0, "read": True}
    assert cases.equal(first.tensors, second.tensors)
    assert torch.equal(first.tensors["head.weight"], cases.model_of("critic", seed=0).head.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_goes_to_one_plain_rank_and_back_to_the_bit(
    two: list[dict[str, Found]], files: Path, precision: str, tmp_path: Path
) -> None:
    saved = two[0][f"saved:{precision}:{files / precision}"]
    run = cases.Run(ALONE, "critic", seed=9)
    cases.read(run, str(files / precision))
    written = {f"written.{name}": tensor for name, tensor in cases.state_of(run).items()}
    (tmp_path / "plain").mkdir()
    cases.write(run, str(tmp_path / "plain"))
    resumed = run_on_ranks("tests.parallel.gemini_cases", [f"resumed:{precision}:{tmp_path / 'plain'}"], tmp_path)
    found = resumed[0][f"resumed:{precision}:{tmp_path / 'plain'}"]
    before = {name: tensor for name, tensor in saved.tensors.items() if name.startswith("written.")}
    assert cases.equal(before, written)
    assert cases.equal(saved.tensors, found.tensors)
    assert found.numbers == saved.numbers


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_state_goes_to_zero_and_back_to_the_bit(two: list[dict[str, Found]], precision: str) -> None:
    assert two[0][f"through_zero:{precision}"].numbers == {"same": True, "goes on": True}


def test_where_one_rank_has_no_kernel_none_goes_on(two: list[dict[str, Found]]) -> None:
    first, second = (found["no_kernel_on_one_rank"].sentence for found in two)
    assert first == "another rank could not build HybridAdam's kernels; its own message says why"
    assert second.startswith("strategy gemini takes steps with ColossalAI's HybridAdam alone, but its kernel needs")
