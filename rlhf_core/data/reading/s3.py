"""Objects of `s3://`: fetched once, and kept for as long as they do not change."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.data.reading.local import is_data_name, is_pattern, listed
from rlhf_core.errors import DataAwayError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rlhf_core.data.reading.results import Access

PREFIX = "s3://"
T = TypeVar("T")


def fetch_objects(address: str, access: Access) -> list[tuple[str, Path]]:
    """Return what an address names, sorted: each object's address, and the file that holds it here.

    An object that has not changed since it was fetched is not fetched again.

    Args:
        address: an object, a pattern, or a prefix that ends in `/` for the data files right under it.
        access: where objects are kept, and how the server is reached.

    Raises:
        DataError: if nothing is there, or the server cannot be reached, refuses, or breaks off.
    """
    bucket = address.removeprefix(PREFIX).partition("/")[0]
    if not bucket or is_pattern(bucket):
        raise DataError(f"{address} names no bucket; write {PREFIX}bucket/path/to/file")
    options = access.storage_options()
    files, origin = _file_system(options, address), str(options.get("endpoint_url", ""))
    return [(name, _fetched(name, files, access.cache_dir / "s3", origin)) for name in _addresses(address, files)]


def _file_system(given: Mapping[str, Any], address: str) -> Any:
    import fsspec  # noqa: PLC0415  # slow to import, and seldom needed

    options = {"use_listings_cache": False, "skip_instance_cache": True, **given}
    return _asked(address, lambda: fsspec.filesystem("s3", **options))


def _addresses(address: str, files: Any) -> list[str]:
    if is_pattern(address):
        found = sorted(PREFIX + name for name in _asked(address, partial(files.glob, address)))
        if not found:
            raise DataError(f"no object matches {address}; check the bucket and the pattern")
        return found
    if not address.endswith("/"):
        return [address]
    listing = [entry["name"] for entry in _asked(address, partial(files.ls, address, detail=True))]
    names = sorted(name for name in listing if is_data_name(name))
    if not names:
        raise DataError(f"there is no data file under {address}, but {listed(sorted(listing))}")
    return [PREFIX + name for name in names]


def _fetched(address: str, files: Any, cache_dir: Path, origin: str) -> Path:
    info = _asked(address, partial(files.info, address))
    if info.get("type") != "file":
        raise DataError(f"{address} is no object but a prefix; end it in / to read the data files under it")
    version = _version(info)
    folder = cache_dir / _short(f"{origin}\0{address}\0{version}")
    kept = folder / address.rpartition("/")[2]
    if kept.is_file() and kept.stat().st_size == info["size"]:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".fetching-")
    os.close(handle)
    part = Path(name)
    try:
        _asked(address, partial(files.get_file, address, name))
        whole = (
            part.stat().st_size == info["size"] and _version(_asked(address, partial(files.info, address))) == version
        )
        if not whole:
            raise DataError(f"{address} changed while it was fetched, or the connection broke off; run it again")
        part.replace(kept)
    finally:
        part.unlink(missing_ok=True)
    return kept


def _version(info: dict[str, Any]) -> str:
    """Return what changes when the object does: its tag, else when it was written, with its size."""
    return f"{info.get('ETag') or info.get('LastModified')}\0{info['size']}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _asked(address: str, request: Callable[[], T]) -> T:
    from aiohttp import ClientError as ConnectionFault  # noqa: PLC0415  # as slow to import as fsspec's S3
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError  # noqa: PLC0415
    from botocore.exceptions import ConnectionError as BotoConnectionError  # noqa: PLC0415

    try:
        return request()
    except FileNotFoundError:
        reason = "there is no such object; check bucket and path"
    except PermissionError as error:
        reason = f"the server refuses ({_first_line(error)}); check the keys and what they permit"
    except NoCredentialsError:
        reason = "there are no keys for the server; set RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY"
    except (BotoConnectionError, HTTPClientError, ConnectionFault, ConnectionError, TimeoutError) as error:
        reason = f"{_first_line(error)}; check that the server runs and that its address is right"
        raise DataAwayError(f"{address} cannot be fetched: {reason}") from None
    except (BotoCoreError, ClientError, OSError, ValueError) as error:
        reason = f"{_first_line(error)}; check that the server runs and that its address is right"
    raise DataError(f"{address} cannot be fetched: {reason}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
