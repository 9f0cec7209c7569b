"""Presets, and the flat parameters that people change them with.

A preset is a file of configuration keys. It may say `extends: NAME`: then it holds only what differs from that preset,
and null clears a list, a free mapping or an option of it.
A path of its data that begins with `./` is relative to the preset's own directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.presets.keys import keys, no_such_key
from infra.strict_yaml import load_yaml
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
        overrides: values by dotted key, such as `{"ppo.lr": 1e-5}`; they win over the other parameters, and null
            clears what the preset says of a list, a free mapping or an option.

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
    try:
        values = load_yaml(file)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file.name} must hold a mapping of configuration keys, but holds {type(values).__name__}")
    data = values.get("data")
    if isinstance(data, dict):
        values["data"] = data | {key: with_paths(data[key], _placed) for key in SOURCES if key in data}
    return values


def with_paths(source: Any, place: Callable[[str], str]) -> Any:
    """Return what names data (a path, a mapping with one, or a list of these) with every path put through `place`."""
    if isinstance(source, list):
        return [with_paths(each, place) for each in source]
    if isinstance(source, dict) and "path" in source:
        return source | {"path": with_paths(source["path"], place)}
    return place(source) if isinstance(source, str) else source


def _placed(path: str) -> str:
    """Return a path, where one from `./` begins at the presets' directory.

    It is written as seen from where the run is, if that is above: the checkout's place is then in no record.
    """
    if not path.startswith("./"):
        return path
    file = DIRECTORY / path
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
    if not isinstance(key, str):
        raise ConfigError(f"a key of overrides must be text such as 'ppo.lr', but it is {key!r}")
    known = dict(keys())
    head = next((name for name in known if key == name or (known[name] and key.startswith(f"{name}."))), None)
    if head is None:
        raise ConfigError(no_such_key(key))
    *path, last = key.split(".")
    for part in path:
        inner = values.get(part)
        values[part] = dict(inner) if isinstance(inner, dict) else {}
        values = values[part]
    values[last] = value


def _sentence(error: ValidationError, preset: str) -> str:
    """Return the first complaint in words, and how many more there are."""
    # an unknown key comes first: what else is missing may stand under its wrong name
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    more = error.error_count() - 1
    # pydantic names in brackets which member of a union it tried
    place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    given = "null" if first["input"] is None else f"{first['input']!r:.200}"
    if first["type"] == "extra_forbidden":
        text = no_such_key(place)
    elif first["type"] == "value_error":
        text = first["msg"].removeprefix("Value error, ")
    elif first["type"] == "missing":
        text = f"{place} is missing"
    elif first["type"] == "model_type":
        inner = [name for name in dict(keys()) if name.startswith(f"{place}.")][:3]
        such = f", such as {', '.join(inner)}" if inner else ""
        text = f"{place} must be a mapping of its keys{such}, but it is {given}"
    else:
        problem = first["msg"][0].lower() + first["msg"][1:]
        text = f"{place}: {problem}, but it is {given}"
    if first["input"] is None:
        text += "; null clears only a list, a free mapping or an option"
    others = f" (and {more} more)" if more else ""
    return f"preset {preset!r} with these parameters cannot run: {text}{others}"
