"""Small files of data, and what makes a preset small enough for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.data.read_sets import CHATML, SIZES

SMALL: dict[str, Any] = {
    "data.splits": SIZES,
    "data.heldout_fraction": 0.25,
    "reward_model.pairs": 12,
    "template": {"prompt": CHATML},
    "ppo.prompts_per_episode": 8,
    "ppo.chunk_size": 8,
    "ppo.train_batch_size": 8,
    "ppo.micro_batch_size": 8,
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
