"""How near a run under a strategy must be to a plain one on one rank with the whole batch.

In float32, at every one of five steps: losses, metrics and gradient norms to 1e-5 relative (to 1e-7 where they are sums
that nearly cancel), first moments after the first step, a tenth of the clipped gradient, to 1e-5 of the tensor's
largest entry, and weights after the last step to the length of the steps: Adam follows the sign of noise where a
gradient is nothing else.

In bfloat16 no two orders of summation agree, and how far apart runs are is measured. The plain bfloat16 run is PyTorch
written out (strategy_reference.py) in the strategy's own arithmetic: autocast over float32 weights for plain and ddp,
weights and gradients in bfloat16 with float32 masters for ZeRO and Gemini. Its *own distance* is that to the same run
in float32; the strategy's run must not be farther from it than that, in each of these distances:

    figures         root mean square, over all losses and norms of all steps, of the relative difference; twice that is
                    allowed with adapters, of which so little is rounded in the same way that runs which cut their rows
                    otherwise are as far from each other as from float32
    first moments   norm of the difference, over all weights of a model together; for each tensor of several numbers
                    twice that is allowed
    last weights    the length of the steps, as in float32
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found


def assert_fp32(found: Found, plain: Found, *, rel: float = 1e-5) -> None:
    """Compare with a plain run in float32: in all of its numbers and tensors."""
    assert found.sentence == ""
    numbers = {name: found.numbers[name] for name in plain.numbers}
    assert numbers == pytest.approx(plain.numbers, rel=rel, abs=rel / 100)
    assert found.tensors.keys() == plain.tensors.keys()
    for name, expected in plain.tensors.items():
        tolerance = _longest(name) if name.startswith("last.") else rel * expected.abs().max().item()
        torch.testing.assert_close(found.tensors[name], expected, rtol=0, atol=tolerance, msg=name)


def assert_bf16(found: Found, plain: Found, exact: Found, *, times: float = 1.0) -> None:
    """Compare with a plain run in bfloat16, whose own distance is that to `exact`, a plain run in float32.

    Figures may be `times` as far off.
    """
    assert found.sentence == ""
    runs = (found, plain, exact)
    figures = [torch.tensor([run.numbers[name] for name in exact.numbers], dtype=torch.float64) for run in runs]
    _assert_within("figures", *(each / figures[2] for each in figures), times=times)
    assert found.tensors.keys() == exact.tensors.keys()
    first = [name for name in exact.tensors if name.startswith("first.")]
    for role in {name.split(".")[1] for name in first}:
        own = [name for name in first if name.split(".")[1] == role]
        _assert_within(
            f"first moments of the {role}", *(torch.cat([run.tensors[n].flatten() for n in own]) for run in runs)
        )
    for name in first:
        if exact.tensors[name].numel() > 1:
            _assert_within(name, *(run.tensors[name] for run in runs), times=2.0)
    for name in exact.tensors.keys() - set(first):
        torch.testing.assert_close(found.tensors[name], exact.tensors[name], rtol=0, atol=_longest(name), msg=name)


def _assert_within(what: str, found: Tensor, plain: Tensor, exact: Tensor, *, times: float = 1.0) -> None:
    distance, own = (found - plain).norm().item(), (plain - exact).norm().item()
    assert distance <= times * own, f"{what}: {distance:.3g} from the plain bfloat16 run, {own:.3g} is its own distance"


def _longest(name: str) -> float:
    """Return how far five steps go at most, whatever their gradients."""
    has_other_rate = name.startswith(("last.critic.", "last.model.head."))
    return stages.STEPS * (stages.OTHER_LR if has_other_rate else stages.LR)
