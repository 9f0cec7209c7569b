"""Users' mistakes, told in one sentence before anything expensive starts: flows against the stack's own server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dotenv import dotenv_values
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.evaluate import evaluate
from flows.pipeline import pipeline
from flows.ppo import ppo
from flows.reward_model import reward_model
from flows.sft import sft
from infra.artifacts import open_default_store
from tests.integration.local_stack import LocalStack
from tests.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.integration

PAIR = {"chosen": "\n\nHuman: hi\n\nAssistant: hello", "rejected": "\n\nHuman: hi\n\nAssistant: go away"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def told(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that calls a flow, sees it fail, and returns what the run's state says."""
    monkeypatch.setenv("RLHF_HOME", str(stack.home))
    monkeypatch.setenv("RLHF_ENV_FILE", str(stack.env_file))

    def call(flow: Any, **parameters: Any) -> str:
        store = open_default_store()
        before = [manifest.ref for manifest in store.list()]
        for name, value in parameters.pop("environment", {}).items():
            monkeypatch.setenv(name, value)
        with temporary_settings({PREFECT_API_URL: stack.api_url}):
            state = flow(**parameters, return_state=True)
        assert state.is_failed()
        message = str(state.message)
        assert "\n" not in message
        assert "Traceback" not in message
        assert [manifest.ref for manifest in store.list()] == before, "nothing is made, nothing is lost"
        return message

    return call


def lines(*rows: object) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "body", "parts"),
    [
        ("broken.jsonl", lines({"question": "1+1", "answer": "#### 2"}, '{"question": '), ["broken.jsonl", "row 2"]),
        ("wrong.jsonl", lines({"query": "1+1", "reply": "2"}), ["wrong.jsonl", "query", "reply"]),
        ("number.jsonl", lines({"question": "1+1", "answer": 2}), ["number.jsonl", "answer"]),
        ("empty.jsonl", b"", ["empty.jsonl", "empty"]),
        ("half.jsonl", lines(PAIR, {"chosen": PAIR["chosen"]}), ["half.jsonl", "row 2", "rejected"]),
        ("cut.jsonl.gz", gzip.compress(lines(PAIR) * 50)[:-20], ["cut.jsonl.gz"]),
        ("few.jsonl", lines({"question": "1+1", "answer": "#### 2"}), ["few.jsonl has 1 ", "problems"]),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    told: Callable[..., str], model: str, tmp_path: Path, name: str, body: bytes, parts: list[str]
) -> None:
    (tmp_path / name).write_bytes(body)
    message = told(pipeline, model=model, data=str(tmp_path / name))
    for part in parts:
        assert part in message, message


def test_a_missing_file_gets_its_nearest_neighbour(told: Callable[..., str], model: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(lines(PAIR))
    message = told(reward_model, model=model, data=str(tmp_path / "trian.jsonl"))
    assert "trian.jsonl" in message
    assert "train.jsonl" in message


@pytest.mark.parametrize(
    ("flow", "parameters", "parts"),
    [
        (pipeline, {"preset": "quikstart"}, ["quikstart", "quickstart"]),
        (sft, {"overrides": {"sft.learning_rate": 1}}, ["sft.learning_rate", "sft."]),
        (ppo, {"overrides": {"ppo.eps_clip": 2}}, ["ppo.eps_clip", "less than 1", "2"]),
        (ppo, {"episodes": 0}, ["ppo.episodes", "0"]),
        (sft, {"model": "/no/such/model"}, ["/no/such/model"]),
        (pipeline, {"overrides": {"template.prompt": "no place"}}, ["template.prompt", "{prompt}", "no place"]),
        (pipeline, {"overrides": {"data.splits.evaluation": 1}}, ["data.splits.evaluation", "2"]),
        (pipeline, {"overrides": {"data.task": "number_sortin"}}, ["number_sortin", "number_sorting"]),
        (ppo, {"preset": "llama7b"}, ["GB", "this machine has", "-p model=PATH"]),
    ],
)
def test_a_wrong_parameter_is_named_with_what_is_right(
    told: Callable[..., str], model: str, flow: Any, parameters: dict[str, Any], parts: list[str]
) -> None:
    if parameters.get("preset") == "llama7b":
        # A size that no machine holds, so that it is refused wherever the tests run.
        given = {**parameters, "overrides": {"model.num_parameters": 10**13}}
    else:
        given = {"model": model, **parameters}
    message = told(flow, **given)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("flow", "parameters"),
    [
        (ppo, {"actor": "sft/no-such-model@1"}),
        (pipeline, {"reward_model": "reward-model/no-such-model"}),
        (sft, {"data": "dataset/no-such-data@7"}),
        (evaluate, {"actor": "policy/no-such-model@champion"}),
        (ppo, {"actor": "no-such-kind/x"}),
    ],
)
def test_an_unknown_reference_is_named_before_anything_is_made(
    told: Callable[..., str], model: str, flow: Any, parameters: dict[str, str]
) -> None:
    [reference] = parameters.values()
    assert reference.split("@")[0] in told(flow, model=model, **parameters)


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"RLHF_S3_SECRET_KEY": "wrong"}, ["secret"]),
        ({"RLHF_STORE_URL": "s3://no-such-bucket"}, ["no-such-bucket"]),
        ({"RLHF_S3_ENDPOINT_URL": "http://127.0.0.1:9"}, ["127.0.0.1:9"]),
        ({"RLHF_STORE_URL": "ftp://somewhere"}, ["ftp://somewhere", "s3://", "file://"]),
    ],
)
def test_a_store_that_cannot_be_used_says_why(
    stack: LocalStack, told: Callable[..., str], model: str, environment: dict[str, str], parts: list[str]
) -> None:
    usual = {name: value for name, value in dotenv_values(stack.home / "stack.env").items() if value is not None}
    message = told(sft, model=model, environment=usual | environment)
    for part in parts:
        assert part in message, message


def test_the_command_says_it_in_one_line_and_exits_with_1(stack: LocalStack) -> None:
    result = stack.type("rlhf", "run", "quikstart")
    assert result.returncode == 1
    assert "pipeline/quickstart" in result.stderr
    assert len(result.stderr.splitlines()) == 1
