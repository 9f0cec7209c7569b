"""At the edge: rubbish in the padding, no tokens, half precision that overflows, float64 that stays, true gradients."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from math import exp, log
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf_core import functional
from rlhf_core.functional.advantages import (
    clip_scores,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    token_rewards,
)
from rlhf_core.functional.kl import kl
from rlhf_core.functional.legacy import legacy_advantages, legacy_sequence_reward, legacy_token_rewards
from rlhf_core.functional.logprobs import logprobs_and_entropy, logprobs_from_logits
from rlhf_core.functional.losses import entropy_bonus, lm_loss, pairwise_loss, policy_loss, value_loss
from rlhf_core.functional.moments import RunningMoments, deviation_sum, masked_sum, masked_sums, whiten_with
from rlhf_core.functional.weights import aggregation_count, aggregation_weights, importance_weights
from tests.unit.functional.ragged import LENGTHS, assert_close, flat, mask, random_rows


class Inputs(NamedTuple):
    """What the functions are called with; none takes all of it."""

    mask: Tensor
    scores: Tensor
    """One number per row."""
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor


Call = Callable[[Inputs], Tensor]


def _policy(x: Inputs) -> Tensor:
    found = policy_loss(
        logprobs=x.a, old_logprobs=x.b, advantages=x.c, mask=x.mask, denominator=5.0, clip_eps=0.2, clip_eps_high=0.3,
        dual_clip=1.5, weights=x.d, importance=x.b,
    )  # fmt: skip
    return torch.stack(found)


def _value(x: Inputs) -> Tensor:
    found = value_loss(values=x.a, old_values=x.b, returns=x.c, mask=x.mask, denominator=5.0, clip_eps=0.3, weights=x.d)
    return torch.stack(found)


def _divergence(estimator: Any) -> Call:
    return lambda x: kl(logprobs=x.a, ref_logprobs=x.b, mask=x.mask, estimator=estimator)


CALLS: dict[str, Call] = {
    "token_rewards": lambda x: token_rewards(scores=x.scores, kl=x.a, mask=x.mask, kl_coef=0.3),
    "gae": lambda x: gae(rewards=x.a, values=x.b, mask=x.mask, gamma=0.9, lam=0.8),
    "reinforce_pp_advantages": lambda x: reinforce_pp_advantages(rewards=x.a, mask=x.mask, gamma=0.9),
    "kl": _divergence("k1"),
    "kl k2": _divergence("k2"),
    "kl k3": _divergence("k3"),
    "legacy_token_rewards": lambda x: legacy_token_rewards(scores=x.scores, kl=x.a, mask=x.mask, kl_coef=0.3),
    "legacy_sequence_reward": lambda x: legacy_sequence_reward(
        scores=x.scores, logprobs=x.a, ref_logprobs=x.b, mask=x.mask, kl_coef=0.3
    ),
    "legacy_advantages": lambda x: legacy_advantages(rewards=x.scores, values=x.a, mask=x.mask),
    "policy_loss": _policy,
    "value_loss": _value,
    "entropy_bonus": lambda x: entropy_bonus(entropy=x.a, mask=x.mask, denominator=5.0, weights=x.b),
    "lm_loss": lambda x: lm_loss(logprobs=x.a, mask=x.mask, denominator=5.0),
    "masked_sum": lambda x: masked_sum(x.a, x.mask),
    "masked_sums": lambda x: torch.stack(masked_sums(x.a, x.mask)),
    "deviation_sum": lambda x: deviation_sum(x.a, x.mask, mean=0.3),
    "whiten_with": lambda x: whiten_with(x.a, x.mask, mean=0.3, variance=2.0),
    "importance_weights": lambda x: importance_weights(logprobs=x.a, behaviour_logprobs=x.b, mask=x.mask, cap=2.0),
}
WITHOUT_VALUES = {"aggregation_weights", "aggregation_count"}
"""They take a mask and nothing else that could be rubbish."""


OF_RESPONSES = {"grpo_advantages", "dr_grpo_advantages", "rloo_advantages"}
"""Their mask is of whole responses, not of tokens: `tests/unit/rollout/test_abstaining.py` tries them."""


def everything_with_a_mask() -> Iterator[str]:
    for module in pkgutil.iter_modules(functional.__path__):
        found = import_module(f"{functional.__name__}.{module.name}")
        for name, member in vars(found).items():
            public = inspect.isfunction(member) and not name.startswith("_") and member.__module__ == found.__name__
            if public and "mask" in inspect.signature(member).parameters:
                yield name


def test_every_function_that_takes_a_mask_is_tried_below() -> None:
    assert {name.split()[0] for name in CALLS} | WITHOUT_VALUES | OF_RESPONSES == set(everything_with_a_mask())


def draws(dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """Scores of three rows, and four tensors that hold zeros where the mask counts nothing."""
    generator = torch.Generator().manual_seed(3)
    scores, *columns = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in [(3,), *[(3, 6)] * 4])
    return scores, [torch.where(mask(), column, 0.0) for column in columns]


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("name", CALLS)
def test_padding_reaches_neither_value_nor_gradient(name: str, rubbish: float) -> None:
    scores, clean = draws()
    dirty = [torch.where(mask(), column, rubbish).requires_grad_() for column in clean]
    found = CALLS[name](Inputs(mask(), scores, *dirty))
    assert torch.equal(found, CALLS[name](Inputs(mask(), scores, *clean)))
    if not found.requires_grad:
        return
    found.sum().backward()
    gradients = [column.grad for column in dirty if column.grad is not None]
    assert gradients
    for gradient in gradients:
        assert torch.isfinite(gradient).all()
        assert torch.equal(gradient[~mask()], torch.zeros(9, dtype=torch.float64))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """The draws lie off the kinks of the clips, where there is no derivative."""
    scores, columns = draws()
    sources = [column.requires_grad_() for column in columns]
    if not CALLS[name](Inputs(mask(), scores, *sources)).requires_grad:
        assert name == "importance_weights"  # a constant, by definition
        return
    # the diagnostics of the losses are detached: they would count as functions with a wrong gradient
    first = (lambda found: found[0]) if name in ("policy_loss", "value_loss") else (lambda found: found)
    assert torch.autograd.gradcheck(lambda *given: first(CALLS[name](Inputs(mask(), scores, *given))), sources)


@pytest.mark.parametrize(("rows", "width"), [(2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("name", CALLS)
def test_responses_of_no_tokens_and_no_responses_are_no_error(name: str, rows: int, width: int) -> None:
    scores, nothing = torch.ones(rows), torch.zeros(rows, width)
    found = CALLS[name](Inputs(nothing.bool(), scores, *[nothing] * 4))
    if name == "legacy_sequence_reward":  # the score alone
        assert torch.equal(found, scores)
    else:
        assert found.sum().item() == 0.0
    assert found.dim() < 2 or found.shape == nothing.shape


@pytest.mark.parametrize("rows", [2, 0])
def test_what_takes_no_mask_is_no_error_without_tokens_either(rows: int) -> None:
    nothing, scores = torch.zeros(rows, 0), torch.zeros(rows)
    for aggregation in ("token_mean", "sequence_mean", "constant_length"):
        assert aggregation_weights(nothing.bool(), aggregation=aggregation, max_tokens=4).shape == (rows, 0)
        assert aggregation_count(nothing.bool(), aggregation=aggregation).item() == 0.0
    assert logprobs_from_logits(torch.zeros(rows, 0, 5), nothing.long(), temperature=1.0).shape == (rows, 0)
    found = logprobs_and_entropy(torch.zeros(rows, 0, 5), nothing.long(), temperature=1.0, entropy_needs_grad=True)
    assert found.entropy.shape == (rows, 0)
    assert clip_scores(scores, 1.0).shape == (rows,)
    assert pairwise_loss(chosen=scores[:0], rejected=scores[:0], denominator=1).item() == 0.0
    assert grpo_advantages(scores=scores, penalties=scores, group_size=2).shape == (rows,)
    for estimator in (dr_grpo_advantages, rloo_advantages):
        assert estimator(scores=scores, group_size=2).shape == (rows,)
    assert RunningMoments().updated(scores[:0]) == RunningMoments()


HALF = torch.float16
ONE = torch.ones(1, 1, dtype=torch.bool)
MANY = torch.ones(8, 1000, dtype=torch.bool)


def half(*values: float) -> Tensor:
    return torch.tensor([values], dtype=HALF)


def policy_in_half(log_ratio: float, advantage: float, **options: Any) -> tuple[Tensor, Tensor]:
    logprobs = half(log_ratio).requires_grad_()
    found = policy_loss(
        logprobs=logprobs, old_logprobs=half(0.0), advantages=half(advantage), mask=ONE, denominator=8, clip_eps=0.2,
        **options,
    )  # fmt: skip
    found.loss.backward()
    assert logprobs.grad is not None
    assert found.max_ratio.item() == pytest.approx(exp(log_ratio), rel=1e-5)
    return found.loss, logprobs.grad


@pytest.mark.parametrize(
    ("advantage", "options", "loss", "gradient"),
    [
        (1.0, {}, -1.2 / 8, 0.0),  # clipped: 0 * inf would be NaN
        (-1.0, {"dual_clip": 3.0}, 3.0 / 8, 0.0),  # bounded
        (-1.0, {}, exp(12) / 8, exp(12) / 8),  # neither: 20,344, which float16 holds, and e^12, which it does not
        (0.0, {}, 0.0, 0.0),
    ],
)
def test_a_log_ratio_of_12_in_float16(
    advantage: float, options: dict[str, float], loss: float, gradient: float
) -> None:
    found, grad = policy_in_half(12.0, advantage, **options)
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert grad.dtype == HALF
    assert grad.item() == pytest.approx(gradient, rel=1e-3)


IN_HALF: dict[str, tuple[Callable[[], Tensor], float]] = {
    "k3 of -12": (
        lambda: kl(logprobs=half(-12), ref_logprobs=half(0), mask=ONE, estimator="k3"), exp(12) - 1 - 12
    ),
    "k2 of -400": (lambda: kl(logprobs=half(-400), ref_logprobs=half(0), mask=ONE, estimator="k2"), 80_000),
    "a sequence reward": (
        lambda: legacy_sequence_reward(
            scores=torch.zeros(1), logprobs=half(12), ref_logprobs=half(0), mask=ONE, kl_coef=1.0
        ),
        -(exp(12) - 1 - 12),
    ),
    "a high cap": (lambda: importance_weights(logprobs=half(0), behaviour_logprobs=half(-12), mask=ONE, cap=1e5), 1e5),
    "an error of 300": (
        lambda: value_loss(
            values=half(300), old_values=half(300), returns=half(0), mask=ONE, denominator=1, clip_eps=0.2
        ).loss,
        45_000,
    ),
    "entropies of 8,000 tokens": (
        lambda: entropy_bonus(entropy=torch.full((8, 1000), 10.0, dtype=HALF), mask=MANY, denominator=8000), 10
    ),
    "logprobs of 8,000 tokens": (
        lambda: lm_loss(logprobs=torch.full((8, 1000), -10.0, dtype=HALF), mask=MANY, denominator=8000), 10
    ),
    "how many tokens": (
        lambda: masked_sums(torch.ones(70, 1001, dtype=HALF), torch.ones(70, 1001).bool()).count, 70_070
    ),
    "deviations": (lambda: deviation_sum(half(0, 600), torch.ones(1, 2).bool(), mean=300.0), 180_000),
    "scores of a group": (
        lambda: grpo_advantages(scores=half(0, 600)[0], penalties=half(0, 0)[0], group_size=2)[1], 2**-0.5
    ),
    "a mean of values": (
        lambda: legacy_advantages(
            rewards=half(0)[0], values=torch.full((1, 1000), 100.0, dtype=HALF), mask=MANY[:1]
        )[0, 0],
        -100,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_HALF)
def test_float16_does_not_overflow_on_the_way(name: str) -> None:
    call, expected = IN_HALF[name]
    found = call()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_clipped_tokens_are_counted_in_half_precision_too(dtype: torch.dtype) -> None:
    ones, counts = torch.ones(3, 1001, dtype=dtype), torch.ones(3, 1001, dtype=torch.bool)  # bfloat16 rounds 257 to 256
    policy = policy_loss(
        logprobs=ones, old_logprobs=0 * ones, advantages=ones, mask=counts, denominator=1, clip_eps=0.2
    )
    value = value_loss(values=ones, old_values=0 * ones, returns=9 * ones, mask=counts, denominator=1, clip_eps=0.2)
    assert (policy.clipped.item(), value.clipped.item()) == (3003, 3003)


@pytest.mark.parametrize("name", CALLS)
def test_bfloat16_reaches_as_far_as_float32_and_stays(name: str) -> None:
    scores, columns = draws(torch.bfloat16)
    found = CALLS[name](Inputs(mask(), scores, *columns))
    with_count = {"policy_loss", "value_loss"}  # a count beside them is in float32
    assert found.dtype == (torch.float32 if name in with_count else torch.bfloat16)


@pytest.mark.parametrize("name", CALLS)
def test_float64_stays(name: str) -> None:
    scores, columns = draws()
    assert CALLS[name](Inputs(mask(), scores, *columns)).dtype == torch.float64


@pytest.mark.parametrize("form", ["log_sigmoid", "log_exp"])
def test_pairs_in_float64_lose_no_digit(form: Any) -> None:
    chosen, rejected, margin = [0.1, 2.0], [0.3, -1.0], [0.2, 0.7]
    found = pairwise_loss(
        chosen=torch.tensor(chosen).double(), rejected=torch.tensor(rejected).double(), denominator=1, form=form
    )  # fmt: skip
    exact = [torch.tensor(row).double().tolist() for row in (chosen, rejected, margin)]
    differences = [good - bad for good, bad in zip(*exact[:2], strict=True)]
    assert found.item() == pytest.approx(sum(log(1 + exp(-d)) for d in differences), rel=1e-14)
    with_margin = pairwise_loss(
        chosen=torch.tensor(chosen).double(), rejected=torch.tensor(rejected).double(), denominator=1, form=form,
        margin=torch.tensor(margin), centring=0.1,
    )  # fmt: skip
    pulls = sum(0.1 * (good + bad) ** 2 for good, bad in zip(*exact[:2], strict=True))
    held_back = [d - m for d, m in zip(differences, exact[2], strict=True)]
    assert with_margin.item() == pytest.approx(sum(log(1 + exp(-d)) for d in held_back) + pulls, rel=1e-14)


def test_a_mean_over_sequences_in_float64_loses_no_digit() -> None:
    rows = random_rows(1)
    values = torch.where(mask(), 0.0, 1.0).double()
    values[mask()] = torch.tensor(flat(rows)).double()
    weights = aggregation_weights(mask(), aggregation="sequence_mean", max_tokens=1, dtype=torch.float64)
    found = entropy_bonus(entropy=values, mask=mask(), denominator=3, weights=weights)
    singles = [torch.tensor(row).double().tolist() for row in rows]
    assert found.item() == pytest.approx(sum(sum(row) / len(row) for row in singles) / len(LENGTHS), rel=1e-14)
    assert_close(weights.sum(dim=1), torch.ones(3).double())
