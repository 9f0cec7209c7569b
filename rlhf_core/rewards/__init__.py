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
    from rlhf_core.rewards.verifying import Answered, Judge, Verdict, build_judge, judge_facts, judge_of, verifier_name

__all__ = [
    "Answered",
    "Judge",
    "RLVRRewardModel",
    "RewardFunction",
    "Scorer",
    "Scores",
    "ScoringBatch",
    "Verdict",
    "build_judge",
    "build_scorer",
    "gsm8k_reward_fn",
    "judge_facts",
    "judge_of",
    "math_competition_reward_fn",
    "resolve_reward_function",
    "validate_response_structure",
    "verifier_name",
]

_HOMES = {
    "Answered": "rlhf_core.rewards.verifying",
    "Judge": "rlhf_core.rewards.verifying",
    "RLVRRewardModel": "rlhf_core.rewards.model",
    "RewardFunction": "rlhf_core.rewards.resolve",
    "Scorer": "rlhf_core.rewards.scoring",
    "Scores": "rlhf_core.rewards.scoring",
    "ScoringBatch": "rlhf_core.rewards.scoring",
    "Verdict": "rlhf_core.rewards.verifying",
    "build_judge": "rlhf_core.rewards.verifying",
    "build_scorer": "rlhf_core.rewards.scoring",
    "gsm8k_reward_fn": "rlhf_core.rewards.functions",
    "judge_facts": "rlhf_core.rewards.verifying",
    "judge_of": "rlhf_core.rewards.verifying",
    "math_competition_reward_fn": "rlhf_core.rewards.functions",
    "resolve_reward_function": "rlhf_core.rewards.resolve",
    "validate_response_structure": "rlhf_core.rewards.structure",
    "verifier_name": "rlhf_core.rewards.verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
