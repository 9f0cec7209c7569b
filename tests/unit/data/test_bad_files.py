"""Whatever is wrong with a data file is told in one sentence that names the file and the row."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhf_core.config.data import SourceConfig
from rlhf_core.data.reading import Access, detect_role
from rlhf_core.errors import DataError
from tests.unit.data.reading_files import HI, lines, read, refusal, written

GOOD = {"question": "What is 6 times 7?", "answer": "6 * 7 = 42\n#### 42"}
PAIR = {"chosen": HI + " Hello", "rejected": HI + " No"}
ROLES = ["problems", "preferences", "prompts", "demonstrations"]


@pytest.mark.parametrize("role", ROLES)
def test_a_missing_file_offers_the_nearest_name(tmp_path: Path, role) -> None:
    near = written(tmp_path, lines(GOOD), "train.jsonl")
    assert f"did you mean {near}?" in refusal(tmp_path / "trian.jsonl", role)


def test_a_missing_file_far_from_every_name_lists_what_is_there(tmp_path: Path) -> None:
    written(tmp_path, lines(GOOD), "zebra.txt")
    assert "holds zebra.txt" in refusal(tmp_path / "pairs.jsonl")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert f"nor does its directory {tmp_path / 'no'}" in refusal(tmp_path / "no" / "data.jsonl")


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    written(tmp_path, b"hello", "notes.txt")
    assert "holds no data file" in refusal(tmp_path)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("content", [b"", b"\n \n\n"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "txt"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes, suffix: str, role) -> None:
    assert "is empty" in refusal(written(tmp_path, content, f"data.{suffix}"), role)


def test_an_empty_gzip_file_is_refused(tmp_path: Path) -> None:
    assert "is empty" in refusal(written(tmp_path, gzip.compress(b""), "data.jsonl.gz"))
    assert "is empty" in refusal(written(tmp_path, b"", "data.jsonl.gz"))


def test_empty_tables_and_arrays_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "data.parquet")
    assert "is empty" in refusal(tmp_path / "data.parquet")
    assert "is empty" in refusal(written(tmp_path, b"", "none.parquet"))
    assert "is empty" in refusal(written(tmp_path, b"[]", "data.json"))
    assert "names of columns and no row" in refusal(written(tmp_path, b"question,answer\n", "data.csv"))


def test_a_malformed_row_is_named_with_its_column(tmp_path: Path) -> None:
    path = written(tmp_path, lines(GOOD) + b"\n" + b'{"question": "2 + 2", "answer": \n')
    assert f"row 3 of {path} is not valid JSON" in refusal(path)


def test_json_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    assert "row 1" in refusal(written(tmp_path, b"[" * 100_000 + b"]" * 100_000))
    assert "not usable JSON" in refusal(written(tmp_path, b"[" * 100_000 + b"]" * 100_000, "data.json"))


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    assert "row 1" in refusal(written(tmp_path, b'{"question": ' + b"9" * 5000 + b"}"))


@pytest.mark.parametrize(("row", "kind"), [([1], "a list"), ("text", "a string"), (3, "a number"), (None, "null")])
def test_a_row_that_is_no_object_is_refused(tmp_path: Path, row: object, kind: str) -> None:
    path = written(tmp_path, lines(GOOD, row))
    assert f"row 2 of {path} is {kind}" in refusal(path)
    array = written(tmp_path, json.dumps([GOOD, row]).encode(), "data.json")
    assert f"row 2 of {array} is {kind}" in refusal(array)


def test_a_malformed_array_is_refused_with_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path, b'[{"prompt": "a"},\n {"prompt" "b"}]', "data.json")
    assert f"{path} is not valid JSON: Expecting ':' delimiter at line 2, column 12" in refusal(path)


def test_missing_fields_are_named_and_those_found_are_listed(tmp_path: Path) -> None:
    path = written(tmp_path, lines(GOOD, {"question": "2 + 2", "solution": "4", "level": 1}))
    message = refusal(path)
    assert f"row 2 of {path} lacks 'answer'" in message
    assert "found 'question', 'solution', 'level'" in message


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "null"), (["42"], "a list"), (True, "a boolean"), ({}, "an obj"), (float("nan"), "the number nan")],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, value: object, kind: str) -> None:
    message = refusal(written(tmp_path, lines(GOOD, {"question": "2 + 2", "answer": value})))
    assert f"field 'answer' must be a string, but is {kind}" in message


def test_blank_questions_and_answers_are_refused(tmp_path: Path) -> None:
    assert "'question' is blank" in refusal(written(tmp_path, lines({"question": " ", "answer": "4"})))
    assert "holds no answer" in refusal(written(tmp_path, lines({"question": "2 + 2", "answer": ""})))
    assert "no answer after '####'" in refusal(written(tmp_path, lines({"question": "2 + 2", "answer": "4 ####"})))


def test_a_file_that_mixes_marked_and_plain_answers_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, lines(GOOD, {"question": "2 + 2", "answer": "4"})))
    assert "row 2" in message
    assert "lacks the mark '####'" in message


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json"])
def test_text_that_is_not_utf8_is_refused_with_its_row_and_byte(tmp_path: Path, suffix: str) -> None:
    content = {
        "jsonl": lines(GOOD) + '{"question": "für", "answer": "1"}\n'.encode("latin-1"),
        "csv": "prompt\nfür\n".encode("latin-1"),
        "json": '[{"prompt": "a"},\n{"prompt": "für"}]'.encode("latin-1"),
    }[suffix]
    path = written(tmp_path, content, f"data.{suffix}")
    assert f"2 of {path} is not UTF-8 (byte 0xfc at position" in refusal(path)


def test_the_position_of_a_wrong_byte_is_counted_from_one(tmp_path: Path) -> None:
    assert "(byte 0xfc at position 2)" in refusal(written(tmp_path, b"prompt\nf\xfcr\n", "data.csv"))


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_truncated_gzip_file_is_refused(tmp_path: Path, kept: float) -> None:
    rows = [{"question": f"What is {i} squared, and why?", "answer": str(i * i)} for i in range(500)]
    whole = gzip.compress(lines(*rows))
    assert "gzip stream is cut off" in refusal(written(tmp_path, whole[: int(len(whole) * kept)], "data.jsonl.gz"))


def test_a_gzip_file_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(lines(*[GOOD] * 200)))
    content[len(content) // 2] ^= 0xFF
    assert "data.jsonl.gz" in refusal(written(tmp_path, bytes(content), "data.jsonl.gz"))


def test_plain_text_under_the_name_of_a_gzip_file_is_refused(tmp_path: Path) -> None:
    assert "holds no gzip" in refusal(written(tmp_path, lines(GOOD), "data.jsonl.gz"))


@pytest.mark.parametrize("kept", [0.1, 0.6, 0.99])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, kept: float) -> None:
    parquet.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(500)]}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    assert "is damaged" in refusal(written(tmp_path, whole[: int(len(whole) * kept)], "cut.parquet"), "prompts")
    flipped = bytearray(whole)
    flipped[int(len(whole) * kept)] ^= 0xFF
    path = written(tmp_path, bytes(flipped), "flipped.parquet")
    with suppress(DataError):  # unless the byte is one that no reader looks at, or of a text
        read(path, "prompts")


def test_text_under_the_name_of_a_parquet_file_is_refused(tmp_path: Path) -> None:
    assert "holds no Parquet" in refusal(written(tmp_path, lines(GOOD), "data.parquet"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04zip", "a zip archive"),
        (b"\x28\xb5\x2f\xfdx", "zstd"),
        (b"prompt\nhi\n", "CSV is known by its name"),
    ],
)
def test_a_file_of_an_unknown_format_says_what_it_is(tmp_path: Path, content: bytes, what: str) -> None:
    assert what in refusal(written(tmp_path, content, "data.bin"))


def test_a_preference_row_without_assistant_turns_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, lines(PAIR, {"chosen": "yes", "rejected": "no"})), "preferences")
    assert "row 2" in message
    assert "field 'chosen' has no" in message
    found = read(tmp_path / "data.jsonl", "preferences", bad_rows="drop")
    assert [row.reason for row in found.rejected] == ["no assistant's turn"]


@pytest.mark.parametrize("bad_rows", ["refuse", "drop"])
def test_a_preference_file_of_identical_pairs_alone_is_refused(tmp_path: Path, bad_rows: str) -> None:
    same = {"chosen": PAIR["chosen"], "rejected": PAIR["chosen"]}
    message = refusal(written(tmp_path, lines(same, same)), "preferences", bad_rows=bad_rows)
    assert message.startswith("all 2 pairs of")
    assert "are identical" in message


def test_a_file_of_which_no_row_is_left_counts_the_reasons(tmp_path: Path) -> None:
    same = {"chosen": PAIR["chosen"], "rejected": PAIR["chosen"]}
    apart = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"}
    message = refusal(written(tmp_path, lines(same, apart, same)), "preferences")
    assert "2 chosen equals rejected, 1 no common prompt" in message


@pytest.mark.parametrize("role", ROLES)
def test_a_file_of_no_form_lists_its_fields_and_the_forms(tmp_path: Path, role) -> None:
    message = refusal(written(tmp_path, lines({"text": "a", "label": 1})), role, bad_rows="drop")
    assert f"is none of {role}, which have {{" in message
    assert "it has 'text', 'label'" in message


def test_the_role_of_a_file_of_no_form_cannot_be_told(tmp_path: Path) -> None:
    path = written(tmp_path, lines({"text": "a", "label": 1}))
    with pytest.raises(DataError, match="it has 'text', 'label'"):
        detect_role(SourceConfig(path=str(path)), Access(tmp_path))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_half_a_character_is_no_text(tmp_path: Path, name: str) -> None:
    half = {**GOOD, "question": "\ud800 and?"}
    whole = {**GOOD, "question": "\U0001f600 and?"}  # JSON writes it in two halves
    body = lines(whole, half) if name.endswith("l") else json.dumps([whole, half]).encode()
    path = written(tmp_path, body, name)
    found = read(path, bad_rows="drop")
    assert [row.prompt for row in found.rows] == ["\U0001f600 and?"]
    assert [row.reason for row in found.rejected] == ["not UTF-8"]
    assert r"holds \ud800, half of a character" in refusal(path)


def test_the_first_bad_row_is_told_with_the_number_of_the_others(tmp_path: Path) -> None:
    blank = {"question": "", "answer": "4"}
    path = written(tmp_path, lines(GOOD, blank, GOOD, blank, blank))
    message = refusal(path)
    assert message.startswith(f"row 2 of {path}: field 'question' is blank")
    assert f"of the 5 rows of {path}, 2 more are bad" in message


def test_dropped_rows_are_kept_with_place_category_and_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, lines(GOOD, {"question": "", "answer": "4"}, [1]) + b"{\n\xff\n")
    found = read(path, bad_rows="drop")
    assert len(found.rows) == 1
    assert [(row.where, row.reason) for row in found.rejected] == [
        (f"row 2 of {path}", "blank question"),
        (f"row 3 of {path}", "not a JSON object"),
        (f"row 4 of {path}", "not valid JSON"),
        (f"row 5 of {path}", "not UTF-8"),
    ]
    assert all(row.detail.startswith(row.where) for row in found.rejected)
    assert found.sources[0].rows == 5
    assert found.sources[0].kept == 1


WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("bad_rows", ["refuse", "drop"])
@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '{"prompt": "\u0a05"}\n{"prompt": "b"}\n'),
        ("p.json", '\n[{"prompt": "a"}]'),
        ("p.csv", "prompt,id\na,1\nb,2\n"),
        ("p.tsv", "prompt\tid\na\t1\nb\t2\n"),
    ],
)
def test_wide_characters_are_refused_as_a_file(
    tmp_path: Path, name: str, text: str, encoding: str, bad_rows: str
) -> None:
    plain = refusal(written(tmp_path, text.encode(encoding), name), "prompts", bad_rows=bad_rows)
    packed = written(tmp_path, gzip.compress(text.encode(encoding)), f"{name}.gz")
    for message in (plain, refusal(packed, "prompts", bad_rows=bad_rows)):
        assert "is UTF-16 or UTF-32, by its first bytes" in message
        assert message.endswith("convert the file to UTF-8")


def test_wide_characters_with_a_mark_are_known_whatever_comes_first(tmp_path: Path) -> None:
    assert "UTF-16" in refusal(written(tmp_path, "問,答\na,1\n".encode("utf-16"), "p.csv"), "prompts")
    bare = written(tmp_path, "問題,解答\na,1\n".encode("utf-16-le"), "p.csv")
    assert "line 1 of" in refusal(bare, "prompts")


def test_a_block_of_zeros_is_a_bad_row_of_json_lines(tmp_path: Path) -> None:
    path = written(tmp_path, lines(GOOD) + b"\0" * 16 + b"\n")
    assert "row 2 of" in refusal(path)
    found = read(path, bad_rows="drop")
    assert ([row.reason for row in found.rejected], len(found.rows)) == (["not UTF-8"], 1)
    assert "holds a NUL byte at position 1" in found.rejected[0].detail


def test_byte_order_marks_of_joined_files_are_no_text(tmp_path: Path) -> None:
    path = written(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "b"}\n')
    assert [row.prompt for row in read(path, "prompts").rows] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "x": [{"y": {"z": 1, "z": 1}}]}', "z"),
        ('{"prompt": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
    ],
)
@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
def test_a_key_that_comes_twice_is_a_bad_row(tmp_path: Path, row: str, key: str, name: str) -> None:
    good = '{"prompt": "good"}'
    content = f'{good}\n{row}\n{good[:-2]}!"}}' if name.endswith("l") else f'[{good}, {row}, {{"prompt": "good!"}}]'
    path = written(tmp_path, content.encode(), name)
    assert f"row 2 of {path} gives the key {key!r} twice in one object" in refusal(path, "prompts")
    found = read(path, "prompts", bad_rows="drop")
    assert [row.prompt for row in found.rows] == ["good", "good!"]
    assert [row.reason for row in found.rejected] == ["key given twice"]


@pytest.mark.parametrize("bad_rows", ["refuse", "drop"])
def test_a_name_that_comes_twice_in_parquet_refuses_the_file(tmp_path: Path, bad_rows: str) -> None:
    path, asked = tmp_path / "p.parquet", pa.array(["a"])
    parquet.write_table(pa.table([asked, pa.array(["b"])], names=["prompt", "prompt"]), path)
    assert "has two columns or fields named 'prompt'" in refusal(path, "prompts", bad_rows=bad_rows)
    twice = pa.StructArray.from_arrays([asked, asked], names=["content", "content"])
    listed = pa.ListArray.from_arrays([0, 1], twice)
    parquet.write_table(pa.table({"prompt": asked, "x": listed}), path)
    assert "has two columns or fields named 'content'" in refusal(path, "prompts", bad_rows=bad_rows)


PRETTY = [json.dumps({"prompt": text, "tags": [1, 2]}, indent=2) for text in "ab"]


@pytest.mark.parametrize("bad_rows", ["refuse", "drop"])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (PRETTY[0], "a JSON object over several lines"),
        ("\n".join(PRETTY), "a JSON object over several lines"),
        (json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1), "a JSON array over several lines"),
        ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]', "a JSON array over several lines"),
        (json.dumps({"data": ["x" * 100] * 20_000}, indent=1), "a JSON object over several lines"),
    ],
)
def test_json_over_several_lines_is_told_as_such(tmp_path: Path, content: str, what: str, bad_rows: str) -> None:
    path = written(tmp_path, content.encode())
    message = refusal(path, "prompts", bad_rows=bad_rows)
    assert f"{path} seems to hold {what}, but JSON lines need one object a line" in message
    with pytest.raises(DataError, match=what):
        detect_role(SourceConfig(path=str(path)), Access(tmp_path))


@pytest.mark.parametrize(
    ("key", "asked"), [("data", "'.data[]'"), ("the rows", """'.["the rows"][]'"""), ("messages", None)]
)
def test_rows_in_an_object_are_told_with_what_takes_them_out(tmp_path: Path, key: str, asked: str | None) -> None:
    row = {"role": "user", "content": "a"} if asked is None else {"prompt": "a"}
    content = {"version": 1, "tags": [1], key: [row, row]}
    pretty = written(tmp_path, json.dumps(content, indent=1).encode(), "pretty.json")
    assert f"`jq -c {asked or '.'}`" in refusal(pretty, "prompts")
    if asked:
        line = written(tmp_path, json.dumps(content).encode(), "line.json")
        assert f"`jq -c {asked}`" in refusal(line, "prompts")
        with pytest.raises(DataError, match=re.escape(f"`jq -c {asked}`")):
            detect_role(SourceConfig(path=str(line)), Access(tmp_path))


def test_only_what_json_calls_space_may_stand_behind_a_row(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a"} \t\r\n{"prompt": "b"}\u2028\n'.encode())
    assert "row 2 of" in refusal(path, "prompts")
    assert "Extra data at column 16" in refusal(path, "prompts")


@pytest.mark.parametrize("first", ['{"prompt": ', '{"prompt": "a', "{", '{"prompt": "a"} x', "[", "nonsense"])
def test_a_broken_first_row_is_a_broken_row(tmp_path: Path, first: str) -> None:
    path = written(tmp_path, first.encode() + b"\n" + lines({"prompt": "b"}, {"prompt": "c"}))
    found = read(path, "prompts", bad_rows="drop")
    assert [row.prompt for row in found.rows] == ["b", "c"]
    assert [row.where for row in found.rejected] == [f"row 1 of {path}"]


def test_json_lines_that_end_in_carriage_returns_are_told_so(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"prompt": "a"}\r{"prompt": "b"}\r')
    assert "end in carriage returns alone" in refusal(path, "prompts", bad_rows="drop")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"prompt": "a\tb"}', "not valid JSON: Invalid control character at column 14"),
        (b'{"prompt": "a', "not valid JSON: Unterminated string starting at column 12"),
        (b'{"prompt": "\\q"}', r"not valid JSON: Invalid \escape at column 13"),
        (b'{"prompt": "a"}, ', "not valid JSON: Extra data at column 16"),
        (
            b"{'prompt': 'a'}",
            "not valid JSON: Expecting property name enclosed in double quotes at column 2; "
            "single quotes are Python's: write JSON with json.dumps",
        ),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not usable JSON: it holds a whole number of thousands of digits"),
        (b'{"prompt": ' + b"[" * 5000, "not usable JSON: it is nested too deeply"),
    ],
)
def test_json_faults_are_told_in_whole_sentences(tmp_path: Path, row: bytes, reason: str) -> None:
    assert f"row 1 of {tmp_path / 'data.jsonl'} is {reason}" in refusal(written(tmp_path, row), "prompts")
    assert "at at" not in refusal(written(tmp_path, b"[\n" + row + b"]", "data.json"), "prompts")
    cell = b'messages\n"[' + row.replace(b'"', b'""') + b']"\n'
    assert "at at" not in refusal(written(tmp_path, cell, "data.csv"), "prompts")


def test_an_answer_of_hundreds_of_digits_is_an_answer(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"question": "10^400?", "answer": 1' + b"0" * 400 + b"}")
    assert [row.answer for row in read(path).rows] == ["1" + "0" * 400]
