"""The compose file has the form that Docker accepts, holds no secret, and agrees with the code and the other files."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from infra.services import seaweed
from infra.services.deploy_elsewhere import IN_THE_IMAGE
from infra.services.prefect_server import prefect_server
from infra.services.store_alone import READY_FILE
from infra.services.take_down import _RUNS_GRACE_S
from infra.services.worker import EVERY_WORKER, WORK_POOL
from infra.settings import CHECKOUT, Settings, read_env_file
from infra.strict_yaml import load_yaml
from tests.unit.deploy.compose_file import COMPOSE, EXAMPLE, FILE, SECRETS, compose, services

OURS = ("server", "store", "deployments", "worker", "worker-gpu")
WORKERS = ("worker", "worker-gpu")
LASTING = ("database", "server", "store", *WORKERS)


def specification() -> Draft202012Validator:
    """The schema of the Compose specification, which the package `check-jsonschema` carries."""
    text = files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    return Draft202012Validator(json.loads(text))


def test_the_file_has_the_form_that_the_compose_specification_demands() -> None:
    document = compose(SECRETS)
    assert [error.message for error in specification().iter_errors(document)] == []
    assert [
        error.message for error in specification().iter_errors(load_yaml(FILE))
    ] == []  # before variables are put in


@pytest.mark.parametrize(
    ("service", "spoilt"),
    [
        ("worker", {"shm": "8gb"}),
        ("server", {"depends_on": {"database": {"condition": "well"}}}),
        ("store", {"user": 1}),
    ],
)
def test_a_key_or_word_that_docker_does_not_know_is_found(service: str, spoilt: dict[str, Any]) -> None:
    document = compose(SECRETS)
    document["services"][service].update(spoilt)
    assert not specification().is_valid(document)


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_secret_that_is_not_set_is_demanded(name: str) -> None:
    for rest in ({**SECRETS, name: ""}, {key: value for key, value in SECRETS.items() if key != name}):
        with pytest.raises(KeyError, match=name):
            compose(rest)


def test_the_example_names_every_variable_and_holds_no_secret() -> None:
    asked = set(re.findall(r"\$\{(\w+)", FILE.read_text()))
    text = EXAMPLE.read_text()
    assert asked | {"COMPOSE_PROFILES"} == set(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]*)=", text, re.MULTILINE))
    assert {name: value for name, value in read_env_file(EXAMPLE).items() if value} == {"COMPOSE_PROFILES": "store,cpu"}
    for name in re.findall(r"\bRLHF_([A-Z0-9_]+)\b", text + FILE.read_text()):
        assert name.lower() in Settings.model_fields, name


def test_the_files_with_secrets_come_neither_into_git_nor_into_the_image() -> None:
    kept_out = (CHECKOUT / ".gitignore").read_text().split()
    (not_copied,) = CHECKOUT.glob("infra/deploy/Dockerfile.dockerignore")
    written = [".env", *(each["path"] for name in WORKERS for each in services()[name]["env_file"])]
    for name in written:
        assert name in kept_out
        assert f"**/{name}" in not_copied.read_text().split()


@pytest.mark.parametrize("name", ["database", *OURS])
def test_every_container_runs_without_rights_on_a_file_system_that_it_cannot_change(name: str) -> None:
    service = services()[name]
    assert service["user"] == ("999:999" if name == "database" else "1000:1000")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc"} & service.keys()
    assert service["logging"] == {"driver": "local"}


def test_nothing_but_the_ui_is_published_and_that_on_the_loopback_address() -> None:
    assert {name: each["ports"] for name, each in services().items() if "ports" in each} == {
        "server": ["127.0.0.1:4200:4200"]
    }
    assert services({**SECRETS, "UI_PORT": "4300"})["server"]["ports"] == ["127.0.0.1:4300:4200"]


def test_the_database_is_out_of_reach_of_workers_and_their_runs() -> None:
    document = compose(SECRETS)
    assert document["networks"]["database"] == {"internal": True}
    assert {name for name, each in document["services"].items() if "database" in each.get("networks", [])} == {
        "database",
        "server",
    }
    for name in ("store", "deployments", *WORKERS):
        assert "POSTGRES_PASSWORD" not in json.dumps(load_yaml(FILE)["services"][name])


@pytest.mark.parametrize("name", LASTING)
def test_what_stays_up_is_watched_started_again_and_given_time_to_end(name: str) -> None:
    service = services()[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
    assert {"interval", "timeout", "retries", "start_period"} <= service["healthcheck"].keys()
    assert "stop_grace_period" in service


def test_each_waits_for_what_it_needs_and_a_bucket_of_ones_own_needs_no_store() -> None:
    found = services()
    store = {"condition": "service_healthy", "required": False}
    needed = {"deployments": {"condition": "service_completed_successfully"}, "store": store}
    assert {name: found[name].get("depends_on") for name in found} == {
        "database": None,
        "store": None,
        "server": {"database": {"condition": "service_healthy"}},
        "deployments": {"server": {"condition": "service_healthy"}},
        "worker": needed,
        "worker-gpu": needed,
    }
    assert {name: found[name]["profiles"] for name in found if "profiles" in found[name]} == {
        "store": ["store"],
        "worker": ["cpu"],
        "worker-gpu": ["gpu"],
    }


def test_a_workers_runs_have_the_time_to_end() -> None:
    grace = services()["worker"]["stop_grace_period"]
    assert grace.endswith("m")
    assert int(grace.removesuffix("m")) * 60 > _RUNS_GRACE_S + 30  # a cluster takes up to 25 s more


def test_all_of_ours_run_one_image_of_this_release_which_has_the_locked_prefect() -> None:
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    assert {services()[name]["image"] for name in OURS} == {f"rlhf-flows:{version}"}
    assert {services({**SECRETS, "IMAGE": "r/f:2"})[name]["image"] for name in OURS} == {"r/f:2"}
    for name in OURS:
        build = services()[name]["build"]
        assert (COMPOSE / build["context"]).resolve() == CHECKOUT
        assert (CHECKOUT / build["dockerfile"]).name == "Dockerfile"
    dockerfile = (CHECKOUT / "infra" / "deploy" / "Dockerfile").read_text()
    assert re.search(rf"^WORKDIR {IN_THE_IMAGE}$", dockerfile, re.MULTILINE)
    assert "sh infra/setup.sh" in dockerfile  # which installs the lock files


def test_the_gpu_worker_is_the_other_one_with_all_gpus() -> None:
    gpu = services()["worker-gpu"]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert {**gpu, "profiles": ["cpu"], "deploy": None} == {**services()["worker"], "deploy": None}


def test_a_worker_is_told_what_ours_are_and_where_everything_is() -> None:
    told = services()["worker"]["environment"]
    assert EVERY_WORKER.items() <= told.items()
    assert f"--pool {WORK_POOL} " in " ".join(services()["worker"]["command"])
    assert told["RLHF_STORE_URL"] == f"s3://{seaweed.BUCKET}"
    assert told["RLHF_S3_ENDPOINT_URL"] == f"http://store:{seaweed.S3_PORT}"
    assert told["RLHF_S3_ACCESS_KEY"] == seaweed.ACCESS_KEY
    assert told["RLHF_S3_REGION"] == seaweed.REGION
    assert services()["store"]["environment"]["RLHF_S3_SECRET_KEY"] == told["RLHF_S3_SECRET_KEY"]
    assert READY_FILE in " ".join(services()["store"]["healthcheck"]["test"])
    amazons = services({**SECRETS, "RLHF_S3_ENDPOINT_URL": "", "RLHF_STORE_URL": "s3://mine/rlhf"})["worker"]
    assert amazons["environment"]["RLHF_S3_ENDPOINT_URL"] == ""
    assert amazons["environment"]["RLHF_STORE_URL"] == "s3://mine/rlhf"


def test_the_server_is_told_what_ours_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / "none"))
    ours = prefect_server(tmp_path, 4200, None, SECRETS["PREFECT_API_AUTH_STRING"], 90).environment
    elsewhere = {"PREFECT_HOME", "PREFECT_SERVER_DATABASE_CONNECTION_URL"}
    told = services()["server"]["environment"]
    assert {name: told.get(name) for name in ours.keys() - elsewhere} == {
        name: value for name, value in ours.items() if name not in elsewhere
    }
    database = services()["database"]["environment"]
    assert told["PREFECT_SERVER_DATABASE_PASSWORD"] == database["POSTGRES_PASSWORD"]
    assert told["PREFECT_SERVER_DATABASE_USER"] == database["POSTGRES_USER"]
    assert told["PREFECT_SERVER_DATABASE_NAME"] == database["POSTGRES_DB"]
    assert told["PREFECT_SERVER_API_AUTH_STRING"] == services()["worker"]["environment"]["PREFECT_API_AUTH_STRING"]
