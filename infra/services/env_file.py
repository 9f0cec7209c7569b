"""The lines of `.env` in the checkout that belong to `rlhf up`; all others are the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.errors import ServiceError
from infra.services.state import write_private

_BEGIN = "# >>> rlhf up: rewritten by it, put your own lines outside"
_END = "# <<< rlhf up"
_OTHERS = 0o077


def assignment(name: str, value: str) -> str:
    """Return a line of an env file, quoted as python-dotenv writes and reads it."""
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{quoted}'"


def write_block(path: Path, variables: Mapping[str, str]) -> int | None:
    """Put the variables into our block of the file, at its end, so that they win; leave all else as it is.

    One of them is a password: the file is for its owner's eyes from then on.

    Returns:
        The mode that the file had, if others could read or write it; else None.

    Raises:
        ServiceError: if the file cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        kept = _without_block(text)
        lines = [_BEGIN, *(assignment(name, value) for name, value in variables.items()), _END]
        wanted = "\n".join([*kept, *lines]) + "\n"
        if wanted != text or mode & _OTHERS:
            write_private(path, wanted)
    except OSError as error:
        raise ServiceError(
            f"{path} cannot be written ({error.strerror}), and without it the prefect command does not find the server"
        ) from None
    return mode if mode & _OTHERS else None


def _without_block(text: str) -> list[str]:
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if line == _BEGIN:
            inside = True
        if not inside:
            kept.append(line)
        if line == _END:
            inside = False
    return kept
