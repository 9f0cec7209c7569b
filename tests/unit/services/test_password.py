"""The password of the local Prefect server: what is drawn, kept, taken back and refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.errors import ServiceError
from infra.prefect_access import PASSWORD_FILE
from infra.services import bring_up, password, processes, runs
from infra.services.bring_up import _BringingUp
from infra.services.state import write_private
from infra.settings import CHECKOUT, STACK_ENV, Settings


def bringing_up(home: Path, told: list[str], **settings: str) -> _BringingUp:
    return _BringingUp(Settings(home=home, **settings), told.append, CHECKOUT)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No stack lives, and nobody has set anything."""
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setattr(processes, "marked", lambda _: [])
    for name in ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)


def test_a_password_is_drawn_once_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    told: list[str] = []
    first = bringing_up(tmp_path, told)._password(new=False)
    assert password.checked(first, "it") == first
    assert len(first) > 40
    assert (tmp_path / PASSWORD_FILE).stat().st_mode & 0o777 == 0o600
    assert bringing_up(tmp_path, told)._password(new=False) == first
    assert bringing_up(tmp_path, told)._password(new=True) not in (first, password.draw())
    assert told == [], "it is told to nobody"


def test_a_file_that_is_lost_is_written_again_from_our_other_one(tmp_path: Path) -> None:
    told: list[str] = []
    write_private(tmp_path / STACK_ENV, "PREFECT_API_AUTH_STRING='rlhf:known'\n")
    assert bringing_up(tmp_path, told)._password(new=False) == "rlhf:known"
    assert (tmp_path / PASSWORD_FILE).read_text() == "rlhf:known\n"
    assert told == [f"{tmp_path / PASSWORD_FILE} was lost, and is written again: the password was still known here"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o700 | 0o004])
def test_a_file_that_others_can_reach_is_refused_until_another_is_drawn(tmp_path: Path, mode: int) -> None:
    password.keep_password(tmp_path, "rlhf:secret")
    path = tmp_path / PASSWORD_FILE
    path.chmod(mode)
    with pytest.raises(ServiceError) as caught:
        bringing_up(tmp_path, [])._password(new=False)
    assert str(caught.value) == (
        f"{path} can be read by others (its mode is {mode:04o}, not 0600), who may know the password; "
        f"`rlhf up --new-password` draws another, or, if nobody else was here: chmod 600 {path}"
    )
    assert path.read_text() == "rlhf:secret\n"
    assert bringing_up(tmp_path, [])._password(new=True) != "rlhf:secret"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "it is empty"),
        ("\n", "it is empty"),
        ("secret", "it has no colon"),
        ("rlhf:", "it has nothing on one side of the colon"),
        (":secret", "it has nothing on one side of the colon"),
        ("rlhf:geheimnüs", "it has characters beyond ASCII"),
        ("rlhf:a secret", "it has spaces or control characters"),
        ("rlhf:a\nsecret", "it has spaces or control characters"),
        ("rlhf:a${HOME}", "it has ${, which begins the name of a variable where it is read from .env"),
    ],
)
def test_a_file_that_holds_no_password_is_refused_and_its_content_not_told(
    tmp_path: Path, text: str, wrong: str
) -> None:
    password.keep_password(tmp_path, "")
    path = tmp_path / PASSWORD_FILE
    path.write_text(text)
    with pytest.raises(ServiceError) as caught:
        bringing_up(tmp_path, [])._password(new=False)
    assert str(caught.value) == (
        f"{path} is no password for the Prefect server, which takes user:password in ASCII: {wrong}; "
        "`rlhf up --new-password` draws another, or correct the file"
    )


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    password.keep_password(tmp_path, "rlhf:secret")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ServiceError, match="belongs to another user, who may know the password"):
        bringing_up(tmp_path, [])._password(new=False)


def test_what_is_no_file_is_told_whatever_is_wanted(tmp_path: Path) -> None:
    (tmp_path / PASSWORD_FILE).mkdir()
    with pytest.raises(ServiceError, match=r"cannot be read \(Is a directory\)"):
        bringing_up(tmp_path, [])._password(new=False)
    with pytest.raises(ServiceError, match=r"cannot be written \(Is a directory\); move away what is there"):
        bringing_up(tmp_path, [])._password(new=True)


def test_a_password_is_not_taken_back_from_a_file_that_others_could_read(tmp_path: Path) -> None:
    (tmp_path / STACK_ENV).write_text("PREFECT_API_AUTH_STRING='rlhf:known'\n")
    (tmp_path / STACK_ENV).chmod(0o644)
    assert bringing_up(tmp_path, [])._password(new=False) != "rlhf:known"


def test_who_could_read_our_other_file_may_know_what_is_still_in_use(tmp_path: Path) -> None:
    told: list[str] = []
    former = {"PREFECT_API_AUTH_STRING": "rlhf:same", "RLHF_S3_SECRET_KEY": "same", "PREFECT_API_URL": "url"}
    path, bringing = tmp_path / STACK_ENV, bringing_up(tmp_path, told)
    bringing._write_stack_env(former)
    assert told == []
    for now in (former, former | {"PREFECT_API_AUTH_STRING": "rlhf:new"}):
        path.chmod(0o640)
        bringing._write_stack_env(now)
        assert path.stat().st_mode & 0o777 == 0o600
    closed = (
        f"{path} can be read by others (its mode is 0640, not 0600); it is yours alone from now on, but they may know"
    )
    secret = f"{closed} the store's secret: `rlhf down`, then delete {tmp_path / 'store.secret'}, then `rlhf up`"
    assert told == [f"{closed} the password: `rlhf up --new-password` draws another", secret, secret]


@pytest.mark.parametrize("name", ["PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"])
def test_who_could_read_the_env_file_may_know_the_password_that_stood_there(tmp_path: Path, name: str) -> None:
    told: list[str] = []
    env = tmp_path / ".env"
    env.write_text(f"{name}='me:own'\n")
    env.chmod(0o644)
    own = {"PREFECT_SERVER_API_AUTH_STRING": "me:own"} if "SERVER" in name else {}
    bringing = bringing_up(tmp_path, told, **own)
    bringing.password = "me:own"
    bringing._write_files({"PREFECT_API_URL": "url", "PREFECT_API_AUTH_STRING": "me:own"})
    change = "change PREFECT_SERVER_API_AUTH_STRING" if own else "`rlhf up --new-password` draws another"
    assert told[0].endswith(f"for it holds the password, which they may know: {change}")


def test_sockets_go_into_no_directory_that_another_may_have_made_meanwhile(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    bringing = bringing_up(tmp_path, [])
    bringing.state.socket_dir = theirs
    bringing._make_directories()
    ours = bringing.state.socket_dir
    assert ours != theirs
    bringing._make_directories()
    assert bringing.state.socket_dir == ours
    ours.rmdir()


def test_the_users_own_password_is_taken_and_kept(tmp_path: Path) -> None:
    password.keep_password(tmp_path, "rlhf:drawn")
    own = {"PREFECT_SERVER_API_AUTH_STRING": "me:my:own"}
    assert bringing_up(tmp_path, [], **own)._password(new=False) == "me:my:own"
    assert password.read_password(tmp_path) == "me:my:own"
    assert bringing_up(tmp_path, [])._password(new=False) == "me:my:own", "also where it is exported no more"
    with pytest.raises(ServiceError, match="PREFECT_SERVER_API_AUTH_STRING is set: the password is yours to change"):
        bringing_up(tmp_path, [], **own)._password(new=True)


def test_a_password_of_the_users_that_no_server_takes_is_refused_and_not_told(tmp_path: Path) -> None:
    with pytest.raises(ServiceError) as caught:
        bringing_up(tmp_path, [], PREFECT_SERVER_API_AUTH_STRING="hunter2")._password(new=False)
    assert "PREFECT_SERVER_API_AUTH_STRING, as it is set, is no password for the Prefect server" in str(caught.value)
    assert "hunter2" not in str(caught.value)


class Process:
    """One that was started with a password."""

    def __init__(self, held: str) -> None:
        self.held = held

    def environ(self) -> dict[str, str]:
        return {"PREFECT_API_AUTH_STRING": self.held} if self.held else {}


@pytest.mark.parametrize("held", ["rlhf:former", ""])
def test_a_new_password_is_refused_beside_a_flow_run_that_would_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    password.keep_password(tmp_path, "rlhf:former")
    monkeypatch.setattr(runs, "engines", lambda _: [Process(held)])
    with pytest.raises(ServiceError) as caught:
        bringing_up(tmp_path, [])._password(new=True)
    assert str(caught.value) == (
        "1 flow run holds the Prefect server's former password, and would lose the server with another; change it when "
        "it has ended (see `rlhf status`), or end everything with `rlhf down` before"
    )
    assert password.read_password(tmp_path) == "rlhf:former"
    password.keep_password(tmp_path, "rlhf:by-hand")
    with pytest.raises(ServiceError, match="1 flow run holds"):
        bringing_up(tmp_path, [])._password(new=False)


def test_a_run_that_begins_while_the_password_is_changed_keeps_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password.keep_password(tmp_path, "rlhf:former")
    begun: list[Process] = []
    monkeypatch.setattr(runs, "engines", lambda _: begun)
    monkeypatch.setattr(bring_up.processes, "end", lambda _, **__: begun.append(Process("rlhf:former")))
    bringing = bringing_up(tmp_path, [])
    record = type("Record", (), {"process": lambda _: Process("rlhf:former")})()
    bringing.state.services["worker"] = record
    assert bringing._password(new=True) == "rlhf:former"
    assert "1 flow run holds" in str(bringing.refusal)
    assert password.read_password(tmp_path) == "rlhf:former"
