"""The digest of a model's files, computed once: it is part of the key of whatever is made with the model."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from rlhf_core.errors import ModelError

# what decides a model's outputs; README files and caches do not
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def model_digest(directory: Path, *, models_dir: Path | None = None) -> str:
    """Return the SHA-256 over a model's weights, configuration and tokenizer, by content.

    Args:
        directory: of the model.
        models_dir: keeps the digests of files that have not changed in size and time; None computes all of them.

    Raises:
        ModelError: if the directory holds none of these files.
    """
    files = sorted({file for pattern in _PATTERNS for file in directory.glob(pattern) if file.is_file()})
    if not files:
        raise ModelError(f"{directory} holds no model: neither weights nor configuration")
    sidecar = None if models_dir is None else _sidecar(models_dir, directory)
    known = _read(sidecar)
    entries = {file.name: _entry(file, known.get(file.name)) for file in files}
    if sidecar is not None and entries != known:
        _write(sidecar, entries)
    whole = json.dumps([[name, entry[2]] for name, entry in entries.items()])
    return hashlib.sha256(whole.encode()).hexdigest()


_Entry = tuple[int, int, str]  # size, time of change in ns, SHA-256


def _entry(file: Path, known: _Entry | None) -> _Entry:
    facts = file.stat()
    if known is not None and known[:2] == (facts.st_size, facts.st_mtime_ns):
        return known
    with file.open("rb") as stream:
        return facts.st_size, facts.st_mtime_ns, hashlib.file_digest(stream, "sha256").hexdigest()


def _sidecar(models_dir: Path, directory: Path) -> Path:
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]
    return models_dir / "digests" / f"{name}.json"


def _read(sidecar: Path | None) -> dict[str, _Entry]:
    if sidecar is None:
        return {}
    try:
        rows = json.loads(sidecar.read_bytes())
        return {name: (int(row[0]), int(row[1]), str(row[2])) for name, row in rows.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # missing or damaged: it is only a memory of what can be computed


def _write(sidecar: Path, entries: dict[str, _Entry]) -> None:
    sidecar.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=sidecar.parent)
    with os.fdopen(handle, "w") as stream:
        json.dump(entries, stream)
    Path(temporary).replace(sidecar)
