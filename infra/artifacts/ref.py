"""How artifacts are named, and where the store keeps everything: references, the names that are allowed, all keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from infra.errors import ReferenceNotFoundError, StoreError

KINDS = ("dataset", "sft", "reward-model", "ppo-state", "policy", "evaluation", "run")
LATEST = "latest"
EXTERNAL_PREFIX = "model/"
"""A parent whose URI starts so came from outside the store: a leaf of every lineage."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
NAME_PATTERN = f"^{_NAME.pattern}$"
"""What names, keys and aliases look like."""
_VERSION = re.compile(r"[0-9]{1,8}")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|/")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """One version of one artifact: what crosses a task's border instead of the artifact."""

    uri: str
    """`kind/name@version`, or `model/...` for what came from outside the store."""
    digest: str
    """SHA-256 over the sorted (path, sha256) list of its files."""

    def __str__(self) -> str:
        return self.uri

    @property
    def is_external(self) -> bool:
        """Whether the store does not hold it."""
        return self.uri.startswith(EXTERNAL_PREFIX)


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference as a person writes it: `policy/llama7b`, `policy/llama7b@12`, `policy/llama7b@champion`."""

    kind: str
    name: str
    selector: str = LATEST

    @property
    def version(self) -> int | None:
        """The version when the reference names one, else None."""
        return int(self.selector) if _VERSION.fullmatch(self.selector) else None

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}@{self.selector}"


def version_uri(kind: str, name: str, version: int) -> str:
    """Return the reference of one version, as manifests and parents write it."""
    return f"{kind}/{name}@{version}"


def parse_reference(text: str) -> Reference:
    """Read a reference to something in the store.

    Args:
        text: `kind/name`, `kind/name@version` or `kind/name@alias`; without `@` it means `@latest`.

    Returns:
        Its parts, each of an allowed form; whether it exists is the store's to say.

    Raises:
        ReferenceNotFoundError: if the text is no reference, or its kind is unknown.

    Example:
        >>> parse_reference("policy/llama7b@12").version
        12
    """
    if _ADDRESS.match(text):
        raise ReferenceNotFoundError(
            f"{text!r} is an address, and names no artifact of this store: a reference is written kind/name@version, "
            "and the store that it is looked up in is chosen by RLHF_STORE_URL"
        )
    if text.startswith(EXTERNAL_PREFIX):
        raise ReferenceNotFoundError(
            f"{text!r} came from outside: lineages name it, but the store holds nothing of it; "
            f"name one of its {', '.join(KINDS)}"
        )
    path, at, selector = text.partition("@")
    kind, _, name = path.partition("/")
    selector = selector if at else LATEST
    if kind not in KINDS:
        raise ReferenceNotFoundError(
            f"{text!r} names no artifact: expected kind/name, kind/name@version or kind/name@alias"
            f"{did_you_mean(kind, KINDS)}; the kinds are {', '.join(KINDS)}"
        )
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(selector)):
        raise ReferenceNotFoundError(
            f"{text!r} names no artifact: expected {kind}/name, {kind}/name@version or {kind}/name@alias, "
            "in lower-case letters, digits, dots, dashes and underscores"
        )
    return Reference(kind, name, selector)


def check_kind(kind: str) -> str:
    """Return the kind, or raise StoreError if there is none such."""
    if kind not in KINDS:
        raise StoreError(
            f"there is no kind of artifact {kind!r}{did_you_mean(kind, KINDS)}; use one of {', '.join(KINDS)}"
        )
    return kind


def is_name(text: str) -> bool:
    """Return whether that can be the name of an artifact, a key or an alias."""
    return _NAME.fullmatch(text) is not None


def check_name(name: str, what: str = "name") -> str:
    """Return the name, or raise StoreError if it could not stand in a path or a reference."""
    if not is_name(name):
        raise StoreError(
            f"{name!r} cannot be the {what} of an artifact: use at most 128 lower-case letters, digits, "
            "dots, dashes and underscores, beginning with a letter or digit"
        )
    return name


def check_key(key: str) -> str:
    """Return the key that an artifact is found by, or raise StoreError if it could not stand in a path."""
    return check_name(key, "key")


def check_alias(alias: str) -> str:
    """Return the alias, or raise StoreError if it reads as a version or is `latest`, which is computed."""
    if alias == LATEST or _VERSION.fullmatch(alias):
        raise StoreError(
            f"{alias!r} cannot be an alias: {LATEST!r} and bare numbers already mean versions; choose a word"
        )
    return check_name(alias, "alias")


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the nearest known names, or nothing when none is near."""
    nearest = difflib.get_close_matches(text, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def enumerate_names(names: Iterable[str]) -> str:
    """Return the names with commas between them; of many, the first few."""
    known = list(names)
    rest = len(known) - _SHOWN
    return ", ".join(known[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


VERSIONS = "versions/"
LEASES = "leases/"
LOCKS = "locks/"
"""Which process works on a run, and which run has a deployment."""
TRASH = "trash/"
"""Lists of what a collection found unreachable, and will delete after its grace time."""
DELETING = "trash/deleting/"
"""Intents of deletions under way."""
PROBES = "probe/"
"""What an opening of the store writes to try it; it stays if that process is killed."""
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
    """Return where the hint is that says which number the versions of an artifact have reached."""
    return f"{HINTS}{check_kind(kind)}/{check_name(name)}.json"


def index_key(kind: str, key: str) -> str:
    """Return where the entry is that says what was made from these inputs."""
    return f"{KEYS}{check_kind(kind)}/{check_key(key)}.json"


def content_key(kind: str, identity: str) -> str:
    """Return where the entry is of the version with this content, made with this configuration from these parents."""
    return f"{KEYS}{check_kind(kind)}/content-{identity}.json"


def aliases_prefix(kind: str, name: str) -> str:
    """Return where the aliases of an artifact are."""
    return f"{ALIASES}{check_kind(kind)}/{check_name(name)}/"


def alias_key(kind: str, name: str, alias: str) -> str:
    """Return where an alias is."""
    return f"{aliases_prefix(kind, name)}{alias}.json"


def plan_prefix(run: str) -> str:
    """Return where the answers are that a run got.

    Raises:
        StoreError: if no run could have that id.
    """
    return f"{PLANS}{_check_planned(run)}/"


def plan_key(run: str, question: str) -> str:
    """Return where the answer is that a run got when it first asked a question.

    Raises:
        StoreError: if run or question could not have that name.
    """
    return f"{plan_prefix(run)}{_check_planned(question)}.json"


def _check_planned(name: str) -> str:
    if not _PLANNED.fullmatch(name):
        raise StoreError(f"{name!r:.120} is no name of a run or question; take letters, digits, dots and dashes")
    return name
