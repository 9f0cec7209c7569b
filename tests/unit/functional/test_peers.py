"""Our numbers beside those of TRL 1.12.0 and OpenRLHF 0.11.2, which `tests/reference/peers.py` wrote down.

Where a convention differs, the test names the difference and turns one number into the other by hand.
"""

from __future__ import annotations

import json
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.functional.advantages import (
    clip_scores,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    token_rewards,
)
from rlhf_core.functional.kl import KLEstimator, adaptive_kl_coef, kl
from rlhf_core.functional.logprobs import logprobs_and_entropy, logprobs_from_logits
from rlhf_core.functional.losses import lm_loss, pairwise_loss, policy_loss, value_loss
from rlhf_core.functional.weights import (
    Aggregation,
    aggregation_count,
    aggregation_weights,
    importance_weights,
)
from tests.reference.peer_openrlhf import IMPORTANCE_CAP, KL_CONTROL, REWARD_CLIP
from tests.reference.peer_trl import (
    CLIP_EPS,
    CLIP_HIGH,
    DUAL_CLIP,
    GAMMA,
    KL_COEF,
    LAM,
    MAX_TOKENS,
    VALUE_CLIP,
)
from tests.reference.peers import GOLDEN, LENGTHS
from tests.unit.functional.ragged import assert_close, whitened

FOUND = json.loads(GOLDEN.read_text())
INPUTS = {name: torch.tensor(value) for name, value in FOUND["inputs"].items()}
TRL, OPENRLHF = FOUND["trl"], FOUND["openrlhf"]
MASK, TOKENS = INPUTS["mask"], sum(LENGTHS)


def on_tokens(numbers: Any) -> Tensor:
    """What a peer leaves on padding is its own affair."""
    return torch.where(MASK, torch.tensor(numbers), 0.0)


def divergence(estimator: KLEstimator) -> Tensor:
    return kl(logprobs=INPUTS["logprobs"], ref_logprobs=INPUTS["ref_logprobs"], mask=MASK, estimator=estimator)


def check_policy(
    expected: dict[str, Any], *, aggregation: Aggregation = "token_mean", high: float = CLIP_HIGH, **options: Any
) -> None:
    logprobs = INPUTS["logprobs"].clone().requires_grad_()
    found = policy_loss(
        logprobs=logprobs,
        old_logprobs=INPUTS["old_logprobs"],
        advantages=INPUTS["advantages"],
        mask=MASK,
        denominator=aggregation_count(MASK, aggregation=aggregation),
        clip_eps=CLIP_EPS,
        clip_eps_high=high,
        weights=aggregation_weights(MASK, aggregation=aggregation, max_tokens=MAX_TOKENS),
        **options,
    )
    found.loss.backward()
    assert_close(found.loss.detach(), torch.tensor(expected["loss"]))
    assert_close(logprobs.grad, torch.tensor(expected["gradient"]))
    if "clip_fraction" in expected and aggregation == "token_mean" and "dual_clip" not in options:
        assert_close(found.clipped / TOKENS, torch.tensor(expected["clip_fraction"]))


def test_logprobs_and_entropy_are_theirs() -> None:
    found = logprobs_and_entropy(INPUTS["logits"], INPUTS["tokens"], temperature=1.0, entropy_needs_grad=False)
    assert_close(found.logprobs, torch.tensor(TRL["logprobs"]))
    assert_close(found.entropy, torch.tensor(TRL["entropy"]))
    assert_close(found.entropy, torch.tensor(OPENRLHF["entropy"]))
    cooler = logprobs_from_logits(INPUTS["logits"], INPUTS["tokens"], temperature=0.7)
    assert_close(cooler, torch.tensor(OPENRLHF["logprobs"]))


def test_kl_estimates_are_theirs() -> None:
    for estimator in ("k1", "k3"):
        assert_close(divergence(estimator), on_tokens(TRL["rewards"][f"kl_{estimator}"]))
    for estimator in ("k1", "k2", "k3"):  # OpenRLHF cuts at 10, which nothing here reaches
        assert_close(divergence(estimator), on_tokens(OPENRLHF["kl"][estimator]))


def test_the_adaptive_coefficient_is_theirs() -> None:
    for observed, expected in zip(KL_CONTROL["observed"], OPENRLHF["adaptive_kl_coef"], strict=True):
        found = adaptive_kl_coef(
            KL_CONTROL["kl_coef"],
            observed_kl=observed,
            target=KL_CONTROL["target"],
            samples=KL_CONTROL["samples"],
            horizon=KL_CONTROL["horizon"],
        )
        assert found == pytest.approx(expected, rel=1e-12)


def test_rewards_are_openrlhfs() -> None:
    for name, scores in (
        ("rewards", INPUTS["scores"]),
        ("clipped_rewards", clip_scores(INPUTS["scores"], REWARD_CLIP)),
    ):
        found = token_rewards(scores=scores, kl=divergence("k1"), mask=MASK, kl_coef=KL_COEF)
        assert_close(found, torch.tensor(OPENRLHF[name]))


def test_trl_pays_the_score_one_token_after_the_last_unless_the_row_is_full() -> None:
    for estimator in ("k1", "k3"):
        found = token_rewards(scores=INPUTS["scores"], kl=divergence(estimator), mask=MASK, kl_coef=KL_COEF)
        theirs = torch.tensor(TRL["rewards"][f"rewards_{estimator}"])
        for row, length in enumerate(LENGTHS):
            if length < MASK.shape[1]:
                theirs[row, length - 1] += theirs[row, length]
                theirs[row, length] = 0.0
        assert_close(found, theirs)


def test_advantages_and_returns_are_theirs() -> None:
    found = gae(rewards=INPUTS["rewards"], values=INPUTS["values"], mask=MASK, gamma=GAMMA, lam=LAM)
    for peer in (TRL["gae"], OPENRLHF["gae"]):
        assert_close(found, torch.tensor(peer["advantages"]))
        assert_close(found + INPUTS["values"], torch.tensor(peer["returns"]))


def test_trl_whitens_with_one_less_in_the_divisor() -> None:
    found = whitened(INPUTS["advantages"], MASK)
    assert_close(found * sqrt((TOKENS - 1) / TOKENS), on_tokens(TRL["whitened"]))


def test_reinforce_pp_whitened_is_openrlhfs_reinforce() -> None:
    rewards = token_rewards(scores=INPUTS["scores"], kl=divergence("k1"), mask=MASK, kl_coef=KL_COEF)
    found = reinforce_pp_advantages(rewards=rewards, mask=MASK, gamma=GAMMA)
    assert_close(found, torch.tensor(OPENRLHF["reinforce"]["returns"]))
    assert_close(whitened(found, MASK), on_tokens(OPENRLHF["reinforce"]["advantages"]))


def test_group_advantages_are_theirs() -> None:
    scores = INPUTS["scores"]
    plain = dr_grpo_advantages(scores=scores, group_size=2)
    assert_close(plain, torch.tensor(TRL["dr_grpo_advantages"]))
    # OpenRLHF spreads them over the tokens; the first token of each row is always one
    assert_close(plain, torch.tensor(OPENRLHF["group"]["dr_grpo"]["advantages"])[:, 0])
    leave_one_out = rloo_advantages(scores=scores, group_size=2)
    assert_close(leave_one_out, torch.tensor(OPENRLHF["group"]["rloo"]["advantages"])[:, 0])


def test_grpo_differs_in_what_is_added_to_the_deviation() -> None:
    scores = INPUTS["scores"]
    found = grpo_advantages(scores=scores, penalties=torch.zeros(4), group_size=2)
    deviation = scores.view(2, 2).std(dim=1).repeat_interleave(2)  # ours adds 1e-6, TRL 1e-4, OpenRLHF 1e-9
    assert_close(found * (deviation + 1e-6) / (deviation + 1e-4), torch.tensor(TRL["grpo_advantages"]))
    theirs = torch.tensor(OPENRLHF["group"]["group_norm"]["advantages"])[:, 0]
    assert_close(found * (deviation + 1e-6) / (deviation + 1e-9), theirs)
    # They add KL to the loss; here each response pays for its own beyond its group's mean, not divided by anything.
    penalties = KL_COEF * divergence("k1").sum(dim=1)
    means = penalties.view(2, 2).mean(dim=1).repeat_interleave(2)
    assert_close(grpo_advantages(scores=scores, penalties=penalties, group_size=2), found - (penalties - means))


def test_rloo_compares_scores_after_the_penalty_as_trl_does() -> None:
    penalised = INPUTS["scores"] - KL_COEF * divergence("k1").sum(dim=1)
    found = rloo_advantages(scores=penalised, group_size=2)
    assert_close(found, torch.tensor(TRL["rloo_advantages"]))


def test_the_ppo_policy_loss_and_its_gradient_are_theirs() -> None:
    check_policy(TRL["ppo"]["policy"], high=CLIP_EPS)
    check_policy(OPENRLHF["policy"]["token_mean"])
    check_policy(OPENRLHF["policy"]["sequence_mean"], aggregation="sequence_mean")


def test_the_inputs_reach_every_clip() -> None:
    plain, *others = (OPENRLHF["policy"][name]["loss"] for name in ("token_mean", "dual_clip", "truncated_importance"))
    assert OPENRLHF["policy"]["token_mean"]["clip_fraction"] > 0.2
    assert all(abs(other - plain) > 1e-3 for other in others)
    assert TRL["ppo"]["value"]["clip_fraction"] > 0.1


def test_the_dual_clip_is_theirs() -> None:
    check_policy(OPENRLHF["policy"]["dual_clip"], dual_clip=DUAL_CLIP)
    check_policy(TRL["dual_clip_loss"], dual_clip=DUAL_CLIP)  # TRL bounds the ratio of gains too, which is clipped


def test_aggregations_are_trls_loss_types() -> None:
    check_policy(TRL["grpo_loss"]["grpo"], aggregation="sequence_mean")
    check_policy(TRL["grpo_loss"]["bnpo"], aggregation="token_mean")
    check_policy(TRL["grpo_loss"]["dr_grpo"], aggregation="constant_length")


def test_truncated_importance_weights_are_openrlhfs() -> None:
    importance = importance_weights(
        logprobs=INPUTS["old_logprobs"],
        behaviour_logprobs=INPUTS["rollout_logprobs"],
        mask=MASK,
        cap=IMPORTANCE_CAP,
    )
    check_policy(OPENRLHF["policy"]["truncated_importance"], importance=importance)


def test_the_value_loss_and_its_gradient_are_theirs() -> None:
    for expected in (TRL["ppo"]["value"], OPENRLHF["value"]):
        values = INPUTS["values"].clone().requires_grad_()
        found = value_loss(
            values=values,
            old_values=INPUTS["old_values"],
            returns=INPUTS["returns"],
            mask=MASK,
            denominator=TOKENS,
            clip_eps=VALUE_CLIP,
        )
        found.loss.backward()
        assert_close(found.loss.detach(), torch.tensor(expected["loss"]))
        assert_close(values.grad, torch.tensor(expected["gradient"]))
    assert_close(found.clipped / TOKENS, torch.tensor(TRL["ppo"]["value"]["clip_fraction"]))


def test_the_other_losses_are_openrlhfs() -> None:
    pair = {"chosen": INPUTS["scores"], "rejected": INPUTS["rejected"], "denominator": 4}
    assert_close(pairwise_loss(**pair), torch.tensor(OPENRLHF["pairwise"]))
    assert_close(pairwise_loss(**pair, margin=INPUTS["margin"]), torch.tensor(OPENRLHF["pairwise_margin"]))
    assert_close(pairwise_loss(**pair, form="log_exp"), torch.tensor(OPENRLHF["log_exp"]))
    found = lm_loss(logprobs=INPUTS["logprobs"], mask=MASK, denominator=TOKENS)
    assert_close(found, torch.tensor(OPENRLHF["lm"]))
