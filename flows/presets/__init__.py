"""Presets, and the flat parameters that people change them with.

A preset is a file of configuration keys. It may say `extends: NAME`: then it holds only what differs from that preset.
A path of its data that begins with `./` is relative to the preset's own directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError

DIRECTORY = Path(__file__).resolve().parent
SOURCES = ("problems", "prompts", "demonstrations", "preferences", "evaluation")
"""Keys of `data` that name sets."""


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(file.stem for file in DIRECTORY.glob("*.yaml"))


def resolve(
    preset: str,
    *,
    model: str | None = None,
    episodes: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> PipelineConfig:
    """Return a preset with a run's parameters in it, checked whole.

    Args:
        preset: name of a file in `flows/presets`.
        model: packaged name, directory or hub name of the base model.
        episodes: PPO episodes.
        seed: seed of everything random.
        overrides: values by dotted key, such as `{"ppo.lr": 1e-5}`; they win over the other parameters.

    Raises:
        ConfigError: the preset is unknown, a key is unknown, or a value is out of its range.
    """
    values = _load(preset)
    changes: dict[str, Any] = {}
    if model is not None:
        changes |= {"model.path": model, "model.num_parameters": None}
    if episodes is not None:
        changes["ppo.episodes"] = episodes
    if seed is not None:
        changes["seed"] = seed
    changes |= overrides or {}
    for key, value in changes.items():  # in order: overrides last
        _set(values, key, value)
    try:
        return PipelineConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, preset)) from error


def _load(preset: str) -> dict[str, Any]:
    """Return a preset's values over those of the preset that it extends, if it names one."""
    values = _read(preset)
    base = values.pop("extends", None)
    if base is None:
        return values
    inherited = _read(str(base))
    if "extends" in inherited:
        raise ConfigError(
            f"{preset}.yaml extends {base}, which extends {inherited['extends']}; a preset may extend one that stands "
            "alone"
        )
    return _merged(inherited, values)


def _read(preset: str) -> dict[str, Any]:
    if preset not in preset_names():
        near = get_close_matches(preset, preset_names(), n=3) or preset_names()
        raise ConfigError(f"there is no preset {preset!r}; did you mean {' or '.join(near)}?")
    file = DIRECTORY / f"{preset}.yaml"
    values = yaml.safe_load(file.read_text())
    if not isinstance(values, dict):
        raise ConfigError(f"{file.name} must hold a mapping of configuration keys, but holds {type(values).__name__}")
    data = values.get("data")
    if isinstance(data, dict):
        values["data"] = data | {key: _placed(data[key]) for key in SOURCES if key in data}
    return values


def _placed(source: Any) -> Any:
    """Return what names data, where a path from `./` begins at the presets' directory.

    It is written as seen from where the run is, if that is above: the checkout's place is then in no record.
    """
    if isinstance(source, list):
        return [_placed(each) for each in source]
    if isinstance(source, dict):
        return source | {"path": _placed(source.get("path"))}
    if not isinstance(source, str) or not source.startswith("./"):
        return source
    file = DIRECTORY / source
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings in one, key by key at every depth; where both have a value, it is the upper one's."""
    both = {
        key: _merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **both}


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    known = dict(_keys(PipelineConfig))
    head = next((name for name in known if key == name or (known[name] and key.startswith(f"{name}."))), None)
    if head is None:
        near = get_close_matches(key, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see rlhf_core/config/ for the keys there are"
        raise ConfigError(f"there is no configuration key {key!r}; {hint}")
    *path, last = key.split(".")
    for part in path:
        inner = values.get(part)
        values[part] = dict(inner) if isinstance(inner, dict) else {}
        values = values[part]
    values[last] = value


def _keys(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every dotted key, and whether free keys may follow it (a mapping such as task parameters)."""
    for name, field in config.model_fields.items():
        options = getattr(field.annotation, "__args__", ()) or (field.annotation,)
        nested = next((each for each in options if isinstance(each, type) and issubclass(each, BaseModel)), None)
        yield f"{prefix}{name}", getattr(field.annotation, "__origin__", None) is dict
        if nested is not None:
            yield from _keys(nested, f"{prefix}{name}.")


def _sentence(error: ValidationError, preset: str) -> str:
    """Return the first complaint in words, and how many more there are."""
    first, more = error.errors()[0], error.error_count() - 1
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = get_close_matches(place, dict(_keys(PipelineConfig)), n=3, cutoff=0.5)
        text = f"there is no configuration key {place!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
    elif first["type"] == "value_error":
        text = first["msg"].removeprefix("Value error, ")
    else:
        problem = first["msg"][0].lower() + first["msg"][1:]
        text = f"{place}: {problem}, but it is {first['input']!r}"
    others = f" (and {more} more)" if more else ""
    return f"preset {preset!r} with these parameters cannot run: {text}{others}"
