"""The directories of a command line: a run goes on where it was, or in a place of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.coati.script.checks import check_arguments, checkpoint_step
from rlhf_core.coati.script.flags import build_parser
from rlhf_core.errors import ConfigError
from rlhf_core.train_ppo import main
from tests.unit.coati.script.command_lines import as_arguments, right_flags, write_inputs


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def test_a_directory_of_an_earlier_run_is_refused_with_the_way_to_go_on(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 10):
        (inputs / f"out/trainer/epoch-0_step-{step}").mkdir(parents=True)
    assert main(as_arguments(right_flags(inputs))) == 2
    told = capsys.readouterr().err
    assert "holds checkpoints of an earlier run, up to epoch-0_step-10" in told
    assert f"--checkpoint_path {inputs / 'out/actor/epoch-0_step-10'}" in told


def test_a_run_goes_on_in_its_own_directory_or_a_new_one_but_not_in_that_of_another(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, str | None] = {}
    for run in ("a", "b"):
        for role in ("actor", "critic", "trainer"):
            (inputs / run / role / "epoch-0_step-2").mkdir(parents=True)
    for flag, role in (("--checkpoint_path", "actor"), ("--critic_checkpoint_path", "critic")):
        flags[flag] = str(inputs / "a" / role / "epoch-0_step-2")
    (inputs / "b/train_ppo.json").write_text("{}")
    assert main(as_arguments(right_flags(inputs) | flags | {"--save_path": str(inputs / "b")})) == 2
    assert f"--save_path {inputs / 'b'} holds checkpoints of an earlier run, up to" in capsys.readouterr().err
    assert (inputs / "b/train_ppo.json").read_text() == "{}"
    for save_path in ("b/../a", "c"):
        flags["--save_path"] = str(inputs / save_path)
        check_arguments(build_parser().parse_args(as_arguments(right_flags(inputs) | flags)))


def test_a_checkpoint_is_one_step_of_one_run(inputs: Path) -> None:
    run = inputs / "run"
    for part in ("actor/epoch-0_step-2", "critic/epoch-0_step-2", "critic/epoch-0_step-4", "trainer/epoch-0_step-2"):
        (run / part).mkdir(parents=True)

    def given(actor: str, critic: str) -> Path | None:
        flags: dict[str, str | None] = {
            "--checkpoint_path": str(run / actor),
            "--critic_checkpoint_path": str(run / critic),
        }
        return checkpoint_step(build_parser().parse_args(as_arguments(right_flags(inputs) | flags)))

    assert given("actor/epoch-0_step-2", "critic/epoch-0_step-2") == run / "trainer/epoch-0_step-2"
    with pytest.raises(ConfigError, match="give one step of one run"):
        given("actor/epoch-0_step-2", "critic/epoch-0_step-4")
    with pytest.raises(ConfigError, match="is not a directory"):
        given("actor/epoch-0_step-9", "critic/epoch-0_step-2")
    with pytest.raises(ConfigError, match="should be like epoch-1_step-20"):
        given("actor", "critic")
    (run / "actor/epoch-0_step-4").mkdir()
    with pytest.raises(ConfigError, match="not a whole checkpoint"):
        given("actor/epoch-0_step-4", "critic/epoch-0_step-4")
