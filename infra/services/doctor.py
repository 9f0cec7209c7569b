"""`rlhf doctor`: look for what would keep the stack or a run from working, and say what to do about it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from infra.errors import InfraError
from infra.lock_file import locked_packages
from infra.prefect_access import PASSWORD_FILE, access_to
from infra.services import automations, prefect_api
from infra.services.password import read_password
from infra.services.ports import holder, is_free
from infra.services.prefect_server import PREFECT_PORT
from infra.services.prefect_yaml import read_prefect_yaml
from infra.services.processes import tree
from infra.services.seaweed import KEYS_FILE, S3_PORT, SECRET_FILE
from infra.services.state import ServiceRecord, StackState, exposure_of
from infra.services.status import running_api_url, status
from infra.settings import CHECKOUT, STACK_ENV, Settings, env_file, inherited_environment, read_env_file

_GIB = 2**30
_QUICKSTART_MEMORY = 12 * _GIB
_DISK = 10 * _GIB
_SHARED_MEMORY = 2 * _GIB
_LONGEST_COMMAND = 60


class Finding(NamedTuple):
    """What one check saw."""

    name: str
    verdict: Literal["well", "warning", "wrong"]
    seen: str
    advice: str = ""
    """One sentence: what to do about it."""


def diagnose(settings: Settings, *, checkout: Path = CHECKOUT) -> list[Finding]:
    """Return what every check saw; none of them changes anything."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _compiler,
        lambda: _memory(settings),
        lambda: _disk(settings),
        _shared_memory,
        lambda: _pins(checkout),
        lambda: _ports(settings),
        lambda: _environment(settings),
        lambda: _password(settings),
        lambda: _secrets(settings),
        lambda: _deployments(checkout),
        lambda: _services(settings),
        lambda: _restarts(settings),
        lambda: _bucket(settings),
    )
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    seen = ".".join(str(part) for part in sys.version_info[:3])
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    advice = "" if good else "use Python 3.11, 3.12 or 3.13: `make setup PYTHON=PATH`"
    yield Finding("python", "well" if good else "wrong", seen, advice)


def _compiler() -> Iterator[Finding]:
    found = shutil.which("g++") or shutil.which("c++")
    if found:
        yield Finding("C++ compiler", "well", found)
    else:
        yield Finding("C++ compiler", "wrong", "none", "install g++ (for instance: apt-get install g++)")


def _memory(settings: Settings) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    ours = sum(line.memory_bytes for line in status(settings))
    seen = f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f}"
    if memory.available + ours >= _QUICKSTART_MEMORY:
        yield Finding("memory", "well", seen)
    else:
        yield Finding("memory", "warning", seen, "the quickstart takes up to 12 GiB: end other programs first")


def _disk(settings: Settings) -> Iterator[Finding]:
    place = next(parent for parent in (settings.home, *settings.home.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    seen = f"{free / _GIB:.1f} GiB free at {settings.home}"
    if free >= _DISK:
        yield Finding("disk", "well", seen)
    else:
        yield Finding("disk", "warning", seen, "free 10 GiB, or set RLHF_HOME to a larger disk")


def _shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")
    if not place.is_dir():
        yield Finding("shared memory", "warning", "there is no /dev/shm", "Ray will use the slower system temp folder")
        return
    free = shutil.disk_usage(place).free
    seen = f"{free / _GIB:.1f} GiB free in /dev/shm"
    if free >= _SHARED_MEMORY:
        yield Finding("shared memory", "well", seen)
    else:
        yield Finding("shared memory", "warning", seen, "give the container 2 GiB or more (docker run --shm-size=4g)")


def _pins(checkout: Path) -> Iterator[Finding]:
    wrong = []
    for package in locked_packages(checkout / "requirements.txt"):
        try:
            found = version(package.name)
        except PackageNotFoundError:
            found = "missing"
        wanted = str(package.specifier).removeprefix("==")
        if found.partition("+")[0] != wanted:  # torch's CPU and CUDA builds differ behind the plus sign
            wrong.append(f"{package.name} {found} instead of {wanted}")
    if wrong:
        yield Finding("packages", "wrong", "; ".join(wrong[:5]), "run `make setup`, which installs the locked versions")
    else:
        yield Finding("packages", "well", "as locked in requirements.txt")


def _ports(settings: Settings) -> Iterator[Finding]:
    state = StackState.load(settings.home) if settings.home.is_dir() else StackState()
    server = ("the Prefect server", state.services.get("server"))
    yield _port(*server, usual=PREFECT_PORT, demanded=settings.prefect_port, variable="RLHF_PREFECT_PORT")
    if settings.wants_local_store:
        store = ("the object store", state.services.get("store"))
        yield _port(*store, usual=S3_PORT, demanded=settings.s3_port, variable="RLHF_S3_PORT")


def _port(what: str, record: ServiceRecord | None, *, usual: int, demanded: int | None, variable: str) -> Finding:
    """Return who has the port that a service should have, and what `rlhf up` will do about it."""
    port = demanded or usual
    name = f"port {port}"
    ours = record.process() if record else None
    who = holder(port)
    if record and ours and record.address.endswith(f":{port}") and (who is None or who in tree(ours)):
        return Finding(name, "well", f"{what} has it")
    elsewhere = f"{what} stays at {record.address} while it runs" if record and ours else ""
    if is_free(port):
        advice = f"{elsewhere}; it comes here after `rlhf down` and `rlhf up`" if elsewhere else ""
        return Finding(name, "well", "free", advice)
    seen = f"{_command(who)} has it, not {what}"
    if demanded:
        return Finding(name, "wrong", seen, f"end that program, or unset {variable}: `rlhf up` refuses to start")
    if elsewhere:
        return Finding(name, "warning", seen, f"nothing: {elsewhere}")
    return Finding(name, "warning", seen, f"nothing, or end that program: `rlhf up` gives {what} another port")


def _command(process: psutil.Process | None) -> str:
    """Return the id and the command of a process, as far as the system tells them."""
    if process is None:
        return "another program"
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:_LONGEST_COMMAND]})"
    except psutil.Error:
        return f"process {process.pid}"


def _environment(settings: Settings) -> Iterator[Finding]:
    told = inherited_environment()
    exported = told.get("PREFECT_API_URL")
    server = StackState.load(settings.home).services.get("server") if settings.home.is_dir() else None
    if exported and server and not exported.startswith(server.address):
        yield Finding(
            "environment",
            "warning",
            f"PREFECT_API_URL is exported as {exported}, the stack's server is {server.address}",
            "unset PREFECT_API_URL, or the prefect command will talk to the other server",
        )
    elif server and told.get("PREFECT_API_AUTH_STRING") not in (None, "", access_to(server.address).auth_string):
        yield Finding(
            "environment",
            "warning",
            "PREFECT_API_AUTH_STRING is exported, and is not the password of the stack's server",
            "unset PREFECT_API_AUTH_STRING, or the server refuses the prefect command",
        )


def _password(settings: Settings) -> Iterator[Finding]:
    """Whether others could read the password of the stack's server, in our files or in `.env`."""
    try:
        kept = read_password(settings.home)
    except InfraError as error:
        yield Finding("password", "wrong", str(error), "draw another with `rlhf up --new-password`")
        return
    if kept is None:
        if StackState.load(settings.home).services:
            seen = f"{settings.home / PASSWORD_FILE} is not there"
            yield Finding("password", "warning", seen, "run `rlhf up`, which writes it again")
        return
    path = env_file()
    said = read_env_file(path)
    holds = kept in (said.get("PREFECT_API_AUTH_STRING"), said.get("PREFECT_SERVER_API_AUTH_STRING"))
    if holds and (mode := path.stat().st_mode & 0o777) & 0o077:
        seen = f"{path} holds it and can be read by others (its mode is {mode:04o})"
        yield Finding("password", "wrong", seen, f"chmod 600 {path}, then `rlhf up --new-password`")
    else:
        yield Finding("password", "well", f"in {settings.home / PASSWORD_FILE}, for your eyes alone")


def _secrets(settings: Settings) -> Iterator[Finding]:
    """Whether others could read another secret of the stack."""
    advice = {
        STACK_ENV: "run `rlhf up`, which closes it and says what to change",
        SECRET_FILE: "run `rlhf down` and `rlhf up`, which draws another secret",
        KEYS_FILE: "run `rlhf up`, which makes it anew",
    }
    for name, what in advice.items():
        if fault := exposure_of(settings.home / name):
            yield Finding(name, "wrong", f"{settings.home / name} {fault}", what)


def _deployments(checkout: Path) -> Iterator[Finding]:
    try:
        entries = read_prefect_yaml(checkout)
    except InfraError as error:
        yield Finding("prefect.yaml", "wrong", str(error), "correct the file, then `rlhf up`")
    else:
        yield Finding("prefect.yaml", "well", f"{len(entries)} deployments")


def _services(settings: Settings) -> Iterator[Finding]:
    for line in status(settings):
        if line.name == "runs":
            continue
        if line.state == "running":
            yield Finding(line.name, "well", f"runs at {line.address}")
        else:
            advice = f"run `rlhf up`; the log is {line.log}" if line.log else "run `rlhf up`"
            yield Finding(line.name, "wrong", line.state, advice)
    api_url = settings.prefect_api_url
    if api_url is None:
        return
    try:  # with our credentials: a server of one's own may be behind a gateway that asks for them
        answers = prefect_api.call(api_url, "GET", "/health", timeout_s=3.0) is True
    except (InfraError, ValueError):
        answers = False
    if not answers:
        yield Finding("Prefect server", "wrong", f"{api_url} does not answer", "run `rlhf up`")
        return
    try:
        prefect_api.call(api_url, "GET", "/admin/version")
    except InfraError as error:
        yield Finding("Prefect server", "wrong", str(error), "correct it, or run `rlhf up`")


def _restarts(settings: Settings) -> Iterator[Finding]:
    ours = running_api_url(settings)
    api_url = ours or settings.prefect_api_url
    if api_url is None:
        return
    try:
        faults = automations.faults(api_url)
    except InfraError:
        return  # a server that does not answer has its own line
    name = "restarts"
    if not faults:
        yield Finding(name, "well", f"runs that crash are started again, {automations.RESTARTS} times at most")
    elif ours:
        advice = "run `rlhf up`, or switch it on again on the page Automations of the Prefect UI"
        yield Finding(name, "warning", f"automation {'; '.join(faults)}", advice)
    else:
        seen = f"the server at {api_url} is not this stack's: automation {'; '.join(faults)}"
        yield Finding(name, "warning", seen, "`rlhf automations` has that server start crashed runs again")


def _bucket(settings: Settings) -> Iterator[Finding]:
    from infra.artifacts import open_default_store  # noqa: PLC0415 - S3's client takes a second to import

    try:
        open_default_store()
    except InfraError as error:
        yield Finding("artifact store", "wrong", str(error), "run `rlhf up`, or correct RLHF_STORE_URL and RLHF_S3_*")
    else:
        yield Finding("artifact store", "well", settings.store_url)
