"""The store in a bucket: s3fs for small requests, plain connections for bodies.

Both say the same to the server and keep the same limits in time. Both make one attempt each: `Retrier` makes the next.
Bodies of blobs do not go through s3fs, because its event loop and changes of threads halve the speed (docs/store.md).
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from functools import cache, partial
from io import BytesIO
from typing import Any, Protocol

import s3fs
from aiobotocore.session import AioSession
from botocore.config import Config
from botocore.loaders import Loader, create_loader
from botocore.session import Session
from fsspec.asyn import sync

from infra.artifacts.backend import BOTH, Stored, check_clock, enforced_conditions
from infra.artifacts.credentials import S3Options
from infra.artifacts.s3_requests import ABSENT, CONDITION_FAILED, FORBIDDEN, Patience, RefusedError, Retrier
from infra.errors import StoreError

BLOCK_BYTES = 256 << 10
"""Larger blocks cost new memory each, smaller ones a call each: 16 KiB or 1 MiB lose a third of the speed."""
CONNECTIONS = 16
_Known = dict[tuple[int, S3Options, Patience], Any]
_files: _Known = {}
_bodies: _Known = {}
"""One of each per process and server, for all stores: it takes a tenth of a second to make."""
_making: dict[int, threading.Lock] = {}
_answered: set[tuple[str, str]] = set()
"""Servers and buckets that this process has had an answer from: it waits for them from then on."""
_conditional: set[tuple[S3Options, str, str]] = set()
"""Where this process has seen all conditions kept: a server, a bucket, a prefix; they are tried once."""


class S3Backend:
    """Objects in a bucket. Its clients make one attempt each; retries and deadline are ours."""

    def __init__(
        self, url: str, bucket: str, prefix: str, options: S3Options, patience: Patience | None = None
    ) -> None:
        self.url = url
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options
        self._patience = patience or Patience()
        self._retrier = Retrier(options.endpoint_url, bucket, self._patience)
        self._enforced = BOTH
        self._locks: dict[int, threading.Lock] = {}

    def probe(self) -> None:
        """Check that the bucket is there and lets us in, that its clock is ours, and that it keeps conditions."""
        place = (self._retrier.server, self._bucket)
        known = place in _answered
        page = {"Prefix": self._prefix, "MaxKeys": 1}
        answer = self._retrier.run(
            "looking around",
            lambda timeout: self._files().call_s3("list_objects_v2", Bucket=self._bucket, timeout=timeout, **page),
            limit_s=None if known else min(self._patience.open_s, self._patience.deadline_s),
        )
        _answered.add(place)
        if date := answer["ResponseMetadata"]["HTTPHeaders"].get("date"):
            check_clock(parsedate_to_datetime(date), f"the S3 server {self._retrier.server}")
        if (self._options, self._bucket, self._prefix) in _conditional:
            return
        try:
            enforced = enforced_conditions(self)
        except RefusedError as error:
            if error.code in FORBIDDEN:
                return  # a user who may only read can open the store; the first write says what is missing
            raise
        if enforced != BOTH and not self._options.single_writer:
            raise StoreError(
                f"the S3 server {self._retrier.server} of the bucket {self._bucket!r} does not enforce conditional "
                f"writes, {enforced.missing()}, so two writers would overwrite each other; use a server that does, or "
                "promise that only one process at a time writes to it (RLHF_STORE_SINGLE_WRITER=true)"
            )
        self._enforced = enforced
        if enforced == BOTH:
            _conditional.add((self._options, self._bucket, self._prefix))

    def read(self, key: str) -> Stored | None:
        """Return a small object, or None if there is none."""
        try:
            data, tag = self._retrier.run(f"reading {key}", partial(self._get, key))
        except RefusedError as error:
            if error.code in ABSENT:
                return None
            raise
        return Stored(data, tag)

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object unless one is there."""
        if self._enforced.create:
            return self._put_if(key, data, IfNoneMatch="*")
        with self._only_writer():
            if self.size(key) is not None:
                return False
            self._put(key, data)
        return True

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        """Write a small object if it is still in the state that `tag`, its ETag, names."""
        if self._enforced.replace:
            return self._put_if(key, data, IfMatch=tag)
        with self._only_writer():
            current = self.read(key)
            if current is None or current.tag != tag:
                return False
            self._put(key, data)
        return True

    def delete(self, key: str) -> None:
        """Remove an object; it may be gone already."""
        limit_s = min(self._patience.delete_s, self._patience.deadline_s)
        self._call(f"deleting {key}", "delete_object", limit_s=limit_s, stops_count=True, Key=self._prefix + key)

    def children(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        """Return the sorted names directly under a prefix."""
        return sorted(self._list(prefix, after, most))

    def tags(self, prefix: str) -> dict[str, str]:
        """Return the names directly under a prefix, each with its ETag; folders have none."""
        return self._list(prefix)

    def _list(self, prefix: str, after: str = "", most: int | None = None) -> dict[str, str]:
        """Return names with their ETags, page by page."""
        full = self._prefix + prefix
        found: dict[str, str] = {}
        more: dict[str, Any] = {"StartAfter": full + after} if after else {}
        while True:
            limit: dict[str, Any] = {} if most is None else {"MaxKeys": most - len(found)}
            page = self._call(f"listing {prefix}", "list_objects_v2", Prefix=full, Delimiter="/", **more, **limit)
            keys = [(item["Key"], item.get("ETag", "")) for item in page.get("Contents", ())]
            keys += [(item["Prefix"], "") for item in page.get("CommonPrefixes", ())]
            found |= {key.removeprefix(full).rstrip("/"): tag for key, tag in keys if key != full}
            if not page.get("IsTruncated") or len(found) == most:
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, or None if there is none."""
        try:
            found = self._call(f"looking for {key}", "head_object", Key=self._prefix + key)
        except RefusedError as error:
            if error.code in ABSENT:
                return None
            raise
        return int(found["ContentLength"])

    def upload(self, key: str, body: bytes) -> None:
        """Send a blob; the server checks it (Content-MD5), and has to hold all of it afterwards."""
        md5 = hashlib.md5(body, usedforsecurity=False)
        target = {"Bucket": self._bucket, "Key": self._prefix + key, "ContentMD5": _base64(md5.digest())}

        def attempt(timeout: float) -> Any:
            client = bodies(self._options, self._patience)
            return client.put_object(Body=Outgoing(body, timeout), **target)

        answer = self._retrier.run(f"writing {key}", attempt, size=len(body))
        is_there = answer.get("ETag", "").strip('"') == md5.hexdigest()  # a tag need not be the MD5
        if not is_there and (stored := self.size(key)) != len(body):
            raise StoreError(f"{key} arrived in the artifact store with {stored} of {len(body)} bytes; try again")

    def download(self, key: str, size: int) -> Iterator[bytes]:
        """Yield an object of known size piece by piece, from one answer unless that breaks off."""
        return read_through(partial(self._ask, key), partial(self._retrier.run, f"reading {key}"), size)

    def _put(self, key: str, data: bytes, **condition: Any) -> None:
        md5 = _base64(hashlib.md5(data, usedforsecurity=False).digest())
        self._call(f"writing {key}", "put_object", Key=self._prefix + key, Body=data, ContentMD5=md5, **condition)

    def _put_if(self, key: str, data: bytes, **condition: str) -> bool:
        try:
            self._put(key, data, **condition)
        except RefusedError as error:
            if error.code in CONDITION_FAILED or (error.code in ABSENT and "IfMatch" in condition):
                return False
            raise
        return True

    def _call(
        self, what: str, method: str, *, limit_s: float | None = None, stops_count: bool = False, **arguments: Any
    ) -> Any:
        def attempt(timeout: float) -> Any:
            return self._files().call_s3(method, Bucket=self._bucket, timeout=timeout, **arguments)

        return self._retrier.run(what, attempt, limit_s=limit_s, stops_count=stops_count)

    def _get(self, key: str, timeout: float) -> tuple[bytes, str]:
        files = self._files()

        async def get() -> tuple[bytes, str]:
            answer = await files._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + key)
            async with answer["Body"] as body:
                return await body.read(), answer["ETag"]

        found: tuple[bytes, str] = sync(files.loop, get, timeout=timeout)
        return found

    def _ask(self, key: str, start: int) -> Answer:
        """Ask for an object from a byte on; its body is read as it comes."""
        span = {"Range": f"bytes={start}-"} if start else {}
        client = bodies(self._options, self._patience)
        answer: Answer = client.get_object(Bucket=self._bucket, Key=self._prefix + key, **span)["Body"]
        return answer

    def _only_writer(self) -> threading.Lock:
        """Return the lock that keeps this process's threads apart where the server does not; a child has its own."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _files(self) -> s3fs.S3FileSystem:
        return files(self._options, self._patience)


def read_through(
    ask: Callable[[int], Answer], run: Callable[[Callable[[float], bytes]], bytes], size: int
) -> Iterator[bytes]:
    """Yield an object block by block; it comes in one answer, unless that breaks off.

    Args:
        ask: asks for the object from a byte on.
        run: makes attempts until one returns.
        size: of the object, in bytes.
    """
    answer: Answer | None = None
    done = 0

    def attempt(_: float) -> bytes:
        nonlocal answer
        answer = answer or ask(done)
        try:
            return answer.read(min(BLOCK_BYTES, size - done))
        except BaseException:
            answer.close()
            answer = None
            raise

    try:
        while done < size and (block := run(attempt)):
            done += len(block)
            yield block
    finally:
        if answer is not None:
            answer.close()


class Answer(Protocol):
    """The body of an answer, as botocore returns it."""

    def read(self, amt: int, /) -> bytes:
        """Return so many bytes; fewer only where the body ends."""

    def close(self) -> None:
        """Release the connection, which is used again if all of the body has been read."""


class Outgoing(BytesIO):
    """A body that is sent block by block: sent as a whole, all of it would have to pass within one block's limit."""

    def __init__(self, body: bytes, timeout: float) -> None:
        """Describe a body.

        Args:
            body: all of it.
            timeout: in seconds, for all of it.
        """
        super().__init__(body)
        self._deadline, self._timeout = time.monotonic() + timeout, timeout

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next block: what sends it asks for 16 KiB.

        Raises:
            TimeoutError: if the body has taken too long already.
        """
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"a body was not sent within {self._timeout:.0f} s")
        return super().read(size if size is None or size < 0 else max(size, BLOCK_BYTES))


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def files(options: S3Options, patience: Patience) -> s3fs.S3FileSystem:
    """Return this process's file system: its event loop and sockets do not survive a fork.

    The parent's stays in the child's table: collecting it would wait for the loop that is not there.
    """
    return _known(_files, options, patience, _open_files)


def bodies(options: S3Options, patience: Patience) -> Any:
    """Return this process's plain client, for all threads: `put_object` and `get_object` of botocore."""
    return _known(_bodies, options, patience, _open_bodies)


def _known(table: _Known, options: S3Options, patience: Patience, make: Callable[[S3Options, Patience], Any]) -> Any:
    place = (os.getpid(), options, patience)
    if place not in table:
        with _making.setdefault(os.getpid(), threading.Lock()):
            table[place] = table.get(place) or make(options, patience)
    return table[place]


def _open_files(options: S3Options, patience: Patience) -> s3fs.S3FileSystem:
    arguments = options.arguments() | {"config_kwargs": _config(options, patience)}
    arguments["session"] = _session(AioSession, arguments.pop("profile", None))
    opened = s3fs.S3FileSystem(**arguments, use_listings_cache=False, skip_instance_cache=True)
    opened.retries = 1
    return opened


def _open_bodies(options: S3Options, patience: Patience) -> Any:
    # urllib3 has a new connection bear the limit for connecting while it sends: a body needs the longer one
    config = _config(options, patience) | {"connect_timeout": patience.read_s}
    return _session(Session, options.profile).create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
        config=Config(**config),
    )


def _session(kind: type[Session], profile: str | None) -> Session:
    made = kind(profile=profile)
    made.register_component("data_loader", _loader(made.get_config_variable("data_path")))
    return made


@cache
def _loader(data_path: str | None) -> Loader:
    """Return what reads botocore's files on S3, and remembers them: that takes two tenths of a second."""
    return create_loader(data_path)


def _config(options: S3Options, patience: Patience) -> dict[str, Any]:
    for name in ("botocore", "aiobotocore", "urllib3"):  # at DEBUG they write headers out, session tokens among them
        logging.getLogger(name).setLevel(max(logging.getLogger(name).level, logging.INFO))
    return {
        # Content-MD5 is signed and holds the body: hashing it once more for the signature would prove nothing new
        "s3": options.arguments().get("config_kwargs", {}).get("s3", {}) | {"payload_signing_enabled": False},
        "connect_timeout": patience.connect_s,
        "read_timeout": patience.read_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": CONNECTIONS,
        # the newer default checksums are unknown to many servers; Content-MD5 is known to all
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
