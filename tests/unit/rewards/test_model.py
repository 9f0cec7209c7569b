"""coati's `RLVRRewardModel`: the raw sum of functions, called as a reward model is."""

from __future__ import annotations

import inspect
import logging
from functools import partial

import pytest
import torch

from rlhf_core.errors import ConfigError
from rlhf_core.rewards import RLVRRewardModel, gsm8k_reward_fn
from rlhf_core.rewards.model import called_values
from tests.tiny_llama import tiny_tokenizer

RIGHT = "<think>6 x 7</think><answer>42</answer>"


def rows(*texts: str) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    tokenizer = tiny_tokenizer()
    prompt = tokenizer("Q:").input_ids
    said = [tokenizer(text).input_ids for text in texts]
    width = max(map(len, said))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([prompt + row + [pad] * (width - len(row)) for row in said])
    mask = torch.tensor([[1] * len(prompt + row) + [0] * (width - len(row)) for row in said])
    return ids, mask, [len(prompt)] * len(said), [len(prompt + row) - 1 for row in said]


@pytest.mark.integration
def test_scores_are_the_raw_sum_of_all_functions_each_as_often_as_given() -> None:
    def counts(input_ids, attention_mask, *, response_start, response_end, gt_answer, bonus, **kwargs):
        del input_ids, attention_mask, gt_answer, kwargs
        return response_end - response_start + 1 + bonus

    model = RLVRRewardModel(
        [gsm8k_reward_fn, counts, lambda *_, **__: 1.5, gsm8k_reward_fn], tokenizer=tiny_tokenizer(), bonus=100
    )
    ids, mask, starts, ends = rows(RIGHT, "no")
    found = model.to("cpu").eval()(ids, mask, response_start=starts, response_end=ends, gt_answer=["42", "42"])
    assert found.tolist() == [10 + len(RIGHT) + 100 + 1.5 + 10, 0 + 2 + 100 + 1.5 + 0]
    assert model.maxima == {"gsm8k_reward_fn": 10.0, "counts": 1.0, "<lambda>#3": 1.0, "gsm8k_reward_fn#4": 10.0}
    model.close()


@pytest.mark.integration
def test_functions_of_one_name_are_kept_apart() -> None:
    def says(value):
        def judge(*_, **__):
            return value

        return judge

    namesake = says(7.0)
    namesake.__name__ = "gsm8k_reward_fn"
    functions = [says(1.0), says(2.0), partial(_weighted, weight=4.0), partial(_weighted, weight=5.0), namesake]
    model = RLVRRewardModel([gsm8k_reward_fn, *functions], tokenizer=tiny_tokenizer())
    ids, mask, starts, ends = rows(RIGHT)
    place = {"response_start": starts, "response_end": ends, "gt_answer": ["42"]}
    called = model.call(ids, mask, **place)
    assert {name: called_values(each).item() for name, each in called.items()} == {
        "gsm8k_reward_fn": 10, "judge": 1, "judge#3": 2, "partial": 4, "partial#5": 5, "gsm8k_reward_fn#6": 7,
    }  # fmt: skip
    assert model(ids, mask, **place).item() == 29
    model.close()


def _weighted(*_, weight, **__):
    return weight


@pytest.mark.integration
def test_a_row_at_which_a_function_fails_has_no_score(caplog: pytest.LogCaptureFixture) -> None:
    def picky(input_ids, attention_mask, *, gt_answer, **kwargs):
        del input_ids, attention_mask, kwargs
        return {"42": 2.0}[gt_answer]

    model = RLVRRewardModel([gsm8k_reward_fn, picky], tokenizer=tiny_tokenizer())
    ids, mask, starts, ends = rows(RIGHT, RIGHT)
    with caplog.at_level(logging.WARNING):
        found = model(ids, mask, response_start=starts, response_end=ends, gt_answer=["42", "#### 42"])
    assert found[0] == 12.0
    assert found[1].isnan()
    called = model.call(ids, mask, response_start=starts, response_end=ends, gt_answer=["42", "#### 42"])
    assert called_values(called["gsm8k_reward_fn"]).tolist() == [10.0, 10.0]
    assert model(ids[:, starts[0] :], gt_answer=["42", "42"]).tolist() == [12.0, 12.0]  # all is response, all counts
    assert "reward function picky: it raised KeyError: '#### 42'; it does not judge row 1" in caplog.text
    model.close()


def test_tags_reach_the_functions_and_others_are_refused() -> None:
    tags = {"answer_start": {"text": "[[", "num_occur": 1}, "answer_end": {"text": "]]", "num_occur": 1}}
    model = RLVRRewardModel([gsm8k_reward_fn], tokenizer=tiny_tokenizer(), tags=tags)
    ids, mask, starts, ends = rows("so [[42]]", RIGHT)
    assert model(ids, mask, starts, ends, ["42", "42"]).tolist() == [10.0, 0.0]
    model.close()
    with pytest.raises(ConfigError, match="answer_start and answer_end"):
        RLVRRewardModel([gsm8k_reward_fn], tokenizer=tiny_tokenizer(), tags={"think": "<think>"})


def test_no_function_or_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one reward function"):
        RLVRRewardModel([])
    with pytest.raises(ConfigError, match="gsm8k_reward_fn reads text; give RLVRRewardModel the model's tokenizer"):
        RLVRRewardModel([gsm8k_reward_fn])


def test_the_signature_is_coatis() -> None:
    assert list(inspect.signature(RLVRRewardModel).parameters) == ["reward_fn_list", "kwargs"]
    assert list(inspect.signature(RLVRRewardModel.forward).parameters)[1:] == [
        "input_ids", "attention_mask", "response_start", "response_end", "gt_answer",
    ]  # fmt: skip
