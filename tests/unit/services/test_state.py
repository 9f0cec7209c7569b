"""The stack's state: whole or not at all, and changed by one command at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from dotenv import set_key

from infra.errors import ServiceError
from infra.services.bring_up import write_block
from infra.services.state import STATE_FILE, StackState, is_private_directory, locked, make_home, write_private
from infra.settings import read_env_file

HOLDER = """
import sys
from pathlib import Path
from infra.services.state import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_state_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    state = StackState(ports={"s3": 8333}, filed={"a server": {"pipeline/nightly": {"tags": {"nightly": True}}}})
    state.save(tmp_path)
    assert StackState.load(tmp_path) == state


def test_two_new_stacks_have_different_marks(tmp_path: Path) -> None:
    assert StackState.load(tmp_path).id != StackState.load(tmp_path).id


def test_a_damaged_state_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"services": ')
    with pytest.raises(ServiceError, match=rf"{tmp_path / STATE_FILE} is damaged"):
        StackState.load(tmp_path)


def test_private_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    write_private(tmp_path / "secret", "x")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_what_cannot_be_replaced_is_told_and_no_secret_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    with pytest.raises(ServiceError, match=r"secret cannot be written \(Is a directory\); move away what is there"):
        write_private(tmp_path / "secret", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_directory_is_private_if_it_is_ours_and_nobody_else_enters_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    assert not is_private_directory(place)
    place.mkdir(mode=0o700)
    assert is_private_directory(place)
    (tmp_path / "link").symlink_to(place)
    assert not is_private_directory(tmp_path / "link")
    place.chmod(0o711)
    assert not is_private_directory(place)
    place.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not is_private_directory(place)


def test_a_home_that_cannot_be_written_is_told_by_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ServiceError, match=r"RLHF_HOME is .*, where nothing can be written"):
        make_home(tmp_path / "file" / "home")


def test_a_second_command_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    told: list[str] = []
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ServiceError, match="another rlhf command has been changing the stack"):  # noqa: SIM117
            with locked(tmp_path, told.append, timeout_s=0.3):
                pass
        assert told == [f"another rlhf command (process {holder.pid}) is changing the stack; waiting"]
        holder.communicate("", timeout=20)
        with locked(tmp_path, told.append, timeout_s=5):
            pass
    assert len(told) == 1, "the lock is free once its holder has ended"


def test_the_users_own_lines_in_the_env_file_stay(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text("# mine\nHF_HOME=/models\n")
    write_block(env, {"PREFECT_API_URL": "http://127.0.0.1:1/api"})
    write_block(env, {"PREFECT_API_URL": "http://127.0.0.1:2/api"})
    lines = env.read_text().splitlines()
    assert lines[:2] == ["# mine", "HF_HOME=/models"]
    assert [line for line in lines if line.startswith("PREFECT_API_URL")] == [
        "PREFECT_API_URL='http://127.0.0.1:2/api'"
    ]


@pytest.mark.parametrize("value", ["/home/o'hara/runs", "a\\b", "ends with \\", "'", "\\'", "a # b", ' "x" ', "ünï"])
def test_a_value_comes_back_from_the_env_file_as_it_was(tmp_path: Path, value: str) -> None:
    env = tmp_path / ".env"
    write_block(env, {"RLHF_HOME": value, "PREFECT_API_URL": "http://127.0.0.1:1/api"})
    assert read_env_file(env) == {"RLHF_HOME": value, "PREFECT_API_URL": "http://127.0.0.1:1/api"}
    set_key(tmp_path / "theirs", "RLHF_HOME", value)  # the library's own
    assert (tmp_path / "theirs").read_text().strip("\n") in env.read_text().splitlines()


def test_what_the_user_writes_below_our_lines_stays_too(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    write_block(env, {"A": "1"})
    env.write_text(env.read_text() + "HF_HOME=/models\n")
    write_block(env, {"A": "2"})
    assert "HF_HOME=/models" in env.read_text().splitlines()
    assert "A='1'" not in env.read_text()


@pytest.mark.parametrize(("before", "told"), [(0o644, 0o644), (0o660, 0o660), (0o600, None), (None, None)])
def test_an_env_file_is_for_its_owner_alone_and_what_it_was_before_is_told(
    tmp_path: Path, before: int | None, told: int | None
) -> None:
    env = tmp_path / ".env"
    if before is not None:
        env.write_text("# mine\n")
        env.chmod(before)
    assert write_block(env, {"A": "1"}) == told
    assert env.stat().st_mode & 0o777 == 0o600
    assert write_block(env, {"A": "1"}) is None
    env.chmod(0o644)
    assert write_block(env, {"A": "1"}) == 0o644, "also where nothing else changes"
    assert env.stat().st_mode & 0o777 == 0o600


def test_an_env_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="cannot be written"):
        write_block(tmp_path / "no" / "such" / "directory" / ".env", {"A": "1"})


def test_an_env_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_bytes(b"A=\xff\n")
    with pytest.raises(ServiceError, match=r"\.env cannot be read \(byte 3 is no UTF-8\)"):
        write_block(env, {"A": "1"})
    assert env.read_bytes() == b"A=\xff\n"
