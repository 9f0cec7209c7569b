"""Who we are to the S3 server: where that comes from, and where it must not go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from httpx import ConnectError
from prefect.blocks.system import Secret

from infra.artifacts import S3Options, open_default_store
from infra.artifacts.credentials import options_of
from infra.errors import InfraError, SettingsError, StoreError
from infra.settings import settings
from tasks.context import data_access

VARIABLES = (
    *(f"AWS_{name}" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "ENDPOINT_URL")),
    *(f"RLHF_S3_{name}" for name in ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN", "PROFILE", "CREDENTIALS_BLOCK")),
    *("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "RLHF_S3_ENDPOINT_URL", "RLHF_STORE_SINGLE_WRITER"),
)
SECRETS = {"access_key": "hunter-key", "secret_key": "hunter2", "session_token": "hunter-token"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nothing is said but that the store is in a bucket."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_STORE_URL", "s3://bucket/prefix")


def keys(options: S3Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SECRETS}


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("AWS_", ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")),
        ("RLHF_S3_", ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN")),
    ],
)
def test_keys_come_from_the_environment_with_their_session_token(
    monkeypatch: pytest.MonkeyPatch, prefix: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "weaker-than-keys" if prefix == "AWS_" else "")
    for name, value in zip(names, SECRETS.values(), strict=True):
        monkeypatch.setenv(prefix + name, value)
    options = options_of(settings())
    assert keys(options) == SECRETS
    assert options.profile is None
    assert options.arguments() == dict(zip(("key", "secret", "token"), SECRETS.values(), strict=True))


@pytest.mark.parametrize("variable", ["RLHF_S3_PROFILE", "AWS_PROFILE"])
def test_a_profile_is_handed_to_botocore_and_to_children(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "research")
    assert options_of(settings()).arguments() == {"profile": "research"}
    assert settings().child_environment()["RLHF_S3_PROFILE"] == "research"
    assert data_access(settings()).storage_options() == {"profile": "research"}  # data's server is the store's


def test_a_profile_that_was_named_for_us_wins_over_keys_that_happen_to_be_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLHF_S3_PROFILE", "research")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "else")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    options = options_of(settings())
    assert (options.profile, options.access_key, options.region) == ("research", None, "eu-central-1")


def test_a_profile_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("RLHF_S3_PROFILE", "reserch")
    with pytest.raises(StoreError, match=r"profile \(reserch\) could not be found; name one of ~/\.aws in RLHF_S3_PRO"):
        open_default_store()


def test_without_any_keys_botocore_looks_for_an_instances_role_and_we_say_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert options_of(settings()).arguments() == {}
    with pytest.raises(StoreError, match="no access key for the S3 server of AWS; set RLHF_S3_ACCESS_KEY and"):
        open_default_store()


def test_two_ways_to_say_who_we_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_S3_ACCESS_KEY", SECRETS["access_key"])
    monkeypatch.setenv("RLHF_S3_CREDENTIALS_BLOCK", "bucket-keys")
    with pytest.raises(SettingsError, match="RLHF_S3_ACCESS_KEY and RLHF_S3_CREDENTIALS_BLOCK are set") as raised:
        options_of(settings())
    assert SECRETS["access_key"] not in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ("RLHF_S3_ACCESS_KEY", "an access key for the S3 server is set, and no secret key; set RLHF_S3_ACCESS_KEY and"),
        ("AWS_ACCESS_KEY_ID", "an access key for the S3 server is set, and no secret key"),
        ("RLHF_S3_SECRET_KEY", "a secret key for the S3 server is set, and no access key"),
        ("AWS_SECRET_ACCESS_KEY", "a secret key for the S3 server is set, and no access key"),
        ("RLHF_S3_SECRET_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY", "a secret key for the S3 server is set, and no"),
        ("RLHF_S3_ACCESS_KEY AWS_SECRET_ACCESS_KEY", "an access key for the S3 server is set, and no secret key"),
        ("AWS_SESSION_TOKEN", "a session token for the S3 server is set, and no keys are; set"),
    ],
)
def test_half_a_pair_of_keys_is_refused_instead_of_passed_over(
    monkeypatch: pytest.MonkeyPatch, variables: str, complaint: str
) -> None:
    for name in variables.split():
        monkeypatch.setenv(name, "hunter2")
    with pytest.raises(SettingsError, match=complaint) as raised:
        open_default_store()
    assert "hunter2" not in str(raised.value)
    with pytest.raises(SettingsError, match=complaint):
        data_access(settings()).storage_options()  # not before: data may lie on this machine


def test_half_a_pair_in_code_is_refused_as_well() -> None:
    with pytest.raises(SettingsError, match="an access key for the S3 server is set, and no secret key"):
        S3Options("http://host", access_key="hunter2")


def test_where_no_store_is_named_it_is_said_how_one_is_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_STORE_URL")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "for-something-else")
    with pytest.raises(
        SettingsError, match=r"no artifact store is named: `rlhf up` starts one .* set RLHF_STORE_URL to s3"
    ):
        open_default_store()


@pytest.mark.parametrize("content", [SECRETS, json.dumps(SECRETS)])
def test_keys_come_from_a_prefect_block_and_children_get_its_name_alone(
    monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.setenv("RLHF_S3_CREDENTIALS_BLOCK", "bucket-keys")
    asked = []

    def load(name: str, **_: Any) -> Secret[Any]:
        asked.append(name)
        return Secret(value=content)

    monkeypatch.setattr(Secret, "load", load)
    assert keys(options_of(settings())) == SECRETS
    assert asked == ["bucket-keys"]
    assert settings().child_environment()["RLHF_S3_CREDENTIALS_BLOCK"] == "bucket-keys"
    assert not set(SECRETS.values()) & set(settings().child_environment().values())


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (ValueError("Unable to find block document"), "there is no Prefect block secret/bucket-keys"),
        (ConnectError("hunter2"), "cannot be read: ConnectError; check PREFECT_API_URL"),
        (Secret(value={"access_key": "hunter-key"}), "holds no keys; expected JSON"),
        (Secret(value={"access_key": "hunter-key", "secret_key": ""}), "holds no keys; expected JSON"),
        (Secret(value="hunter2"), "holds no keys; expected JSON"),
    ],
)
def test_a_block_that_gives_no_keys_is_told_without_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, complaint: str
) -> None:
    def load(name: str, **_: Any) -> Any:
        assert name == "bucket-keys"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setenv("RLHF_S3_CREDENTIALS_BLOCK", "bucket-keys")
    monkeypatch.setattr(Secret, "load", load)
    with pytest.raises(InfraError, match=complaint) as raised:
        open_default_store()
    assert "hunter" not in str(raised.value)


def test_what_children_need_is_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(f"RLHF_S3_{name.upper()}", value)
    monkeypatch.setenv("RLHF_STORE_SINGLE_WRITER", "true")
    ours = options_of(settings())
    children = settings().child_environment()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in children.items():
        monkeypatch.setenv(name, value)
    assert options_of(settings()) == ours
    assert ours.single_writer


def test_nothing_of_it_shows_when_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(f"RLHF_S3_{name.upper()}", value)
    assert "hunter" not in f"{settings()!r} {settings()} {options_of(settings())!r}"
