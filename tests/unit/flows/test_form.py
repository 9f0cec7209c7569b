"""The schema of a flow's parameters: it takes what the configuration takes, and refuses what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from flows.evaluate import evaluate
from flows.pipeline import pipeline
from flows.ppo import ppo
from flows.presets import preset_names, resolve
from flows.presets.form import overrides_schema
from flows.presets.keys import keys
from flows.reward_model import reward_model
from flows.sft import sft
from rlhf_core.errors import ConfigError

SCHEMA = parameter_schema(pipeline).model_dump_for_openapi()

TAKEN: list[Any] = [
    None,
    {},
    {"ppo.lr": 1e-5, "ppo": {"lora": {"r": 8}}, "sft": {}},
    {"ppo.lr": "1e-5"},  # what YAML makes of 1e-5
    {"ppo.kl_target": None, "data.demonstrations": None, "ppo.reward.functions": None},
    {"data.splits": None},
    {"data.splits": {"sft": 300, "evaluation": 0}},
    {"data.demonstrations": "train.jsonl"},
    {"data": {"demonstrations": {"path": "a", "limit": 3}}},
    {"data.demonstrations": ["a", {"path": "b"}]},
    {"data.task_parameters.max_value": 50},
    {"data.lint": "drop"},
    {"data.lint": {"echo": False}},
    {
        "template.tags.answer_start": {"text": "<a>"},
        "template.tags.answer_start.num_occur": 2,
        "template.tags.answer_end": {"text": "</a>"},
    },
    {"data.arrivals": {}},
    {"ppo.reward.functions.gsm8k_reward_fn": 0.2},
    {"template.stop": ["x"], "sft.lora.target_modules": "all-linear"},
    {"name": "mine", "seed": 3},
]
REFUSED: list[tuple[Any, str]] = [
    ({"ppo.lr": -1}, "ppo.lr"),
    ({"ppo": {"lr": -1}}, "overrides.ppo.lr"),
    ({"ppo": {"lr": 0}}, "overrides.ppo.lr"),
    ({"ppo.lr": 0}, "ppo.lr"),
    ({"ppo": {"learning_rate": 1}}, "'learning_rate' was unexpected"),
    ({"ppo.learning_rate": 1}, "there is no configuration key of this name"),
    ({"ppo.episodes": "many"}, "ppo.episodes"),
    ({"ppo.engine": "vlm"}, "'vlm' is not one of"),
    ({"ppo.lr": None}, "ppo.lr"),
    ({"pp": {}}, "there is no configuration key"),
    ("ppo.lr=1", "overrides"),
]


@pytest.mark.parametrize("overrides", TAKEN, ids=str)
def test_the_server_takes_what_a_run_takes(overrides: Any) -> None:
    assert validate({"overrides": overrides}, SCHEMA) == []
    resolve("quickstart", overrides=overrides)


@pytest.mark.parametrize(("overrides", "told"), REFUSED, ids=str)
def test_the_server_refuses_a_wrong_override_and_says_where(overrides: Any, told: str) -> None:
    with pytest.raises(Exception, match="Validation failed") as refused:
        validate({"overrides": overrides}, SCHEMA, raise_on_error=True)
    assert told in str(refused.value)
    assert len(str(refused.value)) < 400
    with pytest.raises(ConfigError):
        resolve("quickstart", overrides=overrides)


@pytest.mark.parametrize(
    "wrong", [{"preset": "quikstart"}, {"episodes": 0}, {"seed": -1}, {"seed": 2**32}, {"episodes": 2.5}], ids=str
)
def test_the_server_refuses_a_wrong_parameter(wrong: dict[str, Any]) -> None:
    assert validate(wrong, SCHEMA)
    assert validate({"preset": "gsm8k", "episodes": None, "seed": 2**32 - 1}, SCHEMA) == []


@pytest.mark.parametrize("preset", preset_names())
def test_every_value_of_every_preset_is_one_that_its_form_takes(preset: str) -> None:
    values = resolve(preset).model_dump(mode="json")
    assert validate({"overrides": values}, SCHEMA) == []
    dotted = {f"{section}.{key}": value for section in ("sft", "ppo", "gate") for key, value in values[section].items()}
    assert validate({"overrides": dotted}, SCHEMA) == []


def test_every_key_of_the_configuration_may_be_set() -> None:
    known = [key.name for key in keys()]
    errors = validate(dict.fromkeys(known), overrides_schema())
    refused = {error.path[-1] for error in errors if error.schema == overrides_schema()["additionalProperties"]}
    assert refused == set()


def test_a_form_sends_nothing_that_was_not_touched() -> None:
    told = json.dumps(overrides_schema())
    assert '"default":' not in told.replace('"default": {"title"', "").replace('"default": {"enum"', "")  # lint's key
    assert '"required"' not in told
    assert '"type": "boolean"' not in json.dumps(overrides_schema()["properties"]["ppo"])  # it would be sent as false


@pytest.mark.parametrize("flow", [pipeline, sft, reward_model, ppo, evaluate], ids=lambda flow: flow.name)
def test_a_deployments_schema_stays_below_100_kb_and_has_help(flow: Any) -> None:
    schema = parameter_schema(flow).model_dump_for_openapi()
    assert schema["properties"]["preset"]["enum"] == preset_names()
    assert schema["properties"]["seed"]["anyOf"][0] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**32,
        "not": {"enum": [2**32]},
    }
    form = schema["properties"]["overrides"]["anyOf"][0]["properties"]
    assert form["ppo"]["properties"]["kl_coef"]["description"]
    assert len(json.dumps(schema)) < 100_000


@pytest.mark.parametrize("flow", [pipeline, sft, reward_model, ppo, evaluate], ids=lambda flow: flow.name)
def test_a_run_takes_its_parameters_as_they_are(flow: Any) -> None:
    given = {"preset": "quickstart", "seed": 3, "overrides": {"ppo.lr": "1e-5"}}
    assert flow.validate_parameters(given).items() >= given.items()
