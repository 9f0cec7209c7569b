"""The store in a bucket, through s3fs."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import s3fs
from fsspec.asyn import sync

from infra.artifacts.backend import CHUNK_BYTES, Stored
from infra.artifacts.opening import S3Options
from infra.artifacts.s3_errors import FORBIDDEN, RefusedError, Retrier
from infra.errors import StoreError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
DEADLINE_S = 120.0
OPEN_LIMIT_S = 8.0
"""An absent server is said soon when the store is opened; later it has the whole deadline to come back."""
_CONDITION_FAILED = {"PreconditionFailed", "412"}
_ABSENT = {"NoSuchKey", "404"}


class S3Backend:
    """Objects in a bucket. s3fs and botocore make one attempt each; retries and deadline are ours."""

    def __init__(self, url: str, bucket: str, prefix: str, options: S3Options, deadline_s: float = DEADLINE_S) -> None:
        self.url = url
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options
        self._open_limit_s = min(OPEN_LIMIT_S, deadline_s)
        self._retrier = Retrier(options.endpoint_url, bucket, deadline_s)
        self._opened: dict[int, s3fs.S3FileSystem] = {}

    def probe(self) -> None:
        """Check that the bucket is there and lets us in, and that the server enforces conditional writes."""
        files, page = self._files(), {"Prefix": self._prefix, "MaxKeys": 1}
        self._retrier.run(
            "looking around",
            lambda timeout: files.call_s3("list_objects_v2", Bucket=self._bucket, timeout=timeout, **page),
            limit_s=self._open_limit_s,
        )
        key = "probe/conditional-write"
        try:
            twice = self.create(key, b"") and self.create(key, b"")
        except RefusedError as error:
            if error.code in FORBIDDEN:
                return  # whoever may only read can open the store, and will not write
            raise
        if twice:
            raise StoreError(
                f"the S3 server of the bucket {self._bucket!r} does not enforce conditional writes "
                "(If-None-Match), so two writers would overwrite each other; use a server that does"
            )

    def read(self, key: str) -> Stored | None:
        """Return a small object, or None if there is none."""
        try:
            data, tag = self._retrier.run(f"reading {key}", partial(self._get, key, None))
        except RefusedError as error:
            if error.code in _ABSENT:
                return None
            raise
        return Stored(data, tag)

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object unless one is there."""
        return self._put_if(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        """Write a small object if it is still in the state that `tag`, its ETag, names."""
        return self._put_if(key, data, IfMatch=tag)

    def delete(self, key: str) -> None:
        """Remove an object; it may be gone already."""
        self._call(f"deleting {key}", "delete_object", Key=self._prefix + key)

    def children(self, prefix: str) -> list[str]:
        """Return the sorted names directly under a prefix, page by page."""
        full = self._prefix + prefix
        names: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = self._call(f"listing {prefix}", "list_objects_v2", Prefix=full, Delimiter="/", **more)
            names += [item["Key"] for item in page.get("Contents", ())]
            names += [item["Prefix"] for item in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated"):
                return sorted(name.removeprefix(full).rstrip("/") for name in names if name != full)
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, or None if there is none."""
        try:
            found = self._call(f"looking for {key}", "head_object", Key=self._prefix + key)
        except RefusedError as error:
            if error.code in _ABSENT:
                return None
            raise
        return int(found["ContentLength"])

    def upload(self, key: str, body: bytes) -> None:
        """Send a blob; the server checks it (Content-MD5), and has to hold all of it afterwards."""
        self._put(key, body)
        if (stored := self.size(key)) != len(body):
            raise StoreError(f"{key} arrived in the artifact store with {stored} of {len(body)} bytes; try again")

    def download(self, key: str, size: int) -> Iterator[bytes]:
        """Yield an object of known size piece by piece, each retried by itself."""
        for start in range(0, size, CHUNK_BYTES):
            span = f"bytes={start}-{min(start + CHUNK_BYTES, size) - 1}"
            yield self._retrier.run(f"reading {key}", partial(self._get, key, span))[0]

    def _put(self, key: str, body: bytes, **condition: str) -> None:
        full = self._prefix + key
        self._call(f"writing {key}", "put_object", Key=full, Body=body, ContentMD5=_md5(body), **condition)

    def _put_if(self, key: str, data: bytes, **condition: str) -> bool:
        try:
            self._put(key, data, **condition)
        except RefusedError as error:
            if error.code in _CONDITION_FAILED or (error.code in _ABSENT and "IfMatch" in condition):
                return False
            raise
        return True

    def _call(self, what: str, method: str, **arguments: Any) -> Any:
        def attempt(timeout: float) -> Any:
            return self._files().call_s3(method, Bucket=self._bucket, timeout=timeout, **arguments)

        return self._retrier.run(what, attempt)

    def _get(self, key: str, span: str | None, timeout: float) -> tuple[bytes, str]:
        arguments = {"Range": span} if span else {}
        files = self._files()

        async def get() -> tuple[bytes, str]:
            answer = await files._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + key, **arguments)
            async with answer["Body"] as body:
                return await body.read(), answer["ETag"]

        found: tuple[bytes, str] = sync(files.loop, get, timeout=timeout)
        return found

    def _files(self) -> s3fs.S3FileSystem:
        """Return this process's file system: its event loop and sockets do not survive a fork.

        The parent's stays in the child's table: collecting it would wait for the loop that is not there.
        """
        files = self._opened.get(os.getpid())
        return files or self._opened.setdefault(os.getpid(), _open_files(self._options))


def _open_files(options: S3Options) -> s3fs.S3FileSystem:
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 16,
        # the newer default checksums are unknown to many servers; Content-MD5 is known to all
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    if options.endpoint_url:
        config["s3"] = {"addressing_style": "path"}  # bucket.localhost has no address
    files = s3fs.S3FileSystem(
        key=options.access_key,
        secret=options.secret_key,
        endpoint_url=options.endpoint_url,
        client_kwargs={"region_name": options.region} if options.region else {},
        config_kwargs=config,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    files.retries = 1
    return files


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
