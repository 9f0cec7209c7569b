"""The usage example of coati's documentation runs with nothing changed but its import."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.training.checkpoint import list_checkpoints
from tests.unit.coati.ppo_trainers import demonstrations, metrics, prompts, reward_model, trainer
from tests.unit.coati.script.brief_llama import brief_llama

EXAMPLE = """
from coati.trainer import PPOTrainer

trainer = PPOTrainer(
    actor_booster=actor_booster,
    critic_booster=critic_booster,
    actor=actor,
    critic=critic,
    reward_model=reward_model,
    initial_model=ref_model,
    actor_optim=actor_optim,
    critic_optim=critic_optim,
    actor_lr_scheduler=actor_lr_scheduler,
    critic_lr_scheduler=critic_lr_scheduler,
    tokenizer=tokenizer,
    kl_coef=0.1,
    ptx_coef=0.0,
    train_batch_size=16,
    accumulation_steps=8,
    save_dir="./checkpoints",
    coordinator=coordinator,
)

trainer.fit(
    num_episodes=10,
    num_collect_steps=2,
    num_update_steps=5,
    prompt_dataloader=train_prompt_dataloader,
    pretrain_dataloader=train_pretrain_dataloader,
    log_dir="./logs",
    use_wandb=False,
)
"""


@pytest.mark.integration
def test_the_example_runs_with_only_its_import_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = trainer(make_actor=brief_llama, lr=1e-6)  # for its models, optimizers and boosters
    actor, critic = (built.checkpoints._roles[role] for role in ("actor", "critic"))
    names = {
        "actor_booster": actor.booster, "critic_booster": critic.booster, "actor": actor.model,
        "critic": critic.model, "reward_model": reward_model(), "ref_model": built.experience_maker.initial_model,
        "actor_optim": actor.optimizer, "critic_optim": critic.optimizer, "actor_lr_scheduler": actor.scheduler,
        "critic_lr_scheduler": critic.scheduler, "tokenizer": built.tokenizer, "coordinator": None,
        "train_prompt_dataloader": prompts(4, batch_size=2), "train_pretrain_dataloader": demonstrations(),
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    exec(EXAMPLE.replace("from coati.trainer import", "from rlhf_core import"), names)
    # 2 x 2 samples are one batch; five passes are five, less than the eight of a step: ten steps in ten episodes.
    assert [found.name for found in list_checkpoints(tmp_path / "checkpoints")] == ["epoch-9_step-10"]
    steps = [line["step"] for line in metrics(tmp_path / "logs") if "train/actor_loss" in line]
    assert steps == list(range(1, 11))
