"""A unit of the user's systemd that supervises the stack: without a terminal, and after a reboot too."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from infra.errors import ServiceError
from infra.services.service import Report
from infra.settings import STACK_ENV, Settings, env_file, inherited_environment, read_env_file, why

UNIT = "rlhf.service"
_TOLD = ("PATH", "RLHF_ENV_FILE")
_MATTER = ("RLHF_", "PREFECT_", "AWS_", "HF_", "CUDA_", "LD_LIBRARY_PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables, or their beginnings, of which services or runs may need those that the user has exported."""
_FORM = """# Written by `rlhf up --supervise --systemd`. Lines of your own: systemctl --user edit {unit}
[Unit]
Description=Local stack of rlhf-flows

[Service]
Type=exec
{variables}
ExecStart={command}
# `rlhf down` ends it without a failure. What the stack runs goes on when the supervisor fails, and when one process of
# it is ended for want of memory.
Restart=on-failure
RestartSec=15
KillMode=process
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


def write_unit(settings: Settings, report: Report, command: Sequence[str]) -> Path:
    """Write the unit where the user's systemd looks for it, and return its path; nothing is started.

    Args:
        settings: as `infra.settings.settings` returns them.
        report: takes a line for what the unit does not know, and for what systemd finds wrong with it.
        command: what it runs.

    Raises:
        ServiceError: if the file is there for another stack, or cannot be written.
    """
    exported = inherited_environment()
    config = Path(exported.get("XDG_CONFIG_HOME") or "")
    path = (config if config.is_absolute() else Path.home() / ".config") / "systemd" / "user" / UNIT
    told = {"RLHF_HOME": str(settings.home), **{name: exported[name] for name in _TOLD if exported.get(name)}}
    lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in told.items()]
    words = [_quoted(word).replace("$", "$$") for word in command]
    text = _FORM.format(unit=UNIT, variables="\n".join(lines), command=" ".join(words))
    try:
        if path.exists() and lines[0] not in path.read_text(encoding="utf-8").splitlines():
            raise ServiceError(f"{path} is there, but not for the stack in {settings.home}: move it away, or delete it")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ServiceError(f"{path} cannot be written ({why(error)}); move away what is there") from None
    if unknown := _unknown(settings, exported, told):
        report(
            f"exported here, but unknown to the unit: {', '.join(unknown)}; put RLHF_* and PREFECT_* into "
            f"{env_file()}, others into `systemctl --user edit {UNIT}`"
        )
    if said := _verdict(path):
        report(f"systemd-analyze says of it: {said}")
    return path


def _quoted(word: str) -> str:
    """Return a word as systemd's files have it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")
    return f'"{escaped}"'


def _unknown(settings: Settings, exported: dict[str, str], told: dict[str, str]) -> list[str]:
    """Return the variables that services get when they are started from here, but not from the unit."""
    known = {**read_env_file(settings.home / STACK_ENV), **read_env_file(env_file()), **told}
    return sorted(
        name for name, value in exported.items() if name.upper().startswith(_MATTER) and known.get(name) != value
    )


def _verdict(path: Path) -> str:
    """Return what systemd finds wrong with the unit; nothing where there is no systemd for this user."""
    program = shutil.which("systemd-analyze")
    if program is None or "XDG_RUNTIME_DIR" not in inherited_environment():
        return ""
    command = [program, "--user", "--man=no", "verify", str(path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(line for line in done.stderr.splitlines() if UNIT in line)
