"""Batches of prompts and demonstrations: who gets which row, and how rows are padded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.data.loaders import (
    DataCollatorForPromptDataset,
    DataCollatorForSupervisedDataset,
    Dialogue,
    Limits,
    PromptDataset,
    StatefulDistributedSampler,
    demonstration_dataset,
    make_loader,
    prompt_dataset,
)
from rlhf_core.errors import DataError

TOKENIZER = SimpleNamespace(pad_token_id=9, eos_token_id=2)


def _dialogue(*contents: str, answer: str | None = None) -> Dialogue:
    roles = ("user", "assistant") * len(contents)
    messages = tuple({"role": role, "content": text} for role, text in zip(roles, contents, strict=False))
    return Dialogue(messages, answer, None, None, "row 1 of f")


def _encode(messages: Sequence[dict[str, str]]) -> list[int]:
    return [len(message["content"]) for message in messages]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_an_epochs_rows_without_overlap(ranks: int) -> None:
    samplers = [StatefulDistributedSampler(range(10), ranks, rank, seed=5) for rank in range(ranks)]
    shares = [list(sampler) for sampler in samplers]
    given = [row for share in shares for row in share]
    assert {len(share) for share in shares} == {10 // ranks} == {len(sampler) for sampler in samplers}
    assert len(set(given)) == len(given)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = StatefulDistributedSampler(range(50), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert list(StatefulDistributedSampler(range(4), 1, 0, shuffle=False)) == [0, 1, 2, 3]


def test_a_start_index_goes_on_where_an_epoch_was_left() -> None:
    sampler = StatefulDistributedSampler(range(20), 2, 1, seed=3)
    whole = list(sampler)
    sampler.set_start_index(4)
    assert list(sampler) == whole[4:]
    assert len(sampler) == 6


def test_prompts_leave_out_the_last_answer_and_what_is_too_long() -> None:
    rows = [_dialogue("abc", "de", "f", answer="7"), _dialogue("abc", "de", "f", "gh"), _dialogue(*"xyzxy")]
    fitted = prompt_dataset(rows, _encode, limits=Limits(3))
    assert fitted.dropped == 1
    assert [fitted.dataset[row]["input_ids"] for row in range(2)] == [[3, 2, 1], [3, 2, 1]]
    assert fitted.dataset[0]["gt_answer"] == "7"
    assert fitted.dataset[0]["key"] == fitted.dataset[1]["key"]
    with pytest.raises(DataError, match="all 3 prompts are longer than fits, 1 token; the shortest has 3"):
        prompt_dataset(rows, _encode, limits=Limits(1))


def test_a_row_that_cannot_be_encoded_is_named() -> None:
    def refuse(messages: Sequence[dict[str, str]]) -> list[int]:
        raise DataError(f"no template for {len(messages)} turns")

    with pytest.raises(DataError, match="row 1 of f: no template for 1 turns"):
        prompt_dataset([_dialogue("abc")], refuse, limits=Limits(8))
    beyond = Dialogue(None, "1", (3, 259), None, "row 2 of f")
    with pytest.raises(DataError, match="row 2 of f: 'input_ids' names token 259, but the tokenizer has 259 tokens"):
        prompt_dataset([beyond], _encode, limits=Limits(8, vocabulary=259))


def test_demonstrations_without_a_token_to_learn_are_refused() -> None:
    def encode(messages: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
        return _encode(messages), [message["role"] == "assistant" for message in messages]

    fitted = demonstration_dataset([_dialogue("abc", "de")], encode, limits=Limits(8))
    assert fitted.dataset[0] == {"input_ids": [3, 2], "loss_mask": [False, True]}
    with pytest.raises(DataError, match="row 1 of f has no token of the assistant's to learn"):
        demonstration_dataset([_dialogue("abc")], encode, limits=Limits(8))


def test_prompts_are_padded_on_the_left() -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3], "gt_answer": "a", "key": "k"},
        {"input_ids": [4], "gt_answer": None, "key": "l"},
    ]
    batch = DataCollatorForPromptDataset(TOKENIZER)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [9, 9, 4]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [False, False, True]]
    assert (batch["gt_answer"], batch["key"]) == (["a", None], ["k", "l"])


def test_demonstrations_are_padded_on_the_right_and_labelled_where_they_count() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]},
        {"input_ids": [4, 5], "loss_mask": [False, True]},
    ]
    batch = DataCollatorForSupervisedDataset(TOKENIZER)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, 5, -100]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False, True, False]]


def test_too_few_rows_for_one_batch_are_refused() -> None:
    rows = PromptDataset([{"input_ids": [1], "gt_answer": None, "key": "k"}] * 3)
    collate = DataCollatorForPromptDataset(TOKENIZER)
    assert len(make_loader(rows, collate, batch_size=3, seed=0, what="prompts")) == 1
    with pytest.raises(DataError, match="3 prompts do not fill one batch of 4; lower it, or give more"):
        make_loader(rows, collate, batch_size=4, seed=0, what="prompts")
