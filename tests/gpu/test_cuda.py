"""The learner and the engines on a CUDA device agree with float64, with the CPU, and with themselves."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from rlhf_core.config import LoRAConfig, PPOConfig
from rlhf_core.generation import GenerationSettings, make_engine, sample_uniforms
from rlhf_core.generation.decoder import WORTH_A_GRAPH
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import Experience
from tests.parallel import learner_cases
from tests.parallel.ranks import run_on_ranks
from tests.reference import definitions
from tests.tiny_llama import tiny_llama
from tests.unit.generation.wide import needs_vllm, wide_causal_lm
from tests.unit.ppo.experience import PROMPTS, RESPONSES, TOKENS, tiny_experience
from tests.unit.ppo.test_learner import rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]


DEVICE = "cuda"
NEW_TOKENS = 2 * WORTH_A_GRAPH
"""The first of them come by a recorded step, the others without."""
SIZES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
"""Of what a tensor's gradient may be off, in parts of its largest entry: some roundings of the arithmetic."""


def learner(device: str, dtype: str, **changes: object) -> PPOLearner:
    """A learner of all weights whose first moments are a tenth of the gradient: nothing is clipped by norm."""
    config = PPOConfig(
        prompts_per_episode=8, chunk_size=8, train_batch_size=8, micro_batch_size=4, warmup_steps=0, dtype=dtype,
        lora=None, grad_clip=1e9,
    ).model_copy(update=changes)  # fmt: skip
    actor, critic = models()
    if config.lora is not None:
        for number, model in enumerate((actor, critic.trunk)):
            attach_lora(model, config.lora, seed=number)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    return PPOLearner.build(actor, critic, config, device=device)


def models() -> tuple[LlamaForCausalLM, Critic]:
    actor = tiny_llama(initializer_range=0.2)
    critic = Critic.from_causal_lm(actor)
    nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(7))
    return actor, critic


class Expected(NamedTuple):
    """The first step, in float64 on rows without padding, by autograd over the definitions."""

    batch: Experience
    figures: dict[str, float]
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def expected() -> Expected:
    actor, critic = (model.double() for model in models())
    experience = tiny_experience()
    assert experience.returns is not None
    whitened = definitions.whiten(rows_of(experience.advantages))
    shift = torch.randn(8, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.4
    policy, value, clipped = torch.zeros(()).double(), torch.zeros(()).double(), 0
    old_logprobs = torch.zeros(8, 4)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids, length, said = torch.tensor([prompt + response]), len(response), slice(len(prompt) - 1, -1)
        every = actor(ids).logits[0, said].log_softmax(dim=-1)
        new = every[torch.arange(length), response]
        old_logprobs[row, :length] = (new - shift[row, :length]).detach()  # not the actor's own: ratios move
        ratio, gain = (new - old_logprobs[row, :length]).exp(), torch.tensor(whitened[row]).double()
        objective = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        policy = policy - objective.sum() / TOKENS
        clipped += int((objective != ratio * gain).sum())
        found = critic(ids, torch.ones_like(ids))[0, said]
        old, target = experience.values[row, :length], experience.returns[row, :length]
        near = old + (found - old).clamp(-0.2, 0.2)
        value = value + torch.maximum((found - target) ** 2, (near - target) ** 2).sum() / (2 * TOKENS)
    policy.backward()
    value.backward()
    gradients = {
        f"{role}.{name}": parameter.grad.float()
        for role, model in (("actor", actor), ("critic", critic))
        for name, parameter in model.named_parameters()
    }
    figures = {"actor_loss": policy.item(), "critic_loss": value.item(), "clip_fraction": clipped / TOKENS}
    return Expected(experience.replace(action_log_probs=old_logprobs), figures, gradients)


def gradients(ours: PPOLearner) -> dict[str, Tensor]:
    moments = {name: tensor for name, tensor in ours.state().tensors.items() if ".optimizer.exp_avg." in name}
    return {name.replace(".optimizer.exp_avg", ""): 10 * tensor for name, tensor in moments.items()}


def assert_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        largest = gradient.abs().max().item()
        assert largest > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("micro_batch_size", [8, 1])
@pytest.mark.parametrize("dtype", SIZES)
def test_losses_and_every_gradient_are_those_of_float64(expected: Expected, dtype: str, micro_batch_size: int) -> None:
    ours = learner(DEVICE, dtype, micro_batch_size=micro_batch_size)
    stats = ours.training_step(expected.batch)
    assert 0.1 < expected.figures["clip_fraction"] < 0.9
    assert abs(expected.figures["actor_loss"]) > 0.03
    for name in ("actor_loss", "critic_loss"):
        assert getattr(stats, name) == pytest.approx(expected.figures[name], rel=SIZES[dtype], abs=SIZES[dtype] / 10)
    if dtype == "float32":
        assert stats.clip_fraction == pytest.approx(expected.figures["clip_fraction"])
        assert_gradients(gradients(ours), expected.gradients, SIZES[dtype])
    else:  # a token at the edge of its clip may fall to its other side: the direction is what must agree
        for name, gradient in gradients(ours).items():
            cosine = nn.functional.cosine_similarity(gradient.flatten(), expected.gradients[name].flatten(), dim=0)
            assert cosine > 1 - SIZES[dtype], name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precisions_gradients_are_those_of_float32_where_no_token_is_clipped(
    expected: Expected, dtype: str
) -> None:
    wide = {"eps_clip": 0.99, "eps_clip_high": 1e6, "value_clip": 1e6}
    found, single = learner(DEVICE, dtype, **wide), learner("cpu", "float32", **wide)
    for ours in (found, single):
        ours.training_step(expected.batch)
    for name, wanted in gradients(single).items():
        off = (gradients(found)[name] - wanted).norm() / wanted.norm()
        assert off < 2 * SIZES[dtype], name  # of the tensor as a whole: its largest entries are sums of many roundings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2, alpha=4.0)])
def test_neither_micro_batches_nor_the_order_of_rows_change_a_gradient(
    expected: Expected, dtype: str, lora: LoRAConfig | None
) -> None:
    found = []
    for size, rows in ((8, range(8)), (2, range(8)), (8, [3, 7, 0, 5, 1, 6, 2, 4])):
        ours = learner(DEVICE, dtype, micro_batch_size=size, lora=lora)
        ours.training_step(expected.batch.select(list(rows)))
        found.append(gradients(ours))
    for other in found[1:]:
        assert_gradients(other, found[0], SIZES[dtype])


def test_a_chunk_in_bfloat16_gives_the_same_bits_twice(expected: Expected) -> None:
    ours, other = (learner(DEVICE, "bfloat16") for _ in range(2))
    first, second = ours.recompute(expected.batch), ours.recompute(expected.batch)
    assert torch.equal(first.action_log_probs, second.action_log_probs)
    assert ours.training_step(expected.batch) == other.training_step(expected.batch)
    weights = other.state().tensors
    assert [name for name, tensor in ours.state().tensors.items() if not torch.equal(tensor, weights[name])] == []


def test_a_state_goes_on_to_the_same_bits() -> None:
    straight, stopped, resumed = (learner(DEVICE, "float32") for _ in range(3))
    batches = [straight.recompute(tiny_experience(seed)) for seed in range(2)]
    for batch in batches:
        straight.training_step(batch)
    stopped.training_step(batches[0])
    resumed.load_state(*stopped.state())
    resumed.training_step(batches[1])
    for name, tensor in straight.merged_weights("actor").items():
        assert torch.equal(tensor, resumed.merged_weights("actor")[name]), name


@pytest.mark.parametrize("engine", ["native", "native_graphs", "hf", pytest.param("vllm", marks=needs_vllm)])
@pytest.mark.parametrize("sampled", [False, True])
def test_an_engine_answers_as_on_the_cpu(sampled: bool, engine: str) -> None:
    settings = GenerationSettings(max_new_tokens=NEW_TOKENS, stop_ids=(2,), pad_id=0, temperature=0.8, top_k=50)
    keys = [str(row) for row in range(len(PROMPTS))]
    uniforms = sample_uniforms(seed=0, episode=0, keys=keys, samples=[0] * len(keys), max_new_tokens=NEW_TOKENS)
    wanted, found = (
        make_engine(each, wide_causal_lm("llama").to(device)).generate(
            PROMPTS, settings, uniforms=uniforms if sampled else None
        )
        for each, device in (("native", "cpu"), (engine, DEVICE))
    )
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["native", "native_graphs", "hf"])
def test_a_chunk_that_is_drawn_twice_in_bfloat16_is_the_same(engine: str) -> None:
    settings = GenerationSettings(max_new_tokens=NEW_TOKENS, stop_ids=(2,), pad_id=0)
    keys = [str(row) for row in range(len(PROMPTS))]
    uniforms = sample_uniforms(seed=0, episode=0, keys=keys, samples=[0] * len(keys), max_new_tokens=NEW_TOKENS)
    model = tiny_llama(initializer_range=0.2).to(DEVICE, torch.bfloat16)
    first, second = (make_engine(engine, model).generate(PROMPTS, settings, uniforms=uniforms) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
    assert torch.equal(first.log_probs, second.log_probs)


OPTIONS: dict[str, object] = {
    "entropy_coef": 0.1, "dual_clip": 3.0, "eps_clip_high": 0.3, "aggregation": "sequence_mean",
    "correction": "truncated", "max_ratio": None,
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 2e-1)])
def test_a_step_with_every_option_gives_the_cpus_figures(expected: Expected, dtype: str, tolerance: float) -> None:
    stats, wanted = (
        learner(*where, **OPTIONS).training_step(expected.batch) for where in ((DEVICE, dtype), ("cpu", "float32"))
    )
    for name in ("actor_loss", "critic_loss", "entropy", "importance_weight", "advantage_std", "actor_grad_norm"):
        assert getattr(stats, name) == pytest.approx(getattr(wanted, name), rel=tolerance, abs=tolerance / 10), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_ratio_is_one_exactly(dtype: str) -> None:
    stats = learn_episode(learner(DEVICE, dtype), tiny_experience(), seed=0, episode=0)
    assert (stats[0].approx_kl, stats[0].clip_fraction, stats[0].max_ratio) == (0.0, 0.0, 1.0)


def test_float16_is_scaled_and_a_gradient_that_overflows_is_told() -> None:
    ours = learner(DEVICE, "float16")
    stats = learn_episode(ours, tiny_experience(), seed=0, episode=0)
    assert 0 < stats[0].critic_grad_norm < float("inf")
    assert ours.state().facts["critic"]["loss_scale"]["good_steps"] == 1
    next(iter(ours.actor.parameters())).register_hook(lambda gradient: gradient * float("inf"))
    stats = learn_episode(ours, tiny_experience(), seed=0, episode=1)
    assert (stats[0].actor_overflowed, stats[0].actor_grad_norm, stats[0].critic_overflowed) == (1.0, 0.0, 0.0)


def test_two_ranks_are_one_with_twice_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL where there are two GPUs, else gloo over one that both share."""
    monkeypatch.setattr(learner_cases, "DEVICE", "cuda")
    found = run_on_ranks("tests.parallel.learner_cases", ["mixed", "agreement"], tmp_path, device="cuda")
    troubles = run_on_ranks(
        "tests.parallel.learner_trouble_cases", ["exploding", "nan_advantage"], tmp_path, device="cuda"
    )
    alone = learner_cases.mixed(ALONE)
    for rank, trouble in zip(found, troubles, strict=True):
        assert rank["mixed"].numbers == pytest.approx(alone.numbers, rel=1e-3, abs=1e-5)
        assert trouble["exploding"].numbers["0.skipped"] == 1.0
        assert "the actor's loss is nan" in trouble["nan_advantage"].sentence
        assert rank["agreement"].tensors["sum"].tolist() == [3.0, 30.0]
