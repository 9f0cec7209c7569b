"""Which runs are of one task: what their names and their gate go by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import DataConfig, EvaluationConfig
from rlhf_core.judged_task import CHECKOUT, JudgedTask, place_of, task_of, task_of_stored

SORTING: dict[str, Any] = {"task": "number_sorting", "task_parameters": {"max_numbers": 3, "min_numbers": 3}}
FILE: dict[str, Any] = {"problems": "/data/sums.jsonl"}
PAIRS: dict[str, Any] = {"preferences": "/data/pairs.jsonl", "evaluation": "/data/heldout.jsonl"}
ORG: dict[str, Any] = {"problems": {"path": "openai/gsm8k", "subset": "main"}}
VERIFIER, MODEL = "verifier", "reward_model"


def task(data: dict[str, Any], judge: str = VERIFIER) -> JudgedTask:
    return task_of(DataConfig.model_validate(data), EvaluationConfig.model_validate({"judge": judge}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SORTING, SORTING | {"splits": {"sft": 7}, "heldout_fraction": 0.3}),
        (SORTING, SORTING | {"task_parameters": {"min_numbers": 3, "max_numbers": 3}}),
        (SORTING, SORTING | {"demonstrations": "/data/careless.jsonl"}),
        (FILE, {"problems": {"path": "/data/sums.jsonl", "limit": 5}, "too_long": "drop"}),
        (FILE, {"problems": "/data/../data/sums.jsonl"}),
        (FILE, FILE | {"verifier": "exact"}),
        ({"problems": ["/a.jsonl", "/b.jsonl"]}, {"problems": ["/b.jsonl", "/a.jsonl"]}),
        ({"problems": "/data/2026-11-27.jsonl"}, {"problems": "/data/2026-11-28.jsonl"}),
        ({"problems": "s3://b/2026/11/27/"}, {"problems": "s3://b/2026/11/28"}),
        ({"problems": "s3://key:secret@b/x.jsonl"}, {"problems": "s3://other:word@b/x.jsonl"}),
        (ORG, {"problems": ORG["problems"] | {"revision": "abc"}}),
    ],
)
def test_sizes_order_days_keys_and_other_demonstrations_make_no_other_task(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert task(one) == task(other)
    assert task(one).digest == task(other).digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SORTING, SORTING | {"task_parameters": {"max_numbers": 4, "min_numbers": 3}}),
        (SORTING, SORTING | {"task": "chain_sum"}),
        (SORTING, SORTING | {"verifier": "exact"} | {"evaluation": "/data/heldout.jsonl"}),
        (SORTING, FILE),
        (FILE, {"problems": "/data/sorting.jsonl"}),
        (FILE, {"demonstrations": "/data/sums.jsonl"}),
        (FILE, FILE | {"verifier": "gsm8k_reward_fn"}),
        (FILE, {"problems": {"path": "/data/sums.jsonl", "columns": {"answer": "other"}}}),
        ({"problems": "/data/part-1.jsonl"}, {"problems": "/data/part-2.jsonl"}),
        (ORG, {"problems": ORG["problems"] | {"subset": "socratic"}}),
    ],
)
def test_other_problems_or_another_verifier_are_another_task(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert task(one) != task(other)
    assert task(one).digest != task(other).digest


def test_preferences_are_part_of_the_task_where_a_reward_model_judges_that_learnt_them() -> None:
    open_prompts = {"prompts": "/data/prompts.jsonl"}
    other = {"preferences": "/data/other.jsonl"}
    assert task(open_prompts | PAIRS, MODEL) != task(open_prompts | PAIRS | other, MODEL)
    assert task(SORTING | PAIRS) == task(SORTING | PAIRS | other)


def test_a_file_is_one_place_by_its_relative_and_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_of("mine.jsonl") == place_of("./mine.jsonl") == place_of(f"{tmp_path}/mine.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place_of("~/mine.jsonl") == place_of("mine.jsonl")


def test_a_hub_name_is_a_place_of_its_own_unless_a_directory_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_of("openai/gsm8k") == "openai/gsm8k"
    os.makedirs("openai/gsm8k")
    assert place_of("openai/gsm8k").endswith("/openai/gsm8k")
    assert place_of("openai/gsm8k").startswith("/")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x.jsonl", "\0", f"owner/{'n' * 300}", "s3://", "/", "*"])
def test_what_cannot_be_a_place_is_left_to_whoever_reads_it(path: str) -> None:
    assert task({"problems": path}) == task({"problems": path})


def test_a_file_of_the_checkout_is_the_same_wherever_the_checkout_is() -> None:
    assert place_of(f"{CHECKOUT}/flows/presets/data/x.jsonl") == "flows/presets/data/x.jsonl"


@pytest.mark.parametrize(
    ("data", "slug"),
    [
        (SORTING, "number-sorting"),
        (FILE, "sums"),
        (ORG, "gsm8k"),
        ({"problems": "/data/Nights 2026/*.jsonl"}, "nights-2026"),
        ({"problems": "/data/sums/2026-11-28.jsonl.gz"}, "sums"),
        ({"problems": "s3://key:secret@bucket/"}, "bucket"),
        ({"problems": "s3://bucket/x.jsonl?X-Amz-Signature=abc&X-Amz-Credential=def"}, "x"),
        ({"problems": "/数据.jsonl"}, "data"),
        ({"problems": "/a-name-that-is-much-too-long-to-be-shown.jsonl"}, "a-name-that-is-much"),
    ],
)
def test_the_word_for_a_task_is_short_and_tells_no_secret(data: dict[str, Any], slug: str) -> None:
    found = task(data)
    assert found.slug == slug
    assert not any(secret in str(found) + found.origins for secret in ("secret", "key:", "Signature", "Credential"))


def test_what_a_stored_configuration_does_not_tell_is_no_task() -> None:
    assert task_of_stored({}) is None
    assert task_of_stored({"data": {"of": "a later release"}}) is None
    assert task_of_stored({"data": SORTING, "evaluation": None}) is None
    assert task_of_stored({"data": DataConfig.model_validate(SORTING).model_dump(mode="json")}) == task(SORTING)


def test_a_task_that_nobody_judges_names_no_judge_and_keeps_its_digest() -> None:
    found = task({"demonstrations": "/data/sums.jsonl"})
    assert str(found) == "demonstrations of /data/sums.jsonl"
    assert found.digest == "49caeb"
