"""The keys that the parts of the local store show each other, and that nobody else on the machine has.

By default SeaweedFS's master gives a token to write with to whoever asks, and its shell opens every file. With these
keys all ports but two refuse who has none of them already when the connection is made (mutual TLS). The two are S3's,
which asks for a signature, and that on which the volume server hands out bytes, which asks for a signed token: TLS
there would halve what is read in a second.

All is one file: a private key, a certificate signed by itself, which is the only one that each part trusts, and, drawn
from the key, those that sign tokens. Nothing that is stored depends on them: lost ones are made anew.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from infra.certificate import NEVER, own_certificate
from infra.errors import ServiceError
from infra.services.service import Report
from infra.services.state import write_private

KEYS_FILE = "store.pem"
_GRPC_PARTS = ("MASTER", "VOLUME", "FILER", "S3", "ADMIN", "WORKER", "CLIENT", "MQ", "MSG_BROKER", "MSG_AGENT")
_HTTPS_PARTS = ("MASTER", "FILER", "ADMIN")
_SIGNED = ("JWT_SIGNING_KEY", "JWT_SIGNING_READ_KEY", "JWT_FILER_SIGNING_KEY", "JWT_FILER_SIGNING_READ_KEY")


def make_keys(home: Path, report: Report) -> None:
    """Make the keys of a store unless they are there and good; those that others could read are replaced.

    Args:
        home: they lie in it, readable by their owner alone.
        report: is told what was wrong with the former ones.

    Raises:
        ServiceError: if they cannot be written.
    """
    path = home / KEYS_FILE
    fault = _fault(path)
    if fault is None:
        return
    try:
        write_private(path, own_certificate("rlhf store"))
    except OSError as error:
        raise ServiceError(
            f"the keys of the object store cannot be written to {path} ({error.strerror}); move away what is there, "
            "they are made anew"
        ) from None
    if fault:
        report(f"{path} {fault}: it was made anew, and nothing stored depends on it")


def keys_environment(home: Path) -> dict[str, str]:
    """Return the variables that make SeaweedFS, or its shell, use the keys of a home."""
    path = home / KEYS_FILE
    pem = path.read_bytes()
    variables = {"GRPC_CA": str(path)}
    for section in (*(f"GRPC_{part}" for part in _GRPC_PARTS), *(f"HTTPS_{part}" for part in _HTTPS_PARTS)):
        variables |= {f"{section}_CERT": str(path), f"{section}_KEY": str(path)}
    variables |= {f"HTTPS_{part}_CA": str(path) for part in _HTTPS_PARTS}
    variables |= {name: hmac.new(pem, name.encode(), hashlib.sha256).hexdigest() for name in _SIGNED}
    return {f"WEED_{name}": value for name, value in variables.items()}


def _fault(path: Path) -> str | None:
    """Return what is wrong with the keys of a file; None: nothing; an empty string: there are none yet."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "is no file"
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return "could be read by others"
        return next(_faults(path.read_bytes()), None)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # unreadable, or no key
        return f"is damaged ({str(error).splitlines()[0]})"


def _faults(pem: bytes) -> Iterator[str]:
    certificate = x509.load_pem_x509_certificate(pem)
    key = serialization.load_pem_private_key(pem, password=None)
    if certificate.public_key() != key.public_key():
        yield "is damaged (its key is another certificate's)"
    if certificate.not_valid_after_utc < NEVER:
        yield "has a certificate that ends"
