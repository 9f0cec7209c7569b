"""The artifact store."""

from infra.artifacts.lineage import Lineage
from infra.artifacts.manifest import FileEntry, Manifest
from infra.artifacts.opening import S3Options, open_default_store, open_store
from infra.artifacts.ref import KINDS, ArtifactRef
from infra.artifacts.store import ArtifactStore

__all__ = [
    "KINDS",
    "ArtifactRef",
    "ArtifactStore",
    "FileEntry",
    "Lineage",
    "Manifest",
    "S3Options",
    "open_default_store",
    "open_store",
]
