"""What a run needs of its data, refused in one sentence before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.encoding import split_pairs
from rlhf_core.data.preparing.dealing import demonstrates
from rlhf_core.data.preparing.limits import PAIRS, too_long
from rlhf_core.data.reading.answers import demonstrated, is_demonstrated
from rlhf_core.errors import DataError
from rlhf_core.rewards.structure import answer_tags, validate_response_structure

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.preparing.metering import TokenMeter
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate


def refuse_unfit(
    splits: Mapping[str, Sequence[Problem]],
    pairs: Sequence[PreferencePair] | None,
    config: PipelineConfig,
    meter: TokenMeter,
    *,
    reads: Collection[str],
) -> None:
    """Refuse data that a stage of the run would stumble over.

    Args:
        splits: problems by split, those that the run reads among them.
        pairs: preference pairs; None where none were given.
        config: says who judges, and the limits.
        meter: counts tokens as the model that will read them does.
        reads: splits that the run reads; "preferences" is what a reward model learns from, pairs too.

    Raises:
        DataError: a split is empty, answers are missing where a verifier judges, pairs are too few, or something is
            longer than its limit.
    """
    if "sft" in reads:
        _refuse_without_demonstrations(splits["sft"])
        _refuse_other_form(splits["sft"], meter.template)
    if "ppo" in reads and config.ppo.reward.verifier > 0:
        _refuse_without_answers(
            splits["ppo"],
            "PPO prompts",
            f"ppo.reward.verifier = {config.ppo.reward.verifier:g} compares with one",
            "ppo.reward.verifier=0 with ppo.reward.reward_model=1",
        )
    if "evaluation" in reads and config.evaluation.judge == "verifier":
        _refuse_without_answers(
            splits["evaluation"],
            "held-out prompts",
            "evaluation.judge = verifier compares with one",
            "evaluation.judge=reward_model",
        )
    if "preferences" in reads and pairs is None:
        _refuse_nothing_to_rank(splits["preferences"])
    elif "preferences" in reads and pairs is not None:
        split_pairs(pairs, config.reward_model, seed=config.seed)
        _refuse_long_pairs(pairs, config, meter)
    for split in ("sft", "ppo", "evaluation"):
        if split in reads:
            found = too_long(split, meter.problems(splits[split]), config, dropped=False)
            if found is not None:
                raise DataError(found.sentence)


def _refuse_without_demonstrations(problems: Sequence[Problem]) -> None:
    if not problems or not all(map(demonstrates, problems)):
        raise DataError(
            "supervised fine-tuning has nothing to learn: the prompts come without responses or answers; give "
            "data.demonstrations, or a model that is fine-tuned already as the parameter `actor`"
        )


def _refuse_other_form(problems: Sequence[Problem], template: PromptTemplate) -> None:
    """Refuse worked solutions that the reader put into tags, where the template wants others."""
    tags = answer_tags(template.answer_tag) if template.tags is None else template.tags
    made = [
        each.demonstration
        for each in problems
        if each.demonstration is not None
        and each.answer is not None
        and is_demonstrated(each.demonstration, each.answer)
    ]
    if made and not any(validate_response_structure(response, tags) for response in made):
        wanted = " ".join(tag["text"] for tag in tags.values())
        raise DataError(
            f"worked solutions are learnt as {demonstrated('...', '...')}, but the template's form is {wanted}; set "
            "template.answer_tag=answer or template.tags to the former, or give whole responses in a field 'response'"
        )


def _can_be_judged(problem: Problem) -> bool:
    return problem.answer is not None or problem.entry is not None  # a task's record is what its scorer asks for


def _refuse_without_answers(problems: Sequence[Problem], what: str, why: str, instead: str) -> None:
    lacking = sum(not _can_be_judged(each) for each in problems)
    if lacking or not problems:
        raise DataError(
            f"{lacking} of {len(problems)} {what} have no answer, but {why}; set {instead}, or give data.problems "
            "with answers"
        )


def _refuse_nothing_to_rank(problems: Sequence[Problem]) -> None:
    if not problems or not all(map(_can_be_judged, problems)):
        raise DataError(
            "a reward model needs pairs, and there are neither data.preferences nor problems with answers by which "
            "the SFT model's samples could be ranked; give one of them, or a trained one as the parameter "
            "`reward_model`"
        )


def _refuse_long_pairs(pairs: Sequence[PreferencePair], config: PipelineConfig, meter: TokenMeter) -> None:
    found = too_long(PAIRS, meter.pairs(pairs), config, dropped=False)
    if found is not None:
        raise DataError(found.sentence)
