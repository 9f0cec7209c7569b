"""What OpenRLHF computes. Its modules import DeepSpeed and a Ray launcher, of which this arithmetic needs nothing.

They are replaced by empty modules while it is imported, and `torch.compile` is switched off.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.reference.peer_trl import CLIP_EPS, CLIP_HIGH, DUAL_CLIP, GAMMA, KL_COEF, LAM, VALUE_CLIP
from tests.reference.peers import Inputs, with_gradient

IMPORTANCE_CAP = 1.5
REWARD_CLIP = 0.5
KL_CONTROL = {"kl_coef": 0.1, "target": 6.0, "horizon": 1000, "samples": 64, "observed": [2.0, 6.6, 30.0]}


def answers(inputs: Inputs) -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")
    _import_without_its_servers()
    from openrlhf.models import loss, utils
    from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

    mask, new, reference = inputs["mask"], inputs["logprobs"], inputs["ref_logprobs"]
    chosen, rejected, margin = inputs["scores"], inputs["rejected"], inputs["margin"]
    kl = {name: utils.compute_approx_kl(new, reference, kl_estimator=name) * mask for name in ("k1", "k2", "k3")}
    controlled = []
    for observed in KL_CONTROL["observed"]:
        controller = AdaptiveKLController(KL_CONTROL["kl_coef"], KL_CONTROL["target"], KL_CONTROL["horizon"])
        controller.update(observed, KL_CONTROL["samples"])
        controlled.append(float(controller.value))
    return {
        "logprobs": utils.log_probs_from_logits(inputs["logits"].clone(), inputs["tokens"], temperature=0.7),
        "entropy": utils.compute_entropy(inputs["logits"]),
        "kl": kl,
        "adaptive_kl_coef": controlled,
        "rewards": utils.compute_reward(chosen, KL_COEF, kl["k1"], action_mask=mask),
        "clipped_rewards": utils.compute_reward(
            chosen, KL_COEF, kl["k1"], action_mask=mask, reward_clip_range=(-REWARD_CLIP, REWARD_CLIP)
        ),
        "gae": _gae(inputs),
        "policy": {
            "token_mean": _policy_loss(inputs, token_level_loss=True),
            "sequence_mean": _policy_loss(inputs, token_level_loss=False),
            "dual_clip": _policy_loss(inputs, dual_clip=DUAL_CLIP),
            "truncated_importance": _policy_loss(
                inputs, is_correction_level="token", is_correction_mode="clip",
                is_correction_threshold=[0.0, IMPORTANCE_CAP],
            ),
        },
        "value": _value_loss(inputs),
        "pairwise": loss.PairWiseLoss()(chosen, rejected),
        "pairwise_margin": loss.PairWiseLoss()(chosen, rejected, margin),
        "log_exp": loss.LogExpLoss()(chosen, rejected),
        "lm": loss.SFTLoss()(inputs["logprobs"], mask.float()),
        "group": {name: _advantages(inputs, name) for name in ("group_norm", "dr_grpo", "rloo")},
        "reinforce": _advantages(inputs, "reinforce", samples_per_prompt=1, kl_coef=KL_COEF),
    }  # fmt: skip


def _import_without_its_servers() -> None:
    for name in ("deepspeed", "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher"):
        sys.modules[name] = MagicMock(name=name)
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("models", "trainer", "trainer.ppo_utils", "utils"):
        package = ModuleType(f"openrlhf.{name}")  # their __init__ would import everything
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[package.__name__] = package


def _policy_loss(inputs: Inputs, **options: Any) -> dict[str, Any]:
    from openrlhf.models.loss import PolicyLoss

    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss, clip_fraction, *_ = PolicyLoss(clip_eps_low=CLIP_EPS, clip_eps_high=CLIP_HIGH, **options)(
        logprobs,
        inputs["old_logprobs"],
        inputs["advantages"],
        action_mask=inputs["mask"].float(),
        rollout_log_probs=inputs["rollout_logprobs"],
    )
    return with_gradient(loss, logprobs) | {"clip_fraction": clip_fraction.item()}


def _value_loss(inputs: Inputs) -> dict[str, Any]:
    from openrlhf.models.loss import ValueLoss

    values = inputs["values"].clone().requires_grad_()
    loss = ValueLoss(clip_eps=VALUE_CLIP)(values, inputs["old_values"], inputs["returns"], inputs["mask"].float())
    return with_gradient(loss, values)


def _gae(inputs: Inputs) -> dict[str, Any]:
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    advantages, returns = RemoteExperienceMaker.get_advantages_and_returns(
        None, inputs["values"], inputs["rewards"], inputs["mask"], GAMMA, LAM
    )
    return {"advantages": advantages, "returns": returns}


def _advantages(inputs: Inputs, estimator: str, *, samples_per_prompt: int = 2, kl_coef: float = 0.0) -> dict[str, Any]:
    """Run the whole of its step from scores to advantages; the reinforce estimator whitens at its end."""
    from openrlhf.trainer.ppo_utils import experience_maker

    experience_maker.apply_length_penalties = MagicMock()
    maker = experience_maker.RemoteExperienceMaker.__new__(experience_maker.RemoteExperienceMaker)
    maker.advantage_estimator = estimator
    maker.kl_ctl = SimpleNamespace(value=kl_coef)
    maker.strategy = SimpleNamespace(
        args=SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=samples_per_prompt),
            reward=SimpleNamespace(clip_range=None),
            algo=SimpleNamespace(
                advantage=SimpleNamespace(
                    estimator=estimator, gamma=GAMMA if estimator == "reinforce" else 1.0, lambd=LAM, no_std_norm=False
                )
            ),
        )
    )
    difference = torch.where(inputs["mask"], inputs["logprobs"] - inputs["ref_logprobs"], 0.0)
    experience = SimpleNamespace(
        index=list(range(len(inputs["scores"]))),
        rewards=inputs["scores"],
        kl=difference,
        action_mask=inputs["mask"],
        values=inputs["values"],
        info={},
    )
    maker.compute_advantages_and_returns([experience])
    return {"advantages": experience.advantages, "returns": experience.returns}
