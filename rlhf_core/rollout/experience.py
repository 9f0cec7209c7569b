"""Prompts in, experience out: sample, score, and turn scores into advantages.

What each model contributes is a function, so that the models may work in one process or in four.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config import RolloutConfig
from rlhf_core.counting import counted
from rlhf_core.data import Problem, PromptTemplate
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.freed_memory import give_back
from rlhf_core.generation import Generation, GenerationSettings, make_engine, notes_suffice, sample_uniforms
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.compatibility import check_same_tokenizer
from rlhf_core.models.critic import Critic, response_values
from rlhf_core.models.lora import adapters_off
from rlhf_core.models.shape import LOGITS_BYTES
from rlhf_core.models.trunk import autocast, device_of, forward_takes, unwrapped
from rlhf_core.phases import reached
from rlhf_core.rewards.scoring import Scorer, Scores, ScoringBatch
from rlhf_core.rollout.advantages import WITH_CRITIC, Forwards, LegacyForm, compares_groups, estimate
from rlhf_core.rollout.samples import MadeExperience, describe
from rlhf_core.types import EpisodeControls, Experience, Prompt

__all__ = [
    "ExperienceMaker",
    "MadeExperience",
    "assemble",
    "draw",
    "judged",
    "read",
    "settings_of",
    "state_values",
    "to_prompts",
    "token_logprobs",
]


def to_prompts(problems: Iterable[Problem], template: PromptTemplate) -> list[Prompt]:
    """Return the problems as the maker takes them: with the token ids that the model is given."""
    return [
        Prompt(tuple(template.prompt_ids(problem.prompt)), problem.prompt, problem.answer, problem.key, problem.entry)
        for problem in problems
    ]


class ExperienceMaker:
    """Makes experience in this process, with its models in evaluation mode and no gradient.

    Args:
        actor: causal language model that samples.
        critic: predicts the return before each token; None if advantages compare samples with each other.
        scorer: judges responses; closed with this maker.
        initial_model: the KL penalty is measured from it; None takes the actor with its adapters switched off.
        config: from prompts to experience.
        template: reads the model's responses.
        seed: seed of the run; with episode, prompt and sample it decides every token drawn.
        legacy_form: which of upstream's trainers `config.legacy` follows.
        generation: how responses are drawn and end, where not as configuration and template say.
        greedy: take the likeliest token each time.

    Raises:
        ConfigError: if the estimator needs a critic, and there is none.
        ModelError: if the models' vocabularies differ.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: Critic | None,
        scorer: Scorer,
        initial_model: PreTrainedModel | None,
        *,
        config: RolloutConfig,
        template: PromptTemplate,
        seed: int,
        legacy_form: LegacyForm = "trainer",
        generation: GenerationSettings | None = None,
        greedy: bool = False,
    ) -> None:
        if critic is None and config.advantage_estimator == WITH_CRITIC:
            raise ConfigError(
                "advantage estimator gae needs a critic, and there is none; give one, or choose grpo or reinforce_pp"
            )
        if config.legacy and config.advantage_estimator != WITH_CRITIC:
            raise ConfigError(
                f"legacy gives the numbers of upstream's PPO, which knows no {config.advantage_estimator}; "
                "set advantage_estimator to gae, or legacy to false"
            )
        for what, other in (("critic", critic), ("initial model", initial_model)):
            if other is not None:
                check_same_tokenizer(actor, other, what=f"the actor and the {what}")
        self.actor = actor.eval()
        self.critic = None if critic is None or config.advantage_estimator != WITH_CRITIC else critic.eval()
        self.scorer = scorer
        self.initial_model = None if initial_model is None else initial_model.eval()
        self.config = config
        self.template = template
        self.generation = generation or settings_of(config, template)
        self.greedy = greedy
        self.generate_seconds = 0.0
        """Time that the last `make_experience` spent on sampling."""
        self._seed = seed
        self._legacy_form = legacy_form
        self._device = device_of(actor)

    def make_experience(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[int],
        *,
        episode: int,
        policy_version: int,
        controls: EpisodeControls | None = None,
    ) -> MadeExperience:
        """Sample one response for each row, score it, and return the experience on the CPU.

        Works on `config.chunk_size` rows at a time, and a chunk's numbers depend on nothing outside it.

        Args:
            prompts: one for each row; a prompt sampled several times stands here several times, in a row.
            samples: which of the prompt's samples each row is, from 0.
            episode: from 0.
            policy_version: of the actor's weights.
            controls: the episode's KL coefficient and scale of scores; None takes `config.kl_coef` and no scaling.

        Raises:
            DataError: if there are no rows, a prompt is empty or longer than `config.max_prompt_tokens`, or the
                estimator compares samples of a prompt and these do not stand together.
        """
        if not prompts or len(prompts) != len(samples):
            raise DataError(
                f"expected rows with one sample number each, got {counted(len(prompts), 'prompt')} and "
                f"{counted(len(samples), 'number')}"
            )
        self._check_lengths(prompts)
        if compares_groups(self.config):
            self._check_groups(prompts)
        self.generate_seconds = 0.0
        controls = controls or EpisodeControls(self.config.kl_coef)
        size = self.config.chunk_size
        chunks = []
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            reached("generate")
            drawn = self._generate(prompts[rows], samples[rows], episode)
            give_back()  # keys and values, before the passes that score
            reached("score")
            chunks.append(self._judge_chunk(prompts[rows], samples[rows], drawn, policy_version, controls))
        made = [sample for chunk in chunks for sample in chunk.samples]
        return MadeExperience(Experience.concat([chunk.experience for chunk in chunks]), made)

    def close(self) -> None:
        """End the scorer's processes."""
        self.scorer.close()

    def _check_lengths(self, prompts: Sequence[Prompt]) -> None:
        limit = self.config.max_prompt_tokens
        for prompt in prompts:
            if not prompt.ids:
                raise DataError(f"the prompt with key {prompt.key} has no tokens; leave it out, or give it a template")
            if len(prompt.ids) > limit:
                raise DataError(
                    f"a prompt has {len(prompt.ids)} tokens, but ppo.max_prompt_tokens is {limit}; "
                    f"raise it or leave out the prompt that begins {prompt.text[:40]!r}"
                )

    def _check_groups(self, prompts: Sequence[Prompt]) -> None:
        size = self.config.samples_per_prompt
        groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        if len(prompts) % size or any(prompt.key != group[0].key for group in groups for prompt in group):
            raise DataError(
                f"advantage estimator {self.config.advantage_estimator} compares {size} samples of a prompt, but the "
                f"batch ({counted(len(prompts), 'row')}) is not made of prompts of {size} rows each, one after the "
                "other"
            )

    def _judge_chunk(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[int],
        drawn: Generation,
        policy_version: int,
        controls: EpisodeControls,
    ) -> MadeExperience:
        batch = read(prompts, drawn, template=self.template, generation=self.generation)
        forwards = self._run_models(batch, drawn)
        scores = judged(self.scorer, batch, device=self._device, config=self.config)
        return assemble(
            batch,
            samples,
            rollout_log_probs=drawn.log_probs,
            forwards=forwards,
            scores=scores,
            policy_version=policy_version,
            config=self.config,
            controls=controls,
            tag=self.template.answer_tag,
            legacy_form=self._legacy_form,
        )

    def _generate(self, prompts: Sequence[Prompt], samples: Sequence[int], episode: int) -> Generation:
        started = time.perf_counter()
        drawn = draw(
            self.actor,
            prompts,
            samples,
            config=self.config,
            generation=self.generation,
            tokenizer=self.template.tokenizer,
            seed=self._seed,
            episode=episode,
            greedy=self.greedy,
        )
        self.generate_seconds += time.perf_counter() - started
        return drawn

    def _run_models(self, batch: ScoringBatch, drawn: Generation) -> Forwards:
        noted = notes_suffice(self.config, self.generation, self.actor) and not self.greedy
        return Forwards(
            logprobs=drawn.log_probs if noted else self._logprobs(self.actor, batch),
            ref_logprobs=self._ref_logprobs(batch),
            values=state_values(self.critic, batch, config=self.config),
            mask=batch.action_mask,
        )

    def _ref_logprobs(self, batch: ScoringBatch) -> Tensor:
        if self.initial_model is not None:
            return self._logprobs(self.initial_model, batch)
        with adapters_off(self.actor):
            return self._logprobs(self.actor, batch)

    def _logprobs(self, model: PreTrainedModel, batch: ScoringBatch) -> Tensor:
        return token_logprobs(model, batch, temperature=self.generation.temperature, config=self.config)


def settings_of(config: RolloutConfig, template: PromptTemplate) -> GenerationSettings:
    """Return how responses are drawn and where they end, as configuration and template say."""
    return GenerationSettings(
        max_new_tokens=config.max_new_tokens,
        stop_ids=template.stop_ids,
        pad_id=template.pad_id,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_length=config.max_length,
        stop_strings=template.stop_strings,
    )


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
    width = batch.action_mask.shape[1]
    positions = width if forward_takes(model, "logits_to_keep") else batch.sequences.shape[1]
    rows = max(1, LOGITS_BYTES // (4 * positions * unwrapped(model).config.get_text_config().vocab_size))
    read = partial(response_logprobs, model, temperature=temperature)
    return _read(read, batch, model, config, most=rows)


def state_values(critic: nn.Module | None, batch: ScoringBatch, *, config: RolloutConfig) -> Tensor:
    """Return the value of the state before each response token, [B A] on the CPU; zero on padding or without critic."""
    if critic is None:
        return torch.zeros(batch.action_mask.shape)
    return _read(partial(response_values, critic), batch, critic, config)


def _read(
    read: Callable[..., Tensor],
    batch: ScoringBatch,
    model: nn.Module,
    config: RolloutConfig,
    *,
    most: int | None = None,
) -> Tensor:
    """Return what a model says of each response token, [B A] on the CPU, zero on padding."""
    found, device = torch.zeros(batch.action_mask.shape), device_of(model)
    with torch.no_grad(), autocast(device, getattr(torch, config.rollout_dtype)):
        for piece in batch.pieces(model, most):
            said = read(
                sequences=piece.sequences.to(device),
                attention_mask=piece.attention_mask.to(device),
                num_actions=piece.num_actions,
            )
            piece.put(found, said.cpu())
    return torch.where(batch.action_mask, found, 0.0)


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
        scores=scores.total, abstains=scores.abstains, forwards=forwards, config=config, controls=controls,
        legacy_form=legacy_form,
    )  # fmt: skip
    experience = Experience(
        sequences=batch.sequences,
        action_log_probs=forwards.logprobs,
        values=forwards.values,
        reward=estimates.rewards,
        kl=estimates.kl,
        advantages=estimates.advantages,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask & ~scores.abstains.unsqueeze(1),
        policy_version=torch.full((len(batch.prompts),), policy_version),
        rollout_log_probs=rollout_log_probs,
        returns=estimates.returns,
    )
    return MadeExperience(experience, describe(batch, samples, scores, estimates.kl, tag=tag))
