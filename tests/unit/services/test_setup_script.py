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

pytestmark = pytest.mark.integration  # shells and Pythons

TOOLS = ("cat", "chmod", "dirname", "grep", "mkdir", "rm", "sed", "sh", "sleep", "tail", "tr")
NEEDED = ("requirements.txt", "requirements-dev.txt", "pyproject.toml", "infra/setup.sh", "Makefile")
ANSWERS = """#!/bin/sh
case "$*" in
    *version_info*) echo {version} ;;
    *ensurepip*) exit {ensurepip} ;;
    *hashlib*) echo digest ;;
    *--version*) echo Python {version}.0 ;;
esac
"""

SETS_UP = """#!/bin/sh
case "$*" in
    *version_info*) echo {version}; exit 0 ;;
    *--version*) echo Python {version}.0; exit 0 ;;
    *ensurepip*) exit 0 ;;
    *hashlib*) echo {version}; exec {python} "$@" ;;
    *"-m venv"*)
        rm -rf .venv
        mkdir -p .venv/bin
        printf '%s\\n' 'version = {version}.0' "executable = $0" "command = -m venv $(pwd -P)/.venv" >.venv/pyvenv.cfg
        cat >.venv/bin/python <<'END'
#!/bin/sh
[ "$1" = -c ] && exec {python} "$@"
true >.venv/bin/rlhf
chmod +x .venv/bin/rlhf
END
        chmod +x .venv/bin/python
        exit 0 ;;
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


def ready_to_install(checkout: Path, python: str = "python3", version: str = "3.11") -> None:
    program(checkout, "c++", "#!/bin/sh\n")
    program(checkout, python, SETS_UP.format(python=sys.executable, version=version))


def refuses(result: subprocess.CompletedProcess[str], sentence: str) -> bool:
    return result.returncode == 1 and result.stdout == "" and result.stderr.splitlines() == [f"setup: {sentence}"]


def test_a_machine_without_python_is_told_what_to_install(checkout: Path) -> None:
    assert refuses(
        setup(checkout),
        "python3 is missing; install Python 3.11, 3.12 or 3.13 "
        "(for instance: apt-get install python3.11 python3.11-venv)",
    )


def test_another_python_is_named_with_its_version(checkout: Path) -> None:
    program(checkout, "python3", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    assert refuses(
        setup(checkout),
        "python3 is Python 3.9.2, but Python 3.11, 3.12 or 3.13 is needed; install one, or name it: "
        "make setup PYTHON=/path/to/python3.11",
    )


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_python_without_venv_is_told_what_to_install(checkout: Path, version: str) -> None:
    program(checkout, "python3", ANSWERS.format(version=version, ensurepip=1))
    assert refuses(
        setup(checkout),
        f"python3 has no venv or ensurepip; install them (for instance: apt-get install python{version}-venv)",
    )


def test_a_machine_without_a_compiler_is_told_what_to_install(checkout: Path) -> None:
    program(checkout, "python3", ANSWERS.format(version="3.11", ensurepip=0))
    assert refuses(setup(checkout), "a C++ compiler is missing; install g++ (for instance: apt-get install g++)")


def test_when_nothing_has_changed_nothing_is_done(checkout: Path) -> None:
    program(checkout, "python3", ANSWERS.format(version="3.11", ensurepip=0))
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


@pytest.mark.parametrize("newer", ["3.12", "3.13"])
def test_an_environment_keeps_its_python_until_another_is_named(checkout: Path, newer: str) -> None:
    ready_to_install(checkout, f"python{newer}", newer)
    assert f"making .venv with Python {newer}.0" in setup(checkout).stdout, "it is the only one there"
    ready_to_install(checkout, "python3.11", "3.11")
    assert setup(checkout).stdout == "setup: up to date\n"
    assert "making .venv with Python 3.11.0" in setup(checkout, PYTHON="python3.11").stdout
    assert setup(checkout).stdout == "setup: up to date\n"


@pytest.mark.parametrize("other", ["3.10", "3.14"])
def test_the_first_python_that_will_do_is_taken(checkout: Path, other: str) -> None:
    ready_to_install(checkout, "python3", other)
    ready_to_install(checkout, "python3.13", "3.13")
    ready_to_install(checkout, "python3.12", "3.12")
    assert "making .venv with Python 3.12.0" in setup(checkout, PYTHON="python3").stdout


def test_what_is_locked_for_another_python_is_not_counted(checkout: Path) -> None:
    ready_to_install(checkout)
    (checkout / "requirements.txt").write_text(
        'a==1\nb==1; python_version < "3"\nc==1; python_version < "3.11"\nd==1; python_version >= "3.11"\n'
    )
    (checkout / "requirements-dev.txt").write_text("uv==1\n")
    assert "setup: installing 3 packages of the lock files" in setup(checkout).stdout.splitlines()


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
    program(checkout, "python3", ANSWERS.format(version="3.11", ensurepip=0))
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


@pytest.mark.integration
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
