"""Inputs of `train_prompts_on_ray` with tiny models, and `PPOTrainer` on the same, to compare with."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.coati.roles.flags import build_parser
from rlhf_core.config import PPOOptions
from rlhf_core.data.loaders import DataCollatorForPromptDataset, PromptDataset, StatefulDistributedSampler
from rlhf_core.data.problems import problem_key
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, load_tokenizer
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import disable_dropout
from rlhf_core.ppo.learner import PPOStats
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.training.optim import Trained, make_trained
from tests.tiny_llama import tiny_tokenizer
from tests.unit.coati.ppo_trainers import record_stats
from tests.unit.models.architectures import tiny_causal_lm

ROWS, LR, SEED, LENGTH = 12, 1e-3, 3, 18


def write_inputs(directory: Path, architecture: str, **sizes: int) -> Path:
    """Write a policy, a reward model on another one's transformer, and prompts; return the directory."""
    tokenizer = tiny_tokenizer()
    tiny_causal_lm(architecture, **sizes).save_pretrained(directory / "policy")
    tokenizer.save_pretrained(directory / "policy")
    scorer = RewardModel.from_causal_lm(tiny_causal_lm(architecture, seed=5, **sizes))
    torch.nn.init.normal_(scorer.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    scorer.save_pretrained(directory / "scorer")
    rows = "".join(f'{number},"{number} plus {number * 3}, say"\n' for number in range(ROWS))
    (directory / "prompts.csv").write_text("number,prompt\n" + rows)
    return directory


def words(directory: Path, **changes: Any) -> list[str]:
    """Return the flags of three rounds of two time steps of two prompts, with some changed; None leaves one out."""
    given: dict[str, Any] = {
        "prompt_csv_url": directory / "prompts.csv", "pretrain": directory / "policy",
        "rm_pretrain": directory / "scorer", "save_path": directory / "policy.pt", "num_episodes": 3,
        "max_timesteps": 2, "update_timesteps": 2, "experience_batch_size": 2, "train_batch_size": 2,
        "max_epochs": 2, "lr": LR, "max_length": 24, "max_prompt_tokens": LENGTH, "top_k": 20, "seed": SEED,
        "start_timeout_s": 400, "timeout_s": 400,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in (given | changes).items() if value is not None]


def flags(directory: Path, **changes: Any) -> Namespace:
    """Return them parsed."""
    return build_parser().parse_args(words(directory, **changes))


class Reference:
    """`PPOTrainer`, with the same models, data and seed, plainly written down.

    Args:
        directory: of the inputs.
        collect_steps: batches of an episode.
        accumulation_steps: training batches of a step.
    """

    def __init__(self, directory: Path, *, collect_steps: int = 2, accumulation_steps: int = 1) -> None:
        self._collect_steps = collect_steps
        policy, initial = (load_causal_lm(directory / "policy", "float32") for _ in range(2))
        for model in (policy, initial):
            disable_dropout(model)
        first, second = self._trained(policy), self._trained(Critic.from_causal_lm(policy))
        self._tokenizer = load_tokenizer(directory / "policy")
        self.trainer = PPOTrainer(
            first.booster, second.booster, first.model, second.model,  # type: ignore[arg-type]
            RewardModel.from_pretrained(directory / "scorer", torch.float32), initial, first.optimizer,
            second.optimizer, first.scheduler, second.scheduler, self._tokenizer, kl_coef=0.1, ptx_coef=0.0,
            train_batch_size=2, eps_clip=0.2, value_clip=0.4, accumulation_steps=accumulation_steps,
            options=PPOOptions(lam=0.95, dtype="float32", rollout_dtype="float32"), seed=SEED, max_length=24,
            max_new_tokens=24, temperature=1.0, top_k=20,
        )  # fmt: skip
        self.stats = record_stats(self.trainer)

    def fit(self, texts: list[str], episodes: int = 3) -> list[PPOStats]:
        """Train, and return the numbers of each step."""
        rows = [{"input_ids": self._tokenizer(text).input_ids[:LENGTH], "key": problem_key(text)} for text in texts]
        dataset = PromptDataset(rows)
        loader = DataLoader(
            dataset, batch_size=2, sampler=StatefulDistributedSampler(dataset, 1, 0, seed=SEED),
            collate_fn=DataCollatorForPromptDataset(self._tokenizer),
        )  # fmt: skip
        self.trainer.fit(episodes, self._collect_steps, 2, loader)
        return self.stats

    @staticmethod
    def _trained(model: torch.nn.Module) -> Trained:
        booster = PlainBooster("fp32", 1.0)
        return make_trained(model, lr=LR, weight_decay=0.0, schedule=lambda _: 1.0, booster=booster)


def texts() -> list[str]:
    """Return the prompts of the file."""
    return [f"{number} plus {number * 3}, say" for number in range(ROWS)]


def actor_figures(stats: list[PPOStats]) -> list[tuple[float, ...]]:
    """Return what a step says of the actor."""
    return [(s.actor_loss, s.approx_kl, s.entropy, s.actor_grad_norm, s.clip_fraction, s.max_ratio) for s in stats]


def critic_figures(stats: list[PPOStats]) -> list[tuple[float, ...]]:
    """Return what a step says of the critic."""
    return [(s.critic_loss, s.critic_grad_norm, s.value_mean, s.explained_variance) for s in stats]
