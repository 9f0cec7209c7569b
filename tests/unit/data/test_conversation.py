"""Which tokens of a conversation the assistant said, for coati's templates and tokenizers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config import TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.data.conversation import Conversation, encode_conversation, setup_conversation_template
from rlhf_core.errors import ConfigError, DataError
from tests.tiny_llama import tiny_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
COATIS = (
    "{% for m in messages %}{% if m.role == 'user' %}Human: {{ m.content }}\n"
    "{% elif m.role == 'assistant' %}Assistant: {{ m.content }}<|im_end|>\n{% else %}{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
TAGS = {"answer_start": {"text": "[[", "num_occur": 1}, "answer_end": {"text": "]]", "num_occur": 1}}


def coatis(**changes: object) -> dict[str, object]:
    tokenizer = tiny_tokenizer()
    config = {"chat_template": COATIS, "system_message": "Be kind.", "stop_ids": [tokenizer.eos_token_id],
              "end_of_assistant": "<|im_end|>"}  # fmt: skip
    return config | changes


def said(turns: list[dict[str, str]], template: object) -> list[str]:
    """The runs of tokens that are learnt, as text, after checking that all tokens are the rendered text."""
    ids, mask = encode_conversation(turns, template)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for place, (token, counts) in enumerate(zip(ids, mask, strict=True)):
        if counts and (place == 0 or not mask[place - 1]):
            runs.append([])
        if counts:
            runs[-1].append(token)
    return [tiny_tokenizer().decode(run) for run in runs]


def test_only_what_the_assistant_said_is_learnt_its_end_token_included() -> None:
    tokenizer = tiny_tokenizer()
    assert said(TURNS, tokenizer) == ["Hello<|im_end|>", "4<|im_end|>"]
    ids, mask = encode_conversation(TURNS, tokenizer)
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(ids) == whole
    assert not mask[-1], "the line's end after the end token is the template's"


def test_a_turn_is_learnt_behind_the_ids_that_it_is_sampled_from() -> None:
    template = PromptTemplate(tiny_tokenizer(), TemplateConfig())
    ids, mask = encode_conversation(TURNS[1:3], template)
    prompt = template.prompt_ids("Hi")
    assert ids[: mask.index(True)] == prompt
    assert [token for token, counts in zip(ids, mask, strict=True) if counts] == template.response_ids("Hello")


def test_coatis_template_brings_its_system_turn_end_and_tokens() -> None:
    conversation = setup_conversation_template(tiny_tokenizer(), coatis())
    assert said(TURNS[1:], conversation) == [" Hello<|im_end|>", " 4<|im_end|>"]
    ids, _ = encode_conversation(TURNS[1:3], conversation)
    assert tiny_tokenizer().decode(ids) == "Be kind.\nHuman: Hi\nAssistant: Hello<|im_end|>\n"
    assert conversation.tokenizer.chat_template == COATIS


def test_a_token_across_the_boundary_is_cut_where_generation_starts() -> None:
    """A tokenizer that would join the prompt's last letter and the answer's first."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(":x", normalized=False)])
    conversation = setup_conversation_template(tokenizer, coatis(chat_template=COATIS.replace(" {{ m", "{{ m")))
    ids, mask = encode_conversation([TURNS[1], {"role": "assistant", "content": "xy"}], conversation)
    learnt = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert tokenizer.decode(learnt) == "xy<|im_end|>"
    assert tokenizer.convert_tokens_to_ids(":x") not in ids


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    forgetful = COATIS.replace("Assistant: {{ m.content }}", "Assistant: {{ m.content if loop.last else 'x' }}")
    conversation = setup_conversation_template(tiny_tokenizer(), coatis(chat_template=forgetful))
    assert said(TURNS[1:3], conversation) == [" Hello<|im_end|>"]
    alone = setup_conversation_template(tiny_tokenizer(), coatis(chat_template=forgetful, system_message=None))
    with pytest.raises(DataError, match="writes turn 2 of 4 differently once other turns follow"):
        encode_conversation(TURNS[1:], alone)


def test_a_conversation_without_the_assistant_is_refused() -> None:
    with pytest.raises(DataError, match="of 2 turns has none of the assistant's"):
        encode_conversation(TURNS[:2], tiny_tokenizer())


def test_a_template_that_refuses_the_turns_is_told() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    conversation = Conversation(tiny_tokenizer(), None, strict, [2], "<|im_end|>")
    with pytest.raises(DataError, match="refuses the turns user, assistant: roles must alternate"):
        encode_conversation(TURNS[1:3], conversation)


def test_what_the_configuration_leaves_out_is_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    made = setup_conversation_template(tokenizer, {"response_format_tags": TAGS}, tmp_path / "deep" / "template.json")
    assert (made.chat_template, made.stop_ids) == (tokenizer.chat_template, [tokenizer.eos_token_id])
    assert (made.end_of_assistant, made.system_message) == ("<|im_end|>", None)
    assert made.template().tags == TAGS
    written = json.loads((tmp_path / "deep" / "template.json").read_text())
    assert setup_conversation_template(tiny_tokenizer(), written).response_format_tags == TAGS
    again = setup_conversation_template(tiny_tokenizer(), tmp_path / "deep" / "template.json")
    assert again.chat_template == made.chat_template


def test_turns_are_added_written_and_forgotten_as_in_coati() -> None:
    conversation = setup_conversation_template(tiny_tokenizer(), coatis())
    conversation.append_message("user", "Hi")
    assert conversation.get_prompt(add_generation_prompt=True) == "Be kind.\nHuman: Hi\nAssistant:"
    conversation.append_message("assistant", "Hello")
    assert conversation.get_prompt(length=1) == "Be kind.\nHuman: Hi\n"
    assert conversation.copy().messages == []
    conversation.clear()
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ([], "must be an object with chat_template"),
        ({"chat_templat": "x"}, "has the unknown key 'chat_templat'"),
        ({"stop_ids": ["<|im_end|>"]}, "must be a list of token ids"),
        ({"stop_ids": [100_000]}, "names token 100000, but the tokenizer has 259 tokens"),
        ({"response_format_tags": {"think_start": {"text": "<think>"}}}, "answer_start and answer_end"),
        ({"response_format_tags": {"answer_start": "<answer>"}}, "answer_start and answer_end"),
    ],
)
def test_a_configuration_of_another_form_is_refused(config: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        setup_conversation_template(tiny_tokenizer(), config)


def test_without_any_chat_template_one_is_asked_for(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has a chat_template; write one"):
        setup_conversation_template(tokenizer, None)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json cannot be read"):
        setup_conversation_template(tokenizer, tmp_path / "bad.json")
