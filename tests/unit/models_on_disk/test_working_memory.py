"""What a stage needs once the data's lengths are known: refused with what would fit, warned of, or let in."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flows.presets import resolve
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.memory import MachineMemory, ModelSize
from rlhf_core.models.shape import NO_LIMIT, PassRows, Shape
from rlhf_core.models.working_memory import TOLERANCE, LongestRow, check_working_memory, working_memory

GB = 10**9
LLAMA_7B = Shape(layers=32, hidden=4096, intermediate=11008, queries=4096, keys=4096, vocabulary=32000, heads=32)
SIZE = ModelSize(6_738_415_616, published_bytes=2, shape=LLAMA_7B)
PROMPTS = LongestRow(prompt=33)
FLOAT32 = {f"{stage}.dtype": "float32" for stage in ("sft", "reward_model", "ppo")} | {"ppo.rollout_dtype": "float32"}


def llama7b(**overrides: Any) -> PipelineConfig:
    return resolve("llama7b", overrides=FLOAT32 | {name.replace("__", "."): each for name, each in overrides.items()})


def test_ppo_on_seven_billion_parameters_by_hand() -> None:
    found = working_memory(llama7b(), "ppo", SIZE, LLAMA_7B, PROMPTS, gpus=0)
    adapters = 32 * 16 * (11 * 4096 + 3 * 11008)  # 40 million
    base = 2 * 6_738_415_616
    # actor and critic: weights, gradients, moments; on their way, and the maker's
    assert found.held == base + 2 * (16 + 4 + 4) * adapters
    # keys and values of a chunk, and SFT's and PPO's adapters joined: more than two rows of the trainer's
    sampled = 16 * (33 + 32) * 2 * 32 * 4096 * 4 + 4 * 2 * adapters
    learnt = 2 * 65 * 32 * (32 * 4096 + 16 * 11008) + 8 * 2 * 32 * 32000
    assert found.passes == max(sampled, learnt) == sampled
    assert found.programs == 2 * 400_000_000 + 1_300_000_000 + 2 * 12 * adapters
    assert 19 * GB < found.held + found.passes + found.programs < 20 * GB


def test_a_stage_that_does_not_fit_is_refused_with_what_would() -> None:
    machine = MachineMemory(24 * GB)
    assert check_working_memory(llama7b(), "ppo", SIZE, PROMPTS, machine=machine) == ""
    large = llama7b(ppo__micro_batch_size=32, ppo__chunk_size=32)
    with pytest.raises(ModelError) as refused:
        check_working_memory(large, "ppo", SIZE, PROMPTS, machine=machine)
    assert "the stage ppo on meta-llama/Llama-2-7b-hf needs about 38.8" in str(refused.value)
    assert "this machine has 24 GB and no GPU" in str(refused.value)
    found = re.search(r"with these overrides it should fit: \{\"ppo\.micro_batch_size\": (\d+)\}$", str(refused.value))
    assert found, refused.value
    mended = llama7b(ppo__micro_batch_size=int(found[1]), ppo__chunk_size=32)
    assert check_working_memory(mended, "ppo", SIZE, PROMPTS, machine=machine) == ""


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_between_the_estimate_and_its_tolerance_it_is_only_named(stage: Any) -> None:
    lengths = LongestRow(33, 14)
    found = working_memory(llama7b(), stage, SIZE, LLAMA_7B, lengths, gpus=0)
    total = found.held + found.passes + found.programs
    assert check_working_memory(llama7b(), stage, SIZE, lengths, machine=MachineMemory(total)) == ""
    named = check_working_memory(llama7b(), stage, SIZE, lengths, machine=MachineMemory(total - 1))
    assert "which may not be enough" in named
    least = MachineMemory(int(total / (1 + TOLERANCE)) - 1)
    with pytest.raises(ModelError):
        check_working_memory(llama7b(), stage, SIZE, lengths, machine=least)


def test_on_one_gpu_of_24_gb_trainer_and_maker_fit_with_one_base() -> None:
    alone = working_memory(llama7b(), "ppo", SIZE, LLAMA_7B, PROMPTS, gpus=0)
    found = working_memory(llama7b(), "ppo", SIZE, LLAMA_7B, PROMPTS, gpus=1)
    assert (found.held, found.passes) == (alone.held + 2 * 750_000_000, alone.passes)
    machine = MachineMemory(32 * GB, (24 * GB,))
    assert check_working_memory(resolve("llama7b"), "ppo", SIZE, PROMPTS, machine=machine) == ""


def test_on_gpus_the_largest_process_must_fit_on_one() -> None:
    found = working_memory(llama7b(), "ppo", SIZE, LLAMA_7B, PROMPTS, gpus=2)
    two = (found.largest, found.largest)
    assert check_working_memory(llama7b(), "ppo", SIZE, PROMPTS, machine=MachineMemory(64 * GB, two)) == ""
    with pytest.raises(ModelError, match="2 GPUs"):
        check_working_memory(llama7b(), "ppo", SIZE, PROMPTS, machine=MachineMemory(64 * GB, (12 * GB, 12 * GB)))


def test_demonstrations_in_packed_rows_are_as_long_as_rows_may_be() -> None:
    row = LongestRow(33, 14)
    packed = llama7b(sft__packing=True, sft__batch_size=16, sft__max_length=256, sft__micro_batch_size=4)
    found = working_memory(packed, "sft", SIZE, LLAMA_7B, row, gpus=0).passes
    assert found == LLAMA_7B.learning_bytes(  # 16 of 47 tokens fill three rows
        PassRows(3, 0, 256), "float32", adapters=True, checkpointing=False, head=True
    )


@pytest.mark.parametrize(("stage", "rows", "most"), [("sft", 8, 2048), ("ppo", 8, 2048), ("reward_model", 16, 4000)])
def test_long_rows_go_through_the_models_in_turn_on_cpus(stage: Any, rows: int, most: int) -> None:
    settings = {f"{stage}__micro_batch_size": 8, "ppo__chunk_size": 1, "ppo__max_prompt_tokens": 1900}
    settings |= {"ppo__max_new_tokens": 100}
    config, row = llama7b(**settings), LongestRow(1900, 0 if stage == "ppo" else 100)
    passes = [working_memory(config, stage, SIZE, LLAMA_7B, row, gpus=gpus).passes for gpus in (0, 1)]
    assert passes == [
        LLAMA_7B.learning_bytes(
            PassRows(rows, 1900, 100, each), "float32", adapters=True, checkpointing=False, head=stage != "reward_model"
        )
        for each in (most, NO_LIMIT)
    ]
    assert PassRows(8, 1900, 100, 2048).learnt == 800
    assert PassRows(8, 0, 1000, 2048).learnt == 2048


def test_half_precision_keeps_a_copy_of_weights_that_are_trained() -> None:
    bf16 = llama7b(sft__lora=None, sft__dtype="bfloat16")
    found = working_memory(bf16, "sft", SIZE, LLAMA_7B, LongestRow(33, 14), gpus=0).passes
    rows = PassRows(4, 33, 14)
    kept = LLAMA_7B.learning_bytes(rows, "bfloat16", adapters=False, checkpointing=False, head=True)
    assert found == kept + 2 * 6_738_415_616


def test_settings_that_exclude_each_other_are_not_proposed() -> None:
    groups = {"ppo.samples_per_prompt": 5, "ppo.advantage_estimator": "grpo", "ppo.prompts_per_episode": 16}
    sizes = {"ppo.chunk_size": 80, "ppo.micro_batch_size": 80, "ppo.train_batch_size": 80}
    config = resolve("llama7b", overrides=FLOAT32 | groups | sizes)
    with pytest.raises(ModelError) as refused:
        check_working_memory(config, "ppo", SIZE, LongestRow(2000), machine=MachineMemory(24 * GB))
    found = re.search(r"with these overrides it should fit: (.*)$", str(refused.value))
    assert found is None or resolve("llama7b", overrides=FLOAT32 | groups | sizes | json.loads(found[1]))


def test_a_preset_for_one_gpu_of_80_gb_is_let_in() -> None:
    qwen = Shape(layers=24, hidden=896, intermediate=4864, queries=896, keys=128, vocabulary=151_936, heads=14)
    size = ModelSize(494_032_768, published_bytes=2, shape=qwen)
    machine = MachineMemory(128 * GB, (80 * GB,))
    assert check_working_memory(resolve("qwen-gsm8k"), "ppo", size, LongestRow(256), machine=machine) == ""


def test_nothing_is_said_of_a_model_whose_shape_is_unknown() -> None:
    assert check_working_memory(llama7b(), "ppo", SIZE._replace(shape=None), PROMPTS, machine=MachineMemory(1)) == ""
