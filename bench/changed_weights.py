"""What share of the published values changes from one version to the next; one JSON line.

    python bench/changed_weights.py [--episodes 4] [--only adapters,all_weights]

Real PPO episodes of SmolLM2-135M in one process, with adapters at the quickstart's rates or with all weights at those
of PPOConfig. After each the weights are cast to bfloat16, adapters merged, as makers without adapters get them, and
held against those of the episode before. `changed`: share of values, by episode after the first. `sparse`: bytes of a
lossless update over those of a full publication, with 32-bit indices and with a bit for each value; of the last
episode.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from torch import Tensor

from bench.storage import episodes
from infra.settings import settings
from rlhf_core.models.loading import locate_model
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.published_weights import published_weights

VALUE, INDEX, BIT = 2, 4, 1 / 8
"""Bytes."""


def published(learner: PPOLearner) -> dict[str, Tensor]:
    """Return all weights as makers are sent them, but for heads, as copies."""
    weights = published_weights(learner, torch.bfloat16)
    return {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in weights if ".head." not in name}


def changed_share(former: dict[str, Tensor], latter: dict[str, Tensor]) -> float:
    """Return the share of values whose bits differ."""
    bits = (
        (tensor.view(torch.int16) != latter[name].view(torch.int16)).sum().item() for name, tensor in former.items()
    )
    return sum(bits) / sum(tensor.numel() for tensor in former.values())


def measure(what: str, count: int) -> dict[str, Any]:
    """Return the figures of one kind of training."""
    config = episodes.config_of(what)
    start = locate_model(config.model.path, models_dir=settings().models_dir)
    former: dict[str, Tensor] = {}
    shares = []
    for number, (learner, _) in enumerate(episodes.learners(start, config, count), start=1):
        latter = published(learner)
        if former:
            shares.append(round(changed_share(former, latter), 4))
            sys.stderr.write(f"{what}: episode {number} changed {shares[-1]:.4f} of the values\n")
        former = latter
    last = shares[-1]
    sparse = {"index": round(last * (VALUE + INDEX) / VALUE, 3), "bits": round((BIT + last * VALUE) / VALUE, 3)}
    return {"lr": config.ppo.lr, "changed": shares, "sparse": sparse}


def main() -> int:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4, help="of each run, at least 2")
    parser.add_argument("--only", default="adapters,all_weights", help="what is trained, with commas between them")
    given = parser.parse_args()
    line: dict[str, Any] = {"bench": "changed_weights", "load": round(os.getloadavg()[0], 1)}
    for what in given.only.split(","):
        line[what] = measure(what, given.episodes)
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
