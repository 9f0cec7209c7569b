"""Experience of a tiny model with every number chosen, in rows of different lengths."""

from __future__ import annotations

import torch

from rlhf_core.types import Experience

PROMPTS = [[5, 6, 7], [8, 9], [10], [11, 12, 13], [14, 15], [16, 17, 18], [19], [20, 21]]
RESPONSES = [[30, 31, 2], [32, 2], [33, 34, 35, 2], [2], [36, 2], [37, 38, 39, 40], [41, 42, 2], [43, 2]]
TOKENS = sum(map(len, RESPONSES))


def tiny_experience(seed: int = 0, *, rubbish: float = 0.0) -> Experience:
    """Eight rows; `rubbish` fills the padding of all float fields."""
    prompt, actions = max(map(len, PROMPTS)), max(map(len, RESPONSES))
    rows, attended = [], []
    for p, r in zip(PROMPTS, RESPONSES, strict=True):
        left, right = prompt - len(p), actions - len(r)
        rows.append([0] * left + p + r + [0] * right)
        attended.append([False] * left + [True] * (len(p) + len(r)) + [False] * right)
    mask = torch.tensor(attended)[:, -actions:]
    generator = torch.Generator().manual_seed(seed)

    def table(scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(len(rows), actions, generator=generator) * scale
        return torch.where(mask, drawn, rubbish)

    return Experience(
        sequences=torch.tensor(rows),
        action_log_probs=table() - 5.5,
        values=table(0.1),
        reward=table(),
        kl=table(),
        advantages=table(),
        attention_mask=torch.tensor(attended),
        action_mask=mask,
        policy_version=torch.zeros(len(rows), dtype=torch.long),
        rollout_log_probs=table() - 5.5,
        returns=table(),
    )
