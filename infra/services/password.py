"""The password of the local Prefect server: drawn once, kept in a file that only its owner can read."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from infra.errors import ServiceError
from infra.prefect_access import PASSWORD_FILE
from infra.services.state import exposure, write_private

USER = "rlhf"
_FORM = re.compile(r"[!-9;-~]+:[!-~]+")
"""Visible ASCII with a colon in it: Prefect answers 500 to anything else, or its clients cannot send it."""
ANOTHER = "`rlhf up --new-password` draws another"


def draw() -> str:
    """Return a new password, as user:secret, in characters that are special in no shell and no file."""
    return f"{USER}:{secrets.token_hex(20)}"


def checked(password: str, where: str) -> str:
    """Return a password as it is, if a server and all its clients can take it.

    Args:
        password: no message shows it.
        where: it was set, for people.

    Raises:
        ServiceError: if they cannot.
    """
    if _FORM.fullmatch(password) and "${" not in password:
        return password
    if not password:
        wrong = "it is empty"
    elif not password.isascii():
        wrong = "it has characters beyond ASCII"
    elif ":" not in password:
        wrong = "it has no colon"
    elif password.startswith(":") or password.endswith(":"):
        wrong = "it has nothing on one side of the colon"
    elif "${" in password:
        wrong = "it has ${, which begins the name of a variable where it is read from .env"
    else:
        wrong = "it has spaces or control characters"
    raise ServiceError(f"{where} is no password for the Prefect server, which takes user:password in ASCII: {wrong}")


def read_password(home: Path) -> str | None:
    """Return the password that is kept in a home directory; None where there is none.

    Raises:
        ServiceError: if others may have read it, or it is none.
    """
    path = home / PASSWORD_FILE
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            there = os.fstat(file.fileno())
            text = file.read().removesuffix("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServiceError(f"{path} cannot be read ({error.strerror}); {ANOTHER}") from None
    if fault := exposure(there):
        raise ServiceError(
            f"{path} {fault}, who may know the password; {ANOTHER}, or, if nobody else was here: chmod 600 {path}"
        )
    try:
        return checked(text, str(path))
    except ServiceError as error:
        raise ServiceError(f"{error}; {ANOTHER}, or correct the file") from None


def keep_password(home: Path, password: str) -> None:
    """Keep a password in a home directory, readable by its owner alone."""
    write_private(home / PASSWORD_FILE, f"{password}\n")
