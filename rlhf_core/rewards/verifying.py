"""Who says whether an answer is right: one judge by name, for PPO, for preferences and for evaluation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rlhf_core.data.gym import ADAPTERS
from rlhf_core.data.verifiers import Verdict, verify
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.abstaining import NO_NUMBER, failure
from rlhf_core.rewards.process import Called, RewardFunctionError, RewardProcess, call_each
from rlhf_core.rewards.resolve import GYM, RewardFunction, code_digest, resolve_reward_function
from rlhf_core.rewards.structure import Tags, answer_tags, validate_response_structure

if TYPE_CHECKING:
    from rlhf_core.config import DataConfig, PipelineConfig
    from rlhf_core.data.template import PromptTemplate

__all__ = [
    "EXACT",
    "Answered",
    "Judge",
    "Verdict",
    "asks_for_answers",
    "build_judge",
    "judge_facts",
    "judge_of",
    "verifier_name",
]

EXACT = "exact"
RIGHT = 1.0
_ROUNDING = 1e-6
"""By so much a value may miss 1, or the range from 0 to 1: sums of tenths do."""
_log = logging.getLogger(__name__)


class Answered(NamedTuple):
    """A response to a problem, with what its judge needs to know."""

    prompt: str
    response: str
    """Decoded, without its stop token."""
    answer: str | None
    """The reference."""
    entry: str | None
    """The task's own record of the problem, as JSON."""
    key: str
    """The problem's key, for warnings."""
    ended: bool
    """Whether a stop token ended the response; one that was cut off scores 0."""


class Judge(Protocol):
    """Whoever says how right responses are."""

    def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
        """Return a verdict for each response.

        Raises:
            DataError: if a row has not what this judge compares with, an answer or the task's record.
        """
        ...

    def close(self) -> None:
        """End what the judge has running."""
        ...


class ExactJudge:
    """The reference answer, word by word, alone in its tags: `rlhf_core.data.verifiers.verify`.

    Args:
        answer_tag: name of the tags.
    """

    def __init__(self, answer_tag: str) -> None:
        self._tag = answer_tag

    def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
        """Return 1 for each right answer, 0 for each other; as in `Judge`."""
        return [verify(row.response, _answer(row, EXACT), ended=row.ended, tag=self._tag) for row in rows]

    def close(self) -> None:
        """Do nothing, as nothing is running."""


class FunctionJudge:
    """A reward function's share of its maximum; what has not the form of the tags is not well formed.

    Args:
        function: of text, or of text and the task's record.
        tags: the form of a response.
        timeout_s: longest time of one call; one that takes longer has failed.

    Raises:
        ConfigError: if the function cannot be imported.
    """

    def __init__(self, function: RewardFunction, tags: Tags, timeout_s: float) -> None:
        self._function, self._tags = function, tags
        self._process = RewardProcess(timeout_s)
        try:
            self._process.load(function)
        except RewardFunctionError as error:
            self._process.close()
            raise ConfigError(f"verifier {function.name!r} cannot be imported: {error}") from None

    def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
        """Return what the function makes of each response that ended; as in `Judge`.

        A call that fails, or returns what is not from 0 to 1, makes a verdict with its failure, and a warning.
        """
        arguments = [self._arguments(row) for row in rows]
        asked = [number for number, row in enumerate(rows) if row.ended]
        names = [f"the response to {rows[number].prompt[:40]!r} (key {rows[number].key})" for number in asked]
        found = call_each(self._process, self._function, [arguments[number] for number in asked], names=names)
        shares = {n: self._share(called, name) for n, called, name in zip(asked, found, names, strict=True)}
        cut_off = Called(0.0)
        return [
            Verdict(
                0.0 if share.failure else share.value,
                row.ended and validate_response_structure(row.response, self._tags),
                share.failure,
            )
            for share, row in ((shares.get(number, cut_off), row) for number, row in enumerate(rows))
        ]

    def close(self) -> None:
        """End the function's process."""
        self._process.close()

    def _arguments(self, row: Answered) -> tuple[str | None, ...]:
        name = self._function.name
        if self._function.form == "entry":
            return (row.prompt, row.response, row.answer, _entry(row, name))
        return (row.prompt, row.response, _answer(row, name))

    def _share(self, called: Called, name: str) -> Called:
        """Return the share of the maximum that a call gave; one outside 0 and 1 is a failure."""
        share = called.value / self._function.maximum
        if called.failure:
            return called
        if -_ROUNDING <= share <= RIGHT + _ROUNDING:
            return Called(RIGHT if share >= RIGHT - _ROUNDING else max(share, 0.0))
        told = f"it returned {called.value:g}, but a verifier says from 0 to 1, where 1 is right"
        _log.warning("verifier %s: %s; it does not judge %s", self._function.name, told, name)
        return Called(called.value, failure(NO_NUMBER, told))


def build_judge(
    name: str | None, *, task: str | None, template: PromptTemplate, allowed_modules: Sequence[str], timeout_s: float
) -> Judge:
    """Return the judge that a name means; a function is imported, so that what is wrong with it shows here.

    Args:
        name: `exact`, `gsm8k_reward_fn`, `math_competition_reward_fn`, `reasoning_gym:<task>`, or
            `package.module:function`, called as f(prompt, response, answer) and expected to return from 0 to 1, 1 for
            a right answer; None takes the task's own scorer, and `exact` without a task.
        task: of reasoning-gym, from which the problems are drawn; None for problems of a file.
        template: names the form of a response.
        allowed_modules: from which functions may be taken by path.
        timeout_s: longest time that a function may take over one response.

    Raises:
        ConfigError: if there is no such verifier, it is another task's, not allowed, or cannot be imported.
    """
    name = name or _default(task)
    if name == EXACT:
        return ExactJudge(template.answer_tag)
    tags = template.tags or answer_tags(template.answer_tag)
    return FunctionJudge(resolve_verifier(name, task=task, allowed_modules=allowed_modules, tags=tags), tags, timeout_s)


def resolve_verifier(
    name: str, *, task: str | None, allowed_modules: Sequence[str], tags: Tags | None = None
) -> RewardFunction:
    """Return the function behind a verifier's name other than `exact`, without importing it.

    Raises:
        ConfigError: if there is no such verifier, it is another task's, or not allowed.
    """
    try:
        function = resolve_reward_function(name, allowed_modules=allowed_modules, tags=tags)
    except ConfigError as error:
        raise ConfigError(f"data.verifier is {name!r} (`{EXACT}` compares with the answer): {error}") from None
    own = function.arguments.get("task")
    if task is not None and own not in {None, task}:
        raise ConfigError(
            f"data.verifier {name!r} scores by the records of task {own!r}, but data.task is {task!r}; draw the data "
            "from that task, or set data.verifier to null for the task's own scorer"
        )
    return function


def verifier_name(data: DataConfig) -> str | None:
    """Return the name of the data's verifier; None where the configuration names no answers.

    A reasoning-gym task is judged by its own scorer, or by `exact` where our short form of it has one right answer.
    """
    if data.verifier is None and data.task is None and not (data.problems or data.evaluation):
        return None
    return data.verifier or _default(data.task)


def asks_for_answers(data: DataConfig) -> bool:
    """Return whether PPO's prompts have answers, as far as the configuration tells.

    They may have none where held-out problems of their own do. Demonstrations have some where a verifier is named.
    """
    demonstrated = data.verifier is not None and not (data.prompts or data.preferences)
    return data.task is not None or bool(data.problems) or demonstrated


def judge_of(config: PipelineConfig, *, template: PromptTemplate, allowed_modules: Sequence[str]) -> Judge | None:
    """Return the judge of a preset's answers, the same for every stage; None where it names no answers.

    Raises:
        ConfigError: as `build_judge`.
    """
    name = verifier_name(config.data)
    if name is None:
        return None
    return build_judge(
        name,
        task=config.data.task,
        template=template,
        allowed_modules=allowed_modules,
        timeout_s=config.ppo.reward.timeout_s,
    )


def judge_facts(config: PipelineConfig) -> list[str | float | None] | None:
    """Return what a preset's verdicts depend on besides data, template and our code; None where it names no answers.

    It is for the keys under which results are found again.
    """
    name = verifier_name(config.data)
    if name is None or name == EXACT:
        return None if name is None else [name]
    return [name, config.ppo.reward.timeout_s, code_digest(name)]


def _default(task: str | None) -> str:
    adapter = ADAPTERS.get(task or "")
    return EXACT if task is None or (adapter is not None and adapter.exact) else f"{GYM}:{task}"


def _answer(row: Answered, name: str) -> str:
    if row.answer is None:
        raise DataError(
            f"verifier {name} compares with a right answer, and the prompt that begins {row.prompt[:40]!r} has none; "
            "give problems with answers (data.problems), or let others judge (ppo.reward.verifier 0 with "
            "ppo.reward.reward_model or functions above 0, evaluation.judge reward_model)"
        )
    return row.answer


def _entry(row: Answered, name: str) -> str:
    if row.entry is None:
        raise DataError(
            f"verifier {name} needs the record that its task keeps of each problem, and the prompt that begins "
            f"{row.prompt[:40]!r} has none; draw the data from that task (data.task), or set data.verifier to another"
        )
    return row.entry
