"""Where a model is: packaged with us, in a directory, or on the model hub."""

from __future__ import annotations

import difflib
import logging
import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from rlhf_core.errors import ModelError
from rlhf_core.models import smollm2

PACKAGED = (smollm2.NAME,)
HUB_TIMEOUT_S = 10.0
# no pickles, no code, no copies of the weights in other formats
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_COMMIT = re.compile("[0-9a-f]{40}")

log = logging.getLogger(__name__)


def locate_model(path: str, *, models_dir: Path) -> Path:
    """Return the directory of a model, which is made or fetched first if need be.

    Args:
        path: name of a packaged model, a local directory, or a hub name such as "Qwen/Qwen2.5-0.5B", perhaps with a
            revision, "Qwen/Qwen2.5-0.5B@main": a branch, a tag or a whole commit.
        models_dir: where converted models are kept.

    Raises:
        ModelError: if there is no such model, or the hub cannot be reached.
    """
    if path in PACKAGED:
        return smollm2.convert_smollm2(models_dir)
    return find_local(path, models_dir=models_dir) or _from_hub(path)


def find_local(path: str, *, models_dir: Path) -> Path | None:
    """Return the directory of a model if it is on this machine, without making or fetching anything.

    Returns:
        None if a packaged model is not converted yet, or the path is a hub name.

    Raises:
        ModelError: if the path can only be a directory's, and there is none.
    """
    if path in PACKAGED:
        directory = smollm2.smollm2_directory(models_dir)
        return directory if directory.is_dir() else None
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory.absolute()
    if directory.is_file():
        raise ModelError(f"model {path!r} is a file; give the directory that holds config.json and safetensors files")
    is_hub_name = _HUB_NAME.fullmatch(path) is not None and not path.startswith(".")
    near = None if is_hub_name and "@" in path else _nearest(path, directory)
    if near is None and is_hub_name:
        return None
    hint = f"; did you mean {near}?" if near else f"; packaged models are {', '.join(PACKAGED)}"
    raise ModelError(f"model {path!r} does not exist{hint}")


def _nearest(path: str, directory: Path) -> str | None:
    """Return a packaged name or a neighbouring directory that was probably meant."""
    named = difflib.get_close_matches(path.casefold(), PACKAGED, n=1, cutoff=0.7)
    if named:
        return named[0]
    if not directory.parent.is_dir():
        return None
    names = sorted(entry.name for entry in directory.parent.iterdir() if (entry / "config.json").is_file())
    near = difflib.get_close_matches(directory.name, names, n=1)
    return str(directory.parent / near[0]) if near else None


def name_on_hub(directory: Path) -> str | None:
    """Return the hub name, with its exact revision, of a model in the hub's cache; None for any other directory."""
    repository = directory.parents[1].name if directory.parent.name == "snapshots" else ""
    kind, *name = repository.split("--")
    is_one = kind == "models" and name and _COMMIT.fullmatch(directory.name)
    return f"{'/'.join(name)}@{directory.name}" if is_one else None


def _from_hub(path: str) -> Path:
    cached = find_fetched(path)
    if cached is not None:
        return cached
    name, revision = split_hub_name(path)
    try:
        # asked first, by itself: the download's own attempts would take a minute to give up
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the client lets its transport's own errors through, whichever library that is
        raise ModelError(_hub_sentence(path, error)) from error
    log.info("fetching %s from the model hub", path)
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES), etag_timeout=HUB_TIMEOUT_S)
        )
    except Exception as error:
        raise ModelError(f"model {path!r} could not be fetched from the model hub: {_reason(error)}") from error


def split_hub_name(path: str) -> tuple[str, str | None]:
    """Return the name and the revision of a hub name."""
    name, _, revision = path.partition("@")
    return name, revision or None


def find_fetched(path: str) -> Path | None:
    """Return the directory of a hub model that was fetched whole before; asks no server."""
    name, revision = split_hub_name(path)
    try:
        directory = Path(
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES), local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    # a download that was cut off leaves a snapshot without its weights: it goes on from there
    whole = any(directory.glob("*.safetensors")) and (directory / "config.json").is_file()
    return directory if whole and not _lacks_shards(directory) else None


def _lacks_shards(directory: Path) -> bool:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return False
    shards = set(re.findall(r"[\w.-]+\.safetensors", index.read_text()))
    return any(not (directory / shard).is_file() for shard in shards)


def _hub_sentence(name: str, error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return (
            f"the model hub does not give {name!r} ({_reason(error)}), and there is no such directory; "
            f"check the name, or log in to the hub if the model is gated; packaged models are {', '.join(PACKAGED)}"
        )
    return (
        f"model {name!r} is neither packaged ({', '.join(PACKAGED)}) nor a directory, and the model hub could not be "
        f"reached within {HUB_TIMEOUT_S:.0f} s ({_reason(error)}); give the directory of a model on this machine"
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
