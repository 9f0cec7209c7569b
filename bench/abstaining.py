"""Does PPO learn as well where its judge fails? One JSON line for each way to fail; a minute.

    python bench/abstaining.py

Policy and critic are tables: one of eight answers to each of sixteen prompts, of which one is right. Advantages,
whitening, denominators and losses are those of PPO. Three seeds each: undisturbed; with 30 % fewer samples in every
minibatch; 30 % of all calls fail; 30 % of those for right answers alone; these again counted as wrong, as release 0.3
did. Limit: the mean level of the last updates lies in the 95 % interval (Student's) of the peer's runs. Peer: the
undisturbed runs; of calls that fail at random also those with as few samples.
"""

from __future__ import annotations

import json
import sys
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from rlhf_core.config import PPOConfig
from rlhf_core.functional.losses import policy_loss, value_loss
from rlhf_core.ppo.minibatch import prepare
from rlhf_core.rollout.advantages import Forwards, estimate
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import EpisodeControls, Experience

PROMPTS, ANSWERS, SHARE = 16, 8, 0.3
SAMPLES, MINIBATCHES = 128, 4
SEEDS, UPDATES, LAST = range(3), 60, 10
STUDENT = 4.303  # the 97.5 % point with two degrees of freedom
CONFIG = PPOConfig(
    prompts_per_episode=SAMPLES, chunk_size=SAMPLES, train_batch_size=SAMPLES // MINIBATCHES,
    micro_batch_size=SAMPLES // MINIBATCHES, max_epochs=2, kl_coef=0.02, max_new_tokens=1,
)  # fmt: skip
LR = 0.02
UNDISTURBED, FEWER, AT_RANDOM = "undisturbed", "none, of 30 % fewer samples", "at random"
WAYS = {
    UNDISTURBED: (0.0, 0.0, True),
    FEWER: (0.0, 0.0, True),
    AT_RANDOM: (SHARE, SHARE, True),
    "right answers": (SHARE, 0.0, True),
    "right answers count as wrong": (SHARE, 0.0, False),
}
"""Share of calls that fail for right answers, and for wrong ones; whether such a sample abstains or gets 0."""
PEERS = {AT_RANDOM: (UNDISTURBED, FEWER)}


def collect(policy: Tensor, start: Tensor, values: Tensor, way: str, draw: torch.Generator) -> tuple[Experience, float]:
    """Return an update's experience and the share of right answers in it."""
    at_right, at_wrong, abstain = WAYS[way]
    samples = round(SAMPLES * (1 - SHARE)) if way == FEWER else SAMPLES
    prompts = torch.randint(PROMPTS, (samples,), generator=draw)
    answers = torch.multinomial(policy.softmax(1)[prompts], 1, generator=draw).squeeze(1)
    right = answers == prompts % ANSWERS
    fails = torch.rand(len(prompts), generator=draw) < torch.where(right, at_right, at_wrong)
    mask, abstains = torch.ones(len(prompts), 1, dtype=torch.bool), fails & abstain
    logprobs, ref = (table.log_softmax(1)[prompts, answers].unsqueeze(1) for table in (policy, start))
    forwards = Forwards(logprobs, ref, values[prompts].unsqueeze(1), mask)
    found = estimate(
        scores=(right & ~fails).float(), abstains=abstains, forwards=forwards, config=CONFIG,
        controls=EpisodeControls(CONFIG.kl_coef), legacy_form="trainer",
    )  # fmt: skip
    experience = Experience(
        sequences=torch.stack([prompts, answers], 1), action_log_probs=logprobs, values=forwards.values,
        reward=found.rewards, kl=found.kl, advantages=found.advantages, attention_mask=mask.expand(-1, 2),
        action_mask=mask & ~abstains.unsqueeze(1), policy_version=torch.zeros(len(prompts), dtype=torch.long),
        rollout_log_probs=logprobs, returns=found.returns,
    )  # fmt: skip
    return experience, right.float().mean().item()


def train(seed: int, way: str) -> list[float]:
    """Return the share of right answers of every update."""
    draw = torch.Generator().manual_seed(seed)
    start = 0.5 * torch.randn(PROMPTS, ANSWERS, generator=draw)
    policy, values = start.clone().requires_grad_(), torch.zeros(PROMPTS, requires_grad=True)
    optimizer = torch.optim.Adam([policy, values], lr=LR)
    curve = []
    for _ in range(UPDATES):
        experience, right = collect(policy.detach(), start, values.detach(), way, draw)
        curve.append(right)
        for rows in experience.split(-(-len(experience) // MINIBATCHES)) * CONFIG.max_epochs:
            batch = prepare(rows, CONFIG, ranks=ALONE, longest=1, cost=None, with_critic=True)
            for micro in batch.micros:
                learn(policy, values, micro.experience, batch.denominator)
            optimizer.step()
            optimizer.zero_grad()
    return curve


def learn(policy: Tensor, values: Tensor, rows: Experience, denominator: Tensor) -> None:
    """Add the gradients of the policy's and the critic's loss."""
    prompts, answers = rows.sequences.unbind(1)
    assert rows.returns is not None
    actor = policy_loss(
        logprobs=policy.log_softmax(1)[prompts, answers].unsqueeze(1), old_logprobs=rows.action_log_probs,
        advantages=rows.advantages, mask=rows.action_mask, denominator=denominator, clip_eps=CONFIG.eps_clip,
    )  # fmt: skip
    critic = value_loss(
        values=values[prompts].unsqueeze(1), old_values=rows.values, returns=rows.returns, mask=rows.action_mask,
        denominator=denominator, clip_eps=CONFIG.value_clip,
    )  # fmt: skip
    (actor.loss + critic.loss).backward()


def main() -> int:
    """Run all, and print a line for each way."""
    torch.set_num_threads(1)
    curves = {way: [train(seed, way) for seed in SEEDS] for way in WAYS}
    levels = {way: [fmean(curve[-LAST:]) for curve in each] for way, each in curves.items()}
    for way, own in levels.items():
        for peer in PEERS.get(way, (UNDISTURBED,)):
            half = STUDENT * stdev(levels[peer]) / len(SEEDS) ** 0.5
            low, high = fmean(levels[peer]) - half, fmean(levels[peer]) + half
            line: dict[str, Any] = {"bench": "abstaining", "calls_fail": way, "level": round(fmean(own), 3)}
            line |= {"by_seed": [round(level, 3) for level in own], "within": low <= fmean(own) <= high}
            line |= {
                "peer": peer,
                "peer_level": round(fmean(levels[peer]), 3),
                "limit": [round(low, 3), round(high, 3)],
            }
            tens = range(0, UPDATES, 10)
            line["curve"] = [round(fmean(fmean(curve[at : at + 10]) for curve in curves[way]), 3) for at in tens]
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
