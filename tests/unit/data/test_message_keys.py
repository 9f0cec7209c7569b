"""What messages have besides role and content: shown where the chat template shows it, named where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data import Problem, PromptTemplate, pairs_from_jsonl, pairs_to_jsonl, problems_from_jsonl
from rlhf_core.data.encoding import encode_demonstrations, encode_pairs
from rlhf_core.data.loaders import read_dialogues
from rlhf_core.data.preparing import TokenMeter, prepare, report_to_markdown
from rlhf_core.data.problems import problem_key, problems_to_jsonl
from rlhf_core.data.reading import NotShown
from rlhf_core.data.transcripts import transcript, turns
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer
from tests.unit.data.chat_templates import ANSWERS_ONLY, EVERY_THOUGHT, QWEN3, SMOLLM2, template
from tests.unit.data.read_sets import config
from tests.unit.data.reading_files import read, refusal, write

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"y": 2, "x": 40}}}
WRITTEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"y": 2, "x": 40}}\n</tool_call>'
UNSHOWN_IN_RESPONSE = "the chat template does not show it in a response"
UNSHOWN_IN_PROMPT = "the chat template does not show it in a prompt"


def user(content: str = "Hi", **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def assistant(content: str | None = "Hello", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def tool(content: str = "42", **keys: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **keys}


def decoded(ids: Any) -> str:
    return str(tiny_tokenizer().decode(list(ids)))


def written(messages: list[dict[str, Any]], chat_template: str, *, for_answer: bool = False) -> str:
    """What transformers makes of the messages as they stand in the file."""
    text = tiny_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=for_answer, chat_template=chat_template
    )
    return str(text)


def test_a_pair_that_differs_in_thoughts_alone_is_learnt_as_two_responses(tmp_path: Path) -> None:
    chosen, rejected = (assistant(reasoning_content=thought) for thought in ("Be kind.", "Whatever."))
    path = write(tmp_path / "p.jsonl", {"prompt": [user()], "chosen": [chosen], "rejected": [rejected]})
    made = template(QWEN3)
    found = read(path, "preferences", template=made)
    [pair] = found.rows
    assert (pair.prompt, found.not_shown, found.rejected) == ("Hi", (), ())
    assert pair.chosen == "<think>\nBe kind.\n</think>\n\nHello"
    assert pair.rejected == "<think>\nWhatever.\n</think>\n\nHello"
    [encoded] = encode_pairs([pair], made)
    for ids, message in ((encoded.chosen, chosen), (encoded.rejected, rejected)):
        assert decoded(ids) + "\n" == written([user(), message], QWEN3)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (template(SMOLLM2), UNSHOWN_IN_RESPONSE),
        (template(prompt="{prompt}\n"), "template.prompt shows the contents of messages alone"),
    ],
)
@pytest.mark.parametrize("prompt", [{}, {"prompt": "Hi"}])
def test_where_the_template_does_not_show_thoughts_they_are_left_out_and_named(
    tmp_path: Path, made: PromptTemplate, why: str, prompt: dict[str, str]
) -> None:
    alike = {**prompt, "chosen": [user(), assistant(thinking="A")], "rejected": [user(), assistant(thinking="B")]}
    other = {
        **prompt,
        "chosen": [user(), assistant("Yes", thinking="A", tool_calls=[])],
        "rejected": [user(), assistant()],
    }
    path = write(tmp_path / "p.jsonl", alike, other)
    found = read(path, "preferences", template=made)
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in found.rows] == [("Hi", "Yes", "Hello")]
    assert [row.reason for row in found.rejected] == [
        "chosen differs from rejected only in what the model is not shown"
    ]
    assert "differs from the rejected one only in thinking, which the model is not shown" in found.rejected[0].detail
    assert found.not_shown == (NotShown("thinking", 3, why),)


def test_what_is_said_about_a_message_makes_no_two_pairs_of_one(tmp_path: Path) -> None:
    def row(number: int) -> dict[str, Any]:
        return {
            "chosen": [user(id=number), assistant("Hey", weight=1), user("Bye", id=-number), assistant("A", id=number)],
            "rejected": [user(id=9), assistant("Hey"), user("Bye"), assistant("B", train=False, loss=0.5)],
        }

    found = read(write(tmp_path / "p.jsonl", row(1), row(2)), "preferences", template=template(QWEN3))
    [pair] = found.rows
    assert (found.duplicates, found.rejected) == (1, ())
    assert pair == read(write(tmp_path / "q.jsonl", {
        "chosen": [user(), assistant("Hey"), user("Bye"), assistant("A")],
        "rejected": [user(), assistant("Hey"), user("Bye"), assistant("B")],
    }), "preferences").rows[0]  # fmt: skip
    assert {each.key for each in found.not_shown} == {"id", "weight", "train", "loss"}


def test_thoughts_of_earlier_turns_that_the_template_drops_do_not_part_a_pair(tmp_path: Path) -> None:
    sides = {
        name: [user(), assistant(reasoning_content=name), user("Bye"), assistant(name, reasoning_content="R")]
        for name in ("chosen", "rejected")
    }
    made = template(QWEN3)
    found = read(write(tmp_path / "p.jsonl", sides), "preferences", template=made)
    [pair] = found.rows
    assert turns(pair.prompt) == [user(), assistant(), user("Bye")]
    assert pair.chosen == "<think>\nR\n</think>\n\nchosen"
    assert found.not_shown == (NotShown("reasoning_content", 2, UNSHOWN_IN_PROMPT),)  # one of each side
    shown = read(write(tmp_path / "p.jsonl", {
        name: [user(), assistant(thinking=name), user("Bye"), assistant(name)] for name in ("chosen", "rejected")
    }), "preferences", template=template(EVERY_THOUGHT))  # fmt: skip
    [early] = shown.rows
    assert (early.prompt, early.chosen) == ("Hi", "(chosen) Hello\n\nHuman: Bye\n\nAssistant: chosen")


def test_calls_of_tools_and_their_results_are_shown_in_the_prompt_and_learnt_as_a_response(tmp_path: Path) -> None:
    asked = [user("40 + 2?"), assistant(None, tool_calls=[CALL]), tool(tool_call_id="call_1")]
    path = write(tmp_path / "d.jsonl", {"messages": [*asked, assistant("It is 42.")]}, {"messages": asked[:2]})
    made = template(QWEN3)
    found = read(path, "demonstrations", template=made)
    answer, call = found.rows
    plain = [{**message, "content": message["content"] or ""} for message in asked]
    assert made.prompt_text(answer.prompt) == written(plain, QWEN3, for_answer=True)
    assert WRITTEN_CALL in made.prompt_text(answer.prompt)
    assert "<tool_response>\n42\n</tool_response>" in made.prompt_text(answer.prompt)
    assert found.not_shown == (NotShown("tool_call_id", 1, UNSHOWN_IN_PROMPT),)
    assert (call.prompt, call.demonstration) == ("40 + 2?", f"<think>\n\n</think>\n\n{WRITTEN_CALL}")
    first, second = encode_demonstrations(found.rows, made)
    assert decoded(first.ids) == made.prompt_text(answer.prompt) + "It is 42.<|im_end|>"
    assert decoded(second.ids) + "\n" == written(plain[:2], QWEN3)
    learnt = [token for token, counts in zip(second.ids, second.loss_mask, strict=True) if counts]
    assert decoded(learnt) == call.demonstration + "<|im_end|>"
    for stored in (problems_from_jsonl(problems_to_jsonl(found.rows)), read(path, "prompts", template=made).rows):
        assert stored[0].prompt == answer.prompt


def test_what_sft_learns_of_earlier_turns_is_what_the_template_writes_of_them() -> None:
    made = template(EVERY_THOUGHT, stop=("<|im_end|>",))
    prompt = transcript([user(), assistant(thinking="T"), user("Bye")])
    [(ids, mask)] = encode_demonstrations([Problem(prompt, demonstration="A")], made)
    learnt = decoded([token for token, counts in zip(ids, mask, strict=True) if counts])
    assert learnt == "(T) Hello\nA<|im_end|>"


def test_a_key_may_be_shown_of_one_turn_and_not_of_another() -> None:
    old, new = assistant(reasoning_content="Old."), assistant("", reasoning_content="New.", tool_calls=[CALL])
    asked = [user(), old, user("40 + 2?"), new, tool()]
    made = template(QWEN3)
    assert made.shown(asked) == [user(), assistant(), user("40 + 2?"), new, tool()]
    assert made.prompt_text(transcript(made.shown(asked))) == written(asked, QWEN3, for_answer=True)


def test_a_key_that_says_what_another_says_is_one_too_many() -> None:
    both = (
        "{% for m in messages %}{{ m.a or m.b }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert template(both).shown([user(a="x", b="x", c="x")]) == [user(b="x")]


def test_a_template_whose_turns_end_in_text_ends_a_response_before_it() -> None:
    made = template(EVERY_THOUGHT)
    assert made.said([user()], assistant(thinking="T")) == ("(T) Hello", ("thinking",))
    other = "{% for m in messages %}{{ m.content }}{{ m.tool }}{{ '<|endoftext|>' if m.tool else '.' }}\n{% endfor %}"
    assert template(other, stop=("<|endoftext|>",)).said([user()], assistant(tool="T")) == ("HelloT", ("tool",))


def test_further_turns_of_a_response_show_the_assistants_keys(tmp_path: Path) -> None:
    chosen = [assistant("A", thinking="1"), user("x", name="Ann"), assistant("B", thinking="2")]
    row = {"prompt": "Hi", "chosen": chosen, "rejected": "No"}
    numbered = template(EVERY_THOUGHT.replace("({{ m.thinking }})", "({{ m.thinking }} in turn {{ loop.index }})"))
    found = read(write(tmp_path / "p.jsonl", row), "preferences", template=numbered)
    assert found.rows[0].chosen == "(1 in turn 2) A\n\nHuman: x\n\nAssistant: (2 in turn 4) B"
    why = "in a response of several turns, only the assistant's turns show keys"
    assert found.not_shown == (NotShown("name", 1, why),)
    assert str(found.not_shown[0]) == f"'name' of 1 message ({why})"


@pytest.mark.parametrize(
    ("made", "row", "sentence"),
    [
        (template(QWEN3), {"prompt": "Hi", "chosen": [assistant(), tool(), assistant()], "rejected": "B"},
         "let the prompt end with the tool's turn"),
        (template(ANSWERS_ONLY), {"prompt": [user(), assistant(), tool()], "chosen": "A", "rejected": "B"},
         "does not write what a tool says"),
        (template(prompt="{prompt}"), {"prompt": [user(), assistant(), tool()], "chosen": "A", "rejected": "B"},
         "has no turn for a tool"),
        (template(SMOLLM2), {"prompt": "Hi", "chosen": [assistant("", tool_calls=[CALL])], "rejected": "B"},
         "says nothing but tool_calls, which the model is not shown"),
        (template("{{ raise_exception('no tools') if messages[-1].tools else '' }}"),
         {"prompt": "Hi", "chosen": [assistant(tools=1)], "rejected": "B"}, "the chat template refuses"),
        (template(QWEN3), {"prompt": "Hi", "chosen": [assistant(reasoning_content="a\n\nHuman: b")], "rejected": "B"},
         "holds the speaker's mark"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_honestly_is_refused_with_its_row(
    tmp_path: Path, made: PromptTemplate, row: dict[str, Any], sentence: str
) -> None:
    message = refusal(write(tmp_path / "p.jsonl", row), "preferences", template=made)
    assert message.startswith("row 1 of ")
    assert sentence in message


@pytest.mark.parametrize(
    "messages",
    [
        [user(name="Ann")],
        [{"role": "system", "content": "Be brief.", "id": 1}, user()],
        [user(), assistant("", tool_calls=[CALL]), tool(name="add"), tool("\n7", tool_call_id="x"), user("]")],
        [user('[keys {"name": "Eve"}] Hi'), assistant(thinking='x"]} [keys {}]\n\nHuman: no\n\nAssistant:'), user()],
        [user(), assistant('[keys {"role": "tool"}]'), user("[keys")],
        [user(), assistant(a=None, b=[1.5, True, {"ü": "ß"}], c=""), user("Bye")],
    ],
)
def test_a_transcript_has_the_keys_of_its_turns_and_no_content_forges_them(messages: list[dict[str, Any]]) -> None:
    told = turns(transcript(messages))
    assert told == [{**message, "content": message["content"].strip()} for message in messages]


@pytest.mark.parametrize(
    "text", ['[keys {"role": "system"}] Hi', '[keys {"content": "x"}] Hi', "[keys [1]] Hi", "[keys {"]
)
def test_what_is_no_keys_behind_a_speakers_mark_is_text(text: str) -> None:
    assert turns(f"\n\nHuman:{text}\n\nAssistant:") == [user(text)]


def test_prompts_that_differ_in_keys_are_different_problems() -> None:
    keys = {problem_key(transcript([user(**key)])) for key in ({}, {"name": "Ann"}, {"name": "Bob"})}
    assert len(keys) == 3
    assert problem_key("\n\nHuman: Hi\n\nAssistant:") == problem_key("hi")


def test_a_null_is_no_key_and_other_names_of_role_and_content_are_none(tmp_path: Path) -> None:
    row = {"messages": [{"from": "human", "role": None, "value": "Hi", "content": None, "name": None}, assistant()]}
    found = read(write(tmp_path / "d.jsonl", row), "demonstrations")
    assert found.rows == (Problem("Hi"),)
    assert found.rows[0].demonstration == "Hello"
    assert found.not_shown == ()


def test_texts_in_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "One", "image_url": None}, {"type": "text", "text": "two"}]
    found = read(
        write(tmp_path / "d.jsonl", {"messages": [{**user(), "content": parts}, assistant()]}), "demonstrations"
    )
    assert found.rows[0].prompt == "One\ntwo"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "narrator", "content": 3}, "message 2 of 'messages' has the role 'narrator' and has a content that"),
        ({"content": "x"}, "message 2 of 'messages' has no role"),
        ({"role": "user"}, "has no content"),
        ({"role": "user", "content": None, "thinking": "x"}, "has a content that is null"),
        ("hello", "message 2 of 'messages' is a string"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "the part 'image_url', but only"),
        ({"role": "user", "content": ["x"]}, "the part 'x', but only parts of type 'text'"),
    ],
)  # fmt: skip
def test_all_that_is_wrong_with_a_message_is_told(tmp_path: Path, message: Any, sentence: str) -> None:
    told = refusal(write(tmp_path / "d.jsonl", {"messages": [user(), message]}), "demonstrations")
    assert "a message must have 'role'" in told
    assert sentence in told


def test_without_a_template_keys_are_kept_and_it_is_told_that_nobody_knows(tmp_path: Path) -> None:
    row = {"chosen": [user(), assistant(thinking="A")], "rejected": [user(), assistant(thinking="B")]}
    found = read(write(tmp_path / "p.jsonl", row), "preferences")
    [pair] = found.rows
    assert (pair.prompt, pair.chosen) == ("Hi", '[keys {"thinking": "A"}] Hello')
    [told] = found.not_shown
    assert str(told).startswith("'thinking' of 2 messages (whether the model is shown it is not known")


def test_what_was_stored_with_a_chat_template_can_be_put_by_a_plain_one() -> None:
    prompt = transcript([user(name="Ann"), assistant(thinking="T"), user("Bye")])
    assert template(prompt="<{prompt}>").prompt_text(prompt) == "<Human: Hi\n\nAssistant: Hello\n\nHuman: Bye>"
    with pytest.raises(DataError, match="has no turn for a tool"):
        template(prompt="{prompt}").prompt_text(transcript([user(), assistant(), tool()]))


def test_the_report_names_what_is_not_shown_and_is_as_it_was_without(tmp_path: Path) -> None:
    made = template(SMOLLM2)

    def facts(**keys: Any) -> tuple[dict[str, Any], str]:
        rows = [{"messages": [user(f"Say {n}."), assistant(f"I say {n}.", **keys)]} for n in range(40)]
        sets = {"demonstrations": read(write(tmp_path / "d.jsonl", *rows), "demonstrations", template=made)}
        report = prepare(config({"demonstrations": "d"}), sets, meter=TokenMeter(made)).report
        return json.loads(json.dumps(report.as_dict())), report_to_markdown(report)

    told, page = facts(thinking="Hm.")
    plain, plain_page = facts()
    assert told["sets"][0].pop("not_shown") == [{"key": "thinking", "messages": 40, "why": UNSHOWN_IN_RESPONSE}]
    assert told == plain
    line = "Keys of messages in `demonstrations` that are left out, because the model is not shown them:"
    assert f"{line}\n\n* `thinking`: 40; {UNSHOWN_IN_RESPONSE}\n" in page
    assert line not in plain_page


def test_stored_pairs_with_keys_come_back_as_they_were(tmp_path: Path) -> None:
    row = {"prompt": [user(name="Ann")], "chosen": [assistant("A")], "rejected": [assistant("B")]}
    made = template(EVERY_THOUGHT)
    pairs = list(read(write(tmp_path / "p.jsonl", row), "preferences", template=made).rows)
    assert made.prompt_text(pairs[0].prompt) == "user (Ann): Hi\nassistant: "
    stored = pairs_to_jsonl(pairs)
    assert pairs_from_jsonl(stored) == pairs
    (tmp_path / "own.jsonl").write_bytes(stored)
    assert list(read(tmp_path / "own.jsonl", "preferences", template=made).rows) == pairs


def test_a_response_whose_beginning_the_template_hides_is_its_content() -> None:
    hides = (
        "{% for m in messages %}{{ m.role }}{{ m.thinking }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}?{% endif %}"
    )
    assert template(hides).said([user()], assistant(thinking="T")) == ("Hello", ())


def test_dialogues_keep_the_keys_of_their_messages(tmp_path: Path) -> None:
    row = {"messages": [user(name="Ann"), assistant(tool_calls=[CALL], content=None), tool(tool_call_id="call_1")]}
    [dialogue] = read_dialogues([write(tmp_path / "a.jsonl", row)])
    assert dialogue.messages == (
        user(name="Ann"),
        assistant("", tool_calls=[CALL]),
        tool(tool_call_id="call_1"),
    )


def test_a_call_from_parquet_has_the_arguments_that_it_had(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    def row(**arguments: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"messages": [user(str(arguments)), assistant("", tool_calls=calls)]}

    rows, made = [row(x=1, y=2), row(city="Rome")], template(QWEN3)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    found = read(str(tmp_path / "p.parquet"), "demonstrations", template=made).rows
    assert found == read(write(tmp_path / "p.jsonl", *rows), "demonstrations", template=made).rows
    assert '"arguments": {"city": "Rome"}' in found[1].demonstration


def test_whatever_is_not_shown_is_named_wherever_it_stands(tmp_path: Path) -> None:
    rows = [
        {"chosen": [user(secret="s"), assistant("A")], "rejected": [user(), assistant("B")]},
        {"chosen": [user(), assistant("C")], "rejected": [user(secret="s"), assistant("D")]},
        {"chosen": [user(), assistant("E", value="twice")], "rejected": [user(), assistant("F")]},
    ]
    found = read(write(tmp_path / "p.jsonl", *rows), "preferences", template=template(SMOLLM2))
    assert {each.key: each.messages for each in found.not_shown} == {"secret": 2, "value": 1}


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ([assistant(thinking="1"), user(), assistant()], [assistant(thinking="2"), user(), assistant()], "differs"),
        ([assistant("A", tool_calls=[])], [assistant("A")], "equals"),
    ],
)  # fmt: skip
def test_pairs_that_are_alike_are_told_from_those_that_are_shown_alike(
    tmp_path: Path, chosen: list[dict[str, Any]], rejected: list[dict[str, Any]], reason: str
) -> None:
    rows = [
        {"prompt": "Hi", "chosen": chosen, "rejected": rejected},
        {"prompt": "Hi", "chosen": "yes", "rejected": "no"},
    ]
    found = read(write(tmp_path / "p.jsonl", *rows), "preferences", template=template(SMOLLM2))
    assert [each.reason.split()[1] for each in found.rejected] == [reason]


def test_a_key_nested_too_deeply_for_a_template_is_a_bad_row(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(600):
        deep = {"a": deep}
    rows = [{"messages": [user(), assistant(tool_calls=[deep])]}, {"messages": [user(), assistant()]}]
    found = read(write(tmp_path / "d.jsonl", *rows), "demonstrations", template=template(QWEN3), bad_rows="drop")
    assert len(found.rows) == 1


def test_a_stop_token_that_a_response_mentions_does_not_end_it() -> None:
    said = template(QWEN3).said([user()], assistant("say <|im_end|> and more", reasoning_content="T"))
    assert said.text.endswith("say <|im_end|> and more")
