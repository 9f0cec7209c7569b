"""Presets started from Prefect's form, which is drawn from the configuration: a wrong value first, then a right one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from flows.presets import resolve
from infra.errors import ServiceError
from infra.services import prefect_api
from tests.integration.browser import Browser, browser
from tests.integration.local_stack import LocalStack, wait_for
from tests.integration.test_hostile_texts import enter

pytestmark = [pytest.mark.integration, pytest.mark.stack]

FIELD = """
    const labels = [...document.querySelectorAll("label")];
    const label = labels.find(each => each.textContent.trim().startsWith({name} + " ("));
    const field = label && (document.getElementById(label.htmlFor)
        || label.closest(".schema-form-property").querySelector("input"));
    field?.setAttribute("data-form", {name});
    field?.scrollIntoView({{block: "center"}});
    field?.select();
    return Boolean(field);
"""
"""Marks the first field of a name, and selects what stands in it."""
SAID = "return document.querySelector('input:invalid')?.validationMessage"
BUTTON = 'return [...document.querySelectorAll("button")].find(each => each.textContent.trim() === {name})'


def press(window: Browser, name: str) -> None:
    wait_for(lambda: window.click(BUTTON.format(name=json.dumps(name))), f"the button {name}")


def fill(window: Browser, name: str, value: str) -> None:
    """Put a value in the place of what a field holds."""
    wait_for(lambda: window.run(FIELD.format(name=json.dumps(name))), f"the field {name}")
    assert window.type(f"[data-form={name}]", value)


def start_from_form(window: Browser, api_url: str, home: str, deployment: str, name: str, right: str) -> dict[str, Any]:
    """Give a field of the form a value that is out of its range, then a right one; return the run's parameters."""
    found = prefect_api.deployment(api_url, deployment)
    assert found is not None
    where = {"deployments": {"id": {"any_": [found["id"]]}}}
    window.open(f"{home}/deployments/deployment/{found['id']}/run")
    press(window, "dict")  # of `overrides`: the form by section
    fill(window, name, "-1")
    press(window, "Submit")
    wait_for(lambda: window.run(SAID) == "Value must be greater than or equal to 0.", "the form to refuse it")
    assert window.run("return location.pathname").endswith("/run")
    assert prefect_api.flow_runs(api_url, where) == []
    fill(window, name, right)
    press(window, "Submit")
    wait_for(lambda: prefect_api.flow_runs(api_url, where), "the run")
    [run] = prefect_api.flow_runs(api_url, where)
    return dict(run["parameters"])


@pytest.fixture
def paused(stack: LocalStack) -> Iterator[str]:
    """The API of a stack whose runs wait; those that a test made are deleted."""
    there = {each["id"] for each in prefect_api.flow_runs(stack.api_url, {})}
    prefect_api.call(stack.api_url, "PATCH", "/work_pools/rlhf", {"is_paused": True})
    try:
        yield stack.api_url
    finally:
        for run in prefect_api.flow_runs(stack.api_url, {}):
            if run["id"] not in there:
                prefect_api.call(stack.api_url, "DELETE", f"/flow_runs/{run['id']}")
        prefect_api.call(stack.api_url, "PATCH", "/work_pools/rlhf", {"is_paused": False})


def test_three_presets_are_started_from_the_form(stack: LocalStack, paused: str) -> None:
    with browser() as window:
        home = enter(window, stack, "v2")
        for deployment, name, right, section in (
            ("ppo/gsm8k", "kl_coef", "0.07", "ppo"),
            ("sft/hh-rlhf", "weight_decay", "0.01", "sft"),
            ("pipeline/quickstart", "vf_coef", "0.2", "ppo"),
        ):
            parameters = start_from_form(window, paused, home, deployment, name, right)
            preset, overrides = deployment.partition("/")[2], parameters.pop("overrides")
            assert {key: value for key, value in parameters.items() if value is not None} == {"preset": preset}
            assert resolve(preset, overrides=overrides) == resolve(preset, overrides={f"{section}.{name}": right})


@pytest.mark.parametrize(
    "wrong",
    [
        {"preset": "quikstart"},
        {"episodes": 0},
        {"seed": -1},
        {"epsiodes": 2},
        {"overrides": {"ppo.lr": -1}},
        {"overrides": {"ppo": {"learning_rate": 1}}},
        {"overrides": {"ppo.learning_rate": 1}},
        {"overrides": "ppo.lr=1"},
    ],
    ids=str,
)
def test_the_server_makes_no_run_of_a_wrong_parameter(paused: str, wrong: dict[str, Any]) -> None:
    found = prefect_api.deployment(paused, "pipeline/quickstart")
    assert found is not None
    where = {"deployments": {"id": {"any_": [found["id"]]}}}
    before = len(prefect_api.flow_runs(paused, where))
    with pytest.raises(ServiceError, match=r"409|422"):
        prefect_api.call(paused, "POST", f"/deployments/{found['id']}/create_flow_run", {"parameters": wrong})
    assert len(prefect_api.flow_runs(paused, where)) == before
