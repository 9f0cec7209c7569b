"""The `rlhf` command: mistakes are one sentence on standard error, never a traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from urllib.request import Request

import pytest

from flows import cli
from infra.errors import StoreError
from infra.services import automations, prefect_api
from rlhf_core.config import PPOConfig
from rlhf_core.errors import DataError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    for name in ("RLHF_STORE_URL", "RLHF_S3_ENDPOINT_URL", "RLHF_S3_PORT", "RLHF_PREFECT_PORT", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def verb() -> None:
        raise error

    monkeypatch.setattr(cli, "app", lambda _: verb())
    return cli.main(["verb"])


@pytest.mark.parametrize("error", [DataError("row 3 is no JSON"), StoreError("row 3 is no JSON")])
def test_a_users_mistake_is_one_sentence_and_status_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(error, monkeypatch) == 1
    assert capsys.readouterr() == ("", "rlhf: row 3 is no JSON\n")


def test_an_interrupt_has_the_shells_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(KeyboardInterrupt(), monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_configuration_out_of_range_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="kl_coef") as caught:
        PPOConfig(kl_coef=-1)
    assert fails_with(caught.value, monkeypatch) == 1
    assert capsys.readouterr().err == "rlhf: kl_coef: Input should be greater than or equal to 0 (got -1)\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a bug"):
        fails_with(ValueError("a bug"), monkeypatch)


def test_a_verbs_status_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", lambda _: 3)
    assert cli.main(["verb"]) == 3


def test_help_names_every_verb_and_loads_none() -> None:
    code = (
        "import sys; from flows.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.stderr.write(' '.join(set(sys.modules) & {'torch', 'prefect', 'ray', 's3fs', 'flows.cli.stack'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for verb in ("up", "run", "status", "doctor", "down", "automations", "artifacts"):
        assert f" {verb} " in result.stdout
    assert result.stderr == ""


def test_status_of_a_stack_that_never_ran_says_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--json"]) == 1
    lines = json.loads(capsys.readouterr().out)
    assert [(line["name"], line["state"]) for line in lines] == [
        ("store", "stopped"),
        ("server", "stopped"),
        ("worker", "stopped"),
        ("supervisor", "none"),
        ("runs", "none"),
    ]


def test_down_on_a_stack_that_never_ran_is_well(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["down"]) == 0
    assert capsys.readouterr().out == "nothing was running\n"
    assert not home.exists()


@pytest.mark.parametrize("variable", ["RLHF_PREFECT_PORT", "RLHF_S3_PORT"])
def test_up_on_a_demanded_port_that_is_occupied_starts_nothing(
    variable: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv(variable, str(port))
        assert cli.main(["up"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"rlhf: port {port} ({variable}) for ")
    assert "starting" not in told.out
    state = json.loads((home / "stack.json").read_text())
    assert (state["services"], state["socket_dir"]) == ({}, None)


def test_up_in_a_home_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "file"))
    assert cli.main(["up"]) == 1
    assert capsys.readouterr().err == (
        f"rlhf: RLHF_HOME is {tmp_path / 'file'}, where nothing can be written (File exists); "
        "set it to a directory of your own\n"
    )


def test_automations_go_to_the_server_that_is_named_which_must_be_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["automations"]) == 1
    assert capsys.readouterr().err == (
        "rlhf: no Prefect server is known here; set PREFECT_API_URL to the address of its API\n"
    )
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    monkeypatch.setattr(automations, "install", lambda api_url: f"told {api_url}")
    assert cli.main(["automations"]) == 0
    assert capsys.readouterr().out == "http://prefect.example/api: told http://prefect.example/api\n"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("PREFECT_API_KEY", "key", "Bearer key"),
        ("PREFECT_API_AUTH_STRING", "me:word", "Basic bWU6d29yZA=="),  # base64 of me:word
        (None, "", None),
    ],
)
def test_a_server_is_told_who_we_are_as_prefects_client_tells_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, value: str, told: str | None
) -> None:
    for name in ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    asked: list[str | None] = []

    def answer(request: Request, timeout_s: float, tls: object) -> BytesIO:
        del timeout_s, tls
        asked.append(request.get_header("Authorization"))
        return BytesIO(b"true")

    monkeypatch.setattr(prefect_api, "open_url", answer)
    assert prefect_api.call("http://prefect.example/api", "GET", "/health")
    assert asked == [told]


def test_an_unknown_verb_offers_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["statsu"])
    assert caught.value.code != 0
    told = capsys.readouterr()
    assert 'Did you mean "status"?' in told.out + told.err
