"""The example of another algorithm in the documents: two methods are written, and the policy learns from groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from torch import Tensor, nn

from rlhf_core.coati.callbacks import TrainerCallback
from rlhf_core.coati.detached.scheduled_fit import DealingOptions
from rlhf_core.config import PPOOptions
from rlhf_core.types import Experience
from tests.integration.detached_models import actor, batches, cluster, end, maker, notes, run

pytestmark = pytest.mark.integration

DOCUMENT = Path(__file__).parents[2] / "docs" / "detached.md"
TEXTS = [f"{number}+{number}" for number in range(8)]  # of one length: no padding
EPISODES = 12
LIKED = 128
"""Tokens below this are liked: half of all."""


class Likes(nn.Module):
    """Scores a sequence by its liked tokens; those of the prompt are the same for all of a group."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return ((input_ids < LIKED) & attention_mask.bool()).float().sum(dim=1)


class Shares(TrainerCallback):
    """Writes the share of liked tokens of each batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        drawn = experience.sequences[:, -experience.num_actions :][experience.action_mask]
        with self._path.open("a") as file:
            file.write(f'{{"share": {(drawn < LIKED).float().mean().item()}, "loss": {metrics["loss"]}}}\n')


@pytest.fixture(scope="module", autouse=True)
def on_a_cluster(tmp_path_factory: pytest.TempPathFactory, forked: dict[str, str]) -> Iterator[None]:
    with patch.dict(os.environ, forked), cluster(tmp_path_factory.mktemp("clusters")):
        yield


def four() -> tuple[Any, Any, Any, Any]:
    return actor(), None, Likes(), actor()


def documented() -> Any:
    (block,) = [
        each for each in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S) if "GRPOTrainer" in each
    ]
    names: dict[str, Any] = {"__name__": "__main__"}  # Ray then sends the class, not where to import it
    exec(block, names)
    return names["GRPOTrainer"]


def test_the_documented_trainer_learns_what_the_reward_model_likes(tmp_path: Path) -> None:
    options = PPOOptions(advantage_estimator="grpo", samples_per_prompt=4, dtype="float32", rollout_dtype="float32")
    handle = maker("maker_0", ["grpo"], model_fn=four, options=options, kl_coef=0.0, sync_models_from_trainers=True)
    trainer = documented().options(name="grpo", num_cpus=0).remote(
        ["maker_0"], train_batch_size=8, callbacks=[Shares(tmp_path / "shares")], actor_fn=actor, lr=3e-3,
        dealing=DealingOptions(start_timeout_s=300.0, max_staleness=1),
    )  # fmt: skip
    ray.get(trainer.sync_models_to_remote_makers.remote(shard_size=10_000), timeout=300)
    run([trainer], [handle], lambda: batches(TEXTS, 8), [EPISODES], EPISODES * 4, 4)
    shares = [each["share"] for each in notes(tmp_path / "shares")]
    assert len(shares) == EPISODES * 4
    first, last = torch.tensor(shares[:4]).mean(), torch.tensor(shares[-4:]).mean()
    assert last > first + 0.2, shares
    figures = ray.get(trainer.figures.remote(), timeout=60)
    assert figures["version"] == EPISODES
    assert 0 <= figures["staleness"] <= 1
    assert figures["chunks/issued"] == figures["chunks/learnt"] == EPISODES
    end(trainer, handle)
