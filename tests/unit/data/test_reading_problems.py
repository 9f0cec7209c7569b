"""Problems, prompts and demonstrations in every form that people write."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import SourceConfig
from rlhf_core.data import Problem, problems_to_jsonl
from rlhf_core.data.problems import category_of, problems_from_jsonl
from rlhf_core.data.reading import Access, detect_role, possible_roles
from rlhf_core.data.reading.rows import RowError, boxed_answer
from rlhf_core.errors import DataError
from tests.unit.data.reading_files import HI, read, refusal, rows, write, written

GSM8K = {"question": " Sales? ", "answer": "It is $<<1200*1=1200>>1,200.\n#### 1,200"}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
LONGER = [{"from": "system", "value": "Be brief."}, *CHAT, {"from": "human", "value": "Bye"}]
ENDED = [*LONGER, {"from": "gpt", "value": "See you"}]
LONG_PROMPT = "\n\nSystem: Be brief." + HI + " Hello\n\nHuman: Bye\n\nAssistant:"


def test_the_answer_of_a_problem_is_what_follows_the_mark_without_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", GSM8K, {"question": "Colour?", "answer": "#### red, or blue"})
    found = rows(path)
    assert found == [Problem("Sales?", "1200"), Problem("Colour?", "red, or blue")]
    assert [problem.demonstration for problem in found] == [None, None]


def test_without_marks_the_whole_text_is_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"question": "2 + 2?", "answer": " 4 "}, {"question": "List", "answer": "1,234"})
    assert [problem.answer for problem in rows(path)] == ["4", "1,234"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "2 + 2?", "answer": "4"}, Problem("2 + 2?", "4")),
        ({"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": 4}, Problem("2 + 2?", "4")),
        ({"problem": "2 + 2?", "answer": 0.5}, Problem("2 + 2?", "0.5")),
        ({"problem": "x?", "solution": r"\boxed{1} or \boxed{\frac{1}{2}}.", "answer": "y"}, Problem("x?", "y")),
        ({"problem": "x?", "solution": r"\boxed{1} or \boxed{\frac{1}{2}}."}, Problem("x?", r"\frac{1}{2}")),
        ({"messages": CHAT, "gt_answer": 8}, Problem("Hi", "8")),
        ({"question": HI, "answer": "a"}, Problem(HI, "a")),
    ],
)
def test_problems_come_in_several_forms(tmp_path: Path, row: dict[str, Any], problem: Problem) -> None:
    assert rows(write(tmp_path / "p.jsonl", row)) == [problem]


def test_a_column_category_is_kept_with_its_problem_and_written_with_it(tmp_path: Path) -> None:
    asked = {"question": "2 + 2?", "answer": "4"}
    path = write(tmp_path / "p.jsonl", {**asked, "category": " sums "}, {**asked, "question": "Sky?", "category": 7})
    found = rows(path)
    assert [category_of(problem) for problem in found] == ["sums", ""]
    assert [problem.category for problem in problems_from_jsonl(problems_to_jsonl(found))] == ["sums", None]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{\{1, 2\}}.", r"\{1, 2\}"),
        (r"so $\boxed 7$ holds", "7"),
        (r"so $\fbox{8}$", "8"),
        (r"\boxed{a_{b_{c}}} and no more }", "a_{b_{c}}"),
    ],
)
def test_the_last_box_holds_the_answer(solution: str, answer: str) -> None:
    assert boxed_answer(solution, "row 1") == answer


@pytest.mark.parametrize(
    ("solution", "sentence"),
    [("so 7", "has no"), (r"so \boxed{\frac{1}{2}", "not closed"), (r"\boxed{1}, \boxed{ }", "empty")],
)
def test_a_solution_without_a_boxed_answer_is_named(solution: str, sentence: str) -> None:
    with pytest.raises(RowError, match=rf"row 1: .*{sentence}"):
        boxed_answer(solution, "row 1")


def test_a_prompt_that_comes_twice_is_kept_once_and_counted(tmp_path: Path) -> None:
    two = {"question": "Two", "answer": "2"}
    path = write(
        tmp_path / "p.jsonl", {"question": "2 + 2?", "answer": "4"}, two, {"question": " 2 +  2?", "answer": "5"}
    )
    found = read(path)
    assert found.rows == (Problem("2 + 2?", "4"), Problem("Two", "2"))
    assert (found.duplicates, found.rejected) == (1, ())


def test_gzip_blank_lines_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"question": "2 + 2?", "answer": "4"}\r\n\r\n{"question": "3?", "answer": "3"}'
    packed = written(tmp_path, gzip.compress(content), "p.jsonl.gz")
    assert rows(written(tmp_path, content)) == rows(packed) == [Problem("2 + 2?", "4"), Problem("3?", "3")]


def test_our_own_problems_come_back_to_the_letter(tmp_path: Path) -> None:
    problems = [
        Problem("sort: 3 1\n", " 1 3", '{"answer": "1 3"}', None),
        Problem("open?", None, "{}", "<answer>x #### y</answer>"),
        Problem("a", "1 #### 2", "{}", " <answer>1</answer>\n"),
        Problem(HI, "7", None, "seven"),
        Problem("b", "1,234"),
    ]
    found = rows(written(tmp_path, problems_to_jsonl(problems)))
    assert [vars(row) for row in found] == [vars(row) for row in problems]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": " Hi ", "answer": "x"}, "Hi"),
        ({"prompt": LONGER}, LONG_PROMPT),
        ({"messages": CHAT[:1]}, "Hi"),
        ({"messages": CHAT}, "Hi"),
        ({"messages": ENDED}, LONG_PROMPT),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({"instruction": "Add.", "input": None}, "Add."),
        ({"question": "Why?", "answer": "x"}, "Why?"),
        ({"problem": "x + 1", "solution": "?"}, "x + 1"),
    ],
)
def test_prompts_come_in_several_forms_without_answers(tmp_path: Path, row: dict[str, Any], prompt: str) -> None:
    assert rows(write(tmp_path / "p.jsonl", row), "prompts") == [Problem(prompt)]


@pytest.mark.parametrize(
    ("row", "prompt", "response", "answer"),
    [
        ({"messages": CHAT}, "Hi", "Hello", None),
        ({"messages": ENDED, "gt_answer": 3}, LONG_PROMPT, "See you", "3"),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2", "3", None),
        ({"instruction": "Add.", "input": " ", "output": "3"}, "Add.", "3", None),
        ({"instruction": "Add.", "output": "3"}, "Add.", "3", None),
        ({"prompt": "Hi", "response": "Hello", "answer": "x"}, "Hi", "Hello", "x"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "Hi", "Hello", None),
        ({"question": "Hi", "response": "Hello"}, "Hi", "Hello", None),
        (GSM8K, "Sales?", "<think>It is $1,200.</think><answer>1200</answer>", "1200"),
        ({"question": "2 + 2?", "answer": "4"}, "2 + 2?", None, "4"),
        (
            {"problem": "x?", "solution": r"It is \boxed{7}."},
            "x?",
            r"<think>It is \boxed{7}.</think><answer>7</answer>",
            "7",
        ),
    ],
)
def test_demonstrations_come_in_several_forms(
    tmp_path: Path, row: dict[str, Any], prompt: str, response: str | None, answer: str | None
) -> None:
    [problem] = rows(write(tmp_path / "p.jsonl", row), "demonstrations")
    assert (problem.prompt, problem.demonstration, problem.answer) == (prompt, response, answer)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": CHAT[:1]}, "the last message of a demonstration must be the assistant's, but is the user's"),
        ({"messages": CHAT[1:]}, "must end with the user's turn, but there is no message"),
        ({"messages": [CHAT[1], *CHAT]}, "must begin with the user's turn"),
        ({"messages": [*CHAT, LONGER[0], *CHAT]}, "one system turn may stand"),
        ({"messages": []}, "a list of at least one message"),
        ({"messages": [{"role": "user", "content": " "}, CHAT[1]]}, "its prompt is blank"),
        ({"prompt": [{"role": "user", "content": ""}], "response": "x"}, "its prompt is blank"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "a message must have 'role'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a message must have 'role'"),
        ({"messages": [{"role": "user", "content": "a" + HI}, CHAT[1]]}, "holds the speaker's mark"),
        ({"instruction": "Add.", "output": " "}, "its response is blank"),
        ({"instruction": "Add.", "input": 3, "output": "3"}, "field 'input' must be a string"),
        ({"prompt": "Hi", "response": None}, "field 'response' must be a string, but is null"),
    ],
)
def test_a_bad_demonstration_is_told_with_its_row(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    path = write(tmp_path / "p.jsonl", row)
    message = refusal(path, "demonstrations")
    assert message.startswith(f"row 1 of {path}")
    assert sentence in message


@pytest.mark.parametrize(
    ("row", "role"),
    [
        ({"chosen": "a", "rejected": "b", "id": 1}, "preferences"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences"),
        ({"question": "?", "answer": "!"}, "problems"),
        ({"problem": "?", "solution": r"\boxed{1}"}, "problems"),
        ({"messages": CHAT, "gt_answer": "x"}, "problems"),
        ({"messages": CHAT}, "demonstrations"),
        ({"instruction": "a", "input": "", "output": "b"}, "demonstrations"),
        ({"messages": CHAT[:1]}, "prompts"),
        ({"prompt": "a"}, "prompts"),
    ],
)
def test_the_role_of_a_file_is_known_by_its_first_row(tmp_path: Path, row: dict[str, Any], role: str) -> None:
    path = write(tmp_path / "a.jsonl", row)
    assert detect_role(SourceConfig(path=str(path)), Access(tmp_path)) == role


LISTED = {"question": "?", "answer": ["!"]}
SAME = {"prompt": "a", "chosen": "b", "rejected": "b"}
WHOLE, OPEN = {"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": None}


@pytest.mark.parametrize(
    ("found", "role"),
    [
        ([SAME, {**SAME, "chosen": "c"}], "preferences"),
        ([SAME], "preferences"),  # which are refused as identical, rather than taken for prompts
        ([LISTED, LISTED], "problems"),
        ([{"question": " ", "answer": ""}], "problems"),
        ([OPEN, WHOLE], "problems"),  # the column is there, and not always empty
        ([OPEN, OPEN], "problems"),  # none of which has an answer, which is told
        ([{"question": "?", "answer": None}] * 2, "problems"),
        ([{"prompt": "a", "response": None}] * 2, "demonstrations"),
        ([{"instruction": "a", "output": None}] * 2, "demonstrations"),
        ([{"messages": CHAT[:1], "gt_answer": None}] * 2, "problems"),
        ([{"messages": CHAT[:1]}] * 2, "prompts"),
        ([{"prompt": "a"}, WHOLE], "prompts"),
        ([{"id": 1}, WHOLE], "problems"),
        ([{"messages": "[{"}], "demonstrations"),
    ],
)
def test_the_role_goes_by_fields_and_not_by_what_they_hold(tmp_path: Path, found: list[Any], role: str) -> None:
    path = write(tmp_path / "a.jsonl", *found)
    assert detect_role(SourceConfig(path=str(path)), Access(tmp_path)) == role


def test_rows_that_cannot_be_read_are_passed_over_for_the_role(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"question": \n[1]\n' + json.dumps({"question": "?", "answer": "!"}).encode())
    assert detect_role(SourceConfig(path=str(path)), Access(tmp_path)) == "problems"
    with pytest.raises(DataError, match=r"row 1 of .*broken\.jsonl is not valid JSON"):
        detect_role(SourceConfig(path=str(written(tmp_path, b"{\n{\n", "broken.jsonl"))), Access(tmp_path))


def test_all_roles_that_fit_are_told_the_one_that_says_most_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "?", "answer": "#### 1"})
    roles = possible_roles(SourceConfig(path=str(path)), Access(tmp_path))
    assert roles == ["problems", "demonstrations", "prompts"]


def test_a_column_that_is_null_in_the_first_row_does_not_hide_the_form(tmp_path: Path) -> None:
    both = {"messages": None, "prompt": "a", "response": "b"}
    path = written(tmp_path, json.dumps([both, {**both, "prompt": "c"}]).encode(), "p.json")
    assert [row.prompt for row in rows(path, "demonstrations")] == ["a", "c"]
