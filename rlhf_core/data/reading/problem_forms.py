"""Rows of problems and of prompts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rlhf_core.data.problems import Problem
from rlhf_core.data.reading.answers import answer_text, boxed_answer, stated_answer
from rlhf_core.data.reading.forms import Form
from rlhf_core.data.reading.messages import prompt_of, read_messages
from rlhf_core.data.reading.rows import RowError, optional_text, text_fields
from rlhf_core.data.transcripts import turns
from rlhf_core.rewards.math_answers import FINAL_ANSWER

if TYPE_CHECKING:
    from rlhf_core.data.reading.rows import Row


def problem_forms() -> list[Form]:
    r"""Return the forms of problems, for the rows of one file.

    * {"question", "answer"}, {"problem", "answer"} and {"prompt", "answer"}. Where answers end in `#### 42`, as
      GSM8K's, the answer is what follows, without the commas of its thousands; without `####` the whole text is
      the answer. A file that mixes the two is taken for a mistake.
    * {"problem", "solution"}, as competition mathematics: the answer is what the solution's last `\boxed{}` holds.
    * {"messages", "gt_answer"}, as coati's: the prompt is all but a last turn of the assistant's.

    A worked solution is not kept: what a problem demonstrates is its answer in the answer tags, which is what
    an exact verifier reads. Read the same file as demonstrations to learn solutions. Our own rows have "entry",
    the task's record, with which question and answer are taken to the letter, and "response", what SFT learns.
    """
    marks = AnswerMarks()
    extras = ("entry", "response")
    return [
        Form(
            "questions with answers",
            ("question", "answer"),
            extras,
            partial(problem_of, "question", marks),
            messages=("question",),
        ),
        Form(
            "problems of a task",
            ("question", "entry"),
            ("answer", "response"),
            partial(problem_of, "question", marks),
            messages=("question",),
        ),
        Form(
            "problems with answers",
            ("problem", "answer"),
            extras,
            partial(problem_of, "problem", marks),
            messages=("problem",),
        ),
        Form("problems with boxed solutions", ("problem", "solution"), (), _boxed, messages=("problem",)),
        Form(
            "prompts with answers",
            ("prompt", "answer"),
            extras,
            partial(problem_of, "prompt", marks),
            messages=("prompt",),
        ),
        Form("messages with answers", ("messages", "gt_answer"), (), _with_messages, messages=("messages",)),
    ]


def prompt_forms() -> list[Form]:
    """Return the forms of prompts, whose answers, if there are any, are not looked at.

    * {"prompt"}: a text, or messages.
    * {"messages"}: all but a last turn of the assistant's, which is what the policy is to say.
    * {"instruction", "input"}: joined by a blank line; the input may be blank or absent.
    * {"question"} or {"problem"}.
    """
    return [
        Form("prompts", ("prompt",), (), lambda row: Problem(prompt_text(row, "prompt")), messages=("prompt",)),
        Form("messages", ("messages",), (), lambda row: Problem(prompt_before_answer(row)), messages=("messages",)),
        Form(
            "instructions",
            ("instruction",),
            ("input",),
            lambda row: Problem(instruction_text(row)),
            messages=("instruction",),
        ),
        Form("questions", ("question",), (), lambda row: Problem(prompt_text(row, "question")), messages=("question",)),
        Form("problems", ("problem",), (), lambda row: Problem(prompt_text(row, "problem")), messages=("problem",)),
    ]


class AnswerMarks:
    """Whether the answers of a file have the mark `####`: all of them, or none."""

    def __init__(self) -> None:
        self._marked: bool | None = None

    def check(self, answer: str, where: str) -> None:
        """Raise a RowError if an answer is written in another way than those before it."""
        marked = FINAL_ANSWER in answer
        if self._marked is None:
            self._marked = marked
        if marked != self._marked:
            raise RowError(
                f"{where} {'has' if marked else 'lacks'} the mark {FINAL_ANSWER!r} before its final answer, unlike the "
                "rows before it; write all answers of a file in one way",
                "answers written in two ways",
            )


def problem_of(field: str, marks: AnswerMarks, row: Row) -> Problem:
    """Return the problem of a row whose question has the named field."""
    where, fields, _ = row
    entry, response = (optional_text(fields, where, name) for name in ("entry", "response"))
    if entry is not None:
        [prompt] = text_fields(fields, where, (field,))
        return Problem(not_blank(prompt, where), optional_text(fields, where, "answer"), entry, response)
    prompt = prompt_text(row, field, besides=("answer",))
    answer = answer_text(fields, where)
    marks.check(answer, where)
    return Problem(prompt, stated_answer(answer, where), None, response)


def prompt_text(row: Row, field: str, *, besides: tuple[str, ...] = ()) -> str:
    """Return a row's prompt: a text, stripped unless it is a transcript, or messages.

    Args:
        row: as the file has it.
        field: where the prompt is.
        besides: fields that are named too if the prompt's is missing.

    Raises:
        RowError: if it is something else, or blank.
    """
    where, fields, _ = row
    if isinstance(fields.get(field), list):
        return not_blank(prompt_of(read_messages(fields[field], where, field), row), where)
    missing = tuple(name for name in besides if name not in fields)
    prompt = text_fields(fields, where, (field, *missing))[0]
    prompt = prompt if turns(prompt) else prompt.strip()
    if not prompt:
        raise RowError(f"{where}: field {field!r} is blank", f"blank {field}")
    return prompt


def prompt_before_answer(row: Row) -> str:
    """Return all messages but a last one of the assistant's as a prompt."""
    messages = read_messages(row.fields.get("messages"), row.where)
    before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return not_blank(prompt_of(before, row), row.where)


def instruction_text(row: Row) -> str:
    """Return an instruction with its input, if it has one, after a blank line."""
    instruction = prompt_text(row, "instruction")
    given = (optional_text(row.fields, row.where, "input") or "").strip()
    return f"{instruction}\n\n{given}" if given else instruction


def not_blank(prompt: str, where: str) -> str:
    """Return a prompt.

    Raises:
        RowError: if it holds nothing.
    """
    if not prompt.strip():
        raise RowError(f"{where}: its prompt is blank", "blank prompt")
    return prompt


def _boxed(row: Row) -> Problem:
    prompt = prompt_text(row, "problem", besides=("solution",))
    [solution] = text_fields(row.fields, row.where, ("solution",))
    return Problem(prompt, boxed_answer(solution, row.where))


def _with_messages(row: Row) -> Problem:
    prompt = prompt_before_answer(row)
    return Problem(prompt, stated_answer(answer_text(row.fields, row.where, "gt_answer"), row.where))
