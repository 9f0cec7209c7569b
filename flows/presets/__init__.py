"""Presets, and the flat parameters that people change them with."""

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
    if preset not in preset_names():
        near = get_close_matches(preset, preset_names(), n=3) or preset_names()
        raise ConfigError(f"there is no preset {preset!r}; did you mean {' or '.join(near)}?")
    file = DIRECTORY / f"{preset}.yaml"
    values = yaml.safe_load(file.read_text())
    if not isinstance(values, dict):
        raise ConfigError(f"{file.name} must hold a mapping of configuration keys, but holds {type(values).__name__}")
    return values


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
