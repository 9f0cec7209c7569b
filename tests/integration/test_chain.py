"""The whole chain on a real stack: Prefect server and worker, SeaweedFS, a Ray cluster; only the model is tiny."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.artifacts import ArtifactRef, ArtifactStore, Manifest
from infra.clusters import ClusterRecord, leftover_processes
from infra.services.automations import RESTARTING
from rlhf_core.config import ConditionsConfig
from tests.integration.local_stack import LocalStack, read_json, wait_for
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("forked_flows")]

EPISODES = 3
MADE_ONCE = ("dataset", "sft", "reward-model", "ppo-state", "policy", "evaluation")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def store(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return stack.store(tmp_path_factory.mktemp("cache"))


def command(
    model: Path, *, seed: int = 0, episodes: int = EPISODES, deployment: str = "quickstart", **further: object
) -> list[str]:
    """`rlhf run`, small: a model that has just learnt the form of an answer, and few problems."""
    known = {
        "name": "quickstart",
        "model": str(model),
        "episodes": episodes,
        "seed": seed,
        "overrides": json.dumps(small(**further)),
    }
    given = [part for name, value in known.items() for part in ("-p", f"{name}={value}")]
    return ["rlhf", "run", deployment, *given]


def small(**further: object) -> dict[str, Any]:
    """Return the overrides with which the chain takes a minute or two."""
    return {
        "name": "quickstart",  # other parameters of the task would make another project
        "data.demonstrations": [],  # right answers: careless ones give a tiny model too few pairs to rank
        "data.task_parameters": {"min_numbers": 2, "max_numbers": 2, "max_decimals": 0, "min_value": 1, "max_value": 9},
        "data.splits": {"sft": 64, "preferences": 16, "ppo": 16, "evaluation": 12},
        "sft.epochs": 15,
        "sft.lr": 1e-2,
        "sft.dtype": "float32",
        "evaluation.dtype": "float32",
        "reward_model.max_new_tokens": 28,
        "reward_model.heldout_fraction": 0.5,
        "ppo.prompts_per_episode": 16,
        "ppo.chunk_size": 4,
        "ppo.train_batch_size": 8,
        "ppo.micro_batch_size": 8,
        "ppo.max_new_tokens": 28,
        "evaluation.max_new_tokens": 28,
        "ppo.cluster": {"num_makers": 1, "object_store_mb": 128},
        "gate.min_gain": -1.0,  # so little training need not help, and may cost what else is asked
        "gate.conditions": dict.fromkeys(ConditionsConfig.model_fields.keys() - {"level"}),
        **further,
    }


@pytest.fixture(scope="module")
def first(stack: LocalStack, model: Path) -> subprocess.CompletedProcess[str]:
    return stack.type(*command(model), timeout_s=400)


def count(store: ArtifactStore) -> dict[str, int]:
    return {kind: len(store.list(kind)) for kind in MADE_ONCE}


def cluster_processes(stack: LocalStack) -> list[str]:
    """Return what runs of Ray under this stack."""
    return [
        each.name() for each in stack.processes() if each.name() in {"gcs_server", "raylet"} or "ray::" in each.name()
    ]


def test_one_command_takes_a_model_through_the_whole_chain_and_shows_its_report(
    stack: LocalStack, first: subprocess.CompletedProcess[str], store: ArtifactStore
) -> None:
    assert first.returncode == 0, first.stdout + first.stderr
    for stage in ("data", "sft", "preferences", "reward-model", "ppo", "evaluate", "gate"):
        assert f"▸ {stage}" in first.stdout, first.stdout
    assert f"episode {EPISODES}/{EPISODES}" in first.stdout
    assert "left in this stage" in first.stdout
    last = first.stdout.splitlines()[-1]
    assert last.startswith("finished: promoted: policy/quickstart@1 against "), last
    assert last.endswith("(rlhf artifacts show run/quickstart@1)")
    for made in (
        "sft/quickstart@1",
        "dataset/quickstart-preferences@1, reward-model/quickstart@1",
        "policy/quickstart@1",
    ):
        assert f"▸ done         made {made}\n" in first.stdout, first.stdout
    for part in ("Where the time went", "before and after", "policy/quickstart@1", "runs/flow-run/", "Champion now"):
        assert part in first.stdout, first.stdout
    assert count(store) == {
        "dataset": 2,  # problems, preferences
        "sft": 1,
        "reward-model": 1,
        "ppo-state": 1,  # what the last one says, without its tensors
        "policy": 1,
        "evaluation": 3,  # base, sft, ppo
    }
    assert cluster_processes(stack) == []


def test_the_pipelines_page_has_every_stages_lines_and_its_own_keys(
    stack: LocalStack, first: subprocess.CompletedProcess[str]
) -> None:
    assert first.returncode == 0
    run_id = re.findall(r"runs/flow-run/([0-9a-f-]+)", first.stdout)[0]
    lines = [line for line in stack.log(run_id) if line.startswith("▸")]
    followed = [line[len("00:00:00 ") :] for line in first.stdout.splitlines() if "▸ ppo" in line]
    assert followed == [line for line in lines if line.startswith("▸ ppo")]
    assert sum(f"episode 1/{EPISODES}  " in line for line in lines) == 1
    [policy] = [child for child in stack.children(run_id) if "episode" in str(stack.log(child["id"]))]
    names = stack.task_names(policy["id"])
    assert [name for name in names if name.startswith("episode")] == [f"episode {n}/{EPISODES}" for n in (1, 2, 3)]
    assert {key for key in stack.artifact_keys() if not key.startswith("quickstart-")} == set()
    assert {"quickstart-report", "quickstart-ppo-curves", "quickstart-ppo-episodes"} <= stack.artifact_keys()


@pytest.mark.stack
def test_a_second_run_reuses_every_stage_and_meets_the_champion_of_the_first(
    stack: LocalStack, model: Path, first: subprocess.CompletedProcess[str], store: ArtifactStore
) -> None:
    assert first.returncode == 0
    assert "Champion now: policy/quickstart@1" in " ".join(first.stdout.split())
    assert store.resolve("policy/quickstart@champion").uri == "policy/quickstart@1"
    before = count(store)
    second = stack.type(*command(model), timeout_s=300)
    assert second.returncode == 0, second.stdout + second.stderr
    assert count(store) == before
    assert "made now" in first.stdout
    assert "made now" not in second.stdout
    assert "▸ done         sft/quickstart@1 was in the store already\n" in second.stdout
    assert "is the champion already" in second.stdout
    assert len(store.list("run")) == 2  # each run has a report of its own


@pytest.mark.parametrize("merged", [False, True])
def test_a_fetched_policy_loads_and_answers_as_in_its_stored_evaluation(
    stack: LocalStack,
    first: subprocess.CompletedProcess[str],
    store: ArtifactStore,
    tmp_path: Path,
    merged: bool,
) -> None:
    assert first.returncode == 0
    whole = ["--merged"] if merged else []
    fetched = stack.type("rlhf", "artifacts", "fetch", "policy/quickstart@latest", str(tmp_path / "policy"), *whole)
    assert fetched.returncode == 0, fetched.stderr
    loader = AutoModelForCausalLM if merged else AutoPeftModelForCausalLM
    policy = loader.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    outcomes = outcomes_of(store, "policy/quickstart@1")[:10]
    assert len(outcomes) == 10
    for outcome in outcomes:
        # the quickstart's template, written out here
        text = f"<|im_start|>user\n{outcome['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        found = policy.generate(input_ids=ids, max_new_tokens=28, do_sample=False, pad_token_id=0)
        out = found[0, ids.shape[1] :].tolist()
        response = out[: out.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in out else out
        assert tokenizer.decode(response) == outcome["response"]


def outcomes_of(store: ArtifactStore, policy: str) -> list[dict[str, Any]]:
    [evaluation] = [each for each in store.list("evaluation") if each.metrics["policy"] == policy]
    return [json.loads(line) for line in store.read_bytes(evaluation, "outcomes.jsonl").decode().splitlines()]


def test_lineage_leads_from_the_policy_to_the_base_model(
    stack: LocalStack, first: subprocess.CompletedProcess[str], store: ArtifactStore
) -> None:
    assert first.returncode == 0
    shown = stack.type("rlhf", "artifacts", "lineage", "policy/quickstart@latest")
    assert shown.returncode == 0
    for ancestor in ("sft/quickstart@1", "reward-model/quickstart@1", "dataset/quickstart@1", "model/tiny"):
        assert ancestor in shown.stdout
    policy = store.resolve("policy/quickstart@latest")
    assert policy.config["name"] == "quickstart"
    assert policy.source_digest
    assert policy.flow_run
    assert read_json(stack.type("rlhf", "artifacts", "list", "policy", "--json"))


@pytest.mark.stack
def test_a_run_killed_in_mid_ppo_is_started_again_by_itself_and_goes_on_as_it_began(
    stack: LocalStack, model: Path, first: subprocess.CompletedProcess[str], store: ArtifactStore, tmp_path: Path
) -> None:
    assert first.returncode == 0
    episodes = 4  # long enough to be killed in the middle
    given = ["-p", "data=dataset/quickstart@1"]  # the actor and the reward model are the latest
    to_be_killed = [*command(model, seed=1, episodes=episodes, deployment="ppo/quickstart"), *given]
    out = tmp_path / "out"
    with out.open("w") as said:
        run = subprocess.Popen(to_be_killed, env=stack.environment, stdout=said, stderr=said, text=True)
        try:
            wait_for(lambda: committed_by_seed_1(store), "the first committed episode", timeout_s=300)
            began_with = {kind: store.resolve(f"{kind}/quickstart@latest").ref for kind in ("sft", "reward-model")}
            for ref in began_with.values():
                store_another(store, ref)
            killed = the_cluster(stack)
            os.kill(killed.owner.pid, signal.SIGKILL)
            wait_for(lambda: "The run crashed in start 1. It is" in out.read_text(), "the restart's notice")
            committed = committed_by_seed_1(store)
            assert committed is not None
            before = store.read_json(committed, "state.json")["history"]  # now: a run keeps its two newest states
            assert run.wait(timeout=400) == 0, out.read_text()
        finally:
            run.kill()
            run.wait()
    assert committed.version < episodes, "the run was killed too late to show anything"
    last = committed_by_seed_1(store)
    assert last is not None
    history = store.read_json(last, "state.json")["history"]
    assert [record["episode"] for record in history] == list(range(episodes))
    assert history[: len(before)] == before
    assert len({record["incarnation"] for record in history}) == 2
    policy = store.resolve("policy/quickstart@latest")
    assert set(began_with.values()) <= set(policy.parents)
    assert re.fullmatch(
        r"finished: made (policy/quickstart@\d+) \(rlhf artifacts show \1\)", out.read_text().splitlines()[-1]
    )
    [found] = set(re.findall(r"runs/flow-run/([0-9a-f-]{36})", out.read_text()))
    started = ["Pending", "Submitting", "Running"]
    restarted = ["Crashed", RESTARTING, "Scheduled"]
    assert stack.history(found) == ["Scheduled", *started, *restarted, *started, "Completed"]
    assert leftover_processes(killed.mark, killed.head) == cluster_processes(stack) == []


def store_another(store: ArtifactStore, reference: ArtifactRef) -> None:
    """Store a later version of an artifact that is made from the same base model, as another run would."""
    found = store.resolve(reference)
    files: dict[str, Path | bytes] = {each.path: store.cached(reference) / each.path for each in found.files}
    later = store.commit(found.kind, found.name, files | {"other": b"other"}, parents=found.parents)
    assert store.resolve(f"{found.kind}/{found.name}@latest").ref == later != reference


def committed_by_seed_1(store: ArtifactStore) -> Manifest | None:
    states = [each for each in store.list("ppo-state") if each.config["seed"] == 1]
    return max(states, key=lambda each: each.version, default=None)


def the_cluster(stack: LocalStack) -> ClusterRecord:
    """Return the cluster of the run that goes on; the process in which the flow runs owns it."""
    [record] = (stack.home / "clusters").glob("*.json")
    return ClusterRecord.load(record)
