"""`train_ppo` under torchrun: the usage examples of the original script on two ranks, with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.models.critic import Critic
from tests.unit.script.brief_llama import write_models
from tests.unit.script.command_lines import TEMPLATE
from tests.unit.script.seed_examples import NEURAL, RULES, as_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_models(tmp_path_factory.mktemp("train_ppo"))
    (directory / "template.json").write_text(json.dumps(TEMPLATE))
    for name, row in (
        ("prompts", {"messages": [{"from": "human", "content": "Hi"}]}),
        ("math_prompts", {"question": "2 + 3?", "answer": "Two and three make five.\n#### 5"}),
    ):
        (directory / name).mkdir()
        (directory / name / "part.jsonl").write_text((json.dumps(row) + "\n") * 32)
    return directory


def _torchrun(directory: Path, example: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        as_command(example), cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parallel
@pytest.mark.integration
def test_the_example_with_a_neural_reward_model_runs_on_two_ranks(inputs: Path) -> None:
    done = _torchrun(inputs, NEURAL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "--mixed_precision fp16 runs as bf16 on a CPU" in lines
    assert "--plugin zero2 runs as plain data parallelism over 2 ranks" in done.stdout
    episodes = [line for line in lines if line.startswith("episode ")]
    # rank 0 alone speaks; 2 collecting steps of 16 prompts on each of 2 ranks are 64 samples
    assert [line.partition(",")[0] for line in episodes] == [f"episode {n}/10: 64 samples" for n in range(1, 11)]
    actor = AutoModelForCausalLM.from_pretrained(inputs / "ppo_checkpoint/actor/modeling")
    AutoTokenizer.from_pretrained(inputs / "ppo_checkpoint/actor/modeling")
    Critic.from_pretrained(inputs / "ppo_checkpoint/critic/modeling", torch.float32)
    before = AutoModelForCausalLM.from_pretrained(inputs / "model")
    moved = [not torch.equal(a, b) for a, b in zip(actor.parameters(), before.parameters(), strict=True)]
    assert any(moved)


@pytest.mark.integration
def test_the_example_with_a_reward_function_runs_on_two_ranks(inputs: Path) -> None:
    done = _torchrun(inputs, RULES)
    assert done.returncode == 0, done.stderr
    assert "episode 1/1: 64 samples" in done.stdout
    # the original's default for --save_path
    AutoModelForCausalLM.from_pretrained(inputs / "actor_checkpoint_prompts/actor/modeling")
    Critic.from_pretrained(inputs / "actor_checkpoint_prompts/critic/modeling", torch.float32)
