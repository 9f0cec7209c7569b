"""Preference pairs from a policy's own samples, ordered by the data's verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from transformers import PreTrainedModel

from rlhf_core.config import RewardModelConfig
from rlhf_core.counting import counted
from rlhf_core.data import PreferencePair, Problem, PromptTemplate
from rlhf_core.data.preferences import VerifiedSample, pairs_from_samples
from rlhf_core.errors import DataError
from rlhf_core.generation import GenerationSettings, make_engine, sample_uniforms
from rlhf_core.rewards.abstaining import check_share
from rlhf_core.rewards.sources import VERIFIER
from rlhf_core.rewards.verifying import RIGHT, Answered, ExactJudge, Judge, Verdict

PROMPTS_AT_ONCE = 16
SAMPLING_ROUND = -1
"""Stands where PPO has its episode, so that no uniform number is used twice in a run."""


class SampledPairs(NamedTuple):
    """The pairs, and what was sampled to get them."""

    pairs: list[PreferencePair]
    figures: dict[str, float]
    """samples that were judged and unjudged; accuracy and share well formed of the judged; mixed: share of prompts with
    right and wrong ones; pairs."""


def sample_pairs(
    model: PreTrainedModel,
    template: PromptTemplate,
    problems: Sequence[Problem],
    config: RewardModelConfig,
    *,
    seed: int,
    on_progress: Callable[[int], None],
    judge: Judge | None = None,
    max_abstained: float = 0.0,
) -> SampledPairs:
    """Sample responses to each problem at temperature 1 and pair better ones with worse ones.

    A response at which the judge fails is in no pair.

    Args:
        model: the policy.
        template: how prompts are put and responses read.
        problems: that it is asked.
        config: samples of each problem, their length, and the most pairs.
        seed: of the samples, and of the pairs' order.
        on_progress: called with the number of problems done.
        judge: the data's verifier (`judge_of`), left open; None compares with the answer (`exact`).
        max_abstained: the largest share of responses at which the judge may fail.

    Raises:
        DataError: the judge fails too often; or no problem has two responses of different worth, so there is nothing
            to learn from.
    """
    judge = judge or ExactJudge(template.answer_tag)
    samples: list[VerifiedSample] = []
    mixed: list[bool] = []
    failures: list[str] = []
    for start in range(0, len(problems), PROMPTS_AT_ONCE):
        batch = problems[start : start + PROMPTS_AT_ONCE]
        answered = _sample(model, template, batch, config, seed)
        verdicts = judge.judge(answered)
        failures += [verdict.failure for verdict in verdicts if verdict.failure is not None]
        made = list(zip(answered, verdicts, strict=True))
        for row in range(0, len(made), config.samples_per_prompt):
            group = _verified(made[row : row + config.samples_per_prompt])
            mixed.append(len({sample.score for sample in group}) > 1)
            samples += group
        on_progress(start + len(batch))
    check_share(
        [{VERIFIER: failed} for failed in failures], abstained=len(failures), of=len(samples) + len(failures),
        most=max_abstained, what="samples for preference pairs", error=DataError,
    )  # fmt: skip
    pairs = pairs_from_samples(samples, most=config.pairs, seed=seed)
    if not pairs:
        raise DataError(
            f"the samples of each prompt ({counted(len(samples), 'sample')} of {counted(len(problems), 'prompt')}) are "
            "all equally good, so they make no preference pairs; give a preference file as `data`, an easier or "
            "harder task, or a better SFT model"
        )
    figures = {
        "samples": len(samples),
        "accuracy": fmean(sample.score >= RIGHT for sample in samples),
        "well_formed": fmean(sample.well_formed for sample in samples),
        "mixed": fmean(mixed),
        "pairs": len(pairs),
        "unjudged": len(failures),
    }
    return SampledPairs(pairs, figures)


def _sample(
    model: PreTrainedModel, template: PromptTemplate, batch: Sequence[Problem], config: RewardModelConfig, seed: int
) -> list[Answered]:
    rows = [(problem, sample) for problem in batch for sample in range(config.samples_per_prompt)]
    made = make_engine("native", model, tokenizer=template.tokenizer).generate(
        [template.prompt_ids(problem.prompt) for problem, _ in rows],
        GenerationSettings(
            max_new_tokens=config.max_new_tokens,
            stop_ids=template.stop_ids,
            pad_id=template.pad_id,
            stop_strings=template.stop_strings,
        ),
        uniforms=sample_uniforms(
            seed=seed,
            episode=SAMPLING_ROUND,
            keys=[problem.key for problem, _ in rows],
            samples=[sample for _, sample in rows],
            max_new_tokens=config.max_new_tokens,
        ),
    )
    width = made.action_mask.shape[1]
    samples = []
    for row, (problem, _) in enumerate(rows):
        ids = made.sequences[row, -width:][made.action_mask[row]].tolist()
        text, ended = template.decode_response(ids), bool(made.ended[row])
        samples.append(Answered(problem.prompt, text, problem.answer, problem.entry, problem.key, ended))
    return samples


def _verified(judged: Iterable[tuple[Answered, Verdict]]) -> list[VerifiedSample]:
    return [
        VerifiedSample(sample.prompt, sample.response, verdict.score, verdict.well_formed)
        for sample, verdict in judged
        if verdict.failure is None
    ]
