"""PPO over three machines: to the bits of one machine, and with one that falls silent or is lost, never hanging."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import pytest

from flows.presets import resolve
from rlhf_core.config import PipelineConfig
from tests.integration.machines import Machines, Node, machines
from tests.integration.ppo_runs import on_a_cluster
from tests.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.integration

ENDS_WITHIN_S = 540.0
"""Of any run: far below all deadlines in a row of one that waits for what never comes."""
ONE_EACH = {"head": Node(1), "one": Node(1, 1), "two": Node(1)}
"""A trainer asks for a GPU, makers for none: the trainer is on `one`, a maker on each of the others."""
WITH_ROOM = {"head": Node(1), "one": Node(2, 1), "two": Node(2, 1)}
"""Whichever of `one` and `two` is lost, the rest has room for all."""
TWO_RANKS = {"head": Node(1), "one": Node(1, 1), "two": Node(1, 1)}
"""A trainer on `one` and `two` each, the maker on the head."""


class Told(NamedTuple):
    """What a run on machines told."""

    facts: dict[str, Any]
    """Its last word on each matter."""
    failures: list[dict[str, Any]]
    """Of attempts at its tasks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)


def configured(model: Path, trainers: int = 1, **cluster: Any) -> PipelineConfig:
    return resolve(
        "llama7b",
        model=str(model),
        episodes=2,
        overrides={
            "data.splits": {"sft": 8, "preferences": 8, "ppo": 16, "evaluation": 8},
            "ppo.strategy": "zero2" if trainers > 1 else "plain",
            "ppo.num_trainers": trainers,
            "ppo.prompts_per_episode": 16,
            "ppo.chunk_size": 4,
            "ppo.train_batch_size": 4,
            "ppo.micro_batch_size": 4,
            "ppo.max_epochs": 6,  # learning takes long enough to be struck in
            "ppo.max_new_tokens": 8,
            "ppo.lr": 1e-3,
            "ppo.critic_lr": 1e-3,
            "ppo.dtype": "float32",
            "ppo.rollout_dtype": "float32",
            "ppo.reward": {"verifier": 0.0, "reward_model": 1.0},
            "ppo.critic_init": "reward_model",
            "ppo.cluster": {
                "num_makers": 2 if trainers == 1 else 1,
                "trainer_threads": 1,
                "maker_threads": 1,
                "object_store_mb": 128,
                "collective_timeout_s": 60,
                "start_timeout_s": 300,
                **cluster,
            },
        },
    )


@pytest.fixture(scope="module")
def on_one_machine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of a run on one machine, by its number of trainers."""
    known: dict[int, dict[str, str]] = {}

    def weights(trainers: int = 1) -> dict[str, str]:
        if trainers not in known:
            with on_a_cluster(configured(model, trainers), tmp_path_factory.mktemp("one-machine")) as run:
                run.finish()
                known[trainers] = run.weights()
        return known[trainers]

    return weights


@contextmanager
def run_on(made: Machines, trainers: int = 1, doing: str = "", victim: str = "", **cluster: Any) -> Iterator[Any]:
    """A run that is driven from the head, as lines that it tells; it is ended when it takes too long."""
    model = write_tiny_llama(made.folder / "model", initializer_range=0.2)
    gpus = {"trainer_gpus": 1.0, "maker_gpus": 0.0}
    config = configured(model, trainers, address=made.cluster_address, **gpus, **cluster)
    (made.folder / "config.json").write_text(config.model_dump_json())
    (made.folder / "run").mkdir()
    arguments = [str(made.folder / "config.json"), str(made.folder / "run"), doing, victim]
    driver = made.head.run(
        sys.executable, "-m", "tests.integration.run_on_machines", *arguments, environment=made.environment()
    )
    late = Timer(ENDS_WITHIN_S, made.head.end)
    late.start()
    try:
        yield (json.loads(line) for line in driver.stdout or () if line.startswith("{"))
        assert driver.wait(60) == 0, made.errors()
    finally:
        late.cancel()


def follow(made: Machines, told: Iterator[dict[str, Any]], strike: Any = None) -> Told:
    """Return what a run told until its end, and do to the machine that it names what is to be done."""
    facts: dict[str, Any] = {}
    failures = []
    names = {machine.address: name for name, machine in made.all.items()}
    for line in told:
        if "strike" in line:
            strike(names[line["strike"]])
            facts["struck_at"] = time.monotonic()
        if "failed" in line:
            failures.append(line)
        facts.update(line)
    assert "weights" in facts or "ended" in facts, f"the run was ended after {ENDS_WITHIN_S:g} s: {facts}"
    return Told(facts, failures)


@pytest.mark.clusters
@pytest.mark.timeout(1200)
def test_a_run_on_three_machines_ends_with_the_bits_of_a_run_on_one(on_one_machine: Any) -> None:
    with machines(ONE_EACH) as made, run_on(made) as told:
        facts, failures = follow(made, told)
        at = {name: made.all[name].address for name in made.all}
    assert failures == []
    assert facts["places"].keys() == {"trainer", "maker-0", "maker-1"}
    assert facts["places"]["trainer"] == at["one"]
    assert {facts["places"]["maker-0"], facts["places"]["maker-1"]} == {at["head"], at["two"]}
    assert facts["weights"] == on_one_machine()


@pytest.mark.clusters
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["cut_off", "kill"])
@pytest.mark.parametrize(("victim", "doing"), [("trainer", "learning"), ("maker", "")])  # "": at its begin
def test_a_run_goes_on_without_a_machine_that_is_silent_or_lost(
    on_one_machine: Any, how: str, victim: str, doing: str
) -> None:
    with machines(WITH_ROOM) as made, run_on(made, doing=f"episode 2: {doing}", victim=victim) as told:
        facts, failures = follow(made, told, getattr(made, how))
    assert facts["weights"] == on_one_machine()
    assert all(failure["mendable"] and failure["after_s"] < 60 for failure in failures)  # of silence Ray takes 65
    if victim == "trainer":  # a lost maker is not waited for: such a run may be over before Ray gives its machine up
        assert len(failures) == 1
        assert facts["strike"] not in facts["places"].values()


@pytest.mark.clusters
@pytest.mark.timeout(1800)
def test_ranks_on_two_machines_learn_as_on_one_and_say_who_was_lost_and_what_has_no_room(on_one_machine: Any) -> None:
    with machines(TWO_RANKS) as made, run_on(made, 2) as told:
        facts, failures = follow(made, told)
        assert failures == []
        assert len(set(facts["places"].values())) == 3
        assert facts["weights"] == on_one_machine(2)
    waits = {"doing": "episode 2: learning", "victim": "trainer-1", "start_timeout_s": 120}
    with machines(TWO_RANKS) as made, run_on(made, 2, **waits) as told:
        facts, failures = follow(made, told, made.cut_off)
    assert "rank 1 of 2" in failures[0]["failed"] or "trainer-1" in failures[0]["failed"]
    assert facts["ended"].startswith("waited 120 s for room for ")
    assert "\n" not in facts["ended"]
