"""What of a demonstration is learnt, and behind which ids."""

from __future__ import annotations

import pytest

from rlhf_core.config import TemplateConfig
from rlhf_core.data import Problem, PromptTemplate
from rlhf_core.data.encoding import encode_demonstrations
from rlhf_core.data.problems import of_the_same_kind, refuse_nothing_to_learn
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer

CHATML = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
TALK = "\n\nSystem: Be brief.\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant:"


def template(**fields: object) -> PromptTemplate:
    return PromptTemplate(tiny_tokenizer(), TemplateConfig(**fields))


def learnt(problem: Problem, made: PromptTemplate) -> list[str]:
    """The runs of tokens that are learnt, as text, after checking what stands before the last one."""
    [(ids, mask)] = encode_demonstrations([problem], made)
    assert len(ids) == len(mask)
    prompt = made.prompt_ids(problem.prompt)
    assert ids[: len(prompt)] == prompt, "the response is learnt behind the ids that it is sampled from"
    assert all(mask[len(prompt) :])
    runs = "".join(chr(token) if said else "\0" for token, said in zip(ids, mask, strict=True)).split("\0")
    return [tiny_tokenizer().decode([ord(token) for token in run]) for run in runs if run]


def test_of_a_problem_with_an_answer_the_answer_in_its_tags_is_learnt() -> None:
    assert learnt(Problem("2+2?", "4"), template(prompt=CHATML)) == ["<answer>4</answer><|im_end|>"]
    assert learnt(Problem("2+2?", "4", demonstration="It is 4."), template()) == ["It is 4.<|im_end|>"]


def test_of_a_conversation_every_turn_of_the_assistants_is_learnt() -> None:
    assert learnt(Problem(TALK, demonstration="4"), template()) == ["Hello<|im_end|>", "4<|im_end|>"]


def test_with_a_template_of_one_place_the_last_response_alone_is_learnt() -> None:
    assert learnt(Problem(TALK, demonstration="4"), template(prompt="{prompt}\n")) == ["4<|im_end|>"]


def test_an_earlier_turn_whose_end_joins_what_follows_is_learnt_up_to_there() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<e>": 0, "A": 1, ":": 2, "y": 3, "U": 4, "x": 5, "yU": 6}  # "yU" joins a turn's end to the next speaker
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[("y", "U")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.decoder = decoders.BPEDecoder()
    chat = "{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }}{{ m.content }}{% endfor %}"
    made = PromptTemplate(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>"),
        TemplateConfig(chat_template=chat + "{% if add_generation_prompt %}A:{% endif %}"),
    )
    prompt = "\n\nHuman: x\n\nAssistant: xy\n\nHuman: x\n\nAssistant:"
    [(ids, mask)] = encode_demonstrations([Problem(prompt, demonstration="y")], made)
    # U : x A : x yU : x A :, then the response y <e>
    assert ids == [4, 2, 5, 1, 2, 5, 6, 2, 5, 1, 2, 3, 0] == [*made.prompt_ids(prompt), 3, 0]
    assert mask == [False] * 5 + [True] + [False] * 5 + [True] * 2


def test_what_cannot_be_learnt_is_named() -> None:
    with pytest.raises(DataError, match=r"demonstration 2 of 2: the prompt 'Why\?' has neither"):
        encode_demonstrations([Problem("2+2?", "4"), Problem("Why?")], template())
    with pytest.raises(DataError, match="dataset/x@1 has no demonstrations to learn") as caught:
        refuse_nothing_to_learn([Problem("Why?")], where="dataset/x@1")
    assert "\n" not in str(caught.value)
    refuse_nothing_to_learn([Problem("Why?"), Problem("2+2?", "4")], where="dataset/x@1")


def test_held_out_problems_are_measured_on_what_is_learnt_of_the_others() -> None:
    bare, told, open_prompt = Problem("a", "1"), Problem("b", "2", demonstration="two"), Problem("c")
    assert of_the_same_kind([bare, told, open_prompt], [Problem("d", "3")]) == [bare]
    assert of_the_same_kind([bare, told, open_prompt], [told]) == [told]
    assert of_the_same_kind([bare, told, open_prompt], [bare, told]) == [bare, told]
