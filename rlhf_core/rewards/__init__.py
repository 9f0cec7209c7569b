"""Who judges responses: reward functions in a process of their own, the verifier, a trained reward model.

The names below are loaded when they are first used: the process that runs reward functions imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.rewards.functions import gsm8k_reward_fn, math_competition_reward_fn
    from rlhf_core.rewards.model import RLVRRewardModel
    from rlhf_core.rewards.resolve import RewardFunction, resolve_reward_function
    from rlhf_core.rewards.scoring import Scorer, Scores, ScoringBatch, build_scorer
    from rlhf_core.rewards.structure import validate_response_structure

__all__ = [
    "RLVRRewardModel",
    "RewardFunction",
    "Scorer",
    "Scores",
    "ScoringBatch",
    "build_scorer",
    "gsm8k_reward_fn",
    "math_competition_reward_fn",
    "resolve_reward_function",
    "validate_response_structure",
]

_HOMES = {
    "RLVRRewardModel": "rlhf_core.rewards.model",
    "RewardFunction": "rlhf_core.rewards.resolve",
    "Scorer": "rlhf_core.rewards.scoring",
    "Scores": "rlhf_core.rewards.scoring",
    "ScoringBatch": "rlhf_core.rewards.scoring",
    "build_scorer": "rlhf_core.rewards.scoring",
    "gsm8k_reward_fn": "rlhf_core.rewards.functions",
    "math_competition_reward_fn": "rlhf_core.rewards.functions",
    "resolve_reward_function": "rlhf_core.rewards.resolve",
    "validate_response_structure": "rlhf_core.rewards.structure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
