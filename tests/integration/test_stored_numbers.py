"""What a run learns with adapters is what is stored here; a release that changes it says so.

`stored_numbers/state/` and `own.safetensors` are from an earlier release (commit db0db1c), in which each process had
float32 weights of its own: a run's state after the first of two episodes, and what it had learnt after the second.
`shared.safetensors` is what the same run learns over a shared base. `rows/` is its dataset: which rows a release draws
is another matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load, load_file

from flows.presets import resolve
from tests.integration.ppo_runs import TINY_RUN, Run, on_a_cluster
from tests.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.integration

STORED = Path(__file__).with_name("stored_numbers")
OVERRIDES = TINY_RUN | {
    "ppo.max_epochs": 1,
    "ppo.dtype": "float32",
    "ppo.rollout_dtype": "float32",
    "ppo.lora": {"r": 2, "dropout": 0.1},
}


@pytest.fixture(scope="module")
def run(forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("run")
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)
    config = resolve("llama7b", model=str(model), episodes=2, overrides=OVERRIDES)
    with patch.dict(os.environ, forked), on_a_cluster(config, directory, STORED / "rows") as made:
        yield made


def check_learnt(run: Run, stored: str) -> None:
    """See that a run's last state holds the weights that are stored: to the bit on the processor that wrote them."""
    state = run.store.resolve(f"ppo-state/{run.plan.name}@2")
    learnt = load(run.store.read_bytes(state, "training-00000.safetensors"))
    expected = load_file(STORED / stored)
    torch.testing.assert_close({name: learnt[name] for name in expected}, expected, rtol=1e-4, atol=1e-6)


def test_a_run_over_a_shared_base_learns_what_it_did(run: Run) -> None:
    assert run.plan.shares_base
    run.finish()
    check_learnt(run, "shared.safetensors")


def test_another_number_of_makers_gives_the_same_bits(run: Run) -> None:
    before = run.weights()
    ppo = run.config.ppo
    cluster = ppo.cluster.model_copy(update={"num_makers": 1})
    run.config = run.config.model_copy(update={"ppo": ppo.model_copy(update={"cluster": cluster})})
    run.begin()
    assert run.plan.config.ppo.cluster.num_makers == 1
    run.finish()
    assert run.weights() == before


def test_a_run_of_an_earlier_release_ends_with_the_numbers_that_it_would_have_had(run: Run) -> None:
    run.begin()
    ppo = run.plan.config.ppo.model_copy(update={"update_lora_weights": False})  # as it stood in every record
    config = run.plan.config.model_copy(update={"ppo": ppo})
    run.plan = run.plan.model_copy(update={"base": None, "reward_model_base": None, "config": config})
    files = {file.name: file for file in (STORED / "state").iterdir()}
    run.store.commit("ppo-state", run.plan.name, files, version=1, config=run.plan.config.model_dump(mode="json"))
    run.finish()
    check_learnt(run, "own.safetensors")
