"""CSV: quotes, line ends and headers as people write them, and their faults by line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.unit.data.reading_files import read, refusal, rows, written


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
        (b'prompt\n"a" b\n', "write a double quote inside a quoted field twice"),
        (b'prompt\n"' + b"x" * 200_000 + b'"\n', "line 2 of"),
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
    assert "'messages' is not valid JSON" in refusal(broken, "prompts")


def test_the_margins_of_a_csv_are_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, b"prompt,chosen,rejected,margin\na,b,c,1.5\na,c,d,\n", "data.csv")
    assert [pair.margin for pair in rows(path, "preferences")] == [1.5, 0.0]
