"""Prompts in, experience out: sample, score, and turn scores into advantages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config import RolloutConfig
from rlhf_core.data import Problem, PromptTemplate
from rlhf_core.data.verifiers import is_well_formed
from rlhf_core.errors import DataError
from rlhf_core.experience_maker.advantages import Judgement, estimate
from rlhf_core.functional.kl import kl
from rlhf_core.generation import Generation, generate, sample_uniforms
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.critic import Critic
from rlhf_core.models.device import autocast, device_of
from rlhf_core.models.lora import adapters_off
from rlhf_core.rewards.scoring import REWARD_MODEL, VERIFIER, Scorer, Scores, ScoringBatch
from rlhf_core.types import EpisodeControls, Experience, Prompt, Sample


class MadeExperience(NamedTuple):
    """The same rows twice: for the learner, and for people."""

    experience: Experience
    samples: list[Sample]


class _Forwards(NamedTuple):
    """What the models say about one chunk, [B A] each; zero on padding."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor


def to_prompts(problems: Iterable[Problem], template: PromptTemplate) -> list[Prompt]:
    """Return the problems as the maker takes them: with the token ids that the model is given."""
    return [
        Prompt(tuple(template.prompt_ids(problem.prompt)), problem.prompt, problem.answer, problem.key)
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
        legacy_form: Literal["trainer", "detached"] = "trainer",
    ) -> None:
        self.actor = actor.eval()
        self.critic = None if critic is None else critic.eval()
        self.scorer = scorer
        self.initial_model = None if initial_model is None else initial_model.eval()
        self.config = config
        self.template = template
        self.generate_seconds = 0.0
        """Time that the last `make_experience` spent on sampling."""
        self._seed = seed
        self._legacy_form = legacy_form
        self._device = device_of(actor)
        self._dtype: torch.dtype = getattr(torch, config.rollout_dtype)

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
            DataError: if there are no rows, or a prompt is longer than `config.max_prompt_tokens`.
        """
        if not prompts or len(prompts) != len(samples):
            raise DataError(
                f"expected rows with one sample number each, got {len(prompts)} prompts and {len(samples)} numbers"
            )
        self._check_lengths(prompts)
        self.generate_seconds = 0.0
        controls = controls or EpisodeControls(self.config.kl_coef)
        size = self.config.chunk_size
        chunks = []
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            drawn = self._generate(prompts[rows], samples[rows], episode)
            chunks.append(self._judge_chunk(prompts[rows], samples[rows], drawn, policy_version, controls))
        made = [sample for chunk in chunks for sample in chunk.samples]
        return MadeExperience(Experience.concat([chunk.experience for chunk in chunks]), made)

    def close(self) -> None:
        """End the scorer's processes."""
        self.scorer.close()

    def _check_lengths(self, prompts: Sequence[Prompt]) -> None:
        limit = self.config.max_prompt_tokens
        for prompt in prompts:
            if len(prompt.ids) > limit:
                raise DataError(
                    f"a prompt has {len(prompt.ids)} tokens, but ppo.max_prompt_tokens is {limit}; "
                    f"raise it or leave out the prompt that begins {prompt.text[:40]!r}"
                )

    def _judge_chunk(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[int],
        drawn: Generation,
        policy_version: int,
        controls: EpisodeControls,
    ) -> MadeExperience:
        responses = self._responses(drawn)
        batch = ScoringBatch(prompts, responses, drawn.ended, drawn.sequences, drawn.attention_mask, drawn.action_mask)
        with torch.no_grad(), autocast(self._device, self._dtype):
            forwards = self._run_models(drawn)
            scores = self.scorer.score(batch)
        mask = drawn.action_mask
        divergence = kl(
            logprobs=forwards.logprobs,
            ref_logprobs=forwards.ref_logprobs,
            mask=mask,
            estimator=self.config.kl_estimator,
        )
        judged = Judgement(scores.total, divergence, forwards.values, mask)
        estimates = estimate(judged, config=self.config, kl_coef=controls.kl_coef)
        experience = Experience(
            sequences=drawn.sequences,
            action_log_probs=forwards.logprobs,
            values=forwards.values,
            reward=estimates.rewards,
            kl=divergence,
            advantages=estimates.advantages,
            attention_mask=drawn.attention_mask,
            action_mask=mask,
            policy_version=torch.full((len(prompts),), policy_version),
            rollout_log_probs=drawn.log_probs,
            returns=estimates.returns,
        )
        return MadeExperience(experience, self._describe(batch, samples, scores, divergence))

    def _generate(self, prompts: Sequence[Prompt], samples: Sequence[int], episode: int) -> Generation:
        started = time.perf_counter()
        with autocast(self._device, self._dtype):
            drawn = generate(
                self.actor,
                [prompt.ids for prompt in prompts],
                max_new_tokens=self.config.max_new_tokens,
                stop_ids=self.template.stop_ids,
                pad_id=self.template.pad_id,
                temperature=self.config.temperature,
                uniforms=sample_uniforms(
                    seed=self._seed,
                    episode=episode,
                    keys=[prompt.key for prompt in prompts],
                    samples=samples,
                    max_new_tokens=self.config.max_new_tokens,
                ),
            )
        self.generate_seconds += time.perf_counter() - started
        return drawn

    def _responses(self, drawn: Generation) -> list[str]:
        width = drawn.action_mask.shape[1]
        rows = zip(drawn.sequences[:, -width:], drawn.action_mask, strict=True)
        return [self.template.decode_response(ids[counts].tolist()) for ids, counts in rows]

    def _run_models(self, drawn: Generation) -> _Forwards:
        ids = drawn.sequences.to(self._device)
        mask = drawn.attention_mask.to(self._device)
        values = torch.zeros(drawn.action_mask.shape)
        if self.critic is not None:
            width = drawn.action_mask.shape[1]
            values = self.critic.response_values(sequences=ids, attention_mask=mask, num_actions=width).cpu()
        return _Forwards(
            logprobs=self._logprobs(self.actor, ids, mask, drawn.action_mask),
            ref_logprobs=self._ref_logprobs(ids, mask, drawn.action_mask),
            values=torch.where(drawn.action_mask, values, 0.0),
        )

    def _ref_logprobs(self, ids: Tensor, mask: Tensor, action_mask: Tensor) -> Tensor:
        if self.initial_model is not None:
            return self._logprobs(self.initial_model, ids, mask, action_mask)
        with adapters_off(self.actor):
            return self._logprobs(self.actor, ids, mask, action_mask)

    def _logprobs(self, model: PreTrainedModel, ids: Tensor, mask: Tensor, action_mask: Tensor) -> Tensor:
        logprobs = response_logprobs(
            model,
            sequences=ids,
            attention_mask=mask,
            num_actions=action_mask.shape[1],
            temperature=self.config.temperature,
        )
        return torch.where(action_mask, logprobs.cpu(), 0.0)

    def _describe(
        self, batch: ScoringBatch, samples: Sequence[int], scores: Scores, divergence: Tensor
    ) -> list[Sample]:
        lengths = batch.action_mask.sum(dim=1).tolist()
        summed = divergence.sum(dim=1).tolist()
        raw = {name: values.tolist() for name, values in scores.raw.items()}
        described = []
        for row, prompt in enumerate(batch.prompts):
            text, ended = batch.responses[row], bool(batch.ended[row])
            said = {name: values[row] for name, values in raw.items()}
            described.append(
                Sample(
                    prompt=prompt.text,
                    answer=prompt.answer or "",
                    response=text,
                    key=prompt.key,
                    score=scores.total[row].item(),
                    verifier=said.get(VERIFIER, 0.0),
                    well_formed=is_well_formed(text, ended=ended, tag=self.template.answer_tag),
                    rm_score=said.get(REWARD_MODEL),
                    kl=summed[row],
                    length=lengths[row],
                    ended=ended,
                    index=samples[row],
                    raw_scores=said,
                )
            )
        return described
