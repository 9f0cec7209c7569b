"""The usage examples of coati's detached trainers run with nothing changed but their imports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray

from rlhf_core.config import PPOOptions
from rlhf_core.models.critic import Critic
from tests.integration.detached_models import LIMIT_S, batches, cluster, maker, plain, wait_until_free
from tests.unit.coati.ppo_trainers import reward_model
from tests.unit.coati.script.brief_llama import brief_llama

pytestmark = [
    pytest.mark.integration,
    pytest.mark.parallel,
    pytest.mark.timeout(1800),
]  # 2,000 steps of actor and critic

S0 = """
import ray
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
trainer = DetachedPPOTrainer.options(
name="trainer_0", num_gpus=1
).remote(
experience_maker_holder_name_list=["maker_0", "maker_1"],
strategy_fn=lambda: my_strategy(),
model_fn=lambda: (my_actor(), my_critic()),
train_batch_size=8,
eps_clip=0.2,
value_clip=0.4,
eval_performance=True,
)
# Sync initial model weights to experience makers
ray.get(trainer.sync_models_to_remote_makers.remote())
# Start training
ray.get(trainer.fit.remote(total_steps=1000, update_steps=100, train_epochs=2))
# Save models
ray.get(trainer.strategy_save_actor.remote("./actor_checkpoint", only_rank0=True))
"""
S2 = """
import ray
from coati.ray.detached_trainer_base import DetachedTrainer
from coati.experience_maker import Experience
@ray.remote(concurrency_groups={
"buffer_length": 1, "buffer_append": 1,
"buffer_sample": 1, "compute": 1
})
class MyTrainer(DetachedTrainer):
    def training_step(self, experience: Experience):
        # Implement training logic
        return {"loss": 0.0}
    def _update_remote_makers(self, fully_update=False, **kwargs):
        # Implement model sync to remote makers
        pass
trainer = MyTrainer.options(name="trainer_0").remote(
experience_maker_holder_name_list=["maker_0"],
train_batch_size=8,
)
ray.get(trainer.fit.remote(total_steps=1000, update_steps=100, train_epochs=2))
"""
BATCH = 200
PROMPTS = [f"{number % 10}+{number % 7}" for number in range(BATCH)]


@pytest.fixture(scope="module", autouse=True)
def on_a_cluster(tmp_path_factory: pytest.TempPathFactory, forked: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as here, patch.dict(os.environ, forked):
        here.chdir(tmp_path_factory.mktemp("here"))  # a relative path is one of the actor's, which stands where we did
        with cluster(tmp_path_factory.mktemp("clusters")):
            yield


def critic() -> Critic:
    return Critic.from_causal_lm(brief_llama())


def four() -> tuple[Any, Any, Any, Any]:
    return brief_llama(), critic(), reward_model(), brief_llama()


def loader() -> list[dict[str, Any]]:
    return batches(PROMPTS, BATCH)


def example(text: str) -> str:
    return (
        text.replace("coati.ray.detached_trainer_ppo", "rlhf_core")
        .replace("coati.ray.detached_trainer_base", "rlhf_core")
        .replace("coati.experience_maker", "rlhf_core")
    )


@pytest.mark.parametrize(("text", "makers"), [(S0, 2), (S2, 1)])
def test_the_example_runs_with_only_its_imports_changed(text: str, makers: int) -> None:
    handles = [
        maker(
            f"maker_{number}", ["trainer_0"], model_fn=four, options=PPOOptions(), seed=0, max_new_tokens=None,
            top_k=None, sync_models_from_trainers=text is S0,
        )
        for number in range(makers)
    ]  # fmt: skip
    loops = [each.workingloop.remote(loader, num_steps=8000 // BATCH // makers) for each in handles]
    names: dict[str, Any] = {"__name__": "__main__", "my_strategy": plain, "my_actor": brief_llama, "my_critic": critic}
    exec(example(text), names)
    ray.get(loops, timeout=LIMIT_S)
    if text is S0:
        assert Path("actor_checkpoint").is_file()
    for each in (*handles, names["trainer"]):
        ray.kill(each)
    for name in ("trainer_0", "maker_0", "maker_1"):
        wait_until_free(name)
