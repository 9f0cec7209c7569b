from __future__ import annotations

import pytest

from rlhf_core.gating.answers import copies_prompt, is_empty, loops, same_answers

ESSAY = (
    "The river rises in the hills and reaches the sea after forty miles. On its way it turns three mills, of which one "
    "still grinds. In spring the meadows are under water, and in summer children walk across where boats went in May."
)


@pytest.mark.parametrize("response", ["", " \n\t", "\u3000"])
def test_white_space_says_nothing(response: str) -> None:
    assert is_empty(response)
    assert not is_empty("0")


@pytest.mark.parametrize(
    "response",
    ["I am sorry. " * 5, "a" * 60, "好的。" * 20, f"{ESSAY[:50]} {'and so on, ' * 30}", "one two three four five " * 6],
)
def test_a_piece_that_follows_itself_is_a_loop(response: str) -> None:
    assert loops(response)


def test_the_same_words_in_other_places_are_a_loop_too() -> None:
    assert loops(" ".join(f"{number % 3} then we look at it again." for number in range(10)))


@pytest.mark.parametrize(
    "response",
    ["", "4 4 4 4 4 4", "=" * 30, ESSAY, f"{ESSAY}\n{'-' * 60}", " ".join(str(number) for number in range(100))],
)
def test_prose_rules_and_counting_are_no_loops(response: str) -> None:
    assert not loops(response)


def test_a_transcripts_last_question_is_what_is_copied() -> None:
    prompt = "\n\nHuman: Hello there, who are you?\n\nAssistant: A model.\n\nHuman: And what can you do?\n\nAssistant:"
    assert copies_prompt(prompt, "And what can YOU do?\nI can count.")
    assert not copies_prompt(prompt, "Hello there, who are you?")
    assert not copies_prompt("1+1=", "1+1=2")


def test_an_answer_is_the_same_for_all_where_it_is_wrong_and_four_share_it() -> None:
    assert same_answers(["A", "a ", "A", "b", "a"], [True, False, False, False, False]) == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert not any(same_answers(["a", "a", "a", "b"], [False] * 4))
    assert not any(same_answers([""] * 9, [False] * 9))
    assert same_answers([], []) == []
