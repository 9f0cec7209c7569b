"""`train_prompts_on_ray` on a real cluster: it learns what `PPOTrainer` does, side by side, and says what it lacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from infra.clusters import ClusterRecord, connect, lease_cluster, release_cluster
from rlhf_core.coati.roles.flags import ROLES
from rlhf_core.coati.roles.loop import Outcome, run
from rlhf_core.coati.roles.spans import Span
from rlhf_core.detached.train_prompts_on_ray import main
from rlhf_core.errors import LostRankError
from rlhf_core.ppo.metrics import PPOStats
from tests.integration import equality
from tests.integration.existing_cluster import as_users_start_them
from tests.integration.role_groups import add_node, await_free, processes_of
from tests.unit.coati.roles.reference import (
    LR,
    Reference,
    actor_figures,
    critic_figures,
    flags,
    texts,
    words,
    write_inputs,
)

pytestmark = pytest.mark.integration

CPUS = 6 + 2
RLHF = str(Path(sys.executable).parent / "rlhf")
MODULE = "rlhf_core.detached.train_prompts_on_ray"
NOISE = "attn.c_attn.bias"
"""Attention does not know the keys' bias: its gradient is rounding, of which Adam makes steps like any other's."""
CLOSE = {"rel": 1e-4, "abs": 1e-5}


@pytest.fixture(scope="module")
def cluster(forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRecord]:
    """Two nodes and one logical GPU, which four models cannot have one each of."""
    directory = tmp_path_factory.mktemp("clusters")
    with as_users_start_them(), patch.dict(os.environ, forked):
        record = lease_cluster("roles", directory=directory, num_cpus=6, num_gpus=1, object_store_mb=100)
        try:
            add_node(record, num_cpus=2)
            connect(record)
            yield record
        finally:
            release_cluster("roles")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), "gpt2")


def keep_losses(shape: str, outcome: Outcome, expected: list[PPOStats]) -> None:
    mine = [
        (actor.actor_loss, critic.critic_loss)
        for done in outcome.rounds
        for actor, critic in zip(done.actor, done.critic, strict=True)
    ]
    equality.keep(f"role groups, {shape}", mine, [(each.actor_loss, each.critic_loss) for each in expected])


def intersect(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


@pytest.mark.usefixtures("cluster")
def test_four_groups_learn_what_one_process_does_and_leave_nothing(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "timeline.png"
    outcome = main(flags(inputs, need_optim_ckpt="yes", timeline=picture))
    said = capsys.readouterr().out
    assert "the cluster has 1 GPU for 4 processes (actor 1, critic 1, initial 1, reward 1): all of them work" in said
    assert "round 3/3: 4 samples" in said

    reference = Reference(inputs)
    expected = reference.fit(texts())
    assert len(expected) == 12
    assert expected[-1].critic_loss > 0
    assert actor_figures([stat for done in outcome.rounds for stat in done.actor]) == actor_figures(expected)
    assert critic_figures([stat for done in outcome.rounds for stat in done.critic]) == critic_figures(expected)
    keep_losses("one process each (gpt2, ddp)", outcome, expected)
    stored = load_file(inputs / "policy.pt")
    for name, weight in reference.trainer.learner.actor.named_parameters():
        assert torch.equal(stored[name], weight), name
    moments = load_file(inputs / "policy.optim.pt")
    assert any(name.endswith("exp_avg") for name in moments)

    assert picture.read_bytes().startswith(b"\x89PNG")
    await_free(CPUS)


@pytest.mark.parallel
@pytest.mark.usefixtures("cluster")
def test_the_groups_work_at_the_same_time(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, "gpt2", hidden_size=512, num_hidden_layers=8)  # busy for longer than a call takes
    outcome = main(flags(inputs))
    judging = [span for span in outcome.spans if span.what in {"log-probs", "reference", "values", "scores"}]
    pairs = {
        frozenset((one.role, other.role))
        for one, other in combinations(judging, 2)
        if one.role != other.role and intersect(one, other)
    }
    assert len(pairs) >= 3, pairs  # of six; which of them meet depends on the machine's two cores
    learning = {role: [span for span in outcome.spans if (span.role, span.what) == (role, "learn")] for role in ROLES}
    assert all(intersect(*both) for both in zip(learning["actor"], learning["critic"], strict=True))
    await_free(CPUS)


@pytest.mark.parallel
@pytest.mark.usefixtures("cluster")
def test_an_actor_on_two_nodes_learns_what_one_does_with_twice_the_batch(inputs: Path, tmp_path: Path) -> None:
    outcome = main(flags(inputs, num_actor_nodes=2, num_episodes=2, save_path=tmp_path / "policy"))
    reference = Reference(inputs, collect_steps=4, accumulation_steps=2)
    expected = reference.fit(texts(), episodes=2)
    assert len(expected) == 8
    assert [done.samples for done in outcome.rounds] == [8, 8]
    for figures, of in ((actor_figures, "actor"), (critic_figures, "critic")):
        mine = [stat for done in outcome.rounds for stat in getattr(done, of)]
        for one, other in zip(figures(mine), figures(expected), strict=True):
            assert one == pytest.approx(other, **CLOSE)
    keep_losses("actor on two nodes (gpt2, ddp; one with twice the batch)", outcome, expected)
    stored = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "policy").named_parameters())
    for name, weight in reference.trainer.learner.actor.named_parameters():
        if not name.endswith(NOISE):
            torch.testing.assert_close(stored[name], weight, rtol=0, atol=LR * 8 * 0.01)
    nodes = {span.rank for span in outcome.spans if span.role == "actor"}
    assert nodes == {0, 1}
    await_free(CPUS)


@pytest.mark.usefixtures("cluster")
def test_more_nodes_than_the_cluster_has_are_waited_for_no_longer_than_told(inputs: Path) -> None:
    with pytest.raises(TimeoutError) as refused:
        main(flags(inputs, num_critic_nodes=3, train_batch_size=3, start_timeout_s=2))
    said = str(refused.value)
    assert said.startswith(
        "waited 2 s for room, and there was none: the critic group wants 3 nodes with 1 CPU free on each, and the "
        "cluster has 2 nodes with "
    )
    assert len(said.splitlines()) == 1
    await_free(CPUS)


@pytest.mark.parallel
def test_a_killed_critic_is_named_and_its_run_leaves_nothing(cluster: ClusterRecord, inputs: Path) -> None:
    def kill_after_the_first_round(line: str) -> None:
        if line.startswith("round 1/"):
            (critic,) = processes_of(cluster, "RayPPOCritic")
            critic.send_signal(signal.SIGKILL)

    with pytest.raises(LostRankError, match=r"critic-0 of this run has ended \(.*; look into its log") as lost:
        run(flags(inputs, gpus_per_actor=0.25), kill_after_the_first_round)
    assert len(str(lost.value).splitlines()) == 1
    await_free(CPUS)


@pytest.mark.parallel
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("architecture", "strategy"),
    [("bloom", "colossalai_zero2"), ("opt", "colossalai_gemini"), ("gpt2", "colossalai_zero2"), ("bloom", "plain")],
)
def test_any_strategy_on_two_ranks_learns_what_one_process_does(
    architecture: str, strategy: str, tmp_path: Path
) -> None:
    inputs = write_inputs(tmp_path, architecture)
    changes = {"num_actor_nodes": 2, "num_critic_nodes": 2, "strategy": strategy, "model": architecture}
    outcome = main(flags(inputs, **changes))
    reference = Reference(inputs, collect_steps=4, accumulation_steps=2)
    expected = reference.fit(texts())
    for figures, of in ((actor_figures, "actor"), (critic_figures, "critic")):
        mine = [stat for done in outcome.rounds for stat in getattr(done, of)]
        for one, other in zip(figures(mine), figures(expected), strict=True):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    keep_losses(
        f"actor and critic on two ranks ({architecture}, {strategy}; one with twice the batch)", outcome, expected
    )
    await_free(CPUS)


@pytest.mark.parallel
@pytest.mark.parametrize("command", [[RLHF, "train-prompts-on-ray"], [sys.executable, "-m", MODULE]])
def test_a_command_brings_its_own_cluster_and_takes_it_with_it(
    command: list[str], inputs: Path, tmp_path: Path
) -> None:
    given = words(inputs, save_path=tmp_path / "policy.pt", num_episodes=1, rm_pretrain=None)
    environment = {**os.environ, "RLHF_HOME": str(tmp_path / "home")}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run([*command, *given], env=environment, check=False, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, third, last = done.stdout.splitlines()
    assert first == "the cluster has no GPU: all 4 processes of the four models work on CPUs"
    assert second.startswith("no --rm_pretrain: the reward model is an untrained head")
    assert third.startswith("round 1/1: 4 samples, score ")
    assert last == f"stored {tmp_path}/policy.pt"
    deadline = time.monotonic() + 30
    while (left := processes_with_home(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.clusters
def test_a_killed_driver_of_somebody_elses_cluster_takes_its_actors_with_it(
    cluster: ClusterRecord, inputs: Path
) -> None:
    given = words(inputs, num_episodes=1000, address=cluster.address)
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(cluster.token)}
    driver = subprocess.Popen(
        [sys.executable, "-m", MODULE, *given], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        assert any(line.startswith("round 2/") for line in driver.stdout)
    finally:
        driver.kill()
        driver.communicate()
    await_free(CPUS)
    assert not processes_of(cluster, "RayPPOActor")
    assert cluster.is_running


def processes_with_home(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RLHF_HOME", "").startswith(str(directory)):
                found.append(process)
    return found
