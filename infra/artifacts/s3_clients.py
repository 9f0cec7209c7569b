"""The two ways to an S3 server: s3fs for small requests, plain connections for bodies.

Both say the same to the server, keep to the same limits in time, and make one attempt each: retries are retrier.py's.
Bodies of blobs do not pass through s3fs: an event loop, and its changes of threads, halve the speed (docs/store.md).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import botocore.session
import s3fs
from botocore.config import Config

from infra.artifacts.credentials import S3Options
from infra.artifacts.retrier import Patience

CONNECTIONS = 16
_Known = dict[tuple[int, S3Options, Patience], Any]
_files: _Known = {}
_bodies: _Known = {}
"""One of each per process and server, for all stores: it takes a tenth of a second to make."""
_making: dict[int, threading.Lock] = {}


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
    opened = s3fs.S3FileSystem(**arguments, use_listings_cache=False, skip_instance_cache=True)
    opened.retries = 1
    return opened


def _open_bodies(options: S3Options, patience: Patience) -> Any:
    # urllib3 has a new connection bear the limit for connecting while it sends: a body needs the longer one
    config = _config(options, patience) | {"connect_timeout": patience.read_s}
    return botocore.session.Session(profile=options.profile).create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
        config=Config(**config),
    )


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
