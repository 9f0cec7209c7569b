"""Every option of the learner: its gradient against autograd over rows without padding, written from the papers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.ptx import Demonstrations
from rlhf_core.training.padding import PaddedBatch, pad_examples
from rlhf_core.types import Experience
from tests.reference import definitions
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.experience import PROMPTS, RESPONSES, TOKENS, tiny_experience
from tests.unit.ppo.test_learner import CONFIG
from tests.unit.training.built import built

EXAMPLES = [([5, 6], [7, 8, 2]), ([9], [10, 2]), ([11, 12, 13], [14, 2])]
Row = list[Tensor]


def learner(*, lora: LoRAConfig | None = None, **changes: object) -> PPOLearner:
    # No clipping and no guard: the first moments are then a tenth of the gradient.
    config = CONFIG.model_copy(update={"grad_clip": 1e9, "max_ratio": None, "micro_batch_size": 2, **changes})
    actor = tiny_llama(initializer_range=0.2)
    critic = Critic.from_causal_lm(actor) if config.advantage_estimator == "gae" else None
    if lora is not None:
        for number, model in enumerate((actor, critic.trunk) if critic else (actor,)):
            attach_lora(model, lora, seed=number)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # at zero, the other factor has no gradient
                    torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    ptx = Demonstrations(EXAMPLES, batch_size=3, seed=0, device="cpu") if config.ptx_coef > 0 else None
    return built(actor, critic, config, ptx=ptx, seed=5)


def shifted(ours: PPOLearner) -> Experience:
    """Old log-probabilities off the actor's own by up to a factor of six, so that every clip has work."""
    batch = ours.recompute(tiny_experience(rubbish=float("nan")))
    shift = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)) * 0.6
    rollout = batch.action_log_probs + torch.randn(8, 4, generator=torch.Generator().manual_seed(4)) * 0.5
    return batch.replace(action_log_probs=batch.action_log_probs + shift, rollout_log_probs=rollout)


def gradients(ours: PPOLearner, role: str = "actor") -> dict[str, Tensor]:
    tensors = ours.state().tensors
    prefix = f"{role}.optimizer.exp_avg."
    return {name.removeprefix(prefix): 10 * tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def unpadded(model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def objective(row: int, ours: PPOLearner, batch: Experience, gains: list[list[float]]) -> Row:
    """The objective of each token of a row, by cases."""
    config = ours.config
    every = unpadded(ours.actor, PROMPTS[row], RESPONSES[row])
    terms = []
    for t, token in enumerate(RESPONSES[row]):
        old, drawn, gain = batch.action_log_probs[row, t], batch.rollout_log_probs[row, t], gains[row][t]
        ratio = (every[t, token] - old).exp()
        high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
        if gain > 0:
            term = ratio * gain if ratio < 1 + high else torch.tensor((1 + high) * gain)
        elif config.dual_clip is not None and ratio > config.dual_clip:
            term = torch.tensor(config.dual_clip * gain)
        else:
            term = ratio * gain if ratio > 1 - config.eps_clip else torch.tensor((1 - config.eps_clip) * gain)
        if config.correction != "none":
            term = term * min((old - drawn).exp().item(), config.importance_cap)
        entropy = -(every[t].exp() * every[t]).sum()
        terms.append((1 - config.ptx_coef) * term + config.entropy_coef * entropy)
    return terms


def naive_loss(ours: PPOLearner, batch: Experience) -> Tensor:
    rows = [row[: len(response)].tolist() for row, response in zip(batch.advantages, RESPONSES, strict=True)]
    gains = definitions.whiten(rows) if ours.config.advantage_estimator == "gae" else rows
    terms = [objective(row, ours, batch, gains) for row in range(8)]
    how: dict[str, Callable[[], Tensor]] = {
        "token_mean": lambda: torch.stack([term for row in terms for term in row]).sum() / TOKENS,
        "sequence_mean": lambda: torch.stack([torch.stack(row).mean() for row in terms]).mean(),
        "constant_length": lambda: torch.stack(
            [torch.stack(row).sum() / CONFIG.max_new_tokens for row in terms]
        ).mean(),
    }
    loss = -how[ours.config.aggregation]()
    if ours.config.ptx_coef > 0:
        likely = [
            unpadded(ours.actor, prompt, response)[t, token]
            for prompt, response in EXAMPLES
            for t, token in enumerate(response)
        ]
        loss = loss - ours.config.ptx_coef * torch.stack(likely).mean()
    return loss


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eps_clip_high": 0.5},
        {"dual_clip": 1.5},
        {"entropy_coef": 0.3},
        {"ptx_coef": 0.4},
        {"aggregation": "sequence_mean"},
        {"aggregation": "constant_length"},
        {"correction": "truncated", "importance_cap": 1.2},
        {"correction": "decoupled", "importance_cap": 5.0},
        {"advantage_estimator": "rloo"},
        {"ptx_coef": 0.2, "entropy_coef": 0.1, "dual_clip": 2.0, "aggregation": "sequence_mean"},
    ],
    ids=lambda changes: ", ".join(f"{name} {value}" for name, value in changes.items()) or "plain",
)
def test_the_actors_gradient_is_that_of_the_objective_on_rows_without_padding(changes: dict[str, object]) -> None:
    ours = learner(**changes)
    batch = shifted(ours)
    naive_loss(ours, batch).backward()
    expected = {name: parameter.grad.clone() for name, parameter in trainable_parameters(ours.actor).items()}  # type: ignore[union-attr]
    ours.actor.zero_grad()
    ours.training_step(batch, None if ours.ptx is None else ours.ptx.batch(0))
    found = gradients(ours)
    for name, gradient in expected.items():
        tolerance = 1e-4 * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance, msg=name)


def test_the_critics_gradient_carries_its_weight() -> None:
    halved, plain = learner(vf_coef=0.5), learner()
    stats = [each.training_step(shifted(each)) for each in (halved, plain)]
    assert stats[0].critic_loss == stats[1].critic_loss
    assert 2 * stats[0].critic_grad_norm == pytest.approx(stats[1].critic_grad_norm)


def test_ptx_and_policy_losses_are_told_apart() -> None:
    ours = learner(ptx_coef=0.4)
    batch = shifted(ours)
    likely = [
        definitions.log_softmax(logits.double().tolist(), 1.0)[token]
        for prompt, response in EXAMPLES
        for logits, token in zip(
            ours.actor(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].detach(),
            response,
            strict=True,
        )
    ]
    assert ours.ptx is not None
    stats = ours.training_step(batch, ours.ptx.batch(0))
    assert stats.ptx_loss == pytest.approx(-sum(likely) / len(likely), rel=1e-4)
    assert stats.actor_loss == pytest.approx(learner().training_step(batch).actor_loss, rel=1e-5)


def test_ptx_without_demonstrations_is_refused() -> None:
    ours = learner(ptx_coef=0.4)
    with pytest.raises(TrainingError, match=r"ppo.ptx_coef is 0.4, but the step was given no demonstrations"):
        ours.training_step(tiny_experience())
    empty = pad_examples(EXAMPLES, torch.device("cpu"))
    empty = PaddedBatch(empty.sequences, empty.attention_mask, torch.zeros_like(empty.action_mask))
    with pytest.raises(TrainingError, match="at least one token to learn, got none"):
        ours.training_step(tiny_experience(), empty)
    ours.ptx = None
    with pytest.raises(ConfigError, match=r"ppo.ptx_coef is 0.4, but there are no demonstrations"):
        learn_episode(ours, tiny_experience(), seed=0, episode=0)


def test_rows_in_another_order_give_the_same_step() -> None:
    stats, found = [], []
    for order in (range(8), [5, 2, 7, 0, 3, 6, 1, 4]):
        ours = learner(micro_batch_size=3, entropy_coef=0.1, aggregation="sequence_mean", correction="truncated")
        stats.append(ours.training_step(shifted(ours).select(order)))
        found.append(gradients(ours))
    assert stats[0] == pytest.approx(stats[1], rel=1e-4, abs=1e-6)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())


def test_eight_of_one_give_the_gradients_of_one_of_eight() -> None:
    stats, found = [], []
    for size in (8, 1):
        ours = learner(micro_batch_size=size, ptx_coef=0.2, entropy_coef=0.1, aggregation="sequence_mean")
        assert ours.ptx is not None
        stats.append(ours.training_step(shifted(ours), ours.ptx.batch(0)))
        found.append(gradients(ours) | gradients(ours, "critic"))
    assert stats[0] == pytest.approx(stats[1], rel=1e-5, abs=1e-6)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())


def test_a_ratio_above_the_bound_leaves_the_actor_and_teaches_the_critic() -> None:
    ours = learner(max_ratio=20.0)
    batch = ours.recompute(tiny_experience())
    batch.action_log_probs[2, 1] -= 3.1  # exp(3.1) = 22.2
    before = ours.state().tensors
    stats = ours.training_step(batch)
    assert (stats.skipped, stats.actor_grad_norm) == (1.0, 0.0)
    assert stats.max_ratio == pytest.approx(22.198, rel=1e-3)
    after = ours.state().tensors
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith("actor"))
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items() if "critic.weights" in name)
    assert all(parameter.grad is None for parameter in ours.actor.parameters())
    assert ours.training_step(ours.recompute(tiny_experience())).skipped == 0.0


def test_a_ratio_below_the_bound_is_learnt_from() -> None:
    ours = learner(max_ratio=20.0)
    batch = ours.recompute(tiny_experience())
    batch.action_log_probs[2, 1] -= 2.9  # exp(2.9) = 18.2
    assert ours.training_step(batch).skipped == 0.0


def test_an_explosion_does_not_hide_a_number_that_is_none() -> None:
    ours = learner(max_ratio=20.0)
    batch = ours.recompute(tiny_experience())
    batch.action_log_probs[2, 1] -= 50.0
    batch.advantages[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="the actor's loss is nan"):
        ours.training_step(batch)


def test_the_correction_tells_its_mean_weight() -> None:
    ours = learner(correction="truncated", importance_cap=1.5)
    batch = shifted(ours)
    weights = [
        min((batch.action_log_probs[row, t] - batch.rollout_log_probs[row, t]).exp().item(), 1.5)
        for row in range(8)
        for t in range(len(RESPONSES[row]))
    ]
    assert ours.training_step(batch).importance_weight == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert learner().training_step(batch).importance_weight == 1.0


def test_decoupled_passes_each_begin_at_a_ratio_of_one_and_weigh_what_the_engine_drew() -> None:
    stats = {}
    for correction in ("truncated", "decoupled"):
        ours = learner(correction=correction, max_epochs=2, lr=1e-3)
        stats[correction] = learn_episode(ours, tiny_experience(), seed=0, episode=0)
    assert [step.approx_kl for step in stats["decoupled"]] == [0.0, 0.0]
    assert stats["truncated"][0] == stats["decoupled"][0]
    assert stats["truncated"][1].approx_kl > 0
    weights = [step.importance_weight for step in stats["decoupled"]]
    assert weights[0] != weights[1]


def test_without_a_critic_its_figures_are_zero_and_experience_needs_no_returns() -> None:
    ours = learner(advantage_estimator="grpo")
    stats = learn_episode(ours, tiny_experience().replace(returns=None), seed=0, episode=0)[0]
    assert (stats.critic_loss, stats.critic_grad_norm, stats.critic_lr, stats.explained_variance) == (0, 0, 0, 0)
    assert stats.actor_grad_norm > 0
    assert ours.merged_weights("critic") == {}
    fresh = learner(advantage_estimator="grpo")
    fresh.load_state(*ours.state())
    assert fresh.steps == 1


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(ConfigError, match="gae needs a critic, and there is none"):
        PPOLearner.build(tiny_llama(), None, CONFIG, device="cpu")


@pytest.mark.parametrize("changes", [{"advantage_estimator": "rloo"}, {"legacy": True}])
def test_advantages_of_groups_and_upstreams_are_not_whitened(changes: dict[str, object]) -> None:
    stats = []
    for scale in (1.0, 2.0):
        ours = learner(**changes)
        batch = shifted(ours)
        stats.append(ours.training_step(batch.replace(advantages=batch.advantages * scale)))
    assert stats[1].actor_grad_norm == pytest.approx(2 * stats[0].actor_grad_norm, rel=1e-5)
    assert stats[1].advantage_std == pytest.approx(2 * stats[0].advantage_std, rel=1e-5)
