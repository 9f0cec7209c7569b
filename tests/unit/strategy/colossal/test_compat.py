"""What adapts ColossalAI: each patch does what it is for, and is needed still. One that is not can go."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.loading import use_cpu
from rlhf_core.strategy.colossal.compat.zero import GlooCollectives, OrderedZero, OrderedZeroPlugin
from rlhf_core.strategy.colossal.zero import buffers_kept

pytestmark = [
    pytest.mark.usefixtures("alone"),
    # pytest undoes, before each test, what `upstream` did about it.
    pytest.mark.filterwarnings("ignore:.*torch.distributed.(reduce_scatter|all_gather_into)_tensor:FutureWarning"),
]

Upstream: Any = upstream("colossalai.zero").LowLevelZeroOptimizer
accelerator = upstream("colossalai.accelerator")


@pytest.mark.integration
def test_boosters_are_imported_without_a_word_and_only_when_asked_for() -> None:
    program = """
import sys
import rlhf_core.strategy.colossal, rlhf_core.coati.strategy
assert not any(name.startswith("colossalai") for name in sys.modules)
import rlhf_core.strategy.colossal.ddp, rlhf_core.strategy.colossal.zero
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.integration
@pytest.mark.skipif(find_spec("galore_torch") is not None, reason="galore_torch is installed, and taken as it is")
def test_what_nobody_uses_need_not_be_installed_and_nothing_stays_in_its_place() -> None:
    program = """
import sys, torch
from rlhf_core.strategy.colossal.compat import upstream
known = torch.compile
assert upstream("colossalai.nn.optimizer").HybridAdam
assert not {"galore_torch", "bitsandbytes"} & sys.modules.keys()
assert torch.compile is known
assert torch.cuda.is_available() or "torch._inductor.compile_fx" not in sys.modules  # the compiler
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    done = subprocess.run(
        [sys.executable, "-c", "import colossalai.nn.optimizer"], capture_output=True, text=True, check=False
    )
    assert "No module named 'galore_torch'" in done.stderr  # needed still


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU is ColossalAI's device only where there is no GPU")
def test_the_cpu_is_a_device_with_one_stream() -> None:
    ours = accelerator.get_accelerator()
    stream = ours.Stream()
    stream.wait_stream(ours.current_stream())
    with ours.stream(stream):
        ours.synchronize()
    assert ours.get_current_device() == torch.device("cpu")
    theirs = accelerator.CpuAccelerator()
    for question in (theirs.Stream, theirs.current_stream, theirs.synchronize, lambda: theirs.stream(None)):
        with pytest.raises(RuntimeError, match="not supported for cpu"):  # needed still
            question()


def test_where_a_gpu_is_the_device_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = accelerator.CpuAccelerator()
    before = accelerator.get_accelerator()
    accelerator.set_accelerator(theirs)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            upstream("colossalai.booster")
            assert accelerator.get_accelerator() is theirs
        use_cpu(accelerator)
        assert accelerator.get_accelerator() is not theirs
    finally:
        accelerator.set_accelerator(before)


def test_collectives_by_their_old_names_are_called_without_a_warning() -> None:
    whole, part = torch.zeros(2), torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(whole, part)
        assert [each.category for each in caught] == [FutureWarning] * 2  # needed still
        upstream("colossalai.booster")
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(whole, part)
    assert len(caught) == 2


def model() -> nn.Module:
    """Two layers of the same size."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers.register_buffer("angle", torch.tensor(0.123456789))
    return layers


def optimizer_of(layers: nn.Module, *, groups: int = 1) -> torch.optim.Optimizer:
    """Return one with weights and biases in groups of their own, if two are asked for."""
    members = list(layers.parameters())
    parts = [members] if groups == 1 else [members[::2], members[1::2]]
    return torch.optim.AdamW([{"params": part} for part in parts], lr=0.1)


class Relaxed(Upstream):
    """ColossalAI's optimizer as it is, but on any device."""

    def _sanity_checks(self) -> None: ...


class Recorder(GlooCollectives):
    """Remembers the sizes of what ZeRO sums over ranks."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def reduce_scatter_tensor(self, output: Tensor, given: Tensor, **rest: Any) -> None:
        self.sizes.append(len(given))
        GlooCollectives.reduce_scatter_tensor(output, given, **rest)


def sent(monkeypatch: pytest.MonkeyPatch, kind: Any, run: Any, *, groups: int = 1) -> tuple[Any, list[int]]:
    """Return an optimizer and the sizes of what a backward pass sends."""
    layers, recorder = model(), Recorder()
    zero = kind(optimizer_of(layers, groups=groups), partition_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(upstream("colossalai.zero.low_level.low_level_optim"), "dist", recorder)
        zero.backward(run(layers))
    return zero, recorder.sizes


# The end of an optimizer whose making failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_zero_takes_any_device() -> None:
    assert OrderedZero(optimizer_of(model()), partition_grad=True)
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="device is required"):  # needed still
            Upstream(optimizer_of(model()), partition_grad=True)


def test_what_is_sent_does_not_depend_on_what_a_rank_used(monkeypatch: pytest.MonkeyPatch) -> None:
    both, one = (lambda layers: layers(torch.ones(3)).sum()), (lambda layers: layers[0](torch.ones(3)).sum())
    zero, sizes = sent(monkeypatch, OrderedZero, one)
    assert sizes == sent(monkeypatch, OrderedZero, both)[1] == [24]
    assert zero.used == [True, True, False, False]
    zero.drop([not used for used in zero.used])
    assert len(zero.gradients()) == 2
    # Needed still: another rank's 24 elements would not fit, or be another weight's.
    assert sent(monkeypatch, Relaxed, one)[1] == [12]


def test_groups_are_sent_off_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layers: nn.Module) -> Tensor:
        return layers(torch.ones(3)).sum()

    assert sent(monkeypatch, OrderedZero, run, groups=2)[1] == [18, 6]
    assert len(sent(monkeypatch, Relaxed, run, groups=2)[1]) > 2  # needed still


def test_a_weight_that_checkpoints_share_has_the_gradient_of_both() -> None:
    def run(layers: Any, again: Any = checkpoint) -> Tensor:
        given = torch.ones(3, requires_grad=True)
        within = again(layers[0], given, use_reentrant=True)
        return again(layers[0], layers[1](within), use_reentrant=True).square().sum()

    torch.manual_seed(0)
    layers = model()
    run(layers, lambda layer, given, **_: layer(given)).backward()
    wanted = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    zero = OrderedZero(optimizer_of(layers), partition_grad=True, reduce_bucket_size=1)
    zero.backward(run(layers))
    for found, expected in zip(wanted, zero.working, strict=True):
        torch.testing.assert_close(zero.get_param_grad(expected), found)


def test_a_gradient_that_is_not_finite_is_known_before_the_step() -> None:
    layers = model()
    zero = OrderedZero(optimizer_of(layers), partition_grad=True)
    zero.backward(layers(torch.ones(3)).sum() * float("nan"))
    assert all(gradient.isnan().any() for gradient in zero.gradients())
    layers = model()
    theirs = Relaxed(optimizer_of(layers), partition_grad=True, clip_grad_norm=1.0)
    theirs.backward(layers(torch.ones(3)).sum() * float("nan"))
    theirs.step()
    assert layers[0].weight.isnan().any()  # needed still


def test_the_multiplier_is_the_one_thing_between_gradient_and_step() -> None:
    layers, twin = model(), model()
    twin.load_state_dict(layers.state_dict())
    zero = OrderedZero(torch.optim.SGD(layers.parameters(), lr=0.1), partition_grad=True, clip_grad_norm=1e-3)
    zero.multiplier = 0.25
    zero.backward(layers(torch.ones(3)).sum())
    zero.step()
    (twin(torch.ones(3)).sum() * 0.25).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for found, expected in zip(layers.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_buffers_keep_their_precision_and_masters_are_made_of_rounded_weights() -> None:
    plugin = OrderedZeroPlugin(stage=2, precision="bf16", overlap_communication=False)
    layers = model()
    kept = [parameter.detach().clone() for parameter in layers.parameters()]
    with buffers_kept(layers):
        _, zero, *_ = plugin.configure(layers, optimizer_of(layers))
        assert layers.angle.dtype == torch.bfloat16  # needed still
    assert torch.equal(layers.angle, torch.tensor(0.123456789))
    assert layers[0].weight.dtype == torch.bfloat16
    for master, before in zip(zero.masters, kept, strict=True):
        assert torch.equal(master, before.bfloat16().float().flatten())  # why ZeroBooster puts them right
