"""Opening a store by its address."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.artifacts.backend import Backend
from infra.artifacts.cache import LIMIT_GB
from infra.artifacts.local import LocalBackend
from infra.artifacts.store import ArtifactStore
from infra.errors import StoreError


@dataclass(frozen=True, slots=True)
class S3Options:
    """Where the S3 server is and who we are; None takes botocore's own defaults."""

    endpoint_url: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    region: str | None = None


def open_store(
    url: str, *, cache_dir: Path, cache_limit_gb: float = LIMIT_GB, s3: S3Options | None = None
) -> ArtifactStore:
    """Open a store and see that it answers.

    Args:
        url: `s3://bucket`, `s3://bucket/prefix` or `file:///directory` (made if need be).
        cache_dir: where `fetch` and `cached` keep what they fetched.
        cache_limit_gb: how much they keep, in GB of 1e9 bytes.
        s3: server and credentials; None takes those of the environment.

    Raises:
        StoreError: if the address is none, the server is away, the secret is wrong, the bucket is missing, or
            the directory cannot be written.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        backend = _open_bucket(url, parts.netloc, parts.path.strip("/"), s3 or S3Options())
    elif parts.scheme == "file" and parts.netloc in {"", "localhost"} and parts.path.startswith("/"):
        backend = LocalBackend(url, Path(unquote(parts.path)))
    else:
        raise StoreError(
            f"{url!r} is no address of an artifact store; expected s3://bucket/prefix or file:///directory"
        )
    backend.probe()
    return ArtifactStore(backend, cache_dir, cache_limit_gb)


def open_default_store() -> ArtifactStore:
    """Open the store that the settings name.

    Raises:
        StoreError: as `open_store`.
    """
    from infra.settings import settings  # noqa: PLC0415 - reads the environment: only when asked

    known = settings()
    s3 = S3Options(
        endpoint_url=known.s3_endpoint_url,
        access_key=known.s3_access_key,
        secret_key=known.s3_secret_key.get_secret_value() if known.s3_secret_key else None,
        region=known.s3_region,
    )
    return open_store(known.store_url, cache_dir=known.cache_dir, cache_limit_gb=known.cache_limit_gb, s3=s3)


def _open_bucket(url: str, bucket: str, prefix: str, options: S3Options) -> Backend:
    from infra.artifacts.s3 import S3Backend  # noqa: PLC0415 - s3fs takes a second to import

    return S3Backend(url, bucket, prefix, options)
