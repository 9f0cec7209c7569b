"""Rows of prompts and demonstrations, in every form that `train_ppo` reads."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import datasets
import pytest

from rlhf_core.coati.script.data import build_loaders
from rlhf_core.data.conversation import Conversation
from rlhf_core.data.loaders import read_dialogues
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer
from tests.unit.data.chat_templates import QWEN3


def _file(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


QUESTION = {"question": "2 + 3?", "answer": "Two and three.\n#### 5"}
MESSAGES = {"messages": [{"from": "human", "content": "4 + 4?"}, {"from": "gpt", "content": "8"}], "gt_answer": 8}


def test_both_forms_of_json_lines_become_messages_with_an_answer(tmp_path: Path) -> None:
    ours, coatis = read_dialogues([_file(tmp_path / "a.jsonl", QUESTION, MESSAGES)])
    assert ours.messages == (
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "Two and three.\n#### 5"},
    )
    assert (ours.answer, coatis.answer) == ("5", "8")
    assert coatis.messages == ({"role": "user", "content": "4 + 4?"}, {"role": "assistant", "content": "8"})


def test_directories_are_read_file_by_file_in_the_order_of_their_names(tmp_path: Path) -> None:
    _file(tmp_path / "b.jsonl", {"question": "second", "answer": "2"})
    _file(tmp_path / "a.jsonl", {"question": "first", "answer": "1"})
    _file(tmp_path / "c" / "c.json", {"question": "third", "answer": "3"})
    (tmp_path / "README.md").write_text("not data")
    assert [row.answer for row in read_dialogues([tmp_path])] == ["1", "2", "3"]


def test_datasets_on_disk_hold_messages_or_token_ids(tmp_path: Path) -> None:
    datasets.Dataset.from_list([MESSAGES]).save_to_disk(tmp_path / "text")
    ids = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "gt_answer": "x"}]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ids)}).save_to_disk(tmp_path / "ids")
    tokens, text = read_dialogues([tmp_path])
    assert text.messages is not None
    assert text.messages[0]["content"] == "4 + 4?"
    assert (tokens.ids, tokens.loss_mask, tokens.answer) == ((5, 6, 7), (False, True, True), "x")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": "2 + 3"}, "row 1 of .* has none of 'messages'"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"from": "narrator", "content": "x"}]}, "a message must have 'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, "a string 'content'"),
        ({"messages": ["hello"]}, "a message must have 'role'"),
        ({"input_ids": []}, "at least one token id"),
        ({"input_ids": [3, -1]}, "row 1 of .* which is 0 or more"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 tokens in 'input_ids', but 1"),
        ({"messages": MESSAGES["messages"], "gt_answer": ["8"]}, "'gt_answer' must be a string, but is a list"),
        ({"question": "2 + 3"}, "lacks 'answer'"),
        ({"question": "2 + 3", "answer": "#### "}, "holds no answer after '####'"),
    ],
)
def test_a_row_of_another_form_is_refused_by_name(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_dialogues([_file(tmp_path / "a.jsonl", row)])


def test_empty_and_damaged_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds neither JSON lines"):
        read_dialogues([tmp_path / "empty"])
    datasets.Dataset.from_list([MESSAGES]).save_to_disk(tmp_path / "cut")
    next((tmp_path / "cut").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(DataError, match="cannot be loaded"):
        read_dialogues([tmp_path / "cut"])
    datasets.DatasetDict({"test": datasets.Dataset.from_list([MESSAGES])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="has the splits test; give the directory of one"):
        read_dialogues([tmp_path / "splits"])


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "2 + 3", "answer": "5", "answer": "6"}')
    with pytest.raises(DataError, match="gives the key 'answer' twice"):
        read_dialogues([tmp_path / "a.jsonl"])


def test_a_run_learns_what_the_template_shows_of_messages_and_names_the_rest(tmp_path: Path) -> None:
    def row(thought: str, call: str) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": call, "arguments": {}}}]
        asked = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Ask.", "weight": 1}
        said = {"role": "assistant", "content": "Done.", "reasoning_content": thought}
        return {"messages": [{"role": "user", "content": "Go"}, asked, {"role": "tool", "content": "ok"}, said]}

    told: list[str] = []
    path = str(_file(tmp_path / "a.jsonl", row("One.", "f"), row("Two.", "g")))
    flags = {"prompt_dataset": [path], "ptx_dataset": [path], "max_length": 999, "max_seq_len": 9, "ptx_coef": 0.1}
    sizes = {"experience_batch_size": 2, "ptx_batch_size": 2, "seed": 0, "reward_functions": None}
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id]
    made = build_loaders(
        Namespace(**flags, **sizes), Conversation(tokenizer, None, QWEN3, ends, "<|im_end|>"), told.append
    )
    [prompts] = list(made.prompts)
    assert len(set(prompts["key"])) == 2, "what is asked differs in the call alone"
    for name in "fg":
        assert any(f'<tool_call>\n{{"name": "{name}"' in text for text in tokenizer.batch_decode(prompts["input_ids"]))
    assert made.demonstrations is not None
    [batch] = list(made.demonstrations)
    learnt = {tokenizer.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)}
    assert learnt == {
        f'<think>\nAsk.\n</think>\n\n<tool_call>\n{{"name": "{call}", "arguments": {{}}}}\n</tool_call><|im_end|>'
        f"<think>\n{thought}\n</think>\n\nDone.<|im_end|>"
        for thought, call in (("One.", "f"), ("Two.", "g"))
    }
    why = "the chat template does not show it"
    assert told == [
        f"--prompt_dataset: left out 'weight' of 2 messages ({why} in a prompt)",
        f"--ptx_dataset: left out 'weight' of 2 messages ({why})",
    ]
