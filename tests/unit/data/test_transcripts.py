"""Conversations as one text, and back."""

from __future__ import annotations

import pytest

from rlhf_core.data.transcripts import transcript, turns
from rlhf_core.errors import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi\n\nthere"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, USER],
        [USER, ASSISTANT, USER],
        [SYSTEM, USER, ASSISTANT, USER],
        [USER, USER],
        [USER, ASSISTANT] * 3 + [USER],
    ],
)
def test_a_transcript_has_the_turns_that_it_was_made_of(messages: list[dict[str, str]]) -> None:
    assert turns(transcript(messages)) == messages


def test_a_single_turn_of_the_users_is_its_own_text() -> None:
    assert transcript([USER]) == "Hi\n\nthere"
    assert turns("Hi\n\nthere") is None


@pytest.mark.parametrize("prompt", ["", "\n\nHuman: Hi", "Hi\n\nAssistant:", "\n\nSystem: x\n\nAssistant:"])
def test_what_does_not_await_the_assistant_is_no_transcript(prompt: str) -> None:
    assert turns(prompt) is None


@pytest.mark.parametrize("messages", [[], [USER, ASSISTANT], [ASSISTANT, USER], [USER, SYSTEM, USER], [SYSTEM]])
def test_other_conversations_are_refused(messages: list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match="user's turn"):
        transcript(messages)


@pytest.mark.parametrize("mark", ["\n\nHuman:", "\n\nAssistant:", "\n\nSystem:"])
def test_a_text_with_a_speakers_mark_is_refused(mark: str) -> None:
    with pytest.raises(DataError, match="would be read as several turns"):
        transcript([{"role": "user", "content": f"a{mark} b"}])
