"""`train_ppo` in this process: adapters, resuming, and models that do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import reasoning_gym
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.coati.script import models as models_of_script
from rlhf_core.coati.script.flags import build_parser
from rlhf_core.coati.script.models import build_models, save_outputs
from rlhf_core.coati.script.run import Plugin, _trainees
from rlhf_core.config import LoRAConfig
from rlhf_core.data.gym import entry_to_json
from rlhf_core.models.adapters import save_adapters
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import adapters_off, attach_lora
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.train_ppo import main
from tests.tiny_llama import tiny_llama, tiny_tokenizer
from tests.unit.coati.script.brief_llama import brief_llama, write_models
from tests.unit.coati.script.command_lines import as_arguments, right_flags, write_inputs

SMALL = {
    "--plugin": "plain",
    "--num_collect_steps": "1",
    "--num_update_steps": "1",
    "--experience_batch_size": "4",
    "--train_batch_size": "4",
    "--accumulation_steps": "1",
    "--max_seq_len": "16",
    "--lr": "1e-3",
    "--critic_lr": "1e-3",
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_models(write_inputs(tmp_path_factory.mktemp("run")))
    lora = {"r": 4, "linear_lora_dropout": 0.0}
    (directory / "lora.json").write_text(json.dumps(lora))
    return directory


def _flags(inputs: Path, out: Path, **more: str | None) -> list[str]:
    changed = {f"--{name}": value for name, value in more.items()}
    return as_arguments(right_flags(inputs) | SMALL | {"--save_path": str(out)} | changed)


def _neural(inputs: Path, out: Path, **more: str | None) -> list[str]:
    """Return the same run with the reward model in place of the functions."""
    rules = {"--no_neural_reward_model", "--reward_functions", "gsm8k_reward_fn"}
    return [word for word in _flags(inputs, out, **more) if word not in rules]


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def test_adapters_are_merged_into_what_is_stored_and_nothing_is_said_on_the_way(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"lora_config": str(inputs / "lora.json"), "rm_checkpoint_path": str(inputs / "rm_checkpoint")}
    assert main(_neural(inputs, tmp_path / "out", **more)) == 0
    assert capsys.readouterr().err == ""
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out/actor/modeling")
    names = dict(stored.named_parameters())
    assert not any("lora" in name for name in names)
    before = dict(brief_llama().named_parameters())
    moved = {name for name in names if not torch.equal(names[name], before[name])}
    assert moved
    assert all("_proj" in name for name in moved)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out/actor/modeling")) == 259
    Critic.from_pretrained(tmp_path / "out/critic/modeling", torch.float32)


def test_kept_adapters_are_pefts_and_give_the_merged_policy(inputs: Path, tmp_path: Path) -> None:
    more = {"lora_config": str(inputs / "lora.json"), "rm_checkpoint_path": str(inputs / "rm_checkpoint")}
    assert main(_neural(inputs, tmp_path / "kept", keep_lora=None, **more)) == 0
    assert main(_neural(inputs, tmp_path / "merged", **more)) == 0
    kept = PeftModel.from_pretrained(brief_llama(), tmp_path / "kept/actor/modeling").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged/actor/modeling").eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        torch.testing.assert_close(kept(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def sft(inputs: Path) -> Path:
    """Return the directory of an adapter that an earlier stage left."""
    policy = brief_llama()
    policy.name_or_path = str(inputs / "model")
    attach_lora(policy, LoRAConfig(r=2), seed=3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    save_adapters(policy, inputs / "sft")
    return inputs / "sft"


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[7, 8, 9, 10]])).logits
    return logits


def test_an_sft_adapter_is_merged_first_and_is_the_reference(inputs: Path, sft: Path, tmp_path: Path) -> None:
    flags = _flags(inputs, tmp_path / "out", pretrain=str(sft), lora_config=str(inputs / "lora.json"))
    models = build_models(build_parser().parse_args(flags), torch.device("cpu"), print)
    for name, parameter in models.actor.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)  # PPO has moved it
    expected = _logits(PeftModel.from_pretrained(brief_llama(), sft).eval())
    with adapters_off(models.actor):
        torch.testing.assert_close(_logits(models.actor), expected, rtol=1e-5, atol=1e-5)
    assert (expected - _logits(brief_llama())).abs().max() > 1e-2
    assert (expected - _logits(models.actor)).abs().max() > 1e-2


def test_adapters_kept_over_an_sft_adapter_stand_on_its_merged_policy_and_nothing_stays_of_an_earlier_run(
    inputs: Path, sft: Path, tmp_path: Path
) -> None:
    more = {"pretrain": str(sft), "lora_config": str(inputs / "lora.json")}
    args = build_parser().parse_args(_flags(inputs, tmp_path / "out", keep_lora=None, **more))
    models = build_models(args, torch.device("cpu"), print)
    for name, parameter in models.actor.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.01)
    trainees = _trainees(args, models, Plugin("plain", "bf16"), ALONE)
    save_outputs(args, models.tokenizer, trainees, ALONE)
    actor = tmp_path / "out/actor/modeling"
    expected = _logits(models.actor)
    kept = AutoModelForCausalLM.from_pretrained(actor)  # as transformers finds the base by itself
    torch.testing.assert_close(_logits(kept), expected, rtol=1e-5, atol=1e-5)
    args.keep_lora = False
    args.rm_pretrain = str(actor.parent / "base")
    save_outputs(args, models.tokenizer, trainees, ALONE)
    assert Path(args.rm_pretrain).is_dir()  # as it is a model that this run was given
    args.rm_pretrain = None
    save_outputs(args, models.tokenizer, trainees, ALONE)
    assert not list(actor.glob("adapter*"))
    torch.testing.assert_close(_logits(AutoModelForCausalLM.from_pretrained(actor)), expected, rtol=1e-5, atol=1e-5)
    assert [path.name for path in actor.parent.iterdir()] == ["modeling"]


def test_what_is_frozen_is_kept_in_the_arithmetic_of_the_run_and_what_trains_in_float32(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_of_script, "_frozen_dtype", lambda *_: torch.bfloat16)  # as on a GPU
    flags = _neural(inputs, tmp_path / "out", rm_checkpoint_path=str(inputs / "rm_checkpoint"))
    models = build_models(build_parser().parse_args(flags), torch.device("cpu"), print)
    assert models.initial_model is not None
    assert models.reward_model is not None
    assert {models.initial_model.dtype, models.reward_model.trunk.dtype} == {torch.bfloat16}
    assert {models.actor.dtype, models.critic.trunk.dtype, models.reward_model.head.weight.dtype} == {torch.float32}
    whole = RewardModel.from_pretrained(inputs / "rm_checkpoint", torch.float32)
    torch.testing.assert_close(models.critic.trunk.state_dict(), whole.trunk.state_dict(), rtol=0, atol=0)
    assert main(flags) == 0


def test_biases_train_beside_adapters_against_a_reference_of_its_own(inputs: Path, tmp_path: Path) -> None:
    lora = {"r": 2, "linear_lora_dropout": 0.0, "lora_train_bias": "all"}
    (tmp_path / "lora.json").write_text(json.dumps(lora))
    assert main(_flags(inputs, tmp_path / "out", lora_config=str(tmp_path / "lora.json"))) == 0


@pytest.mark.integration
def test_functions_of_the_users_and_of_a_task_judge_where_they_are_allowed(inputs: Path, tmp_path: Path) -> None:
    item = reasoning_gym.create_dataset("number_sorting", size=1, seed=1)[0]
    rows = [{"question": f"{n}: {item['question']}", "answer": "", "entry": entry_to_json(item)} for n in range(4)]
    rows = [row | {"answer": item["answer"]} for row in rows]
    (tmp_path / "entries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {
        "prompt_dataset": str(tmp_path / "entries.jsonl"),
        "reward_functions": "tests.unit.coati.script.rewards:length_of_prompt reasoning_gym:number_sorting",
        "allowed_reward_modules": "tests.unit.coati.script",
        "log_dir": str(tmp_path / "logs"),
        "max_length": "600",
    }
    assert main(_flags(inputs, tmp_path / "out", **more)) == 0
    (metrics,) = (tmp_path / "logs").rglob("metrics.jsonl")
    logged: dict[str, float] = {}
    for line in metrics.read_text().splitlines():
        logged |= json.loads(line)
    (length,) = [value for name, value in logged.items() if "length_of_prompt" in name and "raw/" in name]
    assert length > len(item["question"])
    assert any("reasoning_gym:number_sorting" in name for name in logged)


def test_prompts_without_answers_are_counted_and_none_with_one_is_refused(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "gt_answer": None} for n in range(4)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = _says(_flags(inputs, tmp_path / "out", prompt_dataset=str(data)), capsys)
    assert "gsm8k_reward_fn compares responses with answers, but no row of --prompt_dataset has one" in told
    data.write_text("".join(json.dumps(row | {"gt_answer": "1"}) + "\n" for row in rows[:3]) + json.dumps(rows[3]))
    assert main(_flags(inputs, tmp_path / "out", prompt_dataset=str(data))) == 0
    assert f"for which gsm8k_reward_fn gives 0: 1 of 4, such as row 4 of {data}" in capsys.readouterr().out


def test_a_resumed_run_stores_what_an_unbroken_one_does_and_says_what_it_does_otherwise(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"num_episodes": "2", "save_interval": "1", "rm_checkpoint_path": str(inputs / "rm_checkpoint")}
    assert main(_neural(inputs, tmp_path / "whole", **whole)) == 0
    first = sorted((tmp_path / "whole/trainer").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))[0]
    resumed = {
        "checkpoint_path": str(tmp_path / "whole/actor" / first.name),
        "critic_checkpoint_path": str(tmp_path / "whole/critic" / first.name),
    }
    capsys.readouterr()
    assert main(_neural(inputs, tmp_path / "resumed", **whole, **resumed)) == 0
    assert "other settings" not in capsys.readouterr().out
    for role in ("actor", "critic"):
        expected, found = (_weights(tmp_path / run / role / "modeling") for run in ("whole", "resumed"))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    rows = (inputs / "prompts.jsonl").read_text().replace("1?", "2?")
    (tmp_path / "others.jsonl").write_text(rows)
    other = {"seed": "7", "prompt_dataset": str(tmp_path / "others.jsonl"), "num_episodes": "1"}
    assert main(_neural(inputs, tmp_path / "other", **whole | resumed | other)) == 0
    told = capsys.readouterr().out
    assert "--num_episodes 1 (2), --seed 7 (42), --prompt_dataset (another content)" in told.replace("\n", " ")
    assert "1 episode done already; raise --num_episodes" in told


def test_demonstrations_are_learnt_beside(inputs: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 2?", "answer": str(n + 2)} for n in range(4)]
    (tmp_path / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"ptx_coef": "0.5", "ptx_dataset": str(tmp_path / "ptx.jsonl"), "log_dir": str(tmp_path / "logs")}
    assert main(_flags(inputs, tmp_path / "out", **more)) == 0
    (metrics,) = (tmp_path / "logs").rglob("metrics.jsonl")
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    (loss,) = [line["train/ptx_loss"] for line in logged if "train/ptx_loss" in line]
    model, tokenizer, losses = brief_llama(), tiny_tokenizer(), []
    for row in rows:  # all four are in the first batch, before any step
        prompt = f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([tokenizer(f"{prompt}{row['answer']}<|im_end|>").input_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, -3:-1]  # of the digit and the end
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, -2:]))
    assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=0.02)  # bfloat16


def _says(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(r"train_ppo: [^\n]+\n", told), told
    return told


def test_models_that_do_not_fit_are_one_sentence(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "is not a model that transformers can load" in _says(_flags(inputs, out, pretrain=str(inputs)), capsys)
    neural = _neural(inputs, out)
    told = _says([*neural, "--rm_pretrain", str(inputs / "model")], capsys)
    assert "holds no reward model, as it has no head.safetensors" in told
    other = tiny_llama()
    other.resize_token_embeddings(300)
    RewardModel.from_causal_lm(other).save_pretrained(tmp_path / "other")
    told = _says([*neural, "--rm_checkpoint_path", str(tmp_path / "other")], capsys)
    assert "have different vocabularies: 300 and 259" in told
    assert not list(out.iterdir())


def test_too_few_prompts_and_too_long_ones_are_one_sentence(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "8 prompts (--experience_batch_size) do not fill one batch of 16" in _says(
        _flags(inputs, out, experience_batch_size="16"), capsys
    )
    told = _says(_flags(inputs, out, max_length="20"), capsys)
    assert "all 8 prompts are longer than fits, 4 tokens" in told
    assert "raise --max_length" in told
