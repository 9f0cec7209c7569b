"""Rows of preferences: transcripts, responses to a prompt, or chat messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rlhf_core.data.preferences import PreferencePair, first_turn, split_transcripts
from rlhf_core.data.reading.forms import Form
from rlhf_core.data.reading.messages import UNUSABLE, common_turns, prompt_of, read_messages, response_of
from rlhf_core.data.reading.rows import RowError, number_field, text_fields, wrong_kind
from rlhf_core.data.transcripts import conversation, further_keys, is_plain
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.data.reading.rows import Row
    from rlhf_core.data.transcripts import Message

EQUAL, APART = "chosen equals rejected", "no common prompt"
BLANK, NO_TURN = "blank chosen", "no assistant's turn"
ALIKE = "chosen differs from rejected only in what the model is not shown"
_SIDES = ("chosen", "rejected")
_EXTRAS = ("margin", "both_well_formed")


def pair_forms() -> list[Form]:
    """Return the forms of preferences.

    * {"chosen", "rejected"}: transcripts as HH-RLHF's, or lists of messages. What both share up to their last
      common assistant's turn is the prompt.
    * {"prompt", "chosen", "rejected"}: the prompt a text or messages; a response a text, the assistant's
      messages, or a whole conversation that repeats the prompt.

    "margin" says by how much the chosen response's score should exceed the other's; "both_well_formed" is what
    our own files have.
    """
    return [
        Form("preferences with a prompt", ("prompt", *_SIDES), _EXTRAS, _pair, messages=("prompt", *_SIDES)),
        Form("whole conversations in pairs", _SIDES, _EXTRAS, _pair, messages=_SIDES),
    ]


def _pair(row: Row) -> PreferencePair:
    where, fields, _ = row
    margin = number_field(fields, where, "margin", default=0.0)
    pair = _with_prompt(row) if fields.get("prompt") is not None else _without_prompt(row)
    if not pair.prompt.strip():
        raise RowError(f"{where}: field 'prompt' is blank", "blank prompt")
    if pair.chosen.strip() == pair.rejected.strip():
        raise _nothing_to_prefer(row)
    if not first_turn(pair.chosen):
        raise RowError(f"{where}: the chosen response is blank, so there is nothing to learn", BLANK)
    return replace(pair, margin=margin, both_well_formed=_both_well_formed(row))


def _nothing_to_prefer(row: Row) -> RowError:
    """Return the error of a pair whose responses are equal, as they were written or as the model is shown them."""
    sides = [_side(row.fields, row.where, name) for name in _SIDES]
    had = [[further_keys(turn) for turn in side] if isinstance(side, tuple) else [] for side in sides]
    keys = sorted(
        {
            key
            for one, other in zip_longest(*had, fillvalue={})
            for key in {*one, *other}
            if (one.get(key) or None) != (other.get(key) or None)
        }
    )
    if not keys:
        return RowError(
            f"{row.where}: the chosen response equals the rejected one, so there is nothing to prefer", EQUAL
        )
    return RowError(
        f"{row.where}: the chosen response differs from the rejected one only in {', '.join(keys)}, which the model is "
        "not shown, so there is nothing to prefer; take a chat template that shows it",
        ALIKE,
    )


def _without_prompt(row: Row) -> PreferencePair:
    try:
        return _of_conversations(row)
    except RowError as error:
        if "prompt" in row.fields and error.reason in {UNUSABLE, NO_TURN}:
            raise RowError(
                f"{row.where}: field 'prompt' is null, and chosen and rejected are no whole conversations, which tell "
                "it too",
                "field 'prompt' is null",
            ) from error
        raise


def _both_well_formed(row: Row) -> bool | None:
    value = row.fields.get("both_well_formed")
    if not isinstance(value, bool | None):
        raise wrong_kind(row.where, "both_well_formed", "a boolean", value)
    return value


def _with_prompt(row: Row) -> PreferencePair:
    where, fields, _ = row
    sides = [_side(fields, where, name) for name in _SIDES]
    if all(isinstance(side, tuple) and side[0]["role"] != "assistant" for side in sides):
        return _of_conversations(row)
    prompt = fields["prompt"]
    if isinstance(prompt, list):
        prompt = prompt_of(read_messages(prompt, where, "prompt"), row)
    [prompt] = text_fields({"prompt": prompt}, where, ("prompt",))
    chosen, rejected = (side if isinstance(side, str) else response_of(side, row, prompt) for side in sides)
    return PreferencePair(prompt, chosen, rejected)


def _side(fields: dict[str, Any], where: str, name: str) -> str | tuple[Message, ...]:
    if isinstance(fields.get(name), list):
        return read_messages(fields[name], where, name)
    return text_fields(fields, where, (name,))[0]


def _of_conversations(row: Row) -> PreferencePair:
    where, fields, _ = row
    chosen, rejected = (_side(fields, where, name) for name in _SIDES)
    if isinstance(chosen, tuple) and isinstance(rejected, tuple):
        return _of_messages(row, chosen, rejected)
    chosen, rejected = text_fields(fields, where, _SIDES)
    try:
        pair = split_transcripts(chosen, rejected, where)
    except DataError as error:
        raise RowError(str(error), NO_TURN) from error
    if pair is None:
        raise _apart(where)
    return pair


def _of_messages(row: Row, chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> PreferencePair:
    for side in (chosen, rejected):
        if side[-1]["role"] != "assistant":
            raise RowError(f"{row.where}: a conversation must end with the assistant's turn", UNUSABLE)
        try:
            conversation(side)
        except DataError as error:
            raise RowError(f"{row.where}: {error}", UNUSABLE) from error
    common = common_turns(chosen, rejected, row)
    if common is None:
        raise _apart(row.where)
    prompt = prompt_of(chosen[:common], row)
    if not is_plain(rejected[:common]):
        prompt_of(rejected[:common], row)  # the same: what is not shown of it is counted
    better, worse = (response_of(side[common:], row, prompt) for side in (chosen, rejected))
    return PreferencePair(prompt, better, worse)


def _apart(where: str) -> RowError:
    return RowError(f"{where}: chosen and rejected have no common prompt: they part before an answer", APART)
