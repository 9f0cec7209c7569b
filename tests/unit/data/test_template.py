"""Prompts and responses as token ids."""

from __future__ import annotations

import pytest

from rlhf_core.config import TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ConfigError
from tests.tiny_llama import tiny_tokenizer

CHATML = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
TRANSCRIPT = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"


def template(tokenizer=None, **fields) -> PromptTemplate:
    return PromptTemplate(tokenizer or tiny_tokenizer(), TemplateConfig(**fields))


def text_of(made: PromptTemplate, prompt: str) -> str:
    return tiny_tokenizer().decode(made.prompt_ids(prompt))


def without_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def test_the_configured_template_is_put_around_the_prompt_with_its_special_tokens() -> None:
    ids = template(prompt=CHATML).prompt_ids("Sort: 2 1")
    tokenizer = tiny_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert tokenizer.decode(ids) == CHATML.format(prompt="Sort: 2 1")
    assert (ids.count(start), ids.count(end)) == (2, 1)


def test_braces_in_a_prompt_are_text() -> None:
    assert text_of(template(prompt=CHATML), "{prompt} {x}") == CHATML.replace("{prompt}", "{prompt} {x}")


def test_without_a_template_the_chat_template_is_used_once() -> None:
    assert text_of(template(), "Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_without_a_chat_template_needs_a_template() -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*template\.prompt.*template\.chat_template") as told:
        template(without_chat_template()).prompt_ids("Hi")
    assert "\n" not in str(told.value)
    assert text_of(template(without_chat_template(), prompt=CHATML), "Hi") == CHATML.format(prompt="Hi")


def test_a_system_turn_of_the_prompt_is_a_system_turn_of_the_chat_template() -> None:
    said = "\n\nSystem: Be brief.\n\nHuman: Hi\n\nAssistant:"
    assert text_of(template(), said) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokens_are_counted_as_they_are_given() -> None:
    made = template(prompt=CHATML)
    prompts = ["Sort: 2 1", TRANSCRIPT, "größer"]
    assert made.count_tokens([made.prompt_text(prompt) for prompt in prompts]) == [
        len(made.prompt_ids(prompt)) for prompt in prompts
    ]
    assert made.count_tokens([]) == []


def test_the_digest_names_template_and_tokenizer() -> None:
    assert template(prompt=CHATML).digest() == template(prompt=CHATML).digest()
    assert len({template(prompt=CHATML).digest(), template(prompt="{prompt}").digest(), template().digest()}) == 3


def test_a_transcript_becomes_turns_of_the_chat_template() -> None:
    assert text_of(template(), TRANSCRIPT) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_transcript_in_a_configured_template() -> None:
    made = template(prompt=CHATML)
    assert text_of(made, "\n\nHuman: Hi\n\nAssistant:") == CHATML.format(prompt="Hi")
    assert text_of(made, TRANSCRIPT) == CHATML.format(prompt="Human: Hi\n\nAssistant: Hello\n\nHuman: Bye")


def test_a_response_ends_with_the_stop_token_and_is_decoded_without_it() -> None:
    made = template(prompt=CHATML)
    ids = made.response_ids(made.answer_text("61 58"))
    assert ids[-1] == tiny_tokenizer().eos_token_id
    assert made.decode_response(ids) == "<answer>61 58</answer>"
    assert made.decode_response(ids[:-1]) == "<answer>61 58</answer>"
    assert made.decode_response([]) == ""


def test_special_tokens_inside_a_response_are_spelt_out() -> None:
    made = template()
    start = tiny_tokenizer().bos_token_id
    assert made.decode_response([*made.response_ids("a")[:-1], start, *made.response_ids("b")]) == "a<|im_start|>b"


def test_stop_tokens_are_the_templates_and_the_tokenizers_each_once() -> None:
    end, text_end = tiny_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert template().stop_ids == (end,)
    assert template(stop=("<|endoftext|>", "<|im_end|>")).stop_ids == (text_end, end)


def test_padding_is_no_stop_token_even_if_the_tokenizer_says_so() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    made = template(tokenizer)
    assert made.pad_id not in made.stop_ids
    everything = template(tokenizer, stop=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    assert everything.pad_id not in everything.stop_ids or everything.pad_id == everything.stop_ids[-1]


def test_the_answer_tag_is_configurable() -> None:
    assert template(answer_tag="result").answer_text("4") == "<result>4</result>"


@pytest.mark.parametrize("text", ["no place", "{prompt} twice {prompt}"])
def test_a_template_without_exactly_one_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"template\.prompt must hold {prompt} once"):
        template(prompt=text)


def test_a_stop_that_is_not_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"template\.stop names '</s>', which is not one token"):
        template(stop=("</s>",))


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"name one in template\.stop"):
        template(tokenizer)
    assert template(tokenizer, stop=("<|im_end|>",)).stop_ids


def test_a_chat_template_and_a_system_turn_of_the_configuration_come_before_the_tokenizers() -> None:
    made = template(
        chat_template="{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}", system_message="S"
    )
    assert text_of(made, "Hi") == "[system] S [user] Hi "
    assert text_of(template(system_message="S"), "Hi").startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user")


def test_stop_ids_and_stop_strings_are_the_configurations_too() -> None:
    end, text_end = tiny_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    made = template(stop_ids=(text_end,), stop_strings=("</answer>",))
    assert (made.stop_ids, made.stop_strings) == ((text_end, end), ("</answer>",))
    with pytest.raises(ConfigError, match="names token 4000, but the tokenizer has 259 tokens"):
        template(stop_ids=(4000,))


def test_a_template_of_two_kinds_or_tags_without_the_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="set either the first or the others"):
        template(prompt="{prompt}", system_message="S")
    with pytest.raises(ValueError, match="must name answer_start and answer_end"):
        template(tags={"think_start": {"text": "<think>"}})
