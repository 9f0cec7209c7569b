"""A model is data: what transformers would unpickle or run because a directory asks for it is refused before it looks.

`trust_remote_code=False` and `use_safetensors=True` do not cover it: an index may name pickled shards or files
elsewhere, adapters are unpickled where they are not in safetensors, and a configuration may name code of the hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_core.errors import ModelError

SAFE = ".safetensors"


def check_harmless(directory: Path) -> None:
    """See that loading a model's directory reads its own JSON and safetensors, and nothing else.

    Raises:
        ModelError: if a file of it leads to a pickle, to code, or out of the directory.
    """
    for index in sorted(directory.rglob(f"*{SAFE}.index.json")):
        for shard in _shards(index):
            if PurePosixPath(shard).name != shard or not shard.endswith(SAFE):
                raise ModelError(
                    f"{index} names {shard!r}, which is no safetensors file beside it; give a model in safetensors"
                )
    if (directory / "adapter_config.json").is_file() and not (directory / f"adapter_model{SAFE}").is_file():
        raise ModelError(
            f"the adapters in {directory} are not in safetensors, and nothing is unpickled here; "
            "convert them, or merge them into their model"
        )
    for name, value in _choices(_read(directory / "config.json")):
        if isinstance(value, str) and "/" in value:
            raise ModelError(
                f"{directory / 'config.json'} asks for code of the hub ({name}: {value!r}), which is never run; "
                f"remove {name} from it"
            )


def _shards(index: Path) -> list[str]:
    named = _read(index).get("weight_map")
    return sorted(set(map(str, named.values()))) if isinstance(named, dict) else []


def _choices(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each setting that picks an implementation, at any depth."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name.endswith("_implementation"):
            yield from ((name, choice) for choice in (inner.values() if isinstance(inner, dict) else [inner]))
        yield from _choices(inner)


def _read(file: Path) -> dict[str, Any]:
    """Return the file's mapping; none where it is missing or damaged, which transformers says better."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
