"""Users' mistakes, told in one sentence before anything expensive starts: flows against the stack's own server."""

from __future__ import annotations

import gzip
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dotenv import dotenv_values
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client

from flows.evaluate import evaluate
from flows.pipeline import pipeline
from flows.ppo import ppo
from flows.reward_model import reward_model
from flows.sft import sft
from infra.artifacts import open_default_store
from infra.artifacts.credentials import options_of
from infra.errors import StoreError
from infra.settings import settings
from tests.integration.local_stack import LocalStack
from tests.tiny_llama import tiny_tokenizer, write_tiny_llama

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
        with stack.prefect_settings():
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
        (
            "number.jsonl",
            lines({"question": "0", "answer": 0}, {"question": "1", "answer": [2]}),
            ["number.jsonl", "answer", "a list"],
        ),
        ("empty.jsonl", b"", ["empty.jsonl", "empty"]),
        ("half.jsonl", lines(PAIR, {"chosen": PAIR["chosen"]}), ["half.jsonl", "row 2", "rejected"]),
        ("cut.jsonl.gz", gzip.compress(lines(PAIR) * 50)[:-20], ["cut.jsonl.gz"]),
        (
            "few.jsonl",
            lines({"question": "1+1", "answer": "#### 2"}),
            ["few.jsonl) has 1 ", "evaluation may have ", "give more"],
        ),
        ("fields.csv", b"question,answer\n1+1,2\n1,2,3\n", ["line 3 of", "fields.csv", "3 fields", "2 columns"]),
        ("latin.csv", "question,answer\nWie groß?,2\n".encode("latin-1"), ["line 2 of", "latin.csv", "UTF-8"]),
        ("same.jsonl", lines(*[{**PAIR, "rejected": PAIR["chosen"]}] * 2), ["same.jsonl", "chosen equals rejected"]),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    told: Callable[..., str], model: str, tmp_path: Path, name: str, body: bytes, parts: list[str]
) -> None:
    (tmp_path / name).write_bytes(body)
    flow = reward_model if b"chosen" in body else pipeline
    message = told(flow, model=model, data=str(tmp_path / name))
    for part in parts:
        assert part in message, message


PROBLEMS = [{"question": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(80)]
TALKS = [{"prompt": f"Say {n}", "response": f"I say {n}."} for n in range(80)]
THOUGHT = {
    "think_start": {"text": "<think>"},
    "think_end": {"text": "</think>"},
    "answer_start": {"text": "<answer>"},
    "answer_end": {"text": "</answer>"},
}
TINY = {"data.splits": {"sft": 8, "preferences": 8, "ppo": 8, "evaluation": 8}, "ppo.prompts_per_episode": 8}
BATCHES = {"ppo.chunk_size": 8, "ppo.train_batch_size": 8, "ppo.micro_batch_size": 8, "evaluation.max_new_tokens": 40}


@pytest.mark.parametrize(
    ("flow", "rows", "overrides", "parts"),
    [
        (sft, PROBLEMS, {"sft.max_length": 16}, ["8 of 8", "sft.max_length = 16", "data.too_long=drop"]),
        (ppo, PROBLEMS, {"ppo.max_prompt_tokens": 8}, ["8 of 8", "ppo.max_prompt_tokens = 8", "the longest"]),
        (
            sft,
            PROBLEMS,
            {"data.verifier": "gsm8k_reward_fn", "template.tags": THOUGHT},
            ["disagree", "gsm8k_reward_fn", "none of", "<answer>"],
        ),
        (ppo, TALKS, {}, ["no answer", "ppo.reward.verifier", "ppo.reward.reward_model"]),
        (evaluate, TALKS, {}, ["no answer", "evaluation.judge"]),
        (reward_model, TALKS, {}, ["reward model needs pairs", "data.preferences"]),
        (sft, [{"prompt": f"Say {n}"} for n in range(40)], {}, ["nothing to learn", "data.demonstrations"]),
        (sft, PROBLEMS, {"template.prompt": None}, ["no chat template", "template.prompt", "template.chat_template"]),
        (
            sft,
            PROBLEMS,
            {"data.evaluation": "same"},
            ["data.problems", "data.evaluation", "share 80 prompts", "What is"],
        ),
    ],
)
def test_data_that_a_run_could_not_use_are_refused_before_training(
    told: Callable[..., str],
    tmp_path: Path,
    flow: Any,
    rows: list[dict[str, str]],
    overrides: dict[str, Any],
    parts: list[str],
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    given: dict[str, Any] = {"model": str(bare_model(tmp_path)), "overrides": TINY | BATCHES | overrides}
    if "data.evaluation" in overrides:
        own = {"data.task": None, "data.task_parameters": {}, "data.problems": str(tmp_path / "rows.jsonl")}
        given["overrides"] |= own | {"data.evaluation": str(tmp_path / "rows.jsonl")}
    else:
        given["data"] = str(tmp_path / "rows.jsonl")
    message = told(flow, **given)
    for part in parts:
        assert part in message, message


def bare_model(directory: Path) -> Path:
    """Return a model whose tokenizer has no chat template; the preset's own template serves it."""
    made = write_tiny_llama(directory / "bare")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    (made / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(made)
    return made


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


@pytest.fixture(scope="module")
def secret(stack: LocalStack) -> str:
    """The store's secret key, which lies in Secret blocks of the stack's own server, as others lie there."""
    known = dotenv_values(stack.home / "stack.env")
    keys = {name: str(known[f"RLHF_S3_{name.upper()}"]) for name in ("access_key", "secret_key")}
    contents = {
        "keys": json.dumps(keys),  # as it is typed into Prefect's form
        "half-of-them": {"secret_key": "hunter2"},
        "wrong-keys": keys | {"secret_key": "hunter2"},
    }
    with stack.prefect_settings():
        for name, content in contents.items():
            Secret(value=content).save(name)
    return keys["secret_key"]


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("keys", None),
        ("no-such-block", "there is no Prefect block secret/no-such-block (RLHF_S3_CREDENTIALS_BLOCK); save it, or"),
        ("half-of-them", "secret/half-of-them (RLHF_S3_CREDENTIALS_BLOCK) holds no keys; expected JSON"),
        ("wrong-keys", "refuses our secret key"),
    ],
)
def test_keys_in_a_prefect_block_open_the_store_or_it_is_said_why_and_they_show_nowhere(
    stack: LocalStack,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    block: str,
    complaint: str | None,
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(stack.home))
    monkeypatch.setenv("RLHF_ENV_FILE", str(stack.env_file))
    monkeypatch.setenv("RLHF_S3_CREDENTIALS_BLOCK", block)
    caplog.set_level(logging.DEBUG)
    told = ""
    with stack.prefect_settings():
        if complaint is None:
            store = open_default_store()
            told += f"{options_of(settings())!r} {settings()!r} {vars(store)!r} {vars(store._backend)!r}"
            assert isinstance(store.list(), list)
        else:
            with pytest.raises(StoreError) as raised:
                open_default_store()
            assert complaint in str(raised.value)
            assert "\n" not in str(raised.value)
            told += "".join(traceback.format_exception(raised.value))
    assert secret not in told + caplog.text
    assert "hunter2" not in told + caplog.text


def test_a_flow_says_that_its_block_is_none_and_its_server_gets_no_secret(
    told: Callable[..., str], secret: str, stack: LocalStack, model: str
) -> None:
    assert "secret/half-of-them" in told(sft, model=model, environment={"RLHF_S3_CREDENTIALS_BLOCK": "half-of-them"})
    with stack.prefect_settings(), get_client(sync_client=True) as client:
        written = [*client.read_logs(limit=200), *client.read_flow_runs(limit=50)]
    assert written
    assert not [each for each in written if secret in each.model_dump_json() or "hunter2" in each.model_dump_json()]


def test_the_command_says_it_in_one_line_and_exits_with_1(stack: LocalStack) -> None:
    result = stack.type("rlhf", "run", "quikstart")
    assert result.returncode == 1
    assert "pipeline/quickstart" in result.stderr
    assert len(result.stderr.splitlines()) == 1
