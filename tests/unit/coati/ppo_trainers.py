"""A tiny PPOTrainer with everything that it needs, the same in every process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.config import LoRAConfig, PPOOptions
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.ppo.learner import PPOStats
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.training.optim import make_trained
from tests.tiny_llama import tiny_llama, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
OPTIONS = PPOOptions(lam=0.95, dtype="float32", rollout_dtype="float32")


def reward_model() -> RewardModel:
    model = RewardModel.from_causal_lm(tiny_llama(seed=3, initializer_range=0.2))
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def restless_llama() -> LlamaForCausalLM:
    return tiny_llama(initializer_range=0.2)


def trainer(
    *,
    lora: LoRAConfig | None = None,
    lr: float = 1e-3,
    make_actor: Callable[[], LlamaForCausalLM] = restless_llama,
    make_booster: Callable[[], Any] = PlainBooster,
    **changes: Any,
) -> PPOTrainer:
    """Return a trainer over a tiny actor; `changes` are parameters of the trainer.

    Args:
        lora: adapters on actor and critic; None trains all weights, against an initial model of its own.
        lr: of both, falling step by step.
        make_actor: called for the actor, and again for the initial model.
        make_booster: called for each of actor and critic.
        **changes: as the trainer takes them.
    """
    actor = make_actor()
    initial = None if lora else make_actor()
    critic = Critic.from_causal_lm(actor)
    if lora is not None:
        attach_lora(actor, lora, seed=1)
        attach_lora(critic.trunk, lora, seed=2)

    def trained(model: torch.nn.Module) -> Any:
        schedule = lambda step: 1 / (1 + 0.1 * step)  # noqa: E731
        return make_trained(model, lr=lr, weight_decay=0.0, schedule=schedule, booster=make_booster())

    first, second = trained(actor), trained(critic)
    parameters = {
        "actor_booster": first.booster, "critic_booster": second.booster, "actor": first.model,
        "critic": second.model, "reward_model": reward_model(), "initial_model": initial,
        "actor_optim": first.optimizer, "critic_optim": second.optimizer, "actor_lr_scheduler": first.scheduler,
        "critic_lr_scheduler": second.scheduler, "tokenizer": TOKENIZER, "ptx_coef": 0.0, "train_batch_size": 2,
        "options": OPTIONS, "max_new_tokens": 4, "top_k": 20,
    }  # fmt: skip
    return PPOTrainer(**(parameters | changes))


def encoded(texts: Iterable[str]) -> list[dict[str, Any]]:
    return [{"input_ids": TOKENIZER(text, add_special_tokens=False).input_ids} for text in texts]


def padded(rows: list[dict[str, Any]], *, left: bool = True) -> dict[str, Any]:
    width = max(len(row["input_ids"]) for row in rows)
    ids, mask = [], []
    for row in rows:
        pad = [0] * (width - len(row["input_ids"]))
        ones = [1] * len(row["input_ids"])
        ids.append(pad + row["input_ids"] if left else row["input_ids"] + pad)
        mask.append(pad + ones if left else ones + pad)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def prompts(count: int = 6, *, batch_size: int = 2, shuffle: bool = True) -> DataLoader[Any]:
    """Return a loader that shuffles by the global random state, as one of torch does by itself."""
    rows = encoded(f"{number} plus {number * 3}" for number in range(count))
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=padded)  # type: ignore[arg-type]


def demonstrations(count: int = 4) -> DataLoader[Any]:
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = padded(rows, left=False)
        labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
        labels[:, :2] = -100
        return batch | {"labels": labels}

    rows = encoded(f"the answer is {number}" for number in range(count))
    return DataLoader(rows, batch_size=2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def record_stats(ours: PPOTrainer) -> list[PPOStats]:
    """Return a list that gets the numbers of each optimizer step."""
    found: list[PPOStats] = []
    step = ours.learner.training_step

    def spy(*arguments: Any) -> PPOStats:
        found.append(step(*arguments))
        return found[-1]

    ours.learner.training_step = spy  # type: ignore[method-assign, assignment]
    return found


def weights(ours: PPOTrainer) -> dict[str, torch.Tensor]:
    """Return all weights, exactly; of what a booster of another strategy keeps, the trainable ones, on every rank."""
    found = {}
    for role, (model, _, _, booster) in ours.learner._roles.items():
        held = dict(model.named_parameters())
        if type(booster) is not PlainBooster:
            plain = booster.plain(model)  # type: ignore[attr-defined]
            held = booster.weights(model, list(trainable_parameters(plain)))  # type: ignore[attr-defined]
        found |= {f"{role}.{name}": tensor.detach().clone() for name, tensor in held.items()}
    return found


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """Return what differs between two sets of weights, and what may be the reason; nothing if nothing does."""
    apart = {name: (tensor - found[name]).abs().max().item() for name, tensor in expected.items()}
    apart = {
        name: largest for name, largest in apart.items() if largest or not torch.equal(expected[name], found[name])
    }
    if not apart:
        return ""
    name = max(apart, key=lambda each: apart[each])
    return (
        f"{len(apart)} of {len(expected)} weights differ, {name} by up to {apart[name]:.3g}, on "
        f"{torch.get_num_threads()} threads, {torch.get_num_interop_threads()} between operations"
    )


def first_difference(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    """Return the first logged line that differs, as both runs have it; nothing if none does."""
    for one, other in zip_longest(expected, found, fillvalue={}):
        if one != other:
            names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
            pairs = ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in names)
            return f"first at step {one.get('step', other.get('step'))}: {pairs}"
    return ""


def metrics(log_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of all runs under a log directory, in the order of their directories."""
    files = sorted(log_dir.glob("ppo/*/metrics.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
