"""`rlhf doctor`: look for what would keep the stack or a run from working, and say what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit

import psutil

from infra.errors import InfraError
from infra.lock_file import locked_packages
from infra.loopback import open_url
from infra.prefect_access import PASSWORD_FILE, access_to
from infra.services import automations, gpus, notices, postgres, prefect_api
from infra.services.password import read_password
from infra.services.ports import holder, is_free
from infra.services.prefect_server import PREFECT_PORT
from infra.services.prefect_yaml import read_prefect_yaml
from infra.services.processes import marked, tree
from infra.services.runs import engines
from infra.services.seaweed import KEYS_FILE, S3_PORT, SECRET_FILE
from infra.services.state import ServiceRecord, StackState, exposure_of
from infra.services.status import running_api_url, status
from infra.settings import CHECKOUT, STACK_ENV, Settings, env_file, inherited_environment, read_env_file
from infra.trackers import chosen, fault_of, place_of

_GIB = 2**30
_QUICKSTART_MEMORY = 12 * _GIB
_DISK = 10 * _GIB
_SHARED_MEMORY = 2 * _GIB
_LONGEST_COMMAND = 60
_CLOCK_S = 10.0
_BLOCK, _WORTH_TELLING = 512, 0.05 * _GIB


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
        lambda: _growth(settings),
        _shared_memory,
        lambda: _gpus(settings),
        lambda: _clock(settings),
        lambda: _pins(checkout),
        lambda: _database(settings),
        lambda: _ports(settings),
        lambda: _environment(settings),
        lambda: _password(settings),
        lambda: _secrets(settings),
        lambda: _deployments(checkout),
        lambda: _services(settings),
        lambda: _restarts(settings),
        lambda: _notices(settings),
        lambda: _bucket(settings),
        lambda: _retention(settings),
        lambda: _trackers(settings),
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


def _growth(settings: Settings) -> Iterator[Finding]:
    """How large the parts of the home are: they grow with each run."""
    if not settings.home.is_dir():
        return
    parts: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    for place, _, names in os.walk(settings.home):
        part = Path(place).relative_to(settings.home).parts[:1]
        for name in names:
            with suppress(OSError):  # gone in the meantime
                found = Path(place, name).lstat()
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    parts["".join(part) or "the rest"] += found.st_blocks * _BLOCK
    total = parts.total()
    told = ", ".join(f"{part} {size / _GIB:.1f}" for part, size in parts.most_common() if size >= _WORTH_TELLING)
    what = f"{settings.home} has {total / _GIB:.1f} GiB{f' ({told})' if told else ''}"
    if total <= shutil.disk_usage(settings.home).free:
        yield Finding("growth", "well", what)
    else:
        advice = (
            "as much again does not fit: retire old artifacts (`rlhf artifacts collect`, RLHF_RETENTION), lower "
            "RLHF_CACHE_LIMIT_GB, or set RLHF_HOME to a larger disk"
        )
        yield Finding("growth", "warning", what, advice)


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


def _gpus(settings: Settings) -> Iterator[Finding]:
    if not gpus.has_gpu():
        return
    try:
        driver = gpus.read_driver()
    except InfraError as error:
        yield Finding("GPU driver", "wrong", str(error), "mend the NVIDIA driver, or have the container given the GPU")
        return
    built = gpus.cuda_of_torch()
    seen = (
        f"driver {driver.version} for CUDA up to {driver.cuda or '?'}, torch for {f'CUDA {built}' if built else 'CPUs'}"
    )
    if built is None:
        yield Finding("GPU driver", "warning", seen, "runs will use no GPU: install a torch that is built for CUDA")
    elif _major(built) > _major(driver.cuda):
        yield Finding("GPU driver", "wrong", seen, "install a later driver, or a torch that is built for its CUDA")
    else:
        yield Finding("GPU driver", "well", seen)
    state = StackState.load(settings.home) if settings.home.is_dir() else StackState()
    ours = {process.pid for process in marked(state.id)}
    for number, gpu in enumerate(driver.gpus):
        mine = sum(gpu.users[pid] for pid in ours & gpu.users.keys())
        seen = f"{gpu.name}: {gpu.used_bytes / _GIB:.1f} GiB of {gpu.total_bytes / _GIB:.1f} are used"
        if gpu.used_bytes - mine < _GIB or (engines(state.id) and not mine):  # a container may not see whose they are
            yield Finding(f"GPU {number}", "well", seen)
        else:
            who = ", ".join(filter(None, map(_command_of, gpu.users.keys() - ours)))
            advice = "end what uses it, or give runs another one: CUDA_VISIBLE_DEVICES"
            yield Finding(
                f"GPU {number}", "warning", f"{seen}, not by this stack{f' but by {who}' if who else ''}", advice
            )


def _command_of(pid: int) -> str:
    try:
        return _command(psutil.Process(pid))
    except psutil.Error:  # it has ended, or is outside of this container
        return ""


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


def _clock(settings: Settings) -> Iterator[Finding]:
    """Whether this machine's clock agrees with those of the servers that it works with."""
    from infra.artifacts.backend import CLOCK_LIMIT  # noqa: PLC0415 - as in `_bucket`

    apart = {}
    if api_url := running_api_url(settings) or settings.prefect_api_url:
        apart["the Prefect server"] = _ahead_s(f"{api_url}/health", tls_of=api_url)
    if settings.store_url.startswith("s3:") and settings.model_fields_set & {"store_url", "s3_endpoint_url"}:
        apart["the artifact store"] = _ahead_s(settings.s3_endpoint_url or "https://s3.amazonaws.com")
    known = {name: ahead_s for name, ahead_s in apart.items() if ahead_s is not None}
    now = datetime.now().astimezone()
    zone = f"{now:%H:%M} in the time zone {now:%Z} (UTC{now:%z})"
    wrong = {name: ahead_s for name, ahead_s in known.items() if abs(ahead_s) > _CLOCK_S}
    if not wrong:
        agreeing = " and ".join(known)
        yield Finding("clock", "well", f"{zone}{f', in agreement with {agreeing}' if known else ''}")
        return
    told = (f"{abs(by):.0f} s {'ahead of' if by > 0 else 'behind'} that of {name}" for name, by in wrong.items())
    worst = max(abs(ahead_s) for ahead_s in wrong.values())
    verdict: Literal["warning", "wrong"] = "wrong" if worst > CLOCK_LIMIT.total_seconds() else "warning"
    yield Finding("clock", verdict, f"{zone}: {' and '.join(told)}", "set the clock of the one that is wrong (NTP)")


def _ahead_s(url: str, *, tls_of: str | None = None) -> float | None:
    """Return by how much our clock is ahead of that of a server, to a second; None if it does not tell.

    Args:
        url: is asked for without credentials.
        tls_of: address of the API by which the server is recognised.
    """
    try:
        tls = access_to(tls_of).tls() if tls_of and urlsplit(tls_of).scheme == "https" else None
        with open_url(url, timeout_s=5.0, tls=tls) as answer:
            said = answer.headers["Date"]
    except HTTPError as refused:
        said = refused.headers["Date"]
    except (OSError, HTTPException, InfraError, ValueError):
        return None
    try:
        return time.time() - parsedate_to_datetime(said or "").timestamp() - 0.5  # it is cut to a second
    except ValueError:
        return None


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


def _database(settings: Settings) -> Iterator[Finding]:
    if settings.wants_local_postgres:
        name = "PostgreSQL"
        try:
            found = postgres.installation(settings.home)
        except InfraError as error:
            yield Finding(name, "wrong", str(error), "as it says, then `rlhf up`")
        else:
            yield Finding(name, "well", f"{found.version} in {found.programs}")


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
        if line.name in {"runs", "supervisor"}:
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


def _notices(settings: Settings) -> Iterator[Finding]:
    """Whether anybody hears of a night, and whether the last notice arrived."""
    if (api_url := running_api_url(settings) or settings.prefect_api_url) is None:
        return
    try:
        found = [each for each in notices.channels(api_url) if each.is_on]
    except InfraError:
        return  # as above
    lost = [f"{each.name}: {each.last}" for each in found if not each.is_well]
    if lost:
        yield Finding("notices", "warning", "; ".join(lost), "see that the receiver is there, then `rlhf notify test`")
    elif found:
        yield Finding("notices", "well", "; ".join(f"{each.name}: {each.last}" for each in found))
    else:
        yield Finding("notices", "well", "nobody gets any", "`rlhf notify add`, if somebody should")


def _bucket(settings: Settings) -> Iterator[Finding]:
    from infra.artifacts import open_default_store  # noqa: PLC0415 - S3's client takes a second to import

    try:
        open_default_store()
    except InfraError as error:
        yield Finding("artifact store", "wrong", str(error), "run `rlhf up`, or correct RLHF_STORE_URL and RLHF_S3_*")
    else:
        yield Finding("artifact store", "well", settings.store_url)


def _retention(settings: Settings) -> Iterator[Finding]:
    from infra.artifacts import Retention  # noqa: PLC0415 - as above

    try:
        rule = Retention.parse(settings.retention)
    except InfraError as error:
        yield Finding("retention", "wrong", str(error), "correct RLHF_RETENTION")
    else:
        seen = f"newest versions kept: {rule}, and all of other kinds; cache: {settings.cache_limit_gb:g} GB at most"
        yield Finding("retention", "well", seen)


def _trackers(settings: Settings) -> Iterator[Finding]:
    try:
        names = chosen(settings)
    except InfraError as error:
        yield Finding(
            "trackers", "wrong", str(error), "correct RLHF_TRACKERS, or install it: runs are refused until then"
        )
        return
    for name in names:
        fault = fault_of(name, settings)
        if fault is None:
            yield Finding(f"tracker {name}", "well", place_of(name, settings))
        else:
            advice = "start it, or correct its address: runs go on without it, and catch up when it is back"
            yield Finding(f"tracker {name}", "warning", fault, advice)
