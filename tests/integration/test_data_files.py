"""The chain takes files by path: preferences in HH-RLHF's form, problems in GSM8K's; real ones where at hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.artifacts import Artifact

from flows.ppo import ppo
from flows.reward_model import reward_model
from flows.sft import sft
from infra.artifacts import open_default_store
from infra.settings import settings
from tests.integration.local_stack import LocalStack
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("forked_flows")]

SMALL = {
    "ppo.prompts_per_episode": 8,
    "ppo.chunk_size": 4,
    "ppo.train_batch_size": 8,
    "ppo.micro_batch_size": 8,
    "ppo.max_new_tokens": 8,
    "ppo.max_prompt_tokens": 1200,
    "ppo.reward": {"verifier": 1.0, "reward_model": 0.0},
    "ppo.cluster": {"num_makers": 1, "object_store_mb": 128},
    "reward_model.pairs": 64,
    "reward_model.max_length": 1000,
    "sft.max_length": 1200,
    "data.too_long": "drop",
    "data.splits": {"sft": 4, "preferences": 4, "ppo": 16, "evaluation": 4},
}


def real(name: str) -> Path | None:
    """Return a file of real data, or None where RLHF_DATA_DIR names none and the test writes its own."""
    directory = settings().data_dir
    return None if directory is None else directory / name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def run(stack: LocalStack, model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("RLHF_HOME", str(stack.home))
    monkeypatch.setenv("RLHF_ENV_FILE", str(stack.env_file))

    def call(flow: Any, data: Path, **parameters: Any) -> Any:
        with stack.prefect_settings():
            return flow(model=model, data=str(data), overrides=SMALL, **parameters)

    return call


@pytest.fixture
def preferences(tmp_path: Path) -> Path:
    if found := real("hh-rlhf/harmless-base-test.jsonl.gz"):
        return found
    rows = [
        {
            "chosen": f"\n\nHuman: What is {n} and {n}?\n\nAssistant: It is {2 * n}.",
            "rejected": f"\n\nHuman: What is {n} and {n}?\n\nAssistant: Go away, number {n}.",
        }
        for n in range(200)
    ]
    path = tmp_path / "preferences.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    if found := real("gsm8k/train.jsonl"):
        return found
    rows = [{"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(200)]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sources(reference: str, role: str) -> list[str]:
    config = open_default_store().resolve(reference).config["data"]
    return [source["path"] for source in config[role]]


@pytest.mark.stack
def test_a_reward_model_is_trained_on_a_preference_file(run: Callable[..., Any], preferences: Path) -> None:
    pairs, scorer = run(reward_model, preferences)
    assert scorer.metrics["heldout_pairs"] > 0
    assert 0 <= scorer.metrics["low"] <= scorer.metrics["accuracy"] <= scorer.metrics["high"] <= 1
    assert sources(scorer.uri, "preferences") == [str(preferences)]
    store = open_default_store()
    dataset = store.resolve(pairs.uri)
    report = json.loads(store.read_bytes(dataset, "report.json"))
    assert report["splits"]["pairs"]["rows"] == len(store.read_bytes(dataset, "pairs.jsonl").splitlines()) > 0
    assert report["splits"]["sft"]["sample"][0]["response"]


@pytest.mark.stack
def test_ppo_runs_on_a_problem_file_with_its_verifier(run: Callable[..., Any], problems: Path) -> None:
    policy = run(ppo, problems, episodes=1)
    assert policy.metrics["episodes"] == 1
    assert 0 <= policy.metrics["last_verifier"] <= 1
    assert sources(policy.uri, "problems") == [str(problems)]
    assert open_default_store().resolve(policy.uri).config["data"]["task"] is None


def test_the_report_of_the_data_is_on_the_runs_page(run: Callable[..., Any], stack: LocalStack, problems: Path) -> None:
    run(sft, problems, name="of-problems")
    with stack.prefect_settings():
        found = Artifact.get("of-problems-data")
    assert found is not None
    assert problems.name in str(found.data)
    assert "## Lengths in tokens" in str(found.data)
