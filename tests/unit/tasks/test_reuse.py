from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from infra.errors import StoreError
from rlhf_core.config import DataConfig, PipelineConfig
from tasks.context import Context, materialise
from tasks.ppo import plan_ppo
from tasks.results import Parent
from tasks.stages import find_made


def test_what_another_name_made_is_stored_under_this_name_too_once(context: Context) -> None:
    made = context.store.commit("policy", "first", {"x": b"1"}, key="k" * 64, metrics={"m": 1})
    found = find_made(context, "policy", "second", "k" * 64)
    assert found is not None
    assert (found.uri, found.digest, found.metrics) == ("policy/second@1", made.digest, {"m": 1})
    again = find_made(context, "policy", "second", "k" * 64)
    assert again is not None
    assert again.uri == "policy/second@1"
    assert [each.uri for each in context.store.list("policy")] == ["policy/first@1", "policy/second@1"]


def test_what_a_task_was_handed_is_what_it_reads(context: Context) -> None:
    made = context.store.commit("sft", "test", {"x": b"1"})
    directory = materialise(context, Parent(uri=made.uri, digest=made.digest))
    assert (directory / "x").read_bytes() == b"1"
    with pytest.raises(StoreError, match="sft/test@1 holds other files than it is referred to with"):
        materialise(context, Parent(uri=made.uri, digest="0" * 64))


Key = Callable[[PipelineConfig], str]


@pytest.fixture
def ppo_key(context: Context) -> Key:
    actor = context.store.commit("sft", "test", {"x": b"1"})
    dataset = context.store.commit("dataset", "test", {"ppo.jsonl": b""})

    def key(config: PipelineConfig) -> str:
        return str(plan_ppo.fn(config, actor.uri, None, Parent(uri=dataset.uri, digest=dataset.digest)).key)

    return key


def preset(name: str) -> PipelineConfig:
    return PipelineConfig(name=name, data=DataConfig(task="number_sorting"))


def changed(section: str, **values: object) -> PipelineConfig:
    base = preset("test").model_dump()
    base[section] = {**base[section], **values} if isinstance(base[section], dict) else values[section]
    return PipelineConfig.model_validate(base)


@pytest.mark.parametrize(
    "config",
    [
        changed("ppo", lr=2e-5),
        changed("ppo", rollout_dtype="float32"),
        changed("ppo", chunk_size=16),
        changed("ppo", cluster={"trainer_threads": 1}),
        changed("ppo", cluster={"maker_threads": 2}),
        changed("ppo", reward={"verifier": 0.5}),
        changed("template", answer_tag="result"),
        changed("seed", seed=1),
    ],
)
def test_what_changes_ppos_numbers_changes_its_key(ppo_key: Key, config: PipelineConfig) -> None:
    assert ppo_key(config) != ppo_key(preset("test"))


def test_a_reward_model_that_ppo_does_not_ask_is_neither_missed_nor_part_of_its_key(context: Context) -> None:
    actor, dataset = (context.store.commit(kind, "test", {"x": b"1"}) for kind in ("sft", "dataset"))
    scorer = context.store.commit("reward-model", "test", {"x": b"1"})
    judging = changed("evaluation", judge="reward_model")
    data = Parent(uri=dataset.uri, digest=dataset.digest)
    alone, given = (plan_ppo.fn(judging, actor.uri, name, data) for name in (None, scorer.uri))
    assert alone.reward_model is given.reward_model is None
    assert alone.key == given.key
    paid = changed("ppo", reward={"reward_model": 0.5})
    assert plan_ppo.fn(paid, actor.uri, scorer.uri, data).reward_model.uri == scorer.uri


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_reward_model_that_is_not_over_the_policys_base_is_counted_besides(
    is_whole: bool, context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[dict[str, Any]] = []
    caplog.set_level("INFO")
    monkeypatch.setattr("rlhf_core.models.memory.check_memory_for", lambda *_, **given: asked.append(given))
    actor, other, dataset = (context.store.commit("sft", name, {"x": name.encode()}) for name in ("a", "b", "c"))
    note = {} if is_whole else {"base.json": json.dumps({"uri": other.uri, "digest": other.digest}).encode()}
    scorer = context.store.commit("reward-model", "test", {"x": b"1"} | note)
    data = Parent(uri=dataset.uri, digest=dataset.digest)
    paid = changed("ppo", reward={"reward_model": 0.5}, lora={"r": 2})
    for name in (scorer.uri, None):
        plan_ppo.fn(paid if name else changed("ppo", lora={"r": 2}), actor.uri, name, data)
    assert asked == [{"reward_adapters": not is_whole, "bases": 1 if is_whole else 2}]
    what = "a whole model" if is_whole else f"adapters over {other.uri}"
    assert f"the reward model is {what}, the policy is over {actor.uri}: both are held" in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        changed("ppo", cluster={"num_makers": 3}),
        changed("ppo", cluster={"address": "10.0.0.5:6379"}),
        changed("ppo", cluster={"commit_timeout_s": 1.0, "start_timeout_s": 1.0, "object_store_mb": 100}),
        changed("ppo", max_abstained=0.9),
        changed("gate", min_gain=0.1),
        changed("sft", lr=1.0),
        preset("other"),
    ],
)
def test_what_does_not_leaves_the_run_and_its_committed_episodes_found(ppo_key: Key, config: PipelineConfig) -> None:
    assert ppo_key(config) == ppo_key(preset("test"))
