"""A sample of tests/parallel that every run of the tests takes: equal passes, and checkpoints of other ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import supervised_cases, trainer_cases
from tests.parallel.ranks import run_on_ranks

pytestmark = pytest.mark.integration  # processes of their own


def test_ranks_with_unequal_work_make_equal_passes_which_change_nothing(tmp_path: Path) -> None:
    """The second rank has nothing in the last of the learner's steps, and fewer micro-batches with dropout in SFT's."""
    for module, case in (("learner_cases", "uneven_adapters"), ("supervised_cases", "sft_uneven_with_dropout")):
        for found in run_on_ranks(f"tests.parallel.{module}", [case, f"{case}:strict"], tmp_path):
            assert found[f"{case}:strict"].sentence == ""
            assert found[f"{case}:strict"].numbers == found[case].numbers


def test_supervised_training_goes_on_with_one_rank_where_two_stood(tmp_path: Path) -> None:
    case = f"saved:plain:{tmp_path / 'run'}"
    whole, _ = run_on_ranks("tests.parallel.supervised_cases", [case], tmp_path)
    found = supervised_cases.gone_on(ALONE, "plain", str(tmp_path / "run"), "1")
    for figure in ("loss", "grad_norm", "tokens"):
        assert found.numbers[f"0.{figure}"] == pytest.approx(whole[case].numbers[f"1.{figure}"], rel=1e-5)


def test_ppo_goes_on_with_one_rank_where_two_stood_and_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = f"saved:plain:{tmp_path / 'run'}"
    whole, _ = run_on_ranks("tests.parallel.trainer_cases", [case], tmp_path)
    with caplog.at_level(logging.WARNING):
        found = trainer_cases.gone_on(ALONE, "plain", str(tmp_path / "run"), "epoch-0_step-2")
    assert [record.message for record in caplog.records if "go on" in record.message] == [
        "the checkpoint epoch-0_step-2 is of 2 ranks, and 1 go on: loaders behind as many samples as all ranks had "
        "given"
    ]
    for figure in ("critic_loss", "entropy", "actor_grad_norm", "critic_grad_norm"):
        assert found.numbers[f"0.{figure}"] == pytest.approx(whole[case].numbers[f"2.{figure}"], rel=1e-5)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = trainer_cases.gone_on(ALONE, "plain", str(tmp_path / "run"), "epoch-1_step-3")
    assert [record.message for record in caplog.records if "go on" in record.message] == [
        "the checkpoint epoch-1_step-3 is of 2 ranks, and 1 go on: what is left of episode 2, behind step 3, is not "
        "learnt, and episode 3 is collected next"
    ]
    assert (found.numbers["episode"], found.numbers["step"]) == (2, 3)
    assert bool(torch.isfinite(torch.tensor(found.numbers["0.critic_loss"])))
