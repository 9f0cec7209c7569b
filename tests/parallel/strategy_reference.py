"""Five steps of every stage in plain PyTorch, written out: one process, no booster, trainer or loss function of ours.

Every minibatch goes through the model in one piece, in PPO each row alone and without padding. Of ours are only models,
adapters and data. Arithmetic is `fp32`; `autocast`: bfloat16 in forward passes over float32 weights; or `weights`: a
copy of the weights in bfloat16, in which passes run and gradients come, while AdamW works on the float32 ones.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf_core.config import LoRAConfig
from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import Experience
from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found
from tests.reference.definitions import whiten

Arithmetic = Literal["fp32", "autocast", "weights"]


class Written:
    """A model with torch's AdamW: matrices decay, biases and norms do not; a head may have a rate of its own."""

    def __init__(self, model: nn.Module, arithmetic: Arithmetic, *, lr: float, head_lr: float) -> None:
        self.model = model
        self.working = copy.deepcopy(model) if arithmetic == "weights" else model
        if arithmetic == "weights":  # not its buffers: rotary angles of 8 bits are others
            for each in self.working.parameters():
                each.data = each.data.bfloat16()
        self.working.train()
        self._is_exact = arithmetic == "fp32"
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        self._rates, groups = [], []
        for is_head, rate in ((False, lr), (True, head_lr)):
            for is_matrix, decay in ((True, stages.DECAY), (False, 0.0)):
                members = [each for name, each in named if (name[:5] == "head.", each.ndim > 1) == (is_head, is_matrix)]
                if members:
                    groups.append({"params": members, "lr": rate, "weight_decay": decay})
                    self._rates.append(rate)
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(stages.DEVICE).type, dtype=torch.bfloat16, enabled=not self._is_exact)

    def step(self, loss: Tensor, factor: float) -> float:
        """Go backward and take a step at this factor of the peak rates; return the gradient's norm before clipping."""
        for group, peak in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = peak * factor
        loss.backward()
        pairs = [
            (own, used)
            for own, used in zip(self.model.parameters(), self.working.parameters(), strict=True)
            if own.requires_grad
        ]
        for own, used in pairs:
            assert used.grad is not None
            own.grad = used.grad.float()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), stages.CLIP).item()
        self._optimizer.step()
        with torch.no_grad():
            for own, used in pairs:
                own.grad = used.grad = None
                used.copy_(own)
        return norm

    def first_moments(self) -> dict[str, Tensor]:
        state = self._optimizer.state
        return {
            name: state[each]["exp_avg"].to("cpu", copy=True)
            for name, each in self.model.named_parameters()
            if each in state
        }

    def weights(self) -> dict[str, Tensor]:
        return {name: each.detach().cpu() for name, each in self.model.named_parameters() if each.requires_grad}


def trained(stage: str, arithmetic: Arithmetic, *, adapters: bool = False) -> Found:
    """Return losses, norms, first moments and weights of five steps."""
    lora = stages.LORA if adapters else None
    return ppo(arithmetic, lora) if stage == "ppo" else supervised(stage, arithmetic, lora)


def supervised(stage: str, arithmetic: Arithmetic, lora: LoRAConfig | None) -> Found:
    """SFT or the reward model: a pass over permuted rows, three steps of rise and a fall to zero after the last."""
    model = stages.language_model(ALONE) if stage == "sft" else stages.scoring_model(ALONE)
    if lora is not None:
        attach_lora(model, lora, seed=stages.SEED)
    ours = Written(model, arithmetic, lr=stages.LR, head_lr=stages.OTHER_LR)
    numbers: dict[str, float] = {}
    tensors: dict[str, Tensor] = {}
    # As the trainers document it: the order is drawn from seed, episode and pass.
    rows = np.random.default_rng([stages.SEED, 0, 1]).permutation(stages.ROWS * (stages.STEPS - 1) + stages.LAST)
    for step, factor in enumerate((1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)):
        batch = rows[step * stages.ROWS : (step + 1) * stages.ROWS].tolist()
        with ours.autocast():
            loss = (sft_loss if stage == "sft" else reward_model_loss)(ours.working, batch)
        numbers |= {f"{step + 1}.loss": loss.item(), f"{step + 1}.grad_norm": ours.step(loss, factor)}
        tensors = tensors or {f"first.model.{name}": each for name, each in ours.first_moments().items()}
    return Found(numbers, tensors | {f"last.model.{name}": each for name, each in ours.weights().items()})


def sft_loss(model: nn.Module, rows: list[int]) -> Tensor:
    """Mean negative log-likelihood of the responses' tokens."""
    examples = [stages.demonstrations()[row] for row in rows]
    ids, mask = padded([[*prompt, *response] for prompt, response in examples])
    labels = torch.full_like(ids, -100)
    for row, (prompt, response) in enumerate(examples):
        labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response, device=labels.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def reward_model_loss(model: nn.Module, rows: list[int]) -> Tensor:
    """Bradley-Terry with margins, and a tenth of the squared sum of a pair's scores; a mean over pairs."""
    pairs = [stages.pairs()[row] for row in rows]
    scores = []
    for side in ("chosen", "rejected"):
        ids, mask = padded([list(getattr(pair, side)) for pair in pairs])
        scores.append(headed(model, ids, mask).gather(1, mask.sum(dim=1, keepdim=True) - 1)[:, 0])
    chosen, rejected = scores
    margins = torch.tensor([pair.margin for pair in pairs], device=stages.DEVICE)
    return (-functional.logsigmoid(chosen - rejected - margins) + 0.1 * (chosen + rejected) ** 2).mean()


def ppo(arithmetic: Arithmetic, lora: LoRAConfig | None) -> Found:
    """One pass in the order of the rows; three steps of rise, then constant rates."""
    learner = stages.ppo_learner(ALONE, "plain", "fp32", lora=lora)
    actor = Written(copy.deepcopy(learner.actor), arithmetic, lr=stages.LR, head_lr=0.0)
    critic = Written(copy.deepcopy(learner.critic), arithmetic, lr=stages.OTHER_LR, head_lr=stages.OTHER_LR)
    with torch.no_grad():
        old = policy(actor, slice(None))[0]
    numbers: dict[str, float] = {}
    tensors: dict[str, Tensor] = {}
    for step, factor in enumerate((1 / 3, 2 / 3, 1, 1, 1)):
        rows = slice(step * stages.ROWS, (step + 1) * stages.ROWS)
        policy_loss, entropy_mean, entropy_seen = actor_losses(actor, old, rows)
        value_loss = critic_loss(critic, rows)
        figures = {
            "actor_loss": policy_loss.item(),
            "critic_loss": value_loss.item(),
            "entropy": entropy_seen,
            "actor_grad_norm": actor.step(policy_loss - 0.05 * entropy_mean, factor),
            "critic_grad_norm": critic.step(value_loss, factor),
        }
        numbers |= {f"{step + 1}.{name}": value for name, value in figures.items()}
        if not tensors:
            for role, ours in (("actor", actor), ("critic", critic)):
                tensors |= {f"first.{role}.{name}": each for name, each in ours.first_moments().items()}
    for role, ours in (("actor", actor), ("critic", critic)):
        tensors |= {f"last.{role}.{name}": each for name, each in ours.weights().items()}
    return Found(numbers, tensors)


def policy(actor: Written, rows: slice) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each response token of these rows, at the temperature 0.9."""
    found: list[tuple[Tensor, Tensor]] = []
    width = experience().action_mask.shape[1]
    for ids, response in unpadded(rows):
        with actor.autocast():
            logits = actor.working(input_ids=ids[None], use_cache=False).logits[0, -response - 1 : -1]
        every = (logits.float() / 0.9).log_softmax(dim=-1)
        read = every.gather(1, ids[-response:, None])[:, 0], -(every.exp() * every).sum(dim=-1)
        found.append(tuple(functional.pad(each, (0, width - response)) for each in read))
    logprobs, entropy = (torch.stack(each) for each in zip(*found, strict=True))
    return logprobs, entropy


def actor_losses(actor: Written, old: Tensor, rows: slice) -> tuple[Tensor, Tensor, float]:
    """Return the policy's loss and its entropy, means over sequences of means over tokens; and a mean over tokens."""
    batch = experience()
    mask, lengths = batch.action_mask[rows], batch.action_mask[rows].sum(dim=1)
    new, entropy = policy(actor, rows)
    gains = whiten([row[seen].tolist() for row, seen in zip(batch.advantages[rows], mask, strict=True)])
    gain = torch.zeros(mask.shape, device=mask.device)
    gain[mask] = torch.tensor([each for row in gains for each in row], device=mask.device)
    ratio = torch.where(mask, new - old[rows], 0.0).exp()
    objective = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.3) * gain)

    def mean(values: Tensor) -> Tensor:
        return (torch.where(mask, values, 0.0).sum(dim=1) / lengths).mean()

    return -mean(objective), mean(entropy), entropy[mask].mean().item()


def critic_loss(critic: Written, rows: slice) -> Tensor:
    """Half the larger of two squared errors; a mean over sequences of means over tokens."""
    batch = experience()
    mask, width = batch.action_mask[rows], batch.action_mask.shape[1]
    read = []
    for ids, response in unpadded(rows):
        with critic.autocast():
            each = headed(critic.working, ids[None], torch.ones_like(ids)[None])[0, -response - 1 : -1]
        read.append(functional.pad(each, (0, width - response)))
    values = torch.stack(read)
    assert batch.returns is not None
    before, target = batch.values[rows], batch.returns[rows]
    kept = before + (values - before).clamp(-0.2, 0.2)
    error = torch.maximum((values - target) ** 2, (kept - target) ** 2) / 2
    return (torch.where(mask, error, 0.0).sum(dim=1) / mask.sum(dim=1)).mean()


def headed(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return what the head says after each token, in float32."""
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)
    hidden = model.trunk(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).last_hidden_state
    with torch.autocast(torch.device(stages.DEVICE).type, enabled=False):
        return functional.linear(hidden.float(), model.head.weight.float(), model.head.bias.float())[..., 0]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=stages.DEVICE)
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=stages.DEVICE)


def unpadded(rows: slice) -> list[tuple[Tensor, int]]:
    """Return the token ids of each row, and how many of them are its response."""
    batch = experience()
    return [
        (ids[seen], int(acted.sum()))
        for ids, seen, acted in zip(
            batch.sequences[rows], batch.attention_mask[rows], batch.action_mask[rows], strict=True
        )
    ]


def experience() -> Experience:
    found = stages.experience()
    found.to_device(torch.device(stages.DEVICE))
    return found
