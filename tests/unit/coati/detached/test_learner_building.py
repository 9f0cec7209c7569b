"""A learner over the models that coati's `model_fn` returns."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.coati.detached.building import LearningOptions, build_learner
from rlhf_core.coati.strategy import make_strategy
from rlhf_core.config import PPOOptions
from rlhf_core.errors import ModelError
from tests.tiny_llama import tiny_llama


def test_a_model_in_half_precision_is_refused_before_small_steps_vanish_in_it() -> None:
    strategy = make_strategy("plain", device="cpu", seed=3)
    actor = tiny_llama().to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"trainable weights must be float32, got torch.bfloat16 for model\.embed"):
        build_learner(strategy, lambda: (actor, None), LearningOptions(), PPOOptions(), seed=3)
