"""Prompts in, experience out: sample, score, and turn scores into advantages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config import PPOConfig
from rlhf_core.data import Problem, PromptTemplate, Verdict, verify
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.functional.advantages import gae, token_rewards
from rlhf_core.functional.kl import kl
from rlhf_core.generation import Generation, generate, sample_uniforms
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.critic import Critic
from rlhf_core.models.device import autocast, device_of
from rlhf_core.models.lora import adapters_off
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.types import Experience, Sample


class MadeExperience(NamedTuple):
    """The same rows twice: for the learner, and for people."""

    experience: Experience
    samples: list[Sample]


class _Judged(NamedTuple):
    """One chunk's responses and what was thought of them."""

    responses: list[str]
    verdicts: list[Verdict]
    rm_scores: list[float] | None
    scores: Tensor
    """[B]"""


class _Forwards(NamedTuple):
    """What the models say about one chunk, [B A] each; zero on padding where it matters."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    rm_scores: Tensor | None
    """[B], raw."""


class NaiveExperienceMaker:
    """Makes experience in this process, with four models in evaluation mode and no gradient.

    Args:
        actor: causal language model that samples.
        critic: predicts the return before each token.
        reward_model: scores responses; None if only the verifier does.
        initial_model: the KL penalty is measured from it; None takes the actor with its adapters switched off.
        config: the run's configuration.
        template: puts prompts to the model and reads its responses.
        seed: seed of the run; with episode, prompt and sample it decides every token drawn.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: Critic,
        reward_model: RewardModel | None,
        initial_model: PreTrainedModel | None,
        *,
        config: PPOConfig,
        template: PromptTemplate,
        seed: int,
    ) -> None:
        if reward_model is None and config.reward.reward_model > 0:
            raise ConfigError(
                f"ppo.reward.reward_model is {config.reward.reward_model}, but there is no reward model; "
                "give one, or set the weight to 0"
            )
        self.actor, self.critic = actor.eval(), critic.eval()
        self.reward_model = None if reward_model is None else reward_model.eval()
        self.initial_model = None if initial_model is None else initial_model.eval()
        self.config = config
        self.template = template
        self.generate_seconds = 0.0
        """Time that the last `make_experience` spent on sampling."""
        self._seed = seed
        self._device = device_of(actor)
        self._dtype: torch.dtype = getattr(torch, config.rollout_dtype)

    def make_experience(
        self,
        problems: Sequence[Problem],
        samples: Sequence[int],
        *,
        episode: int,
        policy_version: int,
    ) -> MadeExperience:
        """Sample one response for each row, score it, and return the experience on the CPU.

        Works on `config.chunk_size` rows at a time, and a chunk's numbers depend on nothing outside it.

        Args:
            problems: one for each row; a prompt sampled several times stands here several times.
            samples: which of the prompt's samples each row is, from 0.
            episode: from 0.
            policy_version: of the actor's weights.

        Raises:
            DataError: if there are no rows, or a prompt is longer than `config.max_prompt_tokens`.
        """
        if not problems or len(problems) != len(samples):
            raise DataError(
                f"expected rows with one sample number each, got {len(problems)} problems and {len(samples)} numbers"
            )
        self.generate_seconds = 0.0
        size = self.config.chunk_size
        chunks = [
            self._make_chunk(problems[start : start + size], samples[start : start + size], episode, policy_version)
            for start in range(0, len(problems), size)
        ]
        made = [sample for chunk in chunks for sample in chunk.samples]
        return MadeExperience(Experience.concat([chunk.experience for chunk in chunks]), made)

    def _make_chunk(
        self, problems: Sequence[Problem], samples: Sequence[int], episode: int, policy_version: int
    ) -> MadeExperience:
        drawn = self._generate(problems, samples, episode)
        with torch.no_grad(), autocast(self._device, self._dtype):
            forwards = self._run_models(drawn)
        judged = self._judge(problems, drawn, forwards.rm_scores)
        mask = drawn.action_mask
        divergence = kl(
            logprobs=forwards.logprobs,
            ref_logprobs=forwards.ref_logprobs,
            mask=mask,
            estimator=self.config.kl_estimator,
        )
        rewards = token_rewards(scores=judged.scores, kl=divergence, mask=mask, kl_coef=self.config.kl_coef)
        advantages = gae(
            rewards=rewards, values=forwards.values, mask=mask, gamma=self.config.gamma, lam=self.config.lam
        )
        experience = Experience(
            sequences=drawn.sequences,
            action_log_probs=forwards.logprobs,
            values=forwards.values,
            reward=rewards,
            kl=divergence,
            advantages=advantages,
            attention_mask=drawn.attention_mask,
            action_mask=mask,
            policy_version=torch.full((len(problems),), policy_version),
            rollout_log_probs=drawn.log_probs,
            returns=advantages + forwards.values,
        )
        rows = _describe(problems, samples, drawn, judged, divergence)
        return MadeExperience(experience, rows)

    def _generate(self, problems: Sequence[Problem], samples: Sequence[int], episode: int) -> Generation:
        prompts = [self.template.prompt_ids(problem.prompt) for problem in problems]
        for problem, prompt in zip(problems, prompts, strict=True):
            if len(prompt) > self.config.max_prompt_tokens:
                raise DataError(
                    f"a prompt has {len(prompt)} tokens, but ppo.max_prompt_tokens is {self.config.max_prompt_tokens}; "
                    f"raise it or leave out the prompt that begins {problem.prompt[:40]!r}"
                )
        started = time.perf_counter()
        with autocast(self._device, self._dtype):
            drawn = generate(
                self.actor,
                prompts,
                max_new_tokens=self.config.max_new_tokens,
                stop_ids=self.template.stop_ids,
                pad_id=self.template.pad_id,
                temperature=self.config.temperature,
                uniforms=sample_uniforms(
                    seed=self._seed,
                    episode=episode,
                    keys=[problem.key for problem in problems],
                    samples=samples,
                    max_new_tokens=self.config.max_new_tokens,
                ),
            )
        self.generate_seconds += time.perf_counter() - started
        return drawn

    def _run_models(self, drawn: Generation) -> _Forwards:
        ids = drawn.sequences.to(self._device)
        mask = drawn.attention_mask.to(self._device)
        width = drawn.action_mask.shape[1]
        values = self.critic.response_values(sequences=ids, attention_mask=mask, num_actions=width).cpu()
        rm_scores = None if self.reward_model is None else self.reward_model(ids, mask).cpu()
        return _Forwards(
            logprobs=self._logprobs(self.actor, ids, mask, drawn.action_mask),
            ref_logprobs=self._ref_logprobs(ids, mask, drawn.action_mask),
            values=torch.where(drawn.action_mask, values, 0.0),
            rm_scores=rm_scores,
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

    def _judge(self, problems: Sequence[Problem], drawn: Generation, rm_scores: Tensor | None) -> _Judged:
        width = drawn.action_mask.shape[1]
        responses = [
            self.template.decode_response(ids[counts].tolist())
            for ids, counts in zip(drawn.sequences[:, -width:], drawn.action_mask, strict=True)
        ]
        verdicts = [
            verify(response, problem.answer, ended=bool(ended), tag=self.template.answer_tag)
            for response, problem, ended in zip(responses, problems, drawn.ended, strict=True)
        ]
        scores = self.config.reward.verifier * torch.tensor([verdict.score for verdict in verdicts])
        if self.reward_model is not None and rm_scores is not None:
            standardised = self.reward_model.standardise(rm_scores.to(self._device)).cpu()
            scores = scores + self.config.reward.reward_model * standardised
        return _Judged(responses, verdicts, None if rm_scores is None else rm_scores.tolist(), scores)


def _describe(
    problems: Sequence[Problem],
    samples: Sequence[int],
    drawn: Generation,
    judged: _Judged,
    divergence: Tensor,
) -> list[Sample]:
    lengths = drawn.action_mask.sum(dim=1).tolist()
    summed = divergence.sum(dim=1).tolist()
    return [
        Sample(
            prompt=problem.prompt,
            answer=problem.answer,
            response=judged.responses[row],
            key=problem.key,
            score=judged.scores[row].item(),
            verifier=judged.verdicts[row].score,
            well_formed=judged.verdicts[row].well_formed,
            rm_score=None if judged.rm_scores is None else judged.rm_scores[row],
            kl=summed[row],
            length=lengths[row],
            ended=bool(drawn.ended[row]),
            index=samples[row],
        )
        for row, problem in enumerate(problems)
    ]
