"""CSV: quotes, line ends and headers as people write them, and their faults by line."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data import PreferencePair, Problem
from rlhf_core.data.reading import formats
from tests.unit.data.reading_files import read, refusal, rows, write, written


def prompts(tmp_path: Path, content: bytes, name: str = "data.csv") -> list[str]:
    return [row.prompt for row in rows(written(tmp_path, content, name), "prompts")]


@pytest.mark.parametrize(
    "content",
    [
        b"id,prompt\n1,a\n2,b\n",
        b"\xef\xbb\xbfprompt,id\r\na,1\r\n\r\nb,2",
        b'"prompt"\n"a"\n"b"\n',
        b"prompt \na\nb\n",
    ],
)
def test_a_csv_with_a_prompt_column_is_read(tmp_path: Path, content: bytes) -> None:
    assert prompts(tmp_path, content) == ["a", "b"]
    assert prompts(tmp_path, gzip.compress(content), "data.csv.gz") == ["a", "b"]


def test_fields_in_quotes_hold_commas_quotes_and_lines(tmp_path: Path) -> None:
    assert prompts(tmp_path, b'prompt,id\n"one, ""two""\nthree",1\n') == ['one, "two"\nthree']


def test_tabs_part_the_fields_of_a_tsv(tmp_path: Path) -> None:
    assert prompts(tmp_path, b"id\tprompt\n1\ta, b\n", "data.tsv") == ["a, b"]


def test_a_row_with_too_many_or_too_few_fields_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, b'prompt,id\n"two\nlines",1\nHello, world,2\nalone\n', "data.csv")
    message = refusal(path, "prompts")
    assert f"line 4 of {path} has 3 fields, but the first line names 2 columns ('prompt', 'id')" in message
    assert "put double quotes around a field that holds a comma" in message
    found = read(path, "prompts", bad_rows="drop")
    assert [row.where for row in found.rejected] == [f"line {number} of {path}" for number in (4, 5)]
    assert {row.reason for row in found.rejected} == {"wrong number of fields"}
    assert [row.prompt for row in found.rows] == ["two\nlines"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"prompt,prompt\na,b\n", "two columns named 'prompt'"),
        (b"prompt,\na,b\n", "column 2 of"),
        (b'prompt\n"a\nb\n', "is not closed"),
        (b'prompt\n"a" b\n', "neither ',' nor the line's end follows a closing double quote"),
        (b'prompt\n"a\n' + b"x" * 200_000, "line 2 of"),
        (b"prompt,id\na\rb,1\n", "line 2 of"),
        (b"prompt,id\na\rb,1\n", "a field holds a carriage return; put double quotes around the field"),
        (b"prompt\na\n\0\0\n", "line 3 of"),
        (b"prompt\na\n\0\0\n", "holds a NUL byte"),
    ],
)
@pytest.mark.parametrize("bad_rows", ["refuse", "drop"])
def test_faults_after_which_no_row_can_be_trusted_are_always_refused(
    tmp_path: Path, content: bytes, sentence: str, bad_rows: str
) -> None:
    assert sentence in refusal(written(tmp_path, content, "data.csv"), "prompts", bad_rows=bad_rows)


def test_messages_stand_in_csv_as_json(tmp_path: Path) -> None:
    content = b'messages\n"[{""role"": ""user"", ""content"": ""Hi""}]"\n'
    assert prompts(tmp_path, content) == ["Hi"]
    broken = written(tmp_path, b'messages\n"[{""role"": ]"\n', "broken.csv")
    assert "'messages', which begins as messages do, is not valid JSON" in refusal(broken, "prompts")


def test_the_margins_of_a_csv_are_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, b"prompt,chosen,rejected,margin\na,b,c,1.5\na,c,d,\n", "data.csv")
    assert [pair.margin for pair in rows(path, "preferences")] == [1.5, 0.0]


@pytest.mark.parametrize("end", [b"\r", b"\r\r\n", b"\r\n"])
def test_lines_end_as_old_and_careless_programs_end_them(tmp_path: Path, end: bytes) -> None:
    content = end.join([b"prompt,id", b'"a\rb",1', b"c,2", b""])
    assert prompts(tmp_path, content) == ["a\rb", "c"]
    assert prompts(tmp_path, gzip.compress(content.strip()), "data.csv.gz") == ["a\rb", "c"]


def test_a_long_field_is_read_and_nobody_elses_limit_is_lowered(tmp_path: Path) -> None:
    long = "x," * 200_000
    assert prompts(tmp_path, f'prompt\n"{long}"\n'.encode()) == [long]
    assert csv.field_size_limit() >= len(long)


def test_a_field_without_an_end_is_told_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = csv.field_size_limit(100)
    monkeypatch.setattr(formats, "_LONGEST_FIELD", 1000)
    try:
        message = refusal(written(tmp_path, b'prompt,id\na,1\n"b,2\n' + b"c,3\n" * 300, "data.csv"), "prompts")
    finally:
        csv.field_size_limit(before)
    assert "line 3 of" in message
    assert "goes on for more than 1,000 characters: a double quote that opens there is probably not closed" in message


def test_the_name_of_a_single_column_may_be_a_text_of_it(tmp_path: Path) -> None:
    assert prompts(tmp_path, b"prompt\nprompt\nb\n") == ["prompt", "b"]


def test_names_of_columns_in_the_middle_are_no_row(tmp_path: Path) -> None:
    for names in (b"prompt,id", b'"prompt","id"'):
        path = written(tmp_path, (b"\xef\xbb\xbf" + names + b"\na,1\n") * 2, "data.csv")
        assert "line 3 of" in refusal(path, "prompts")
        found = read(path, "prompts", bad_rows="drop")
        assert [row.reason for row in found.rejected] == ["names of columns again"]


def test_a_byte_order_mark_within_a_field_is_of_its_text(tmp_path: Path) -> None:
    assert prompts(tmp_path, b'\xef\xbb\xbfprompt,id\n"a\n\xef\xbb\xbfb",1\n') == ["a\n\ufeffb"]


USER, GOOD, BAD = (
    json.dumps([{"role": role, "content": content}])
    for role, content in (("user", "Hi"), ("assistant", "Hello"), ("assistant", "No"))
)
PAIR = PreferencePair("Hi", "Hello", "No")
SHOWN = Problem("Hi", demonstration="Hello")


def both(*lists: str) -> str:
    return json.dumps([message for each in lists for message in json.loads(each)])


@pytest.mark.parametrize(
    ("fields", "role", "row"),
    [
        ({"prompt": USER, "chosen": GOOD, "rejected": BAD}, "preferences", PAIR),
        ({"prompt": "Hi", "chosen": GOOD, "rejected": BAD}, "preferences", PAIR),
        ({"prompt": "Hi", "chosen": both(USER, GOOD), "rejected": both(USER, BAD)}, "preferences", PAIR),
        ({"chosen": both(USER, GOOD), "rejected": both(USER, BAD)}, "preferences", PAIR),
        ({"chosen": GOOD, "rejected": BAD, "prompt": both(USER)}, "preferences", PAIR),
        ({"prompt": USER, "response": GOOD}, "demonstrations", SHOWN),
        ({"prompt": USER, "completion": GOOD}, "demonstrations", SHOWN),
        ({"instruction": USER, "output": "Hello"}, "demonstrations", SHOWN),
        ({"question": USER, "answer": "4"}, "problems", Problem("Hi", "4")),
        ({"prompt": USER}, "prompts", Problem("Hi")),
    ],
)
def test_messages_stand_in_any_field_as_json(tmp_path: Path, fields: dict[str, str], role: Any, row: Any) -> None:
    table = io.StringIO()
    csv.writer(table).writerows([fields.keys(), fields.values()])
    found = [
        *rows(written(tmp_path, table.getvalue().encode(), "data.csv"), role),
        *rows(write(tmp_path / "data.jsonl", fields), role),
    ]
    assert [vars(each) for each in found] == [vars(row)] * 2


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2] is a list",
        "[1, 2]",
        '["a"]',
        "[]",
        '[{"a": 1}]',
        '[{"role": "Hamlet", "actor": "Olivier"}]',
        '[{"from": "Berlin", "to": "Rome"}]',
        '[{"role": "user"}, 1]',
        USER + " is how a chat begins.",
        "[" * 5000,
        '{"role": "Hamlet", "actor": "Olivier"}',
        '{"from": "Berlin", "to": "Rome"}',
        "{not json}",
    ],
)
def test_a_text_that_begins_with_a_bracket_stays_a_text(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": text, "chosen": text + "!", "rejected": text})
    assert rows(path, "preferences") == [PreferencePair(text, text + "!", text)]


def test_a_column_of_another_meaning_leaves_messages_what_they_are(tmp_path: Path) -> None:
    assert rows(write(tmp_path / "p.jsonl", {"prompt": USER, "entry": "7"}), "prompts") == [Problem("Hi")]


@pytest.mark.parametrize("text", [both(USER, GOOD), USER[:-3]])
@pytest.mark.parametrize(
    ("fields", "field", "role"),
    [
        ({"instruction": "Sum up.", "output": "A greeting."}, "input", "demonstrations"),
        ({"instruction": "Sum up."}, "input", "prompts"),
        ({"instruction": "Write a chat."}, "output", "demonstrations"),
        ({"question": "Write a chat."}, "response", "demonstrations"),
        ({"question": "Write a chat."}, "answer", "demonstrations"),
        ({"question": "Write a chat."}, "answer", "problems"),
        ({"messages": json.loads(USER)}, "gt_answer", "problems"),
        ({"problem": "Write a chat."}, "solution", "problems"),
    ],
)
def test_what_can_only_be_a_text_stays_a_text(tmp_path: Path, fields: Any, field: str, role: Any, text: str) -> None:
    text += r" \boxed{1}" if field == "solution" else ""
    assert read(write(tmp_path / "p.jsonl", fields | {field: text}), role).rejected == ()


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (GOOD[:-3], "which begins as messages do, is not valid JSON: Unterminated string starting at column 35"),
        (str(json.loads(GOOD)), "single quotes are Python's: write JSON with json.dumps"),
        (GOOD.replace('"role"', '"role": "user", "role"'), "gives the key 'role' twice in one object"),
        (GOOD.replace("Hello", r"\ud800"), r"holds \ud800, half of a character"),
        (GOOD.replace('"content"', '"text"'), "a message must have 'role'"),
        (GOOD.replace("assistant", "Assistant"), "message 1 of 'chosen' has the role 'Assistant'"),
        (GOOD.replace("assistant", "developer"), "message 1 of 'chosen' has the role 'developer'"),
        (GOOD.replace("assistant", "tool"), "must begin and end with the assistant's"),
        (GOOD.strip("[]"), "'chosen' is a single message; put it into a list: ["),
    ],
)
def test_a_field_that_begins_as_messages_and_is_none_is_named(tmp_path: Path, cell: str, sentence: str) -> None:
    message = refusal(write(tmp_path / "p.jsonl", {"prompt": "Hi", "chosen": cell, "rejected": BAD}), "preferences")
    assert message.startswith(f"row 1 of {tmp_path}/p.jsonl: ")
    assert sentence in message
