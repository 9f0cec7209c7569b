"""`train_ppo` under torchrun: the usage examples of the original script on two ranks, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.models.critic import Critic
from tests.parallel.processes import free_port
from tests.unit.coati.script.brief_llama import write_models
from tests.unit.coati.script.command_lines import TEMPLATE
from tests.unit.coati.script.seed_examples import NEURAL, RULES, as_command

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
    environment = _environment() | {"TMPDIR": str(directory)}  # where torchrun leaves a directory
    return subprocess.run(
        as_command(example), cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parallel
@pytest.mark.integration
def test_the_example_with_a_neural_reward_model_runs_on_two_ranks(inputs: Path) -> None:
    done = _torchrun(inputs, NEURAL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "--mixed_precision fp16 runs as bf16 on a CPU" in lines
    episodes = [line for line in lines if line.startswith("episode ")]
    # rank 0 alone speaks; 2 collecting steps of 16 prompts on each of 2 ranks are 64 samples
    assert [line.partition(",")[0] for line in episodes] == [f"episode {n}/10: 64 samples" for n in range(1, 11)]
    actor = AutoModelForCausalLM.from_pretrained(inputs / "ppo_checkpoint/actor/modeling")
    AutoTokenizer.from_pretrained(inputs / "ppo_checkpoint/actor/modeling")
    Critic.from_pretrained(inputs / "ppo_checkpoint/critic/modeling", torch.float32)
    before = AutoModelForCausalLM.from_pretrained(inputs / "model")
    moved = [not torch.equal(a, b) for a, b in zip(actor.parameters(), before.parameters(), strict=True)]
    assert any(moved)


@pytest.fixture(scope="module")
def zero2_run(inputs: Path) -> subprocess.CompletedProcess[str]:
    """The example with reward functions, which names the plugin zero2."""
    return _torchrun(inputs, RULES)


@pytest.mark.integration
def test_the_example_with_a_reward_function_runs_on_two_ranks(
    inputs: Path, zero2_run: subprocess.CompletedProcess[str]
) -> None:
    assert zero2_run.returncode == 0, zero2_run.stderr
    assert zero2_run.stderr == ""
    assert "episode 1/1: 64 samples" in zero2_run.stdout
    # the original's default for --save_path
    AutoModelForCausalLM.from_pretrained(inputs / "actor_checkpoint_prompts/actor/modeling")
    Critic.from_pretrained(inputs / "actor_checkpoint_prompts/critic/modeling", torch.float32)


@pytest.mark.integration
@pytest.mark.parallel
def test_gemini_goes_on_from_what_zero2_left(inputs: Path, zero2_run: subprocess.CompletedProcess[str]) -> None:
    assert zero2_run.returncode == 0
    before = inputs / "actor_checkpoint_prompts"
    (step,) = [path.name for path in (before / "trainer").iterdir()]
    more = (
        f"--checkpoint_path {before}/actor/{step} --critic_checkpoint_path {before}/critic/{step} --num_episodes 2 "
        "--save_path gemini"
    )
    done = _torchrun(inputs, RULES.replace("--plugin zero2", f"--plugin gemini {more}"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"going on from {step}" in done.stdout
    assert "--plugin gemini (zero2)" in done.stdout
    assert "episode 2/2: 64 samples" in done.stdout
    Critic.from_pretrained(inputs / "gemini/critic/modeling", torch.float32)
    found, start = (AutoModelForCausalLM.from_pretrained(at / "actor/modeling") for at in (inputs / "gemini", before))
    largest = max((a - b).abs().max().item() for a, b in zip(found.parameters(), start.parameters(), strict=True))
    assert 1e-7 < largest < 2 * 9e-6  # two steps, of at most the learning rate


@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.parametrize(
    "parts",
    ["--tp 2", "--pp 2 --grad_checkpoint", "--sp 2 --sp_mode all_to_all", "--tp 2 --enable_sequence_parallelism"],
)
def test_two_ranks_hold_one_model_in_parts(inputs: Path, parts: str) -> None:
    shutil.rmtree(inputs / "parts", ignore_errors=True)
    done = _torchrun(inputs, RULES.replace("--plugin zero2", f"--plugin 3d {parts} --save_path parts"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "episode 1/1: 32 samples" in done.stdout  # both have the same prompts
    (checkpoint,) = (inputs / "parts/trainer").iterdir()
    assert [each.name for each in sorted(checkpoint.glob("rank-*.json"))] == ["rank-0.json"]
    more = (
        f"--checkpoint_path parts/actor/{checkpoint.name} --critic_checkpoint_path parts/critic/{checkpoint.name} "
        "--save_path parts --num_episodes 2"
    )
    done = _torchrun(inputs, RULES.replace("--plugin zero2", f"--plugin 3d {parts} {more}"))
    assert done.returncode == 0, done.stderr
    assert f"going on from {checkpoint.name}" in done.stdout
    assert "episode 2/2: 32 samples" in done.stdout
    Critic.from_pretrained(inputs / "parts/critic/modeling", torch.float32)
    found, start = (
        AutoModelForCausalLM.from_pretrained(at) for at in (inputs / "parts/actor/modeling", inputs / "model")
    )
    assert any(not torch.equal(a, b) for a, b in zip(found.parameters(), start.parameters(), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--wrong x", "error: unrecognized arguments: --wrong x; --help lists the flags"),
        pytest.param(
            "--conversation_template_config nowhere.json",
            "error: nowhere.json cannot be read",
            marks=pytest.mark.parallel,
        ),
        ("--tp 2", "error: --tp 2 would cut one model into parts, which only --plugin 3d does"),
        pytest.param(
            "--plugin 3d --tp 4",
            "a model in tp 4 needs groups of 4, into which 2 processes cannot be cut",
            marks=pytest.mark.parallel,
        ),
        pytest.param(  # found by both ranks, once torch is loaded and they have met
            "--pretrain math_prompts", "{inputs}/math_prompts is not a model", marks=pytest.mark.parallel
        ),
    ],
)
def test_torchruns_report_of_a_mistake_ends_with_our_sentence(inputs: Path, flags: str, complaint: str) -> None:
    done = _torchrun(inputs, f"{RULES.rstrip()} {flags} --save_path mistaken")
    assert done.returncode == 1
    _last_words(done.stderr, f"train_ppo: {complaint.format(inputs=inputs)}")


@pytest.mark.integration
def test_torchrun_starts_one_driver_of_role_groups_at_most(inputs: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words += ["-m", "rlhf_core.detached.train_prompts_on_ray", "--prompt_csv_url", "prompts.csv"]
    environment = _environment() | {"TMPDIR": str(inputs)}
    done = subprocess.run(words, cwd=inputs, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    _last_words(done.stderr, "train_prompts_on_ray: error: torchrun started 2 of this command")


def _last_words(told: str, sentence: str) -> None:
    """The last line but torchrun's border is the sentence, whole; it was said when the mistake was found, too."""
    lines = [line.strip() for line in told.splitlines() if line.strip("= ")]
    assert lines[-1].startswith(sentence), told
    assert lines.count(lines[-1]) == 2, told
    assert lines.index(lines[-1]) < lines.index("Traceback (most recent call last):")


@pytest.mark.parallel
@pytest.mark.integration
def test_a_rank_that_dies_is_named_by_the_one_that_lives(inputs: Path, tmp_path: Path) -> None:
    """As on several machines: on one, torchrun itself ends the others and says which was first."""
    words = as_command(RULES)
    command = [sys.executable, *words[words.index("-m", 2) :]]
    command += ["--num_episodes", "1000", "--num_collect_steps", "1", "--save_path", str(tmp_path / "out")]
    ranks = []
    port = str(free_port())
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd=inputs, env=_environment() | own, **pipes))  # type: ignore[call-overload]
    first, second = ranks
    try:
        assert next(line for line in first.stdout if line.startswith("episode 1/"))
        second.kill()
        _, told = first.communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert re.fullmatch(
        rf"train_ppo: rank 1 of 2 has ended \(process {second.pid} on .*\), and the others cannot go on without it; "
        r"its own log says more\n",
        told,
    ), told
    assert first.returncode == 1
