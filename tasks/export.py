"""Takes a model out of the store in a form that others load: adapters joined to one set, or merged into their base."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from typing import TYPE_CHECKING

from infra.artifacts import ArtifactRef
from infra.artifacts.manifest import BASE_FILE
from infra.artifacts.ref import EXTERNAL_PREFIX
from infra.errors import StoreError
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ModelError
from tasks.models import read_base
from tasks.scratch import scratch_directory

if TYPE_CHECKING:
    from infra.artifacts import ArtifactStore, Manifest
    from infra.settings import Settings
    from tasks.models import NotedBase

BASE = "base"
"""Directory of a base that is in the store, beside the adapters over it."""


def export(
    store: ArtifactStore,
    known: Settings,
    manifest: Manifest,
    directory: Path,
    *,
    merged: bool,
    model: str | None = None,
) -> None:
    """Put a model of adapters into a directory.

    Args:
        store: holds it.
        known: the settings.
        manifest: of the model.
        directory: an empty one; made if it is not there.
        merged: a whole model that transformers loads; else one set of adapters that peft loads, with the absolute path
            of its base, which is put beside it if the store holds it.
        model: a base that the store does not hold; None looks where the run found it.

    Raises:
        ModelError: if the base is not in the store, and not on this machine.
        StoreError: if the directory holds anything, or the store does not give what it holds.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise StoreError(
            f"{directory} is not an empty directory; give an empty directory, or a new one, for {manifest.uri}"
        )
    files = store.cached(manifest.ref)
    base = read_base(store, manifest)
    assert base is not None  # the manifest names the file
    try:
        source = _base_directory(store, known, manifest, base, model, beside=None if merged else directory / BASE)
        with scratch_directory(known.home) as folder:
            _write(files, source, folder / "model", merged=merged)
            copytree(folder / "model", directory, dirs_exist_ok=True)
    except BaseException:
        rmtree(directory, ignore_errors=True)  # it was empty: the next try finds nothing of this one
        raise


def _write(files: Path, source: Path, folder: Path, *, merged: bool) -> None:
    from rlhf_core.models.adapters import BELOW, CONFIG_FILE, WEIGHTS_FILE, read_joined, write_adapters, write_merged

    stored = json.loads((files / CONFIG_FILE).read_bytes())
    adapters, transposed = read_joined(files), bool(stored.get("fan_in_fan_out"))
    copytree(files, folder, ignore=ignore_patterns(BELOW, CONFIG_FILE, WEIGHTS_FILE, *([BASE_FILE] if merged else [])))
    if merged:
        write_merged(source, adapters, folder, transposed=transposed)
        return
    write_adapters(
        adapters, folder, base_model_name_or_path=str(source), task_type=stored.get("task_type"),
        fan_in_fan_out=transposed,
    )  # fmt: skip


def _named(known: Settings, manifest: Manifest, base: NotedBase) -> str:
    """Return where the run had its base from, if it is there unchanged; else its name on the hub, if it has one."""
    from rlhf_core.models.loading import model_digest

    path = PipelineConfig.model_validate(manifest.config).model.path
    directory = Path(path).expanduser()
    with suppress(ModelError):  # no model is there
        if directory.is_dir() and model_digest(directory, models_dir=known.models_dir) == base.digest:
            return path
    return base.hub or path


def _base_directory(
    store: ArtifactStore,
    known: Settings,
    manifest: Manifest,
    base: NotedBase,
    model: str | None,
    *,
    beside: Path | None,
) -> Path:
    """Return where the base is: beside the adapters, in the cache, or outside the store."""
    from rlhf_core.models.loading import model_digest
    from rlhf_core.models.locating import locate_model

    if not base.uri.startswith(EXTERNAL_PREFIX):
        reference = ArtifactRef(base.uri, base.digest)
        return store.cached(reference) if beside is None else store.fetch(reference, beside).absolute()
    path = model or _named(known, manifest, base)
    try:
        directory = locate_model(path, models_dir=known.models_dir)
    except ModelError as error:
        raise ModelError(
            f"{manifest.uri} is adapters over {base.uri}, which the store does not hold: {error}; say with --model "
            "where it is"
        ) from error
    digest = model_digest(directory, models_dir=known.models_dir)
    if digest != base.digest:
        raise ModelError(
            f"{manifest.uri} was trained over {base.uri} (digest {base.digest[:12]}), but {path} holds another model "
            f"by now ({digest[:12]}); put back what was there, or say with --model where it is"
        )
    return directory.absolute()
