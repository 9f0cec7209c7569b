"""Preferences in every form that people write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import SourceConfig
from rlhf_core.data import PreferencePair, pairs_to_jsonl
from rlhf_core.data.reading import Access, detect_role
from tests.unit.data.reading_files import HI, read, refusal, rows, write, written

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_transcripts_are_split_at_the_last_turn_that_both_share(tmp_path: Path) -> None:
    start = HI + " Hello\n\nHuman: Bye\n\nAssistant:"
    path = write(tmp_path / "p.jsonl", {"chosen": start + " See you", "rejected": start + " So what"})
    assert rows(path, "preferences") == [PreferencePair(start, "See you", "So what")]


def test_transcripts_that_part_early_keep_their_further_turns_as_responses(tmp_path: Path) -> None:
    row = {"chosen": HI + " A\n\nHuman: x\n\nAssistant: B", "rejected": HI + " C\n\nHuman: x\n\nAssistant: D"}
    [pair] = rows(write(tmp_path / "p.jsonl", row), "preferences")
    assert pair == PreferencePair(HI, "A\n\nHuman: x\n\nAssistant: B", "C\n\nHuman: x\n\nAssistant: D")


def test_equal_pairs_and_pairs_without_a_common_prompt_never_raise_but_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"chosen": HI + " A", "rejected": HI + " B"},
        {"chosen": HI + " A", "rejected": HI + " A "},
        {"chosen": "\n\nHuman: One\n\nAssistant: A", "rejected": "\n\nHuman: Two\n\nAssistant: A"},
    )
    found = read(path, "preferences", bad_rows="refuse")
    assert len(found.rows) == 1
    assert [row.reason for row in found.rejected] == ["chosen equals rejected", "no common prompt"]
    assert found.rejected[0].where == f"row 2 of {path}"


def test_an_empty_response_is_a_response(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"chosen": HI + " A", "rejected": HI})
    assert rows(path, "preferences") == [PreferencePair(HI, "A", "")]


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, ("Hi", "Hello", "No")),
        ({"prompt": HI, "chosen": " A", "rejected": "B"}, (HI, " A", "B")),
        ({"prompt": [USER], "chosen": "A", "rejected": "B"}, ("Hi", "A", "B")),
        ({"prompt": [USER], "chosen": [assistant("A")], "rejected": [assistant("B")]}, ("Hi", "A", "B")),
        (
            {"prompt": [SYSTEM, USER], "chosen": [assistant("A")], "rejected": [assistant("B")]},
            ("\n\nSystem: Be brief." + HI, "A", "B"),
        ),
        ({"chosen": [USER, assistant("A")], "rejected": [USER, assistant("B")]}, ("Hi", "A", "B")),
        (
            {"prompt": "Hi", "chosen": [USER, assistant("A")], "rejected": [USER, assistant("B")]},
            ("Hi", "A", "B"),
        ),
        (
            {
                "chosen": [USER, assistant("Hello"), {"from": "human", "value": "Bye"}, assistant("A")],
                "rejected": [USER, assistant("Hello"), {"from": "human", "value": "Bye"}, assistant("B")],
            },
            (HI + " Hello\n\nHuman: Bye\n\nAssistant:", "A", "B"),
        ),
        (
            {
                "chosen": [USER, assistant("A"), {"role": "user", "content": "x"}, assistant("B")],
                "rejected": [USER, assistant("C"), {"role": "user", "content": "y"}, assistant("D")],
            },
            ("Hi", "A\n\nHuman: x\n\nAssistant: B", "C\n\nHuman: y\n\nAssistant: D"),
        ),
    ],
)
def test_texts_and_chat_messages_become_pairs(tmp_path: Path, row: dict[str, Any], pair: tuple[str, str, str]) -> None:
    assert rows(write(tmp_path / "p.jsonl", row), "preferences") == [PreferencePair(*pair)]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "Hi", "chosen": [USER], "rejected": [assistant("B")]}, "must begin and end with the assistant"),
        ({"prompt": [assistant("A")], "chosen": "A", "rejected": "B"}, "must end with the user's turn"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "B"}, "field 'chosen' must be a string, but is a number"),
        ({"prompt": " ", "chosen": "A", "rejected": "B"}, "'prompt' is blank"),
        ({"chosen": [USER, assistant("A")], "rejected": HI + " B"}, "field 'chosen' must be a string, but is a list"),
        ({"chosen": [USER], "rejected": [USER, assistant("B")]}, "must end with the assistant's turn"),
        (
            {"prompt": "Hi", "chosen": [assistant("A" + HI)], "rejected": [assistant("B")]},
            "holds the speaker's mark",
        ),
        ({"prompt": [{"role": "user", "content": " "}], "chosen": "A", "rejected": "B"}, "'prompt' is blank"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400},
            "but is 10000000000000000000... (401 characters)",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e999}, "must be finite in float64 and at least 0"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "must be a number, but is a string"),
        ({"prompt": None, "chosen": "A", "rejected": "B"}, "field 'prompt' is null"),
        ({"prompt": None, "chosen": [assistant("A")], "rejected": [assistant("B")]}, "field 'prompt' is null"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "both_well_formed": 1}, "must be a boolean"),
    ],
)
def test_a_bad_pair_is_told_with_its_row(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    path = write(tmp_path / "p.jsonl", row)
    message = refusal(path, "preferences")
    assert message.startswith(f"row 1 of {path}")
    assert sentence in message


def test_conversations_that_part_before_an_answer_have_no_common_prompt(tmp_path: Path) -> None:
    other = {"role": "user", "content": "Other"}
    apart = {"chosen": [USER, assistant("A")], "rejected": [other, assistant("A")]}
    good = {"chosen": [USER, assistant("A")], "rejected": [USER, assistant("B")]}
    found = read(write(tmp_path / "p.jsonl", apart, good), "preferences")
    assert [row.reason for row in found.rejected] == ["no common prompt"]


def test_a_pair_that_comes_twice_is_kept_once_and_another_pair_of_its_prompt_stays(tmp_path: Path) -> None:
    one, other = ({"prompt": "Hi", "chosen": "A", "rejected": worse} for worse in "BC")
    found = read(write(tmp_path / "p.jsonl", one, other, one), "preferences")
    assert [pair.rejected for pair in found.rows] == ["B", "C"]
    assert found.duplicates == 1


def test_our_own_pairs_come_back_as_they_were(tmp_path: Path) -> None:
    pairs = [
        PreferencePair("a\n", " b", "c", 1.5, True),
        PreferencePair(HI, "b", "", 0.0, False),
        PreferencePair("a", "b", "d"),
    ]
    assert rows(written(tmp_path, pairs_to_jsonl(pairs)), "preferences") == pairs


def test_a_blank_chosen_response_is_left_out_and_counted(tmp_path: Path) -> None:
    silent = HI + " \n\n\nHuman: Well?\n\nAssistant: B"
    path = write(
        tmp_path / "p.jsonl",
        {"chosen": HI, "rejected": HI + " A"},
        {"chosen": silent, "rejected": HI + " A"},
        {"prompt": "Hi", "chosen": " ", "rejected": "A"},
        {"prompt": "Hi", "chosen": [assistant(""), USER, assistant("B")], "rejected": "A"},
        {"chosen": HI + " A", "rejected": silent},
    )
    found = read(path, "preferences", bad_rows="refuse")
    assert [row.reason for row in found.rejected] == ["blank chosen"] * 4
    assert found.rows == (PreferencePair(HI, "A", "\n\nHuman: Well?\n\nAssistant: B"),)


@pytest.mark.parametrize("empty", [("chosen",), ("rejected",), ("chosen", "rejected")])
@pytest.mark.parametrize("prompt", [{}, {"prompt": "a"}])
def test_pairs_of_which_a_side_is_null_throughout_are_preferences_that_hold_nothing(
    tmp_path: Path, empty: tuple[str, ...], prompt: dict[str, str]
) -> None:
    row = {**prompt, "chosen": "b", "rejected": "c"} | dict.fromkeys(empty)
    path = write(tmp_path / "p.jsonl", row, row)
    assert detect_role(SourceConfig(path=str(path)), Access(tmp_path)) == "preferences"
    message = refusal(path, "preferences", bad_rows="drop")
    assert f"no row of {path} can be used: 2 field {empty[0]!r} is not a string" in message


def test_pairs_whose_prompt_is_null_are_whole_conversations(tmp_path: Path) -> None:
    row = {"prompt": None, "chosen": HI + " A", "rejected": HI + " B"}
    assert rows(write(tmp_path / "p.jsonl", row), "preferences") == [PreferencePair(HI, "A", "B")]
