"""What each model contributes to experience, one function for each, so that they may work in one process or in four."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config import RolloutConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.generation import Generation, GenerationSettings, make_engine, sample_uniforms
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.critic import response_values
from rlhf_core.models.shape import LOGITS_BYTES
from rlhf_core.models.trunk import autocast, device_of, forward_takes, unwrapped
from rlhf_core.rewards.scoring import Scorer, Scores, ScoringBatch
from rlhf_core.rollout.advantages import Forwards, LegacyForm, estimate
from rlhf_core.rollout.samples import MadeExperience, describe
from rlhf_core.types import EpisodeControls, Experience, Prompt


def draw(
    actor: PreTrainedModel,
    prompts: Sequence[Prompt],
    samples: Sequence[int],
    *,
    config: RolloutConfig,
    generation: GenerationSettings,
    tokenizer: object,
    seed: int,
    episode: int,
    greedy: bool = False,
) -> Generation:
    """Return a response to each prompt.

    Args:
        actor: samples them.
        prompts: one for each row.
        samples: which of its prompt's samples each row is.
        config: engine and arithmetic.
        generation: how responses are drawn and end.
        tokenizer: of the actor.
        seed: of the run; with episode, prompt and sample it decides every token.
        episode: from 0.
        greedy: take the likeliest token each time.
    """
    uniforms = None
    if not greedy:
        uniforms = sample_uniforms(
            seed=seed,
            episode=episode,
            keys=[prompt.key for prompt in prompts],
            samples=samples,
            max_new_tokens=generation.max_new_tokens,
        )
    engine = make_engine(config.engine, actor, tokenizer=tokenizer)
    with autocast(device_of(actor), getattr(torch, config.rollout_dtype)):
        return engine.generate([prompt.ids for prompt in prompts], generation, uniforms=uniforms)


def read(
    prompts: Sequence[Prompt], drawn: Generation, *, template: PromptTemplate, generation: GenerationSettings
) -> ScoringBatch:
    """Return the responses with their texts, as judges take them."""
    width = drawn.action_mask.shape[1]
    texts = [
        template.decode_response(row[counts].tolist(), stop_ids=generation.stop_ids)
        for row, counts in zip(drawn.sequences[:, -width:], drawn.action_mask, strict=True)
    ]
    return ScoringBatch(prompts, texts, drawn.ended, drawn.sequences, drawn.attention_mask, drawn.action_mask)


def token_logprobs(model: PreTrainedModel, batch: ScoringBatch, *, temperature: float, config: RolloutConfig) -> Tensor:
    """Return what a policy thinks of each response token, [B A] on the CPU, zero on padding."""
    device, width = device_of(model), batch.action_mask.shape[1]
    positions = width if forward_takes(model, "logits_to_keep") else batch.sequences.shape[1]
    rows = max(1, LOGITS_BYTES // (4 * positions * unwrapped(model).config.get_text_config().vocab_size))
    with torch.no_grad(), autocast(device, getattr(torch, config.rollout_dtype)):
        found = [
            response_logprobs(
                model,
                sequences=sequences.to(device),
                attention_mask=mask.to(device),
                num_actions=width,
                temperature=temperature,
            ).cpu()
            for sequences, mask in zip(
                *(torch.split(each, rows) for each in (batch.sequences, batch.attention_mask)), strict=True
            )
        ]
    return torch.where(batch.action_mask, torch.cat(found), 0.0)


def state_values(critic: nn.Module | None, batch: ScoringBatch, *, config: RolloutConfig) -> Tensor:
    """Return the value of the state before each response token, [B A] on the CPU; zero on padding or without critic."""
    if critic is None:
        return torch.zeros(batch.action_mask.shape)
    device = device_of(critic)
    with torch.no_grad(), autocast(device, getattr(torch, config.rollout_dtype)):
        found = response_values(
            critic,
            sequences=batch.sequences.to(device),
            attention_mask=batch.attention_mask.to(device),
            num_actions=batch.action_mask.shape[1],
        )
    return torch.where(batch.action_mask, found.cpu(), 0.0)


def judged(scorer: Scorer, batch: ScoringBatch, *, device: torch.device, config: RolloutConfig) -> Scores:
    """Return what the judges say of each response.

    Args:
        scorer: asks them.
        batch: the responses.
        device: where a model among them works.
        config: arithmetic.
    """
    with torch.no_grad(), autocast(device, getattr(torch, config.rollout_dtype)):
        return scorer.score(batch)


def assemble(
    batch: ScoringBatch,
    samples: Sequence[int],
    *,
    rollout_log_probs: Tensor,
    forwards: Forwards,
    scores: Scores,
    policy_version: int,
    config: RolloutConfig,
    controls: EpisodeControls,
    tag: str,
    legacy_form: LegacyForm = "trainer",
) -> MadeExperience:
    """Return the experience that the models' contributions make.

    Args:
        batch: the responses.
        samples: which of its prompt's samples each row is.
        rollout_log_probs: [B A], of the distribution that responses were drawn from.
        forwards: what actor, initial model and critic say of them.
        scores: what the judges say.
        policy_version: of the actor's weights.
        config: estimator, discount, clipping.
        controls: the episode's KL coefficient and scale of scores.
        tag: of the answer, as for `describe`.
        legacy_form: which of upstream's trainers `config.legacy` follows.
    """
    estimates = estimate(
        scores=scores.total, forwards=forwards, config=config, controls=controls, legacy_form=legacy_form
    )
    experience = Experience(
        sequences=batch.sequences,
        action_log_probs=forwards.logprobs,
        values=forwards.values,
        reward=estimates.rewards,
        kl=estimates.kl,
        advantages=estimates.advantages,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask,
        policy_version=torch.full((len(batch.prompts),), policy_version),
        rollout_log_probs=rollout_log_probs,
        returns=estimates.returns,
    )
    return MadeExperience(experience, describe(batch, samples, scores, estimates.kl, tag=tag))
