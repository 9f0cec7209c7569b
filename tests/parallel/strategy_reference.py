"""Five steps of SFT and of a reward model in plain PyTorch, written out: one process, no booster, no trainer of ours.

Every minibatch goes through the model in one piece. Of ours are only the model and its data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found

Loss = Callable[[nn.Module, list[int]], Tensor]


def minibatches() -> list[list[int]]:
    """The first pass over the rows, permuted as the trainers' documentation says: keyed by seed, episode and pass."""
    rows = np.random.default_rng([stages.SEED, 0, 1]).permutation(stages.ROWS * (stages.STEPS - 1) + stages.LAST)
    return [rows[start : start + stages.ROWS].tolist() for start in range(0, len(rows), stages.ROWS)]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def sft_loss(model: nn.Module, rows: list[int]) -> Tensor:
    """Mean negative log-likelihood of the responses' tokens."""
    examples = [stages.demonstrations()[row] for row in rows]
    ids, mask = padded([[*prompt, *response] for prompt, response in examples])
    labels = torch.full_like(ids, -100)
    for row, (prompt, response) in enumerate(examples):
        labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def reward_model_loss(model: Any, rows: list[int]) -> Tensor:
    """Bradley-Terry with margins, and a tenth of the squared sum of a pair's scores; a mean over pairs."""
    pairs = [stages.pairs()[row] for row in rows]
    scores = []
    for side in ("chosen", "rejected"):
        ids, mask = padded([list(getattr(pair, side)) for pair in pairs])
        hidden = model.trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(pairs)), mask.sum(dim=1) - 1]
        with torch.autocast("cpu", enabled=False):
            scores.append(functional.linear(last.float(), model.head.weight.float(), model.head.bias.float())[:, 0])
    chosen, rejected = scores
    margins = torch.tensor([pair.margin for pair in pairs])
    losses = -functional.logsigmoid(chosen - rejected - margins) + 0.1 * (chosen + rejected) ** 2
    return losses.mean()


def rate(step: int) -> float:
    """Three steps of rise, then a fall to zero after the last: 1/3, 2/3, 1, 2/3, 1/3."""
    return min((step + 1) / 3, (stages.STEPS - step) / (stages.STEPS - 2))


def trained(stage: str, arithmetic: str) -> Found:
    """Return the numbers, first moments and weights of five steps.

    Args:
        stage: sft or reward_model.
        arithmetic: fp32; autocast: bfloat16 in forward passes over float32 weights; or weights: a copy of the weights
            in bfloat16, in which passes run and gradients come, while AdamW works on the float32 ones.
    """
    model: nn.Module = stages.language_model(ALONE) if stage == "sft" else stages.scoring_model(ALONE)
    loss_of: Loss = sft_loss if stage == "sft" else reward_model_loss
    working = copy.deepcopy(model).to(torch.bfloat16) if arithmetic == "weights" else model
    optimizer = torch.optim.AdamW(_groups(model), lr=stages.LR, betas=(0.9, 0.95))
    rates = [group["lr"] for group in optimizer.param_groups]
    numbers, tensors = {}, {}
    working.train()
    for step, rows in enumerate(minibatches()):
        for group, peak in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * rate(step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic != "fp32"):
            loss = loss_of(working, rows)
        loss.backward()
        for own, used in zip(model.parameters(), working.parameters(), strict=True):
            own.grad = used.grad.float() if used.grad is not None else None
        norm = nn.utils.clip_grad_norm_(model.parameters(), stages.CLIP)
        optimizer.step()
        working.zero_grad()
        with torch.no_grad():
            for own, used in zip(model.parameters(), working.parameters(), strict=True):
                own.grad = None
                used.copy_(own)
        numbers |= {f"{step + 1}.loss": loss.item(), f"{step + 1}.grad_norm": norm.item()}
        if step == 0:
            for name, parameter in model.named_parameters():
                tensors[f"first.model.{name}"] = optimizer.state[parameter]["exp_avg"].clone()
    weights = {f"last.model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return Found(numbers, tensors | weights)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, biases and norms do not; a head has a rate of its own."""
    named = list(model.named_parameters())
    return [
        {"params": members, "lr": lr, "weight_decay": decay}
        for prefix_is_head, lr in ((False, stages.LR), (True, stages.OTHER_LR))
        for matrices, decay in ((True, stages.DECAY), (False, 0.0))
        if (
            members := [
                parameter
                for name, parameter in named
                if name.startswith("head.") == prefix_is_head and (parameter.ndim > 1) == matrices
            ]
        )
    ]
