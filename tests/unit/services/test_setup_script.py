"""`make setup` names what is missing in one sentence, and does nothing when nothing has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.settings import CHECKOUT
from rlhf_core.strategy.factory import INSTALL

TOOLS = ("cat", "dirname", "grep", "mkdir", "rm", "sed", "sh", "sleep", "tail", "tr")
NEEDED = ("requirements.txt", "requirements-dev.txt", "pyproject.toml", "infra/setup.sh", "Makefile")
PYTHON_311 = """#!/bin/sh
case "$*" in
    *ensurepip*) exit {ensurepip} ;;
    *hashlib*) echo digest ;;
    *--version*) echo Python 3.11.0 ;;
esac
"""

SETS_UP = """#!/bin/sh
case "$*" in
    *ensurepip*) exit 0 ;;
    *"-m venv"*) exec {python} -c "
import os, pathlib
venv = pathlib.Path('.venv')
(venv / 'bin').mkdir(parents=True, exist_ok=True)
(venv / 'pyvenv.cfg').write_text('command = python3 -m venv --clear ' + os.path.abspath(venv) + chr(10))
(venv / 'bin' / 'python').write_text('#!/bin/sh' + chr(10) + 'true >.venv/bin/rlhf; chmod +x .venv/bin/rlhf' + chr(10))
(venv / 'bin' / 'python').chmod(0o755)
" ;;
esac
exec {python} "$@"
"""
"""A Python whose `venv` is quick, with a `pip` that installs nothing but a command."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, and a directory of programs beside it that holds the bare minimum."""
    for name in NEEDED:
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / "checkout" / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (programs / tool).symlink_to(found)
    return tmp_path / "checkout"


def program(checkout: Path, name: str, text: str) -> None:
    path = checkout.parent / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def setup(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "infra/setup.sh"],
        cwd=checkout,
        env={"PATH": str(checkout.parent / "bin"), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ready_to_install(checkout: Path) -> None:
    program(checkout, "c++", "#!/bin/sh\n")
    program(checkout, "python3", SETS_UP.format(python=sys.executable))
    (checkout.parent / "bin" / "chmod").symlink_to(shutil.which("chmod") or "")


def refuses(result: subprocess.CompletedProcess[str], sentence: str) -> bool:
    return result.returncode == 1 and result.stdout == "" and result.stderr.splitlines() == [f"setup: {sentence}"]


def test_a_machine_without_python_is_told_what_to_install(checkout: Path) -> None:
    assert refuses(
        setup(checkout),
        "python3 is missing; install Python 3.11 (for instance: apt-get install python3.11 python3.11-venv)",
    )


def test_another_python_is_named_with_its_version(checkout: Path) -> None:
    program(checkout, "python3", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    assert refuses(
        setup(checkout),
        "python3 is Python 3.9.2, but Python 3.11 is needed; install it, or name it: "
        "make setup PYTHON=/path/to/python3.11",
    )


def test_a_python_without_venv_is_told_what_to_install(checkout: Path) -> None:
    program(checkout, "python3", PYTHON_311.format(ensurepip=1))
    assert refuses(
        setup(checkout),
        "python3 has no venv or ensurepip; install them (for instance: apt-get install python3.11-venv)",
    )


def test_a_machine_without_a_compiler_is_told_what_to_install(checkout: Path) -> None:
    program(checkout, "python3", PYTHON_311.format(ensurepip=0))
    assert refuses(setup(checkout), "a C++ compiler is missing; install g++ (for instance: apt-get install g++)")


def test_when_nothing_has_changed_nothing_is_done(checkout: Path) -> None:
    program(checkout, "python3", PYTHON_311.format(ensurepip=0))
    program(checkout, "c++", "#!/bin/sh\n")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "rlhf").symlink_to(shutil.which("true") or "")
    (checkout / ".venv" / "set-up-for").write_text("digest\n")
    result = setup(checkout)
    assert (result.returncode, result.stdout, result.stderr) == (0, "setup: up to date\n", "")
    assert not (checkout / ".rlhf").exists()


def test_a_checkout_that_was_moved_is_set_up_anew(checkout: Path) -> None:
    ready_to_install(checkout)
    assert "making .venv" in setup(checkout).stdout
    assert setup(checkout).stdout == "setup: up to date\n"
    moved = checkout.rename(checkout.with_name("moved"))
    result = setup(moved)
    assert "making .venv" in result.stdout, "the programs of the old one name the old place"
    assert result.returncode == 0
    assert setup(moved).stdout == "setup: up to date\n"


def test_an_environment_of_this_place_is_kept_when_the_lock_files_change(checkout: Path) -> None:
    ready_to_install(checkout)
    setup(checkout)
    (checkout / "requirements.txt").write_text("a==1\n")
    result = setup(checkout)
    assert "making .venv" not in result.stdout
    assert "installing" in result.stdout


@pytest.mark.parametrize("home", [None, "elsewhere/home"])
def test_home_and_logs_are_for_their_owner_alone(checkout: Path, home: str | None) -> None:
    ready_to_install(checkout)
    before = os.umask(0o002)
    try:
        result = setup(checkout, **({"RLHF_HOME": home} if home else {}))
    finally:
        os.umask(before)
    assert result.returncode == 0, result.stderr
    made = checkout / (home or ".rlhf")
    assert {path.stat().st_mode & 0o777 for path in (made, made / "logs")} == {0o700}
    assert (checkout / ".venv").stat().st_mode & 0o777 == 0o775, "what is no secret follows the user's own mask"


def test_colossalai_is_built_on_what_the_lock_files_name_and_brings_nothing_along(checkout: Path) -> None:
    ready_to_install(checkout)
    assert setup(checkout).returncode == 0
    said = (checkout / ".rlhf" / "logs" / "setup.log").read_text().splitlines()
    installs = [line for line in said if line.startswith("$ ") and " uv pip install " in line]
    assert ["requirements.txt" in line for line in installs] == [True, False], "it is built with the locked setuptools"
    assert INSTALL.removeprefix("pip install ").split()[-1] in installs[1].split()
    assert {"--no-deps", "--no-build-isolation"} <= set(installs[1].split()) & set(INSTALL.split())
    assert not [line for line in installs if "://" in line]


def test_a_python_whose_path_has_spaces_is_taken(checkout: Path) -> None:
    ready_to_install(checkout)
    directory = checkout.parent / "my own python"
    directory.mkdir()
    (checkout.parent / "bin" / "python3").rename(directory / "python")
    result = setup(checkout, PYTHON=str(directory / "python"))
    assert (result.returncode, result.stderr) == (0, "")


def test_a_failing_installation_shows_the_end_of_its_log_and_leaves_no_stamp(checkout: Path) -> None:
    program(checkout, "python3", PYTHON_311.format(ensurepip=0))
    program(checkout, "c++", "#!/bin/sh\n")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    pip = checkout / ".venv" / "bin" / "python"
    pip.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "WARNING: chatter"; echo "ERROR: no such package" >&2; exit 1\n'
    )
    pip.chmod(0o755)
    (checkout / ".venv" / "set-up-for").write_text("an older digest\n")
    result = setup(checkout)
    assert result.returncode == 1
    assert "chatter" not in result.stdout
    assert result.stderr.splitlines()[-1] == "ERROR: no such package"
    assert not (checkout / ".venv" / "set-up-for").exists()


def test_make_test_fails_when_no_test_ran(checkout: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    (checkout / "infra" / "setup.sh").write_text("")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link to it would not find its packages
    python.chmod(0o755)
    (checkout / "pyproject.toml").unlink()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [make, "test"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "no tests ran" in result.stdout
    assert result.returncode != 0


@pytest.mark.parametrize(
    ("said", "status", "last"),
    [
        ("===== 3 passed in 1.00s =====", 0, "===== 3 passed in 1.00s ====="),
        ("===== 1 failed, 2 passed in 1.00s =====", 2, "===== 1 failed, 2 passed in 1.00s ====="),
        ("mypy found errors", 2, "make check stopped with status 2 before pytest had a summary"),
    ],
)
def test_ci_ends_with_pytests_summary_and_the_checks_status(tmp_path: Path, said: str, status: int, last: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(CHECKOUT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text(f"check:\n\t@echo '{said}'\n\t@echo more\n\t@exit {min(status, 1)}\n")
    result = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines()[-1] == last
    assert result.returncode == status
