"""Where things stand in the store."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infra.artifacts.ref import check_key, check_kind, check_name
from infra.errors import StoreError

VERSIONS = "versions/"
LEASES = "leases/"
LOCKS = "locks/"
"""Which process a run is worked on by, and which run a deployment is taken by."""
TRASH = "trash/"
"""Lists of what a collection found unreachable, and will delete after its grace time."""
DELETING = "trash/deleting/"
"""Intents of deletions under way."""
PROBES = "probe/"
"""What opening a store wrote to try it, left by those who were killed meanwhile."""
BLOBS = "blobs/sha256/"
KEYS = "keys/"
ALIASES = "aliases/"
HINTS = "hints/"
"""Where to begin to look for the newest version."""
PLANS = "plans/"
"""What each run resolved when it began."""
MANIFEST = re.compile(r"([0-9]{8})\.json")
"""What a manifest is called in the folder of its artifact."""
_PLANNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,119}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOCK = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")


def blob_key(sha256: str) -> str:
    """Return where the body of that hash is.

    Raises:
        StoreError: if it is no hash; a note in the store that was altered by hand could lead elsewhere.
    """
    if not _SHA256.fullmatch(sha256):
        raise StoreError(f"{sha256!r:.80} is no SHA-256, so there is no blob of it")
    return f"{BLOBS}{sha256[:2]}/{sha256[2:]}"


def lock_key(name: str) -> str:
    """Return where the lock of that name is.

    Raises:
        StoreError: if no lock can have the name.
    """
    if not _LOCK.fullmatch(name):
        raise StoreError(f"{name!r:.120} cannot name a lock: use lower case letters, digits and dashes, 100 at most")
    return f"{LOCKS}{name}.json"


def versions_prefix(kind: str, name: str) -> str:
    """Return where the manifests of an artifact are."""
    return f"{VERSIONS}{check_kind(kind)}/{check_name(name)}/"


def version_key(kind: str, name: str, version: int) -> str:
    """Return where the manifest of a version is."""
    return f"{versions_prefix(kind, name)}{version:08d}.json"


def version_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the manifests among the names that are in the folder of an artifact."""
    return [int(match[1]) for match in map(MANIFEST.fullmatch, names) if match]


def hint_key(kind: str, name: str) -> str:
    """Return where it stands which number the versions of an artifact have reached."""
    return f"{HINTS}{check_kind(kind)}/{check_name(name)}.json"


def index_key(kind: str, key: str) -> str:
    """Return where it stands what was made from these inputs."""
    return f"{KEYS}{check_kind(kind)}/{check_key(key)}.json"


def content_key(kind: str, identity: str) -> str:
    """Return where it stands which version holds this content, made with this configuration from these parents."""
    return f"{KEYS}{check_kind(kind)}/content-{identity}.json"


def aliases_prefix(kind: str, name: str) -> str:
    """Return where the aliases of an artifact are."""
    return f"{ALIASES}{check_kind(kind)}/{check_name(name)}/"


def alias_key(kind: str, name: str, alias: str) -> str:
    """Return where an alias is."""
    return f"{aliases_prefix(kind, name)}{alias}.json"


def plan_prefix(run: str) -> str:
    """Return where it stands what a run was told.

    Raises:
        StoreError: if no run could have that id.
    """
    return f"{PLANS}{_check_planned(run)}/"


def plan_key(run: str, question: str) -> str:
    """Return where it stands what a run was told when it first asked.

    Raises:
        StoreError: if run or question could not have that name.
    """
    return f"{plan_prefix(run)}{_check_planned(question)}.json"


def _check_planned(name: str) -> str:
    if not _PLANNED.fullmatch(name):
        raise StoreError(f"{name!r:.120} is no name of a run or question; take letters, digits, dots and dashes")
    return name
