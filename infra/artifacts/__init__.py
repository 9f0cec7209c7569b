"""The artifact store."""

from infra.artifacts.collect import LEAST_GRACE, Collection
from infra.artifacts.credentials import S3Options
from infra.artifacts.deletion import Retention
from infra.artifacts.diff import Difference
from infra.artifacts.lineage import Descent, Lineage
from infra.artifacts.manifest import FileEntry, Manifest
from infra.artifacts.ref import KINDS, ArtifactRef
from infra.artifacts.store import ArtifactStore, open_default_store, open_store
from infra.artifacts.verify import Verification

__all__ = [
    "KINDS",
    "LEAST_GRACE",
    "ArtifactRef",
    "ArtifactStore",
    "Collection",
    "Descent",
    "Difference",
    "FileEntry",
    "Lineage",
    "Manifest",
    "Retention",
    "S3Options",
    "Verification",
    "open_default_store",
    "open_store",
]
