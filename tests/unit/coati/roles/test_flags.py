"""The flags of `train_prompts_on_ray`: coati's names and defaults, and what cannot be run said in one sentence."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from flows.cli import main as rlhf
from rlhf_core.coati.roles.flags import build_parser, check_arguments
from rlhf_core.coati.roles.models import check_kind
from rlhf_core.coati.roles.settings import RoleSettings
from rlhf_core.detached.train_prompts_on_ray import cli
from rlhf_core.errors import ConfigError, ModelError
from tests.tiny_llama import write_tiny_llama

COATIS = {
    "prompt_csv_url": None, "strategy": "ddp", "model": "gpt2", "pretrain": "gpt2",
    "save_path": "actor_checkpoint_prompts.pt", "need_optim_ckpt": False, "num_episodes": 10, "max_timesteps": 10,
    "update_timesteps": 10, "train_batch_size": 8, "experience_batch_size": 8, "num_actor_nodes": 1,
    "num_critic_nodes": 1, "num_initial_nodes": 1, "num_reward_nodes": 1, "num_gpus_per_node": 1,
}  # fmt: skip
FIXED = {
    "max_length": 128, "max_prompt_tokens": 96, "temperature": 1.0, "top_k": 50, "eps_clip": 0.2, "value_clip": 0.4,
    "lr": 5e-6,
}  # fmt: skip


def parsed(*words: str) -> Namespace:
    return build_parser().parse_args(["--prompt_csv_url", "p.csv", *words])


def test_names_and_defaults_are_coatis() -> None:
    args = vars(build_parser().parse_args([]))
    assert {name: args[name] for name in COATIS} == COATIS
    assert {name: args[name] for name in FIXED} == FIXED
    for choice in ("ddp", "colossalai_gemini", "colossalai_zero2"):
        assert parsed("--strategy", choice).strategy == choice
    for choice in ("gpt2", "bloom", "opt"):
        assert parsed("--model", choice).model == choice


def test_the_optimizers_flag_is_what_its_word_says() -> None:
    for word in ("false", "False", "no", "0", "off"):
        assert parsed("--need_optim_ckpt", word).need_optim_ckpt is False  # upstream took each of them for true
    for words in (["true"], ["YES"], ["1"], []):
        assert parsed("--need_optim_ckpt", *words).need_optim_ckpt is True
    with pytest.raises(ConfigError, match="--need_optim_ckpt: expected one of true, yes"):
        parsed("--need_optim_ckpt", "maybe")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max_length", "90"], "--max_prompt_tokens 96 leaves no room for a response in --max_length 90"),
        (
            ["--train_batch_size", "3", "--num_critic_nodes", "2"],
            "an optimizer step learns from 3 responses .* do not divide by the critic's 2 processes",
        ),
        (["--save_path", "/nowhere/actor.pt"], "--save_path /nowhere/actor.pt cannot be written: there is no direc"),
        (["--address", "ray://head:10001"], "--address ray://head:10001 is not read; give host:port"),
        (["--eps_clip", "0"], "--eps_clip must be above 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_arguments(parsed(*words))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--num_actor_nodes", "0"], "--num_actor_nodes: must be at least 1, not 0"),
        (["--model", "llama9"], "--model: invalid choice: 'llama9'"),
        (["--lam", "1.5"], "--lam: must be from 0 to 1, not 1.5"),
        (
            ["--gpus_per_actor", "0.00001"],
            "--gpus_per_actor: must be 0, from 0.0001 to 1, or a whole number, not 0.00001",
        ),
        (["--gpus_per_actor", "1.5"], "--gpus_per_actor: must be 0, from 0.0001 to 1, or a whole number, not 1.5"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_a_bad_value_is_one_sentence_and_status_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (cli, lambda given: rlhf(["train-prompts-on-ray", *given])):
        assert command(["--prompt_csv_url", "p.csv", *words]) == 2
        said = capsys.readouterr().err
        assert complaint in said
        assert len(said.splitlines()) == 1


def test_a_wrong_column_another_kind_of_model_and_a_lack_of_machines_are_told_before_a_cluster_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (tmp_path / "p.csv").write_text("question\nWhy?\n")
    words = ["--prompt_csv_url", str(tmp_path / "p.csv"), "--pretrain", str(model)]
    words += ["--save_path", str(tmp_path / "out.pt")]
    assert rlhf(["train-prompts-on-ray", *words]) == 1
    assert "has no column 'prompt', but 'question'" in capsys.readouterr().err
    (tmp_path / "p.csv").write_text("prompt\nWhy?\n")
    assert rlhf(["train-prompts-on-ray", *words]) == 1
    said = capsys.readouterr().err
    assert f"--pretrain {model} holds a model of the kind llama, but --model says gpt2; give --model llama" in said
    assert len(said.splitlines()) == 1
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for command in (cli, lambda given: rlhf(["train-prompts-on-ray", *given])):
        assert command([*words, "--model", "auto", "--num_reward_nodes", "2"]) == 1
        assert "--num_reward_nodes 2 wants as many machines, but without --address" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_a_picture_may_have_any_name_and_be_drawn_again(tmp_path: Path) -> None:
    place = tmp_path / "picture"
    check_arguments(parsed("--timeline", str(place)))
    place.touch()
    check_arguments(parsed("--timeline", str(place)))
    with pytest.raises(ConfigError, match=r"--timeline .* is a directory; give a file's path"):
        check_arguments(parsed("--timeline", str(tmp_path)))
    with pytest.raises(ConfigError, match=r"--save_path .* is a file; without a suffix it is to be a directory"):
        check_arguments(parsed("--save_path", str(place)))
    check_arguments(parsed("--save_path", str(tmp_path)))


def test_the_cluster_of_the_settings_is_taken_where_no_flag_names_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (tmp_path / "p.csv").write_text("prompt\nWhy?\n")
    words = ["--prompt_csv_url", str(tmp_path / "p.csv"), "--pretrain", str(model), "--model", "auto"]
    words += ["--save_path", str(tmp_path / "out.pt")]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:3")
    for address, given in (("127.0.0.1:1", []), ("127.0.0.1:2", ["--address", "127.0.0.1:2"])):
        monkeypatch.setenv("RLHF_RAY_ADDRESS", "127.0.0.1:1")
        assert rlhf(["train-prompts-on-ray", *words, *given]) == 1
        assert f"no Ray cluster answers at {address} (" in capsys.readouterr().err


def test_any_kind_is_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    check_kind(model, "model", "auto")
    check_kind(model, "model", "llama")
    (model / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not say which kind of model it is"):
        check_kind(model, "model", "auto")


def test_every_group_steps_from_the_same_rows_whatever_its_ranks() -> None:
    args = parsed("--num_actor_nodes", "2", "--num_critic_nodes", "4", "--train_batch_size", "6", "--max_epochs", "3")
    settings = RoleSettings.from_args(args)

    class Drawn:
        temperature, top_k, top_p = 1.0, 50, 1.0

    for ranks in (1, 2, 4):
        config = settings.learning(Drawn, ranks)  # type: ignore[arg-type]
        assert config.train_batch_size * ranks == 12
        assert config.train_batch_size % config.micro_batch_size == 0
        assert config.micro_batch_size <= 6
        assert config.max_epochs == 3


def test_one_process_of_torchrun_may_start_the_actors_and_several_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_arguments(parsed())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun started 2 of this command"):
        check_arguments(parsed())
