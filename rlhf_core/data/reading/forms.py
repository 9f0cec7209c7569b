"""The forms of rows: which fields the rows of each role may have, how a form is recognised, and what a row becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf_core.data.preferences import PreferencePair, split_transcripts
from rlhf_core.data.problems import Problem
from rlhf_core.data.reading.messages import (
    UNUSABLE,
    common_turns,
    ends_with_assistant,
    prompt_of,
    read_messages,
    response_of,
)
from rlhf_core.data.reading.rows import (
    RowError,
    answer_text,
    boxed_answer,
    demonstrated,
    number_field,
    optional_text,
    stated_answer,
    text_fields,
    worked_solution,
    wrong_kind,
)
from rlhf_core.data.transcripts import conversation, first_turn, further_keys, is_plain, turns
from rlhf_core.errors import DataError
from rlhf_core.rewards.math_answers import FINAL_ANSWER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.data.reading.messages import ViewedRow
    from rlhf_core.data.transcripts import Message

Role = Literal["problems", "prompts", "demonstrations", "preferences"]


class Form(NamedTuple):
    """One way to write a row."""

    name: str
    """What a file of such rows is called in facts."""
    needs: tuple[str, ...]
    """Fields without which a row is of another form."""
    may: tuple[str, ...]
    """Fields that are read where they are."""
    build: Callable[[ViewedRow], Any]
    """Makes a row of ours, or raises a RowError."""
    suits: Callable[[Mapping[str, Any]], bool] = lambda _: True
    """Whether a row that has the fields is meant for this: where the same field may hold two kinds of rows."""
    messages: tuple[str, ...] = ()
    """Which of the fields may hold messages: as a list, or as that list in JSON in a text."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All that are read."""
        return self.needs + self.may

    def message_fields(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the fields in which a row may hold messages: none in a task's record, whose texts stay as they are."""
        return () if "entry" in self.fields and row.get("entry") is not None else self.messages

    def is_named_by(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the needed fields, be they null."""
        return all(name in row for name in self.needs)

    def is_had_by(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the needed fields, and is meant for this."""
        return all(row.get(name) is not None for name in self.needs) and self.suits(row)


def form_of(row: Mapping[str, Any], forms: Sequence[Form], columns: Iterable[str]) -> Form | None:
    """Return the first form all of whose fields a row has, and that reads all fields of a column map.

    A column that is null in this row still tells the form where nothing else does.
    """
    mapped = set(columns)
    usable = [form for form in forms if mapped <= set(form.fields)]
    whole = [form for form in usable if all(row.get(name) is not None for name in form.needs)]
    named = [form for form in usable if form.is_named_by(row)]
    return next(iter(whole + named), None)


def known_fields(forms: Sequence[Form]) -> list[str]:
    """Return the fields that any of the forms reads."""
    return list(dict.fromkeys(name for form in forms for name in form.fields))


def in_words(forms: Sequence[Form]) -> str:
    """Return the forms' fields, to stand in a sentence."""
    return " or ".join(dict.fromkeys("{" + ", ".join(form.needs) + "}" for form in forms))


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
        Form("problems with boxed solutions", ("problem", "solution"), (), _boxed_demonstration, messages=("problem",)),
    ]


def _messages(row: ViewedRow) -> Problem:
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


def _instruction(row: ViewedRow) -> Problem:
    [output] = text_fields(row.fields, row.where, ("output",))
    return Problem(instruction_text(row), None, None, _not_empty(output, row.where))


def _prompt(field: str, row: ViewedRow) -> Problem:
    where, fields, _ = row
    prompt = prompt_text(row, "prompt", besides=(field,))
    if isinstance(fields.get(field), list):
        response = response_of(read_messages(fields[field], where, field), row, prompt)
    else:
        [response] = text_fields(fields, where, (field,))
    return Problem(prompt, _answer(row, "answer"), None, _not_empty(response, where))


def _own(row: ViewedRow) -> Problem:
    [response] = text_fields(row.fields, row.where, ("response",))
    if row.fields.get("answer") is not None or row.fields.get("entry") is not None:
        return problem_of("question", AnswerMarks(), row)
    return Problem(prompt_text(row, "question"), None, None, _not_empty(response, row.where))


def _solved(marks: AnswerMarks, row: ViewedRow) -> Problem:
    problem = problem_of("question", marks, row)
    text = row.fields.get("answer")
    if problem.entry is not None or problem.demonstration is not None or FINAL_ANSWER not in str(text):
        return problem
    response = demonstrated(worked_solution(str(text)), problem.answer or "")
    return Problem(problem.prompt, problem.answer, None, response)


def _boxed_demonstration(row: ViewedRow) -> Problem:
    prompt = prompt_text(row, "problem", besides=("solution",))
    [solution] = text_fields(row.fields, row.where, ("solution",))
    answer = boxed_answer(solution, row.where)
    return Problem(prompt, answer, None, demonstrated(solution.strip(), answer))


def _answer(row: ViewedRow, name: str) -> str | None:
    if row.fields.get(name) is None:
        return None
    return stated_answer(answer_text(row.fields, row.where, name), row.where)


def _not_empty(response: str, where: str) -> str:
    if not response.strip():
        raise RowError(f"{where}: its response is blank, so there is nothing to learn", "blank response")
    return response


EQUAL, APART = "chosen equals rejected", "no common prompt"
BLANK, NO_TURN = "blank chosen", "no assistant's turn"
ALIKE = "chosen differs from rejected only in what the model is not shown"
_SIDES = ("chosen", "rejected")
_EXTRAS = ("margin", "both_well_formed")


def pair_forms() -> list[Form]:
    """Return the forms of preferences.

    * {"chosen", "rejected"}: transcripts as HH-RLHF's, or lists of messages. What both share up to their last
      common assistant's turn is the prompt.
    * {"prompt", "chosen", "rejected"}: the prompt a text or messages; a response a text, the assistant's
      messages, or a whole conversation that repeats the prompt.

    "margin" says by how much the chosen response's score should exceed the other's; "both_well_formed" is what
    our own files have.
    """
    return [
        Form("preferences with a prompt", ("prompt", *_SIDES), _EXTRAS, _pair, messages=("prompt", *_SIDES)),
        Form("whole conversations in pairs", _SIDES, _EXTRAS, _pair, messages=_SIDES),
    ]


def _pair(row: ViewedRow) -> PreferencePair:
    where, fields, _ = row
    margin = number_field(fields, where, "margin", default=0.0)
    pair = _with_prompt(row) if fields.get("prompt") is not None else _without_prompt(row)
    if not pair.prompt.strip():
        raise RowError(f"{where}: field 'prompt' is blank", "blank prompt")
    if pair.chosen.strip() == pair.rejected.strip():
        raise _nothing_to_prefer(row)
    if not first_turn(pair.chosen):
        raise RowError(f"{where}: the chosen response is blank, so there is nothing to learn", BLANK)
    return replace(pair, margin=margin, both_well_formed=_both_well_formed(row))


def _nothing_to_prefer(row: ViewedRow) -> RowError:
    """Return the error of a pair whose responses are equal, as they were written or as the model is shown them."""
    sides = [_side(row.fields, row.where, name) for name in _SIDES]
    had = [[further_keys(turn) for turn in side] if isinstance(side, tuple) else [] for side in sides]
    keys = sorted(
        {
            key
            for one, other in zip_longest(*had, fillvalue={})
            for key in {*one, *other}
            if (one.get(key) or None) != (other.get(key) or None)
        }
    )
    if not keys:
        return RowError(
            f"{row.where}: the chosen response equals the rejected one, so there is nothing to prefer", EQUAL
        )
    return RowError(
        f"{row.where}: the chosen response differs from the rejected one only in {', '.join(keys)}, which the model is "
        "not shown, so there is nothing to prefer; take a chat template that shows it",
        ALIKE,
    )


def _without_prompt(row: ViewedRow) -> PreferencePair:
    try:
        return _of_conversations(row)
    except RowError as error:
        if "prompt" in row.fields and error.reason in {UNUSABLE, NO_TURN}:
            raise RowError(
                f"{row.where}: field 'prompt' is null, and chosen and rejected are no whole conversations, which tell "
                "it too",
                "field 'prompt' is null",
            ) from error
        raise


def _both_well_formed(row: ViewedRow) -> bool | None:
    value = row.fields.get("both_well_formed")
    if not isinstance(value, bool | None):
        raise wrong_kind(row.where, "both_well_formed", "a boolean", value)
    return value


def _with_prompt(row: ViewedRow) -> PreferencePair:
    where, fields, _ = row
    sides = [_side(fields, where, name) for name in _SIDES]
    if all(isinstance(side, tuple) and side[0]["role"] != "assistant" for side in sides):
        return _of_conversations(row)
    prompt = fields["prompt"]
    if isinstance(prompt, list):
        prompt = prompt_of(read_messages(prompt, where, "prompt"), row)
    [prompt] = text_fields({"prompt": prompt}, where, ("prompt",))
    chosen, rejected = (side if isinstance(side, str) else response_of(side, row, prompt) for side in sides)
    return PreferencePair(prompt, chosen, rejected)


def _side(fields: dict[str, Any], where: str, name: str) -> str | tuple[Message, ...]:
    if isinstance(fields.get(name), list):
        return read_messages(fields[name], where, name)
    return text_fields(fields, where, (name,))[0]


def _of_conversations(row: ViewedRow) -> PreferencePair:
    where, fields, _ = row
    chosen, rejected = (_side(fields, where, name) for name in _SIDES)
    if isinstance(chosen, tuple) and isinstance(rejected, tuple):
        return _of_messages(row, chosen, rejected)
    chosen, rejected = text_fields(fields, where, _SIDES)
    try:
        pair = split_transcripts(chosen, rejected, where)
    except DataError as error:
        raise RowError(str(error), NO_TURN) from error
    if pair is None:
        raise _apart(where)
    return pair


def _of_messages(row: ViewedRow, chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> PreferencePair:
    for side in (chosen, rejected):
        if side[-1]["role"] != "assistant":
            raise RowError(f"{row.where}: a conversation must end with the assistant's turn", UNUSABLE)
        try:
            conversation(side)
        except DataError as error:
            raise RowError(f"{row.where}: {error}", UNUSABLE) from error
    common = common_turns(chosen, rejected, row)
    if common is None:
        raise _apart(row.where)
    prompt = prompt_of(chosen[:common], row)
    if not is_plain(rejected[:common]):
        prompt_of(rejected[:common], row)  # the same: what is not shown of it is counted
    better, worse = (response_of(side[common:], row, prompt) for side in (chosen, rejected))
    return PreferencePair(prompt, better, worse)


def _apart(where: str) -> RowError:
    return RowError(f"{where}: chosen and rejected have no common prompt: they part before an answer", APART)


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


def problem_of(field: str, marks: AnswerMarks, row: ViewedRow) -> Problem:
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


def prompt_text(row: ViewedRow, field: str, *, besides: tuple[str, ...] = ()) -> str:
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


def prompt_before_answer(row: ViewedRow) -> str:
    """Return all messages but a last one of the assistant's as a prompt."""
    messages = read_messages(row.fields.get("messages"), row.where)
    before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return not_blank(prompt_of(before, row), row.where)


def instruction_text(row: ViewedRow) -> str:
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


def _boxed(row: ViewedRow) -> Problem:
    prompt = prompt_text(row, "problem", besides=("solution",))
    [solution] = text_fields(row.fields, row.where, ("solution",))
    return Problem(prompt, boxed_answer(solution, row.where))


def _with_messages(row: ViewedRow) -> Problem:
    prompt = prompt_before_answer(row)
    return Problem(prompt, stated_answer(answer_text(row.fields, row.where, "gt_answer"), row.where))


FORMS: dict[Role, Callable[[], list[Form]]] = {
    "preferences": pair_forms,
    "problems": problem_forms,
    "demonstrations": demonstration_forms,
    "prompts": prompt_forms,
}
