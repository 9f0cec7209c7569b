"""The manifest of one version: what it holds, what it came from, and who wrote it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Annotated, Any, Self
from uuid import uuid4

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticSerializationError, to_jsonable_python

from infra.artifacts.ref import KINDS, NAME_PATTERN, ArtifactRef, check_key, check_kind, check_name, version_uri
from infra.errors import StoreError

PACKAGES = (
    "rlhf-flows",
    "torch",
    "transformers",
    "peft",
    "datasets",
    "safetensors",
    "numpy",
    "ray",
    "prefect",
    "reasoning-gym",
    "math-verify",
)
"""What the numbers of an artifact depend on; their versions stand in its manifest."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_VERSION = "1.0"
"""Major and minor: a later minor version only adds fields, which an older release passes over."""
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def _check_schema_version(value: object) -> object:
    """Refuse what this release cannot read; the first manifests had a bare 1."""
    text = f"{value}.0" if isinstance(value, int) else str(value)
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"{value!r} is no version of the schema; expected major.minor")
    if major != SCHEMA_VERSION.partition(".")[0]:
        raise ValueError(f"it has schema {text}, this release reads {SCHEMA_VERSION}; upgrade rlhf-flows to read it")
    return text


SchemaVersion = Annotated[
    str,
    BeforeValidator(_check_schema_version),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": r"^1\.[0-9]+$"}, {"const": 1}], "default": SCHEMA_VERSION}),
]


def check_path(path: str) -> str:
    """Return a file's path inside its artifact, or raise StoreError if it could lead outside of it."""
    pure = PurePosixPath(path)
    clean = str(pure) == path and "\\" not in path and path.isprintable()
    if not clean or pure.is_absolute() or ".." in pure.parts or path in {"", "."}:
        raise StoreError(
            f"{path!r} cannot be a file of an artifact: use a relative path with forward slashes and no '..'"
        )
    return path


FilePath = Annotated[
    str,
    AfterValidator(check_path),
    WithJsonSchema({"type": "string", "pattern": r"^(?!/)(?!.*(^|/)\.{0,2}(/|$))[^\\]+$"}),
]
Kind = Annotated[str, AfterValidator(check_kind), WithJsonSchema({"type": "string", "enum": list(KINDS)})]
Name = Annotated[str, AfterValidator(check_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]
Key = Annotated[str, AfterValidator(check_key), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]


class BlobEntry(BaseModel):
    """One blob: a body under its hash, at `blobs/sha256/<first two digits>/<the others>`."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    size: int = Field(ge=0)
    """In bytes."""
    sha256: Sha256
    """Of the body, in lower-case hexadecimal digits."""


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    path: FilePath
    """Where it lies in the artifact's directory: relative, with forward slashes, no `..`, and printable."""
    size: int = Field(ge=0)
    """In bytes."""
    sha256: Sha256
    """Of the whole file."""
    blobs: tuple[BlobEntry, ...] = ()
    """The blobs that make up its body, in order; none when the body is one blob, of the file's own hash."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.blobs and sum(blob.size for blob in self.blobs) != self.size:
            raise ValueError(f"the blobs of {self.path!r} do not add up to its size")
        return self

    @property
    def pieces(self) -> tuple[BlobEntry, ...]:
        """The blobs that make up its body, in order; at least one."""
        return self.blobs or (BlobEntry(size=self.size, sha256=self.sha256),)


BASE_FILE = "base.json"
"""The file in which a model of adapters names its base."""
ENDED = "states_deleted"
"""A figure of what takes the place of a run's training states; an episode has none of the name."""
_POLICIES = ("sft", "policy")


class Manifest(BaseModel):
    """What one version of an artifact is; it is written after all that it names, and never changes."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", use_attribute_docstrings=True)

    schema_version: SchemaVersion = SCHEMA_VERSION
    """Major and minor. A minor version only adds fields, none of them names blobs; the first manifests had a bare 1."""
    kind: Kind
    """What sort of artifact it is."""
    name: Name
    """Of the artifact; it has versions of its own in each kind."""
    version: int = Field(ge=0, le=99_999_999)
    """The next free number, or for a `ppo-state` the number of episodes behind it; one more once the run has ended."""
    digest: Sha256
    """SHA-256 over the sorted list of [path, sha256] of its files, as JSON without spaces."""
    files: tuple[FileEntry, ...]
    """All that it holds. The blobs that they name are the only ones that it keeps from being collected."""
    parents: tuple[ArtifactRef, ...] = ()
    """What it was made from, by version; `model/...` for what came from outside the store."""
    key: Key | None = None
    """What it can be found by again: a hash of all that it was made from."""
    config: dict[str, JsonValue] = {}
    """The resolved configuration that it was made with."""
    source_digest: str = ""
    """SHA-256 of the code that made it."""
    packages: dict[str, str] = {}
    """Versions of what its numbers depend on."""
    metrics: dict[str, JsonValue] = {}
    """Figures worth keeping with it; what is no finite number is the text NaN, Infinity or -Infinity."""
    flow_run: str | None = None
    """Id of the run in Prefect."""
    created: datetime
    """When the manifest was drafted, by its writer's clock."""
    writer: str
    """A random id: tells a writer whose answer was lost that the manifest it finds is its own."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a path is named twice")
        if {str(parent) for path in paths for parent in PurePosixPath(path).parents} & set(paths):
            raise ValueError("a path is both a file and a folder")
        if self.digest != digest_of(self.files):
            raise ValueError("the digest is not that of the files")
        return self

    @property
    def uri(self) -> str:
        """`kind/name@version`."""
        return version_uri(self.kind, self.name, self.version)

    @property
    def ref(self) -> ArtifactRef:
        """What other artifacts and tasks know it by."""
        return ArtifactRef(uri=self.uri, digest=self.digest)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(entry.size for entry in self.files)

    @property
    def has_adapters(self) -> bool:
        """Whether it is adapters over a base, and no whole model."""
        return any(entry.path == BASE_FILE for entry in self.files)

    @property
    def has_ended(self) -> bool:
        """Whether it took the place of a run's training states when the run's policy was stored."""
        return self.kind == "ppo-state" and ENDED in self.metrics

    @property
    def base(self) -> ArtifactRef | None:
        """The parent that its adapters are over, the last of its policies: without it, it is of no use."""
        models = [each for each in self.parents if each.is_external or each.uri.partition("/")[0] in _POLICIES]
        return models[-1] if self.has_adapters and models else None

    @property
    def blobs(self) -> tuple[BlobEntry, ...]:
        """Every blob that its files are made of, in order; one that serves twice is there twice."""
        return tuple(blob for entry in self.files for blob in entry.pieces)

    @property
    def identity(self) -> str:
        """SHA-256 over what makes two versions of an artifact the same: name, content, configuration, parents."""
        parents = sorted([parent.uri, parent.digest] for parent in self.parents)
        facts = json.loads(self.model_dump_json(include={"kind", "name", "digest", "config"})) | {"parents": parents}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def entry(self, path: str) -> FileEntry:
        """Return the entry of one file.

        Raises:
            StoreError: if the artifact has no such file; the message lists those it has.
        """
        for entry in self.files:
            if entry.path == path:
                return entry
        listing = ", ".join(entry.path for entry in self.files) or "none"
        raise StoreError(f"{self.uri} has no file {path!r}; its files are {listing}")

    def to_json(self) -> bytes:
        """Return the manifest as it is stored."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def draft(cls, files: tuple[FileEntry, ...], *, kind: str, name: str, **fields: Any) -> Manifest:
        """Return a manifest that is complete, but not yet written.

        Args:
            files: what it holds.
            kind: of the artifact.
            name: of the artifact.
            **fields: the others; config and metrics may hold whatever becomes JSON.

        Raises:
            StoreError: if a field cannot stand in a manifest.
        """
        try:
            for field in ("config", "metrics"):
                fields[field] = to_jsonable_python(dict(fields.get(field, {})))
            return cls(
                kind=kind,
                name=name,
                digest=digest_of(files),
                files=files,
                packages=installed_packages(),
                created=datetime.now(UTC),
                writer=uuid4().hex,
                **fields,
            )
        except ValidationError as error:
            raise StoreError(f"cannot store {kind}/{name}: {first_complaint(error)}") from None
        except PydanticSerializationError as error:
            raise StoreError(f"cannot store {kind}/{name}: config or metrics are not plain JSON: {error}") from None

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Read a stored manifest.

        Raises:
            StoreError: if it is damaged or of a later form; the message names it and what is wrong.
        """
        try:
            return cls.model_validate_json(data)
        except (ValidationError, StoreError) as error:
            complaint = first_complaint(error) if isinstance(error, ValidationError) else str(error)
            advice = "restore it from a backup, or remove it (rlhf artifacts verify names all such)"
            why = _complaint_of_version(data) or f"{complaint}; {advice}"
            raise StoreError(f"the manifest {where} cannot be read: {why}") from None


class _Form(BaseModel):
    """As much of a manifest as says whether the rest can be read."""

    schema_version: SchemaVersion = SCHEMA_VERSION


def _complaint_of_version(data: bytes) -> str | None:
    """Return what is wrong with a manifest's version, or None: whatever a later one holds may be right there."""
    try:
        _Form.model_validate_json(data)
    except ValidationError as error:
        return first_complaint(error) if error.errors()[0]["loc"] else None
    return None


def first_complaint(error: ValidationError) -> str:
    """Return where and what, of the first thing that pydantic found wrong."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def digest_of(files: Iterable[FileEntry]) -> str:
    """Return the SHA-256 over the sorted (path, sha256) list: the same files, the same digest."""
    listing = sorted([entry.path, entry.sha256] for entry in files)
    return hashlib.sha256(json.dumps(listing, separators=(",", ":")).encode()).hexdigest()


@cache
def installed_packages() -> dict[str, str]:
    """Return the versions of the packages that numbers depend on, without importing them."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def manifest_schema() -> dict[str, Any]:
    """Return the JSON schema of the manifests that this release reads.

    Fields that it does not know are allowed: a later minor version may have them.
    """
    schema = Manifest.model_json_schema(mode="validation")
    return {"$schema": DIALECT, "title": f"rlhf-flows manifest, version {SCHEMA_VERSION}"} | {
        name: value for name, value in schema.items() if name != "title"
    }


def schema_text() -> str:
    """Return the schema as docs/manifest.schema.json holds it."""
    return json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n"
