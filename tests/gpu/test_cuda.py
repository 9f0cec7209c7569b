"""The learner and the engine on a CUDA device agree with the CPU's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.config import LoRAConfig, PPOConfig
from rlhf_core.generation import GenerationSettings, make_engine
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.trainer.ppo.learner import PPOLearner, PPOStats
from tests.parallel import learner_cases
from tests.parallel.ranks import run_on_ranks
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


OPTIONS: dict[str, object] = {
    "entropy_coef": 0.1, "dual_clip": 3.0, "eps_clip_high": 0.3, "aggregation": "sequence_mean",
    "correction": "truncated", "max_ratio": None,
}  # fmt: skip


def step_with_options(device: str, dtype: str, **changes: object) -> tuple[PPOStats, dict[str, torch.Tensor]]:
    ours = learner(device, dtype)
    ours.config = ours.config.model_copy(update=OPTIONS | changes)
    stats = ours.training_step(tiny_experience())
    moments = {name: tensor for name, tensor in ours.state().tensors.items() if ".exp_avg." in name}
    return stats, moments


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 1e-1)])
def test_a_step_with_every_option_gives_the_cpus_figures(dtype: str, tolerance: float) -> None:
    expected, _ = step_with_options("cpu", "float32")
    stats, _ = step_with_options("cuda", dtype)
    for name in ("actor_loss", "critic_loss", "entropy", "importance_weight", "advantage_std", "actor_grad_norm"):
        assert getattr(stats, name) == pytest.approx(getattr(expected, name), rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_ratio_is_one_exactly(dtype: str) -> None:
    stats = learner("cuda", dtype).learn(tiny_experience(), seed=0, episode=0)
    assert (stats[0].approx_kl, stats[0].clip_fraction, stats[0].max_ratio) == (0.0, 0.0, 1.0)


def test_one_micro_batch_of_eight_gives_the_gradients_of_eight_of_one() -> None:
    (_, whole), (_, pieces) = (step_with_options("cuda", "float32", micro_batch_size=size) for size in (8, 1))
    for name, moment in whole.items():
        torch.testing.assert_close(pieces[name], moment, rtol=0, atol=1e-4 * moment.abs().max().item() + 1e-12)


def test_float16_is_scaled_and_steps() -> None:
    config = PPOConfig(
        prompts_per_episode=8, chunk_size=8, train_batch_size=8, micro_batch_size=4, warmup_steps=0, dtype="float16",
        lora=None,
    )  # fmt: skip
    ours = PPOLearner.build(
        tiny_llama(initializer_range=0.2), Critic.from_causal_lm(tiny_llama()), config, device="cuda"
    )
    stats = ours.learn(tiny_experience(), seed=0, episode=0)
    assert 0 < stats[0].critic_grad_norm < float("inf")
    assert ours.state().facts["critic"]["loss_scale"]["good_steps"] == 1


def test_two_ranks_are_one_with_twice_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL where there are two GPUs, else gloo over one that both share."""
    monkeypatch.setattr(learner_cases, "DEVICE", "cuda")
    cases = ["mixed", "exploding", "nan_advantage", "agreement"]
    found = run_on_ranks("tests.parallel.learner_cases", cases, tmp_path, device="cuda")
    alone = learner_cases.mixed(ALONE)
    for rank in found:
        assert rank["mixed"].numbers == pytest.approx(alone.numbers, rel=1e-3, abs=1e-5)
        assert rank["exploding"].numbers["0.skipped"] == 1.0
        assert "the actor's loss is nan" in rank["nan_advantage"].sentence
        assert rank["agreement"].tensors["sum"].tolist() == [3.0, 30.0]
