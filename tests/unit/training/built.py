"""Learners and supervised runs whose boosters are those that a test wants, whatever the strategy is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from rlhf_core.config import PPOConfig
from rlhf_core.ppo import learner as learner_module
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.booster import OwnBooster
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.supervised import step as step_module
from rlhf_core.training import boosted

MakeBooster = Callable[[Any, float | None, Ranks | None], OwnBooster]


@contextmanager
def boosters(make: MakeBooster) -> Iterator[None]:
    """Run the block with every trainer's boosters made by `make` of precision, largest norm and ranks."""

    def made(_: str, *, dtype: torch.dtype, max_norm: float, ranks: Ranks | None, **__: object) -> OwnBooster:
        return make(boosted.PRECISIONS[dtype], max_norm, ranks)

    with (
        patch.object(learner_module, "strategy_booster", made),
        patch.object(step_module, "strategy_booster", made),
    ):
        yield


def built(actor: Any, critic: Any, config: PPOConfig, **options: Any) -> PPOLearner:
    """Return a learner; also in float16, which is slow on a CPU and refused to users, but exact enough to compare."""
    if config.dtype != "float16":
        return PPOLearner.build(actor, critic, config, device="cpu", **options)
    with boosters(PlainBooster):
        return PPOLearner.build(actor, critic, config, device="cpu", **options)
