"""Whatever is wrong with a data file is told in one sentence that names the file and the row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rlhf_core.data import detect_form, read_preferences, read_problems
from rlhf_core.errors import DataError

GOOD = {"question": "What is 6 times 7?", "answer": "6 * 7 = 42\n#### 42"}
PAIR = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def refusal(path: Path, read=read_problems) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def written(tmp_path: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("read", [read_problems, read_preferences, detect_form])
def test_a_missing_file_offers_the_nearest_name(tmp_path: Path, read) -> None:
    near = written(tmp_path, lines(GOOD), "train.jsonl")
    message = refusal(tmp_path / "trian.jsonl", read)
    assert f"did you mean {near}?" in message


def test_a_missing_file_far_from_every_name_lists_what_is_there(tmp_path: Path) -> None:
    written(tmp_path, lines(GOOD), "zebra.txt")
    assert "holds zebra.txt" in refusal(tmp_path / "pairs.jsonl")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert f"nor does its directory {tmp_path / 'no'}" in refusal(tmp_path / "no" / "data.jsonl")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)


@pytest.mark.parametrize("read", [read_problems, read_preferences, detect_form])
@pytest.mark.parametrize("content", [b"", b"\n \n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes, read) -> None:
    assert "is empty" in refusal(written(tmp_path, content), read)


def test_an_empty_gzip_file_is_refused(tmp_path: Path) -> None:
    assert "is empty" in refusal(written(tmp_path, gzip.compress(b""), "data.jsonl.gz"))
    assert "is empty" in refusal(written(tmp_path, b"", "data.jsonl.gz"))


def test_a_malformed_row_is_named_with_its_column(tmp_path: Path) -> None:
    path = written(tmp_path, lines(GOOD) + b"\n" + b'{"question": "2 + 2", "answer": \n')
    assert f"row 3 of {path} is not valid JSON" in refusal(path)


def test_json_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    assert "row 1" in refusal(written(tmp_path, b"[" * 100_000 + b"]" * 100_000))


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    assert "row 1" in refusal(written(tmp_path, b'{"question": ' + b"9" * 5000 + b"}"))


@pytest.mark.parametrize(("row", "kind"), [([1], "a list"), ("text", "a string"), (3, "a number"), (None, "null")])
def test_a_row_that_is_no_object_is_refused(tmp_path: Path, row: object, kind: str) -> None:
    path = written(tmp_path, lines(GOOD, row))
    assert f"row 2 of {path} is {kind}" in refusal(path)


def test_missing_fields_are_named_and_those_found_are_listed(tmp_path: Path) -> None:
    path = written(tmp_path, lines(GOOD, {"question": "2 + 2", "solution": "4", "level": 1}))
    message = refusal(path)
    assert f"row 2 of {path} lacks 'answer'" in message
    assert "found 'question', 'solution', 'level'" in message


@pytest.mark.parametrize(("value", "kind"), [(42, "a number"), (None, "null"), (["42"], "a list"), (True, "a boolean")])
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, value: object, kind: str) -> None:
    message = refusal(written(tmp_path, lines({"question": "2 + 2", "answer": value})))
    assert f"field 'answer' must be a string, but is {kind}" in message


def test_blank_questions_and_answers_are_refused(tmp_path: Path) -> None:
    assert "'question' is blank" in refusal(written(tmp_path, lines({"question": " ", "answer": "4"})))
    assert "holds no answer" in refusal(written(tmp_path, lines({"question": "2 + 2", "answer": ""})))
    assert "no answer after '####'" in refusal(written(tmp_path, lines({"question": "2 + 2", "answer": "4 ####"})))


def test_a_file_that_mixes_marked_and_plain_answers_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, lines(GOOD, {"question": "2 + 2", "answer": "4"})))
    assert "row 2" in message
    assert "lacks the mark '####'" in message


def test_text_that_is_not_utf8_is_refused_with_its_row(tmp_path: Path) -> None:
    path = written(tmp_path, lines(GOOD) + '{"question": "für", "answer": "1"}\n'.encode("latin-1"))
    assert f"row 2 of {path} is not UTF-8 (byte 0xfc" in refusal(path)


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


def test_a_preference_file_without_assistant_turns_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, lines(PAIR, {"chosen": "yes", "rejected": "no"})), read_preferences)
    assert "row 2" in message
    assert "field 'chosen' has no" in message


def test_a_preference_file_of_equal_pairs_alone_is_refused(tmp_path: Path) -> None:
    same = {"chosen": PAIR["chosen"], "rejected": PAIR["chosen"]}
    assert "2 rows have equal responses" in refusal(written(tmp_path, lines(same, same)), read_preferences)


def test_a_file_of_neither_form_lists_its_fields(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, lines({"text": "a", "label": 1})), detect_form)
    assert "it has 'text', 'label'" in message
