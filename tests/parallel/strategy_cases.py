"""What each strategy is held to on every rank: steps, bytes, checkpoints, adapters."""

from __future__ import annotations

from rlhf_core.strategy.ranks import Ranks
from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found


def steps(ranks: Ranks, stage: str, strategy: str, precision: str) -> Found:
    """Five steps of all weights."""
    return stages.STAGES[stage](ranks, strategy, precision)


def adapter_steps(ranks: Ranks, stage: str, strategy: str, precision: str) -> Found:
    """Five steps of adapters alone; in PPO of the critic's head too."""
    return stages.STAGES[stage](ranks, strategy, precision, lora=stages.LORA)
