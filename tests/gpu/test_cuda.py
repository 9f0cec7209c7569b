"""The learner and the engine on a CUDA device agree with the CPU's numbers."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import LoRAConfig, PPOConfig
from rlhf_core.generation import GenerationSettings, make_engine
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.trainer.ppo_learner import PPOLearner
from tests.tiny_llama import tiny_llama
from tests.unit.trainer.experience import PROMPTS, tiny_experience

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]


def learner(device: str, dtype: str) -> PPOLearner:
    config = PPOConfig(
        prompts_per_episode=8, chunk_size=8, train_batch_size=8, micro_batch_size=4, warmup_steps=0, dtype=dtype
    )
    actor = tiny_llama(initializer_range=0.2)
    critic = Critic.from_causal_lm(actor)
    for model in (actor, critic.trunk):
        attach_lora(model, LoRAConfig(r=2, alpha=4.0), seed=1)
    return PPOLearner.build(actor, critic, config, device=device)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_a_step_gives_the_cpus_losses(dtype: str, tolerance: float) -> None:
    expected = learner("cpu", "float32").learn(tiny_experience(), seed=0, episode=0)
    stats = learner("cuda", dtype).learn(tiny_experience(), seed=0, episode=0)
    for here, there in zip(stats, expected, strict=True):
        assert here.actor_loss == pytest.approx(there.actor_loss, rel=tolerance, abs=tolerance)
        assert here.critic_loss == pytest.approx(there.critic_loss, rel=tolerance, abs=tolerance)


def test_a_state_goes_on_to_the_same_bits() -> None:
    straight, stopped, resumed = (learner("cuda", "float32") for _ in range(3))
    batches = [straight.recompute(tiny_experience(seed)) for seed in range(2)]
    for batch in batches:
        straight.training_step(batch)
    stopped.training_step(batches[0])
    resumed.load_state(*stopped.state())
    resumed.training_step(batches[1])
    for name, tensor in straight.merged_weights("actor").items():
        assert torch.equal(tensor, resumed.merged_weights("actor")[name]), name


def test_greedy_answers_are_the_cpus() -> None:
    settings = GenerationSettings(max_new_tokens=12, stop_ids=(2,), pad_id=0)
    answers = [
        make_engine("native", tiny_llama().to(device)).generate(PROMPTS, settings, uniforms=None).sequences
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(*answers)
