"""Which source of a setting wins, and what a wrong value is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import SettingsError
from infra.settings import STACK_ENV, secrets, settings

LOCAL = {
    "RLHF_STORE_URL": "s3://rlhf",
    "RLHF_S3_ENDPOINT_URL": "http://127.0.0.1:8333",
    "RLHF_S3_ACCESS_KEY": "rlhf",
    "RLHF_S3_SECRET_KEY": "local secret",
    "PREFECT_API_URL": "http://127.0.0.1:4200/api",
}
USERS_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", *LOCAL)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory as `rlhf up` leaves it, and an environment in which nothing else is said."""
    for name in USERS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("RLHF_HOME", str(home))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    (home / STACK_ENV).write_text("".join(f"{name}='{value}'\n" for name, value in LOCAL.items()))
    return home


def test_the_local_stack_is_found_through_its_own_file(home: Path) -> None:
    found = settings()
    assert found.home == home
    assert found.s3_endpoint_url == "http://127.0.0.1:8333"
    assert found.s3_secret_key is not None
    assert found.s3_secret_key.get_secret_value() == "local secret"
    assert found.prefect_api_url == "http://127.0.0.1:4200/api"


@pytest.mark.usefixtures("home")
def test_secrets_do_not_show_when_settings_are_printed() -> None:
    assert "local secret" not in repr(settings())


@pytest.mark.usefixtures("home")
def test_what_no_log_may_show_are_secret_settings_and_variables_that_are_secret_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "somebody:password of the server")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"Gate": "asked for at the gate"}')
    monkeypatch.setenv("HUB_TOKEN", "of some hub")
    monkeypatch.setenv("SHORT_TOKEN", "none")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "not secret")
    monkeypatch.setenv("DB_PASS", "of a database")
    monkeypatch.setenv("FTP_PWD", "of a file server")
    monkeypatch.setenv("PWD", "/where/we/are")
    monkeypatch.setenv("OLDPWD", "/where/we/were")
    found = secrets()
    assert found >= {"local secret", "password of the server", "asked for at the gate", "of some hub"}
    assert found >= {"of a database", "of a file server"}
    assert not found & {"none", "not secret", "http://127.0.0.1:8333", "s3://rlhf", "/where/we/are", "/where/we/were"}


def test_no_log_may_show_a_line_of_a_key_nor_the_password_in_an_address(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home.is_dir()
    monkeypatch.setenv("TLS_KEY", "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADAN\nBgkqhkiG9w0B\n")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:of%20the%20proxy@proxy:3128")
    (tmp_path / ".env").write_text("RLHF_DATABASE_URL=postgresql+asyncpg://rlhf:in:the:database@db/prefect\n")
    found = secrets()
    assert found >= {"MIIEvQIBADAN", "BgkqhkiG9w0B", "of%20the%20proxy", "of the proxy", "in:the:database"}
    assert not found & {"proxy:3128", "db/prefect"}


@pytest.mark.usefixtures("home")
def test_exported_aws_keys_do_not_break_the_local_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "amazon's")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "amazon's secret")
    assert settings().s3_access_key == "rlhf"


def test_another_store_gets_no_key_of_the_local_one(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("RLHF_STORE_URL=s3://theirs/prefix\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "amazon's")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "amazon's secret")
    found = settings()
    assert home.is_dir()
    assert (found.store_url, found.s3_endpoint_url, found.s3_access_key) == ("s3://theirs/prefix", None, "amazon's")
    assert not found.wants_local_store


def test_the_environment_wins_over_the_env_file(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(f"RLHF_HOME={home}\nRLHF_PREFECT_PORT=5000\nPREFECT_API_URL=http://file/api\n")
    monkeypatch.setenv("RLHF_PREFECT_PORT", "5001")
    assert settings().prefect_port == 5001


def test_what_has_changed_since_the_last_answer_is_in_the_next(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settings()
    assert settings() is settings()
    (home / STACK_ENV).write_text("RLHF_S3_ENDPOINT_URL='http://127.0.0.1:9999'\n")
    assert (first.s3_endpoint_url, settings().s3_endpoint_url) == ("http://127.0.0.1:8333", "http://127.0.0.1:9999")
    (tmp_path / ".env").write_text("RLHF_RETENTION=ppo-state=3\n")
    assert settings().retention == "ppo-state=3"
    monkeypatch.setenv("RLHF_RETENTION", "ppo-state=4")
    assert settings().retention == "ppo-state=4"
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    assert settings().s3_endpoint_url is None
    (tmp_path / ".env").unlink()
    monkeypatch.delenv("RLHF_RETENTION")
    assert settings().retention is None


def test_the_users_choice_of_a_wrong_secret_is_kept_so_that_it_can_be_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_S3_SECRET_KEY", "wrong")
    found = settings()
    assert home.is_dir()
    assert found.s3_endpoint_url == LOCAL["RLHF_S3_ENDPOINT_URL"]
    assert found.s3_secret_key is not None
    assert found.s3_secret_key.get_secret_value() == "wrong"


@pytest.mark.usefixtures("home")
def test_a_child_of_the_stack_still_sees_the_local_store_as_local(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings().child_environment().items():
        monkeypatch.setenv(name, value)
    assert settings().wants_local_store
    assert settings().child_environment()["RLHF_S3_SECRET_KEY"] == "local secret"


@pytest.mark.usefixtures("home")
def test_a_value_that_is_no_port_is_told_by_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_S3_PORT", "many")
    with pytest.raises(SettingsError, match=r"RLHF_S3_PORT is 'many': input should be a valid integer"):
        settings()


@pytest.mark.usefixtures("home")
def test_modules_of_reward_functions_are_a_list_with_commas_and_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().reward_modules == ()
    assert "RLHF_REWARD_MODULES" not in settings().child_environment()
    monkeypatch.setenv("RLHF_REWARD_MODULES", "mine, ours.rewards,")
    assert settings().reward_modules == ("mine", "ours.rewards")
    assert settings().child_environment()["RLHF_REWARD_MODULES"] == "mine,ours.rewards"


@pytest.mark.usefixtures("home")
def test_trackers_are_a_list_with_spaces_or_commas_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().trackers == ()
    monkeypatch.setenv("RLHF_TRACKERS", "MLflow, tensorboard mlflow")
    assert settings().trackers == ("mlflow", "tensorboard")


@pytest.mark.parametrize("name", [".env", f"home/{STACK_ENV}"])
def test_a_file_that_is_no_text_is_told(tmp_path: Path, home: Path, name: str) -> None:
    assert home.is_dir()
    (tmp_path / name).write_bytes(b"A=\xff\n")
    with pytest.raises(SettingsError) as caught:
        settings()
    assert str(caught.value) == (f"{tmp_path / name} cannot be read (byte 3 is no UTF-8); correct it, or move it away")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("headers", ['{"X": "€hunter2"}', '{"Ü-hunter2": "x"}'])
def test_headers_that_cannot_be_sent_are_told(monkeypatch: pytest.MonkeyPatch, headers: str) -> None:
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", headers)
    with pytest.raises(SettingsError, match="expected ascii in names of headers, and latin-1 in what they") as caught:
        settings()
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X": "ü"}')
    assert settings().prefect_client_custom_headers["X"].get_secret_value() == "ü"
