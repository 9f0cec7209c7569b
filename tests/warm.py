"""Flows and actors forked from one server of processes (`infra.forked_processes`) for many tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from infra.forked_processes import forking_python, server_command, server_environment
from infra.settings import CHECKOUT

START_TIMEOUT_S = 300.0


def with_forked_actors(address: Path) -> dict[str, str]:
    """Return the variables of a driver whose actors' processes are forked: its job's runtime environment says so."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": forking_python(address)}})}


@contextmanager
def warm_processes(address: Path, imported: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Run a server that forks processes.

    Args:
        address: of its socket.
        imported: the module that it imports.
        environment: what is read while it imports; each process has its own afterwards.
    """
    server = subprocess.Popen(
        server_command(address, [imported]),
        env=server_environment(environment)
        | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(CHECKOUT), environment.get("PYTHONPATH", "")])},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            assert server.poll() is None, "the server of processes ended"
            assert time.monotonic() < deadline, f"waited {START_TIMEOUT_S:.0f} s for the server of processes"
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()
        address.unlink(missing_ok=True)


def quicken() -> None:
    """Do once, in a server, what each forked process would otherwise do at its first use of Prefect."""
    _share_certificates()
    _complete_models()


def _share_certificates() -> None:
    """Read the 140 certificates of certifi here: each client of Prefect reads them, though its server has none."""
    import ssl

    import certifi

    known: Any = ssl.create_default_context
    usual = {"cafile": certifi.where()}
    context = known(**usual)
    ssl.create_default_context = lambda *args, **given: context if given == usual else known(*args, **given)


def _complete_models() -> None:
    """Build the models of pydantic that each process would build at their first use."""
    pydantic = sys.modules.get("pydantic")
    models = [pydantic.BaseModel] if pydantic else []
    while models:
        model = models.pop()
        models += model.__subclasses__()
        with suppress(Exception):  # some never can be
            model.model_rebuild()
