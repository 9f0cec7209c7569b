"""What a run requires of its data: rows, answers, lengths within limits, and a verifier that accepts what is learnt.

All of it is checked before anything is trained, and refused in one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.data.preferences import split_pairs
from rlhf_core.data.preparing.lengths import PAIRS, TooLong, too_long
from rlhf_core.data.preparing.splits import DEVELOPMENT
from rlhf_core.data.problems import has_response_to_learn, response_to_learn
from rlhf_core.data.reading.rows import demonstrated, is_demonstrated
from rlhf_core.errors import DataError, Fault, refuse_together
from rlhf_core.rewards.structure import answer_tags, validate_response_structure
from rlhf_core.rewards.verifying import Answered, judge_of, verifier_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.preparing.lengths import TokenMeter
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate
    from rlhf_core.rewards.verifying import Judge

ASKED, ASKED_OF_OTHERS = 64, 8
"""Rows that the verifier is asked about, of what is learnt and of each other split: some take a second each."""
LEARNT = "sft"
SHOWN = 80
NO_THOUGHT = "<think></think>"


def refuse_unfit(
    splits: Mapping[str, Sequence[Problem]],
    pairs: Sequence[PreferencePair] | None,
    config: PipelineConfig,
    meter: TokenMeter,
    *,
    reads: Collection[str],
    besides: Sequence[Fault] = (),
) -> None:
    """Refuse data that a stage of the run could not use, and name everything that is wrong at once.

    Args:
        splits: problems by split, those that the run reads among them.
        pairs: preference pairs; None where none were given.
        config: says who judges, and the limits.
        meter: counts tokens as the model that will read them does.
        reads: splits that the run reads; "preferences" is what a reward model learns from, pairs too.
        besides: other faults, to be named with these.

    Raises:
        DataError: a split is empty, answers are missing where a verifier judges, pairs are too few, or something is
            longer than its limit.
    """
    faults = [*besides]
    if "sft" in reads:
        faults += _without_demonstrations(splits["sft"])
        faults += _of_another_form(splits["sft"], meter.template)
    for split in ("ppo", "evaluation"):
        if split in reads:
            faults += _empty(split, splits[split])
    if "ppo" in reads and config.ppo.reward.verifier > 0:
        faults += _without_answers(
            splits["ppo"],
            "PPO prompts",
            f"ppo.reward.verifier = {config.ppo.reward.verifier:g} compares with one",
            "ppo.reward.verifier=0 with ppo.reward.reward_model=1",
            {"ppo.reward.verifier": 0, "ppo.reward.reward_model": 1},
        )
    if "evaluation" in reads and config.evaluation.judge == "verifier":
        faults += _without_answers(
            splits["evaluation"],
            "held-out prompts",
            "evaluation.judge = verifier compares with one",
            "evaluation.judge=reward_model",
            {"evaluation.judge": "reward_model"},
        )
    if "preferences" in reads:
        faults += _nothing_to_rank(splits["preferences"]) if pairs is None else _unfit_pairs(pairs, config, meter)
    elif (
        pairs is None
        and any("reward_model" in str(fault.overrides) for fault in faults)
        and not _wants_reward_model(config)
    ):
        faults += _nothing_to_rank(splits.get("preferences", ()))  # nor could one be trained, if it were asked for
    measured = {DEVELOPMENT} if "ppo" in reads and config.ppo.evaluate_every else set()
    ranked = () if pairs is not None else ("preferences",)
    faults += _without_verifier({split: splits.get(split, ()) for split in measured | {*reads}}, ranked, config)
    faults += [fault for split in measured for fault in _empty(split, splits.get(split, ()))]
    for split in ("sft", "ppo", "evaluation", DEVELOPMENT):
        if split in {*reads, *measured}:
            faults += _longer(too_long(split, meter.problems(splits.get(split, ())), config, dropped=False), meter)
    refuse_together(faults, DataError)


def _empty(split: str, problems: Sequence[Problem]) -> list[Fault]:
    if problems:
        return []
    sentence = (
        f"data.splits.{split} is 0, or other splits took every row, so that there is nothing for this run to read; "
        f"set data.splits.{split} above 0, and the others lower"
    )
    return [Fault(sentence, {})]


def _without_demonstrations(problems: Sequence[Problem]) -> list[Fault]:
    if problems and all(map(has_response_to_learn, problems)):
        return []
    sentence = (
        "supervised fine-tuning has nothing to learn: the prompts come without responses or answers; give "
        "data.demonstrations, or a model that is fine-tuned already as the parameter `actor`"
    )
    return [Fault(sentence, {})]


def _of_another_form(problems: Sequence[Problem], template: PromptTemplate) -> list[Fault]:
    """Find worked solutions that the reader put into tags which are not the template's."""
    tags = answer_tags(template.answer_tag) if template.tags is None else template.tags
    made = [
        each.demonstration
        for each in problems
        if each.demonstration is not None
        and each.answer is not None
        and is_demonstrated(each.demonstration, each.answer)
    ]
    if not made or any(validate_response_structure(response, tags) for response in made):
        return []
    wanted = " ".join(tag["text"] for tag in tags.values())
    sentence = (
        f"worked solutions are learnt as {demonstrated('...', '...')}, but the template's form is {wanted}; set "
        "template.answer_tag=answer or template.tags to the former, or give whole responses in a field 'response'"
    )
    return [Fault(sentence, {})]


def _wants_reward_model(config: PipelineConfig) -> bool:
    """Return whether the run uses a reward model; a run that reads no pairs for it has named a trained one."""
    return config.ppo.reward.reward_model > 0 or config.evaluation.judge == "reward_model"


def _can_be_judged(problem: Problem) -> bool:
    return problem.answer is not None or problem.entry is not None  # a task's record is what its scorer asks for


def _without_answers(
    problems: Sequence[Problem], what: str, why: str, instead: str, overrides: Mapping[str, Any]
) -> list[Fault]:
    lacking = sum(not _can_be_judged(each) for each in problems)
    if not lacking:
        return []
    sentence = (
        f"{lacking} of {len(problems)} {what} have no answer, but {why}; set {instead}, or give data.problems "
        "with answers"
    )
    return [Fault(sentence, overrides)]


def _without_verifier(
    splits: Mapping[str, Sequence[Problem]], ranked: Sequence[str], config: PipelineConfig
) -> list[Fault]:
    """Find rows that have answers, as demonstrations may, where nobody is named who compares with them."""
    if verifier_name(config.data) is not None:
        return []
    asked = [*ranked, *(("evaluation", DEVELOPMENT) if config.evaluation.judge == "verifier" else ())]
    found = [split for split in asked if splits.get(split) and all(map(_can_be_judged, splits[split]))]
    if not found:
        return []
    sentence = (
        f"rows of {', '.join(found)} have answers, and no verifier is named that compares with them; name one as "
        "data.verifier (`exact`, or another of docs/judges.md)"
    )
    return [Fault(sentence, {})]


def _nothing_to_rank(problems: Sequence[Problem]) -> list[Fault]:
    if problems and all(map(_can_be_judged, problems)):
        return []
    sentence = (
        "a reward model needs pairs, and there are neither data.preferences nor problems with answers by which "
        "the SFT model's samples could be ranked; give one of them, or a trained one as the parameter "
        "`reward_model`"
    )
    return [Fault(sentence, {})]


def _unfit_pairs(pairs: Sequence[PreferencePair], config: PipelineConfig, meter: TokenMeter) -> list[Fault]:
    try:
        split_pairs(pairs, config.reward_model, seed=config.seed)
    except DataError as error:
        return [Fault(str(error), {})]
    return _longer(too_long(PAIRS, meter.pairs(pairs), config, dropped=False), meter)


def _longer(found: TooLong | None, meter: TokenMeter) -> list[Fault]:
    """Say what is too long; the remedy is a higher limit, unless the model itself reads no more tokens."""
    if found is None:
        return []
    most = meter.template.tokenizer.model_max_length
    raised = {found.key: found.longest} if found.longest <= most else {"data.too_long": "drop"}
    return [Fault(found.sentence, raised)]


class VerifierCheck(NamedTuple):
    """How many of the demonstrations the verifier accepts; of the problems' answers where nothing is to be learnt."""

    verifier: str
    asked: int
    accepted: int
    split: str

    @property
    def fraction(self) -> float:
        """Accepted ones of those that it was asked about."""
        return self.accepted / self.asked

    def __str__(self) -> str:
        """Return it as one clause."""
        return f"{self.verifier} accepts {self.accepted} of {self.asked} {_what(self.split)}"


def ask_verifier(
    splits: Mapping[str, Sequence[Problem]],
    config: PipelineConfig,
    template: PromptTemplate,
    *,
    allowed_modules: Sequence[str],
) -> VerifierCheck | None:
    """Return what the verifier says of demonstrations, or of answers in their tags; None where nothing has answers.

    Raises:
        DataError: if it accepts none of one split; the splits may come from different sets.
        ConfigError: if there is no such verifier.
    """
    name = verifier_name(config.data)
    answered = {
        split: known for split, problems in splits.items() if (known := [p for p in problems if p.answer is not None])
    }
    judge = judge_of(config, template=template, allowed_modules=allowed_modules) if answered else None
    if judge is None or name is None:
        return None
    try:
        reported = LEARNT if LEARNT in answered else next(iter(answered))
        found = {
            split: ask_about(
                judge, name, rows[: ASKED if split == reported else ASKED_OF_OTHERS], template, split=split
            )
            for split, rows in answered.items()
        }
    finally:
        judge.close()
    return found[reported]


def ask_about(
    judge: Judge, name: str, problems: Sequence[Problem], template: PromptTemplate, *, split: str = LEARNT
) -> VerifierCheck:
    """Return how many of the problems' demonstrations, or answers in their tags, a judge accepts.

    An answer outside the split that is learnt is also tried after a thought, which some verifiers require.

    Raises:
        DataError: if it accepts none.
    """
    accepted = _accepted(judge, problems, [response_to_learn(each, template) for each in problems])
    if not accepted and split != LEARNT:
        thought = [f"{NO_THOUGHT}{response_to_learn(each, template)}" for each in problems]
        accepted = _accepted(judge, problems, thought)
    if not accepted:
        first = problems[0]
        raise DataError(
            f"the data and the verifier disagree: {name} accepts none of {len(problems)} {_what(split)}, such as "
            f"{_short(response_to_learn(first, template))} for the answer {_short(first.answer or '')}; name another "
            "data.verifier, or correct the answers, the demonstrations or template.answer_tag"
        )
    return VerifierCheck(name, len(problems), accepted, split)


def _accepted(judge: Judge, problems: Sequence[Problem], responses: Sequence[str]) -> int:
    rows = [
        Answered(each.prompt, response, each.answer, each.entry, each.key, ended=True)
        for each, response in zip(problems, responses, strict=True)
    ]
    return sum(verdict.score >= 1 for verdict in judge.judge(rows))


def _what(split: str) -> str:
    return "demonstrations" if split == LEARNT else f"answers of the {split} problems"


def _short(text: str) -> str:
    """Return both ends of a text: a demonstration's verdict often hangs on its last words."""
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}")
