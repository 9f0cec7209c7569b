"""Files of users: GSM8K's problems and HH-RLHF's preferences."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from infra.settings import settings
from rlhf_core.data import PreferencePair, Problem, detect_form, read_preferences, read_problems


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def real_data() -> Path:
    directory = settings().data_dir
    if directory is None or not directory.is_dir():
        pytest.skip("RLHF_DATA_DIR names no directory with gsm8k/ and hh-rlhf/ in it")
    return directory


def test_the_answer_of_a_problem_is_what_follows_the_mark_without_commas(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"question": " Sales? ", "answer": "It is $1,200.\n#### 1,234,500"},
        {"question": "Colour?", "answer": "#### red, or blue"},
    )
    assert read_problems(path) == [Problem("Sales?", "1234500"), Problem("Colour?", "red, or blue")]


def test_without_marks_the_whole_text_is_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"question": "2 + 2?", "answer": " 4 "}, {"question": "List", "answer": "1,234"})
    assert [problem.answer for problem in read_problems(path)] == ["4", "1,234"]


def test_a_prompt_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"question": "2 + 2?", "answer": "4"},
        {"question": "Two", "answer": "2"},
        {"question": " 2 +  2?", "answer": "5"},
    )
    assert read_problems(path) == [Problem("2 + 2?", "4"), Problem("Two", "2")]


def test_gzip_blank_lines_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"question": "2 + 2?", "answer": "4"}\r\n\r\n{"question": "3?", "answer": "3"}'
    plain, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    assert read_problems(plain) == read_problems(packed) == [Problem("2 + 2?", "4"), Problem("3?", "3")]


def test_transcripts_are_split_at_the_last_turn_that_both_share(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"
    path = write(tmp_path / "p.jsonl", {"chosen": start + " See you", "rejected": start + " So what"})
    assert list(read_preferences(path)) == [PreferencePair(start, "See you", "So what")]


def test_transcripts_that_part_early_keep_their_further_turns_as_responses(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    path = write(
        tmp_path / "p.jsonl",
        {"chosen": start + " A\n\nHuman: x\n\nAssistant: B", "rejected": start + " C\n\nHuman: x\n\nAssistant: D"},
    )
    [pair] = read_preferences(path)
    assert pair == PreferencePair(start, "A\n\nHuman: x\n\nAssistant: B", "C\n\nHuman: x\n\nAssistant: D")


def test_equal_pairs_and_pairs_without_a_common_prompt_are_dropped_and_counted(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    path = write(
        tmp_path / "p.jsonl",
        {"chosen": start + " A", "rejected": start + " B"},
        {"chosen": start + " A", "rejected": start + " A "},
        {"chosen": "\n\nHuman: One\n\nAssistant: A", "rejected": "\n\nHuman: Two\n\nAssistant: A"},
    )
    found = read_preferences(path)
    assert (len(found), found.identical, found.without_common_prompt) == (1, 1, 1)
    assert found.dropped == "2 of 3 rows were dropped: 1 with equal responses, 1 without a common prompt"


def test_an_empty_response_is_a_response(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    path = write(tmp_path / "p.jsonl", {"chosen": start + " A", "rejected": start})
    assert list(read_preferences(path)) == [PreferencePair(start, "A", "")]


def test_pairs_with_a_field_for_the_prompt_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "Hi", "chosen": "Hello", "rejected": "No"})
    assert list(read_preferences(path)) == [PreferencePair("Hi", "Hello", "No")]
    assert read_preferences(path).dropped is None


def test_the_form_of_a_file_is_known_by_its_first_row(tmp_path: Path) -> None:
    assert detect_form(write(tmp_path / "a.jsonl", {"question": "?", "answer": "!"})) == "problems"
    assert detect_form(write(tmp_path / "b.jsonl", {"chosen": "a", "rejected": "b", "id": 1})) == "preferences"


def test_all_of_gsm8k_is_read_as_problems_with_numbers(real_data: Path) -> None:
    counts = {name: len(read_problems(real_data / "gsm8k" / f"{name}.jsonl")) for name in ("train", "test")}
    assert counts == {"train": 7473, "test": 1319}
    problems = read_problems(real_data / "gsm8k" / "train.jsonl")
    assert problems[0].answer == "72"
    assert all(float(problem.answer) is not None for problem in problems)


def test_all_of_hh_rlhf_is_read_as_pairs_with_a_common_prompt(real_data: Path) -> None:
    path = real_data / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    found = read_preferences(path)
    assert len(found) == len(rows) == 2312
    for row, pair in zip(rows, found, strict=True):
        assert (pair.prompt + " " + pair.chosen).split() == row["chosen"].split()
        assert (pair.prompt + " " + pair.rejected).split() == row["rejected"].split()
