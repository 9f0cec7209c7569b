"""Whatever is wrong with a data file is told in one sentence that names the file and the row."""

from __future__ import annotations

import gzip
import json
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
    [(None, "null"), (["42"], "a list"), (True, "a boolean"), ({}, "an obj"), (float("nan"), "a num")],
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
    assert "line 1 of" in refusal(written(tmp_path, "prompt\nhi\n".encode("utf-16"), "wide.csv"))


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
