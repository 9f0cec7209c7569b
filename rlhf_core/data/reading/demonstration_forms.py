"""Rows of demonstrations: a prompt, and the whole response to learn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rlhf_core.data.problems import Problem
from rlhf_core.data.reading.answers import (
    answer_text,
    boxed_answer,
    demonstrated,
    stated_answer,
    worked_solution,
)
from rlhf_core.data.reading.forms import Form
from rlhf_core.data.reading.messages import ends_with_assistant, read_messages, response_of
from rlhf_core.data.reading.problem_forms import (
    AnswerMarks,
    instruction_text,
    problem_of,
    prompt_before_answer,
    prompt_text,
)
from rlhf_core.data.reading.rows import RowError, text_fields
from rlhf_core.rewards.math_answers import FINAL_ANSWER

if TYPE_CHECKING:
    from rlhf_core.data.reading.rows import Row


def demonstration_forms() -> list[Form]:
    r"""Return the forms of demonstrations, for the rows of one file.

    * {"messages"}: the last turn, which is the assistant's, is the response; "gt_answer" may be its answer.
    * {"instruction", "input", "output"}, as Alpaca's: the input may be blank or absent.
    * {"prompt", "response"} or {"prompt", "completion"}, texts or messages; "answer" may be given.
    * {"question", "response"}, with "answer" and "entry" or without: our own.
    * {"question", "answer"} with `#### 42`, as GSM8K's: the response is `<think>solution</think><answer>42</answer>`,
      without the calculator's marks, and 42 the answer, so that a verifier can check what is learnt. Without the
      mark, the answer in its tags is learnt; to learn an answer as it stands, map the column to "response".
    * {"problem", "solution"} with `\boxed{}`: in the same tags.
    """
    marks = AnswerMarks()
    extras = ("entry", "response")
    return [
        Form("messages", ("messages",), ("gt_answer",), _messages, ends_with_assistant, ("messages",)),
        Form(
            "instructions with outputs", ("instruction", "output"), ("input",), _instruction, messages=("instruction",)
        ),
        Form(
            "prompts with responses",
            ("prompt", "response"),
            ("answer",),
            partial(_prompt, "response"),
            messages=("prompt", "response"),
        ),
        Form(
            "prompts with completions",
            ("prompt", "completion"),
            ("answer",),
            partial(_prompt, "completion"),
            messages=("prompt", "completion"),
        ),
        Form("questions with responses", ("question", "response"), ("answer", "entry"), _own, messages=("question",)),
        Form("questions with answers", ("question", "answer"), extras, partial(_solved, marks), messages=("question",)),
        Form("problems with boxed solutions", ("problem", "solution"), (), _boxed, messages=("problem",)),
    ]


def _messages(row: Row) -> Problem:
    messages = read_messages(row.fields.get("messages"), row.where)
    if messages[-1]["role"] != "assistant":
        raise RowError(
            f"{row.where}: the last message of a demonstration must be the assistant's, but is the "
            f"{messages[-1]['role']}'s",
            "last message not the assistant's",
        )
    prompt = prompt_before_answer(row)
    response = _not_empty(response_of(messages[-1:], row, prompt), row.where)
    return Problem(prompt, _answer(row, "gt_answer"), None, response)


def _instruction(row: Row) -> Problem:
    [output] = text_fields(row.fields, row.where, ("output",))
    return Problem(instruction_text(row), None, None, _not_empty(output, row.where))


def _prompt(field: str, row: Row) -> Problem:
    where, fields, _ = row
    prompt = prompt_text(row, "prompt", besides=(field,))
    if isinstance(fields.get(field), list):
        response = response_of(read_messages(fields[field], where, field), row, prompt)
    else:
        [response] = text_fields(fields, where, (field,))
    return Problem(prompt, _answer(row, "answer"), None, _not_empty(response, where))


def _own(row: Row) -> Problem:
    [response] = text_fields(row.fields, row.where, ("response",))
    if row.fields.get("answer") is not None or row.fields.get("entry") is not None:
        return problem_of("question", AnswerMarks(), row)
    return Problem(prompt_text(row, "question"), None, None, _not_empty(response, row.where))


def _solved(marks: AnswerMarks, row: Row) -> Problem:
    problem = problem_of("question", marks, row)
    text = row.fields.get("answer")
    if problem.entry is not None or problem.demonstration is not None or FINAL_ANSWER not in str(text):
        return problem
    response = demonstrated(worked_solution(str(text)), problem.answer or "")
    return Problem(problem.prompt, problem.answer, None, response)


def _boxed(row: Row) -> Problem:
    prompt = prompt_text(row, "problem", besides=("solution",))
    [solution] = text_fields(row.fields, row.where, ("solution",))
    answer = boxed_answer(solution, row.where)
    return Problem(prompt, answer, None, demonstrated(solution.strip(), answer))


def _answer(row: Row, name: str) -> str | None:
    if row.fields.get(name) is None:
        return None
    return stated_answer(answer_text(row.fields, row.where, name), row.where)


def _not_empty(response: str, where: str) -> str:
    if not response.strip():
        raise RowError(f"{where}: its response is blank, so there is nothing to learn", "blank response")
    return response
