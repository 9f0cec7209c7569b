"""The flags of `train_ppo`: coati's names and defaults, and every mistake in one sentence before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rlhf_core.coati.script.checks import check_arguments, read_json, read_lora
from rlhf_core.coati.script.flags import build_parser
from rlhf_core.data.conversation import read_template
from rlhf_core.data.loaders import read_dialogues
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.math_answers import gsm8k_score
from rlhf_core.train_ppo import main
from tests.unit.coati.script.command_lines import as_arguments, right_flags, write_inputs

# name: default, as the original script has them
DEFAULTS: dict[str, Any] = {
    "pretrain": None,
    "rm_pretrain": None,
    "tokenizer_dir": None,
    "prompt_dataset": [],
    "ptx_dataset": [],
    "conversation_template_config": None,
    "plugin": None,  # the original's is gemini; ours, what the machine can do
    "no_neural_reward_model": False,
    "reward_functions": None,
    "num_episodes": 1,
    "num_collect_steps": 2,
    "num_update_steps": 5,
    "train_batch_size": 16,
    "experience_batch_size": 16,
    "ptx_batch_size": 4,
    "lr": 9e-6,
    "critic_lr": 9e-6,
    "kl_coef": 0.1,
    "ptx_coef": 0.0,
    "max_length": 2048,
    "max_seq_len": 256,
    "checkpoint_path": None,
    "critic_checkpoint_path": None,
    "rm_checkpoint_path": None,
    "lora_config": None,
    "tp": 1,
    "pp": 1,
    "sp": 1,
    "sp_mode": "split_gather",
    "enable_sequence_parallelism": False,
    "zero_stage": 0,
    "zero_cpu_offload": False,
    "grad_clip": 1.0,
    "weight_decay": 0.1,
    "warmup_steps": None,
    "mixed_precision": "fp16",
    "accumulation_steps": 8,
    "disable_loss_mask": False,
    "save_path": "actor_checkpoint_prompts",
    "save_interval": 1000,
    "log_dir": None,
    "use_wandb": False,
    "grad_checkpoint": False,
    "use_flash_attn": False,
}
OURS: dict[str, Any] = {"seed": 42, "keep_lora": False, "critic_init": None, "allowed_reward_modules": []}


def test_flags_and_defaults_but_the_plugins_are_those_of_the_original_script_and_four_of_ours() -> None:
    assert vars(build_parser().parse_args([])) == DEFAULTS | OURS


def test_every_flag_has_a_help_text() -> None:
    bare = [action.dest for action in build_parser()._actions if not (action.help and len(action.help) > 10)]
    assert bare == []


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom rlhf_core.train_ppo import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'pydantic'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--no_neural_reward_model" in done.stdout


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def test_a_right_command_line_passes(inputs: Path) -> None:
    check_arguments(build_parser().parse_args(as_arguments(right_flags(inputs))))


RULES = ["--no_neural_reward_model", "--reward_functions"]
MISTAKES: list[tuple[dict[str, str | None], list[str], str]] = [
    ({}, ["--pretrain"], "--pretrain is required"),
    ({}, ["--prompt_dataset"], "--prompt_dataset is required"),
    ({}, ["--conversation_template_config"], "--conversation_template_config is required"),
    ({}, ["--reward_functions"], "--no_neural_reward_model needs --reward_functions"),
    ({}, ["--no_neural_reward_model"], "a reward model is required"),
    ({"--rm_pretrain": "m"}, ["--no_neural_reward_model"], "--reward_functions are used with"),
    ({"--rm_checkpoint_path": "m"}, [], "which --no_neural_reward_model leaves out"),
    ({"--critic_init": "reward_model"}, [], "--critic_init reward_model needs a reward model"),
    ({"--reward_functions": "gsm8k"}, [], "there is no reward function 'gsm8k'; known are gsm8k_reward_fn"),
    ({"--reward_functions": "os:getcwd"}, [], "add os to --allowed_reward_modules if you trust it"),
    ({"--rm_checkpoint_path": "nowhere"}, RULES, "--rm_checkpoint_path nowhere is not a directory"),
    ({"--tokenizer_dir": "nowhere"}, [], "--tokenizer_dir nowhere is not a directory"),
    ({"--save_path": "/proc/version/out"}, [], "--save_path is /proc/version/out, where nothing can be written (Not a"),
    ({"--log_dir": "/proc/version"}, [], "--log_dir is /proc/version, where nothing can be written (File exists)"),
    ({"--seed": "-1"}, [], "must be from 0 to 9223372036854775807, not -1"),
    (
        {"--tp": "2"},
        [],
        "--tp 2 would cut one model into parts, which only --plugin 3d does; set that, or leave it out",
    ),
    ({"--pp": "2", "--sp": "2", "--sp_mode": "all_to_all"}, [], "--pp 2 and --sp 2 would cut one model into parts"),
    ({"--sp": "2", "--plugin": "3d"}, [], "sp is 2, but split_gather cuts rows over the 1 that have the parts of"),
    ({"--sp": "2", "--sp_mode": "ring", "--plugin": "3d"}, [], "sp_mode ring is not supported; take all_to_all or"),
    (
        {"--enable_sequence_parallelism": None, "--plugin": "3d"},
        [],
        "--enable_sequence_parallelism with --sp_mode split_gather needs --tp above 1; set it",
    ),
    ({"--lora_config": "lora.json", "--plugin": "gemini"}, [], "--lora_config does not go with --plugin gemini"),
    ({"--plugin": "gemini_auto"}, [], "does not accumulate gradients, but --accumulation_steps is 8"),
    ({"--ptx_coef": "0.1"}, [], "--ptx_coef 0.1 needs demonstrations"),
    ({"--ptx_coef": "1.5"}, [], "below 1, not 1.5"),
    ({"--max_seq_len": "2048"}, [], "leaves no room for a prompt"),
    ({"--use_wandb": None}, [], "--use_wandb needs --log_dir"),
    ({"--keep_lora": None}, [], "--keep_lora needs --lora_config"),
    ({"--checkpoint_path": "epoch-0_step-1"}, [], "go together"),
    ({"--prompt_dataset": "nowhere.jsonl"}, [], "data nowhere.jsonl does not exist"),
    ({"--conversation_template_config": "no.json"}, [], "no.json cannot be read: data file no.json does not exist"),
    ({"--num_episodes": "0"}, [], "must be at least 1, not 0"),
    ({"--lr": "fast"}, [], "expected a number, got 'fast'"),
    ({"--plugin": "zero3"}, [], "invalid choice: 'zero3'"),
    ({"--sed": "3"}, [], "unrecognized arguments: --sed 3"),
]


@pytest.mark.parametrize(("more", "less", "sentence"), MISTAKES, ids=[sentence for *_, sentence in MISTAKES])
def test_flags_that_do_not_fit_together_are_one_sentence_and_status_2(
    inputs: Path,
    capsys: pytest.CaptureFixture[str],
    more: dict[str, str | None],
    less: list[str],
    sentence: str,
) -> None:
    flags = {flag: value for flag, value in (right_flags(inputs) | more).items() if flag not in less}
    assert main(as_arguments(flags)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert told.err.startswith("train_ppo: error: ")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "template.json cannot be read"),
        ("[]", "template.json must be an object with chat_template"),
        ('{"chat_template": 3}', "chat_template of "),
        ('{"system_message": ["x"]}', "system_message of "),
        ('{"end_of_assistant": 2}', "end_of_assistant of "),
        ('{"stop_ids": "2"}', "stop_ids of "),
        ('{"response_format_tags": {"answer_start": 1}}', "response_format_tags of "),
    ],
)
def test_a_template_of_another_form_is_refused_by_file_and_key(
    inputs: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (inputs / "template.json").write_text(text)
    assert main(as_arguments(right_flags(inputs))) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "template.json" in told


def test_a_tilde_is_the_home_directory_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ["pretrain", "checkpoint_path", "rm_checkpoint_path", "lora_config", "log_dir", "save_path", "ptx_dataset"]
    args = build_parser().parse_args([word for name in paths for word in (f"--{name}", "~/x")])
    found = [getattr(args, name) for name in paths]
    assert found == [*[f"{tmp_path}/x"] * 6, [f"{tmp_path}/x"]]


def _lora(directory: Path, **keys: Any) -> str:
    path = directory / "lora.json"
    path.write_text(json.dumps(keys))
    return str(path)


def test_a_lora_file_of_the_original_form_is_read_with_its_defaults(tmp_path: Path) -> None:
    assert read_lora(_lora(tmp_path, r=8)) == {
        "r": 8,
        "alpha": 32,
        "dropout": 0.1,
        "bias": "none",
        "init": "kaiming_uniform",
        "target_modules": "all-linear",
    }
    told = read_lora(_lora(tmp_path, r=4, lora_initialization_method="PiSSA", target_modules=["q_proj"]))
    assert (told["init"], told["target_modules"]) == ("pissa", ["q_proj"])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "r \\(the rank\\) must be"),
        ({"r": 8, "rank": 8}, "unknown key 'rank'"),
        ({"r": 8, "embedding_lora_dropout": 0.1}, "embedding_lora_dropout is not supported"),
        ({"r": 8, "lora_initialization_method": "zeros"}, "not 'zeros'"),
    ],
)
def test_a_lora_file_that_cannot_be_followed_is_refused(tmp_path: Path, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_lora(_lora(tmp_path, **keys))


def test_the_rlhf_command_allows_the_modules_of_its_settings(
    inputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.cli import main as rlhf

    flags = as_arguments(right_flags(inputs) | {"--reward_functions": "os:getcwd", "--tokenizer_dir": "nowhere"})
    assert rlhf(["train-ppo", *flags]) == 2
    assert "add os to --allowed_reward_modules" in capsys.readouterr().err
    monkeypatch.setenv("RLHF_REWARD_MODULES", "os")
    assert rlhf(["train-ppo", *flags]) == 2
    assert "--tokenizer_dir nowhere is not a directory" in capsys.readouterr().err


def test_the_rlhf_command_passes_the_flags_on(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flows.cli import main as rlhf

    assert rlhf(["train-ppo", *as_arguments(right_flags(inputs) | {"--tp": "2"})]) == 2
    assert "train_ppo: error: --tp 2" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        rlhf(["train-ppo", "--help"])
    assert end.value.code == 0
    assert "--conversation_template_config" in capsys.readouterr().out


def test_the_documents_template_and_rows_are_what_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "docs/train_ppo.md").read_text()
    rows, template = (block.partition("```")[0] for block in text.split("```json\n")[1:])
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "template.json").write_text(template)
    assert [row.answer for row in read_dialogues([tmp_path / "rows.jsonl"])] == ["5", "42"]
    tags = read_template(tmp_path / "template.json")["response_format_tags"]
    scores = [gsm8k_score("", f"<think>3 + 2</think> <answer>{n}</answer>", "#### 5", tags=tags) for n in (5, 6)]
    assert [*scores, gsm8k_score("", "5", "#### 5", tags=tags)] == [10.0, 1.0, 0.0]


def test_another_rank_than_the_first_waits_before_it_speaks(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")  # as torchrun sets it; without WORLD_SIZE there is nobody to join
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert main(as_arguments(right_flags(inputs) | {"--tp": "2"})) == 2
    assert capsys.readouterr().err.startswith("train_ppo: rank 1: error: --tp 2")
    assert len(waited) == 1
    assert waited[0] > 1  # torchrun looks for dead ranks ten times a second


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"r": "\t"}', "is not valid JSON: Invalid control character at column 8"),
        ("{'r': 4}", "single quotes are Python's"),
        ("[" * 5000, "is nested too deeply"),
    ],
)
def test_a_json_file_of_a_flag_is_blamed_in_a_whole_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "lora.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"--lora_config .*lora\.json .*{sentence}"):
        read_json(str(tmp_path / "lora.json"), "--lora_config")


def test_torchrun_is_left_the_sentence_where_it_looks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place))
    assert main(["--wrong", "x"]) == 2
    told = capsys.readouterr().err.strip()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(place))  # as torchrun reads it
    report = ChildFailedError("train_ppo", {0: failure}).format_msg()
    assert report.rstrip("= \n").splitlines()[-1].strip() == told
    assert 0 <= time.time() - failure.timestamp < 600
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere/error.json"))
    assert main(["--wrong", "x"]) == 2, "a directory that is gone is no second mistake"
    assert capsys.readouterr().err.strip() == told
