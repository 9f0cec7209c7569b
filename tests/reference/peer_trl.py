"""What TRL computes. Most of its arithmetic stands in the middle of long methods: those lines are run where they are.

`lines_between` cuts the lines out of the installed source by what they begin with, and runs them on our inputs; none
of them is kept here.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.reference.peers import Inputs, with_gradient

CLIP_EPS, CLIP_HIGH, DUAL_CLIP, VALUE_CLIP, KL_COEF, GAMMA, LAM = 0.2, 0.3, 1.4, 0.2, 0.1, 0.9, 0.8
MAX_TOKENS = 8


def answers(inputs: Inputs) -> dict[str, Any]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.ppo import ppo_trainer
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return {
        "logprobs": selective_log_softmax(inputs["logits"], inputs["tokens"]),
        "entropy": entropy_from_logits(inputs["logits"]),
        "whitened": ppo_trainer.masked_whiten(inputs["advantages"], inputs["mask"]),
        "rewards": _rewards(inputs),
        "gae": _gae(inputs),
        "ppo": _ppo_losses(inputs),
        "grpo_advantages": _grpo_advantages(inputs, "group"),
        "dr_grpo_advantages": _grpo_advantages(inputs, "none"),
        "rloo_advantages": _rloo_advantages(inputs),
        "grpo_loss": {kind: _grpo_loss(inputs, kind) for kind in ("grpo", "bnpo", "dr_grpo")},
        "dual_clip_loss": _grpo_loss(inputs, "bnpo", delta=DUAL_CLIP),
    }


def lines_between(function: Callable[..., Any], first: str, last: str) -> str:
    """Return the function's lines from the one that begins with `first` to before the one that begins with `last`."""
    lines = inspect.getsource(function).splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith(first))
    end = next(n for n, line in enumerate(lines) if n > start and line.strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start:end]))


def run_lines(function: Callable[..., Any], first: str, last: str, names: dict[str, Any]) -> dict[str, Any]:
    scope = {**function.__globals__, **names}
    exec(lines_between(function, first, last), scope)
    return scope


def _sequence_lengths(inputs: Inputs) -> Tensor:
    return inputs["mask"].sum(dim=1) - 1  # TRL's name for the index of the last token


def _ppo_train() -> Callable[..., Any]:
    from trl.experimental.ppo.ppo_trainer import PPOTrainer

    return PPOTrainer.train


def _rewards(inputs: Inputs) -> dict[str, Tensor]:
    lengths = _sequence_lengths(inputs)
    padding = ~inputs["mask"]
    found = {}
    for estimator in ("k1", "k3"):
        scope = run_lines(
            _ppo_train(), "# 4. compute rewards", "# 5. whiten rewards",
            {
                "logprobs": inputs["logprobs"].masked_fill(padding, 1.0),
                "ref_logprobs": inputs["ref_logprobs"].masked_fill(padding, 1.0),
                "args": SimpleNamespace(kl_estimator=estimator, kl_coef=KL_COEF),
                "sequence_lengths": lengths,
                "sequence_lengths_p1": lengths + 1,
                "scores": inputs["scores"],
            },
        )  # fmt: skip
        found |= {f"kl_{estimator}": scope["kl"], f"rewards_{estimator}": scope["rewards"]}
    return found


def _gae(inputs: Inputs) -> dict[str, Tensor]:
    scope = run_lines(
        _ppo_train(), "# 6. compute advantages", "advantages = masked_whiten",
        {
            "responses": inputs["tokens"],
            "values": inputs["values"],
            "rewards": inputs["rewards"],
            "args": SimpleNamespace(gamma=GAMMA, lam=LAM),
        },
    )  # fmt: skip
    return {"advantages": scope["advantages"], "returns": scope["returns"]}


def _ppo_losses(inputs: Inputs) -> dict[str, Any]:
    logprobs, values = inputs["logprobs"].clone().requires_grad_(), inputs["values"].clone().requires_grad_()
    padding = ~inputs["mask"]
    names = {
        "vpred": values,
        "mb_values": inputs["old_values"],
        "mb_return": inputs["returns"],
        "new_logprobs": logprobs,
        "mb_logprobs": inputs["old_logprobs"],
        "mb_advantage": inputs["advantages"],
        "padding_mask": padding,
        "padding_mask_p1": padding,  # TRL counts one state more, that after the last token; not here
        "micro_batch_inds": slice(None),
        "args": SimpleNamespace(cliprange=CLIP_EPS, cliprange_value=VALUE_CLIP),
    }
    scope = run_lines(_ppo_train(), "vpredclipped = torch.clamp(", "loss = pg_loss", names)
    policy = with_gradient(scope["pg_loss"], logprobs)
    value = with_gradient(scope["vf_loss"], values)
    scope = run_lines(_ppo_train(), "pg_clipfrac = masked_mean(", "prob_dist", scope)
    return {
        "policy": policy | {"clip_fraction": scope["pg_clipfrac"]},
        "value": value | {"clip_fraction": scope["vf_clipfrac"]},
    }


def _grpo_advantages(inputs: Inputs, scale: str) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    scope = run_lines(
        GRPOTrainer._generate_and_score_completions,
        "mean_grouped_rewards = torch.nanmean(", "is_std_zero",
        {
            "rewards": inputs["scores"],
            "num_generations": 2,
            "self": SimpleNamespace(scale_rewards=scale),
        },
    )  # fmt: skip
    return scope["advantages"]


def _rloo_advantages(inputs: Inputs) -> Tensor:
    from trl.trainer.rloo_trainer import RLOOTrainer

    scope = run_lines(
        RLOOTrainer._generate_and_score_completions,
        "# Include the KL penalty in the reward", "# Normalize advantages",
        {
            "old_per_token_logps": inputs["logprobs"],
            "ref_per_token_logps": inputs["ref_logprobs"],
            "completion_mask": inputs["mask"],
            "gather": lambda kl: kl,
            "rewards": inputs["scores"],
            "num_generations": 2,
            "self": SimpleNamespace(beta=KL_COEF),
        },
    )  # fmt: skip
    return scope["advantages"]


def _grpo_loss(inputs: Inputs, kind: str, delta: float | None = None) -> dict[str, Any]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs = inputs["logprobs"].clone().requires_grad_()
    trainer = SimpleNamespace(
        importance_sampling_level="token",
        beta=0.0,
        loss_type=kind,
        epsilon_low=CLIP_EPS,
        epsilon_high=CLIP_HIGH,
        args=SimpleNamespace(delta=delta),
        off_policy_mask_threshold=None,
        use_vllm=False,
        model=SimpleNamespace(training=False),
        max_completion_length=MAX_TOKENS,
    )
    scope = run_lines(
        GRPOTrainer._compute_loss, "log_ratio = per_token_logps", "# Entropy bonus",
        {
            "per_token_logps": logprobs,
            "old_per_token_logps": inputs["old_logprobs"],
            "advantages": inputs["advantages"],
            "mask": inputs["mask"].float(),
            "entropy_mask": None,
            "inputs": {},
            "self": trainer,
        },
    )  # fmt: skip
    return with_gradient(scope["loss"], logprobs)
