"""Opening a store by its address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from infra.artifacts.backend import Backend
from infra.artifacts.cache import LIMIT_GB
from infra.artifacts.credentials import S3Options, options_of
from infra.artifacts.local import LocalBackend
from infra.artifacts.store import ArtifactStore
from infra.errors import SettingsError, StoreError


def open_store(
    url: str,
    *,
    cache_dir: Path,
    cache_limit_gb: float = LIMIT_GB,
    s3: S3Options | None = None,
    patient: bool = False,
    deadline_s: float | None = None,
) -> ArtifactStore:
    """Open a store and see that it answers, and keeps what its protocol rests on (backend.py).

    Who may not write opens it all the same, and reads; the first write says what is missing.

    Args:
        url: `s3://bucket`, `s3://bucket/prefix` or `file:///directory` (made if need be).
        cache_dir: where `fetch` and `cached` keep what they fetched.
        cache_limit_gb: how much they keep, in GB of 1e9 bytes.
        s3: server and credentials; None takes those of the environment.
        patient: wait for an absent server as long as any request does; else that it is away is said within
            seconds, unless it has answered this process before.
        deadline_s: how long an absent server is waited for; None: as long as a person would wait.

    Raises:
        StoreError: if the address is none, the server is away, the secret is wrong, the bucket is missing, the
            server's clock is not ours, or it does not enforce conditional writes; or if the directory is not there.
    """
    parts = _parts(url)
    scheme = "" if parts.query or parts.fragment else parts.scheme  # or what follows a # would be left out in silence
    if scheme == "s3" and parts.netloc:
        backend = _open_bucket(url, s3 or S3Options(), patient=patient, deadline_s=deadline_s)
    elif scheme == "file" and parts.netloc in {"", "localhost"} and parts.path.startswith("/"):
        backend = LocalBackend(url, Path(unquote(parts.path)))
    else:
        raise StoreError(
            f"{url!r} is no address of an artifact store; set RLHF_STORE_URL to s3://bucket/prefix or file:///directory"
        )
    backend.probe()
    return ArtifactStore(backend, cache_dir, cache_limit_gb)


def open_default_store(*, patient: bool = False, in_run: bool = False) -> ArtifactStore:
    """Open the store that the settings name.

    Args:
        patient: as for `open_store`: for what runs unattended.
        in_run: wait for an absent server as long as a run waits (RLHF_STORE_PATIENCE_S).

    Raises:
        StoreError: as `open_store`.
        SettingsError: if no store is named, or several sources of credentials, or half a pair of keys.
    """
    from infra.settings import settings  # noqa: PLC0415 - reads the environment: only when asked

    known = settings()
    if not known.model_fields_set & {"store_url", "s3_endpoint_url"}:
        raise SettingsError(
            "no artifact store is named: `rlhf up` starts one on this machine; or set RLHF_STORE_URL to "
            "s3://bucket/prefix or file:///directory"
        )
    s3 = options_of(known) if known.store_url.startswith("s3://") else None
    return open_store(
        known.store_url,
        cache_dir=known.cache_dir,
        cache_limit_gb=known.cache_limit_gb,
        s3=s3,
        patient=patient,
        deadline_s=known.store_patience_s if in_run else None,
    )


def _parts(url: str) -> SplitResult:
    """Return the parts of an address; one that may hold a password is not shown."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets, in which only IPv6 may stand; its text shows the address
        raise StoreError("RLHF_STORE_URL cannot be read; set it to s3://bucket/prefix or file:///directory") from None
    if "@" in parts.netloc:
        raise StoreError(
            "the address of the artifact store (RLHF_STORE_URL) must not hold a user or password; keys are set in "
            "RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY"
        )
    return parts


def _open_bucket(url: str, options: S3Options, *, patient: bool, deadline_s: float | None) -> Backend:
    from infra.artifacts.retrier import Patience  # noqa: PLC0415 - s3fs takes a second to import
    from infra.artifacts.s3 import S3Backend  # noqa: PLC0415

    parts = urlsplit(url)
    return S3Backend(url, parts.netloc, parts.path.strip("/"), options, Patience.of(deadline_s, patient=patient))
