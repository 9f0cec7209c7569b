"""Presets, and the flat parameters that people change them with.

A preset is a file of configuration keys. It may say `extends: NAME`: then it holds only what differs from that preset,
and null clears a list, a free mapping or an option of it.
A path of its data that begins with `./` is relative to the preset's own directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from flows.presets.keys import FORMER, keys, no_such_key
from infra.strict_yaml import load_yaml
from rlhf_core.config import PipelineConfig, SplitsConfig
from rlhf_core.config.ppo import BATCHES, MICRO
from rlhf_core.config.sizes import KEYS, LEAST, Sizes, settle, shortage
from rlhf_core.config.sizes import SPLITS as SPLIT_SIZES
from rlhf_core.errors import ConfigError, Fault, refuse_together
from rlhf_core.strategy.parts import Parts

DIRECTORY = Path(__file__).resolve().parent
SOURCES = ("problems", "prompts", "demonstrations", "preferences", "evaluation")
"""Keys of `data` that name sets."""
_OF_BATCHES = ("ppo.samples_per_prompt", "ppo.num_trainers", "ppo.tp", "ppo.pp", "ppo.sp", "ppo.buffer_limit")
_PAIRS = "reward_model.pairs"
_DATA = {f"data.{name}" for name in (*SOURCES, "task", "task_parameters")}
_NUMBER = TypeAdapter(int)


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
        overrides: values by dotted key, such as `{"ppo.lr": 1e-5}`, or by section, `{"ppo": {"lr": 1e-5}}`; they win
            over the other parameters, and null clears what the preset says of a list, a free mapping or an option.

    Raises:
        ConfigError: the preset is unknown, a key is unknown, a value is out of its range, or sizes exclude each other.
    """
    draft = draft_of(preset, model=model, episodes=episodes, seed=seed, overrides=overrides)
    refuse_together([Fault(each, draft.instead) for each in draft.complaints])
    return draft.config


class Draft(NamedTuple):
    """A configuration before the data are read, which its sizes follow."""

    config: PipelineConfig
    """Its sizes fit together; where `complaints` says so, some that the user set had to change for it."""
    sizes: Sizes
    """What the preset and the user want of them."""
    complaints: tuple[str, ...]
    instead: dict[str, int]
    """Overrides that answer the complaints."""


def draft_of(
    preset: str,
    *,
    data: str | None = None,
    name: str | None = None,
    model: str | None = None,
    episodes: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    goes_on: bool = False,
) -> Draft:
    """Return a preset with a run's parameters in it, and which of its sizes may follow the data.

    What the overrides set is kept. So is what the preset sets, unless the run has data or sizes of its own with which
    that cannot be; the splits' sizes are the preset's data's, and follow data that take their place.

    Args:
        preset: as of `resolve`, like the rest.
        data: the run's own data, or a stored dataset; None takes the preset's.
        name: the project; None leaves the preset's name.
        model: of `resolve`.
        episodes: of `resolve`.
        seed: of `resolve`.
        overrides: of `resolve`.
        values: what the preset's file says, where that was read before; None reads it.
        goes_on: of a run that began before: keys that there were then are left out, and not refused.

    Raises:
        ConfigError: as `resolve`, but for sizes that exclude each other.
    """
    preset_says = preset_values(preset) if values is None else values
    values = deepcopy(dict(preset_says))
    changes: dict[str, Any] = {} if name is None else {"name": name}
    if model is not None:
        changes |= {"model.path": model, "model.num_parameters": None}
    if episodes is not None:
        changes["ppo.episodes"] = episodes
    if seed is not None:
        changes["seed"] = seed
    changes |= _by_key({} if overrides is None else overrides, preset_says)
    if goes_on:
        changes = {key: value for key, value in changes.items() if key not in FORMER}
    faults = _changed(values, changes)
    if not goes_on:
        faults += [Fault(no_such_key(key), {}) for key in sorted(_leaves(preset_says)) if key in FORMER]
    sizes = _sizes(values, _fixed(values, changes, data))
    settled = settle(sizes) if sizes is not None else None
    if settled is not None:
        faults += _changed(values, {key: size for key, size in settled.values.items() if _value(values, key) != size})
    try:
        config = PipelineConfig.model_validate(values)
    except ValidationError as error:
        faults += [Fault(each, {}) for each in _complaints(error)]
    if sizes is not None and settled is None:
        faults.append(Fault(shortage(sizes, (), tuple(LEAST)), {}))
    if faults and settled is not None:  # with something else to correct, sizes are told with it
        faults += [Fault(each, settled.instead) for each in settled.complaints]
    refuse_together(faults, opening=f"preset {preset!r} with these parameters cannot run")
    assert sizes is not None  # what is no size has been refused
    assert settled is not None
    return Draft(config, sizes, settled.complaints, settled.instead)


def _by_key(given: Mapping[str, Any], preset_says: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides by dotted key, in order: what stands under a section's name sets the keys within alone.

    A mapping under a dotted key takes the place of the whole. An empty section names nothing, as Prefect's form sends
    one that was not touched; but it switches on what may be null, where the preset does not say how.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"overrides must be a mapping such as {{'ppo.lr': 1e-5}}, but it is {given!r:.200}")
    sections = {key.name: key for key in keys() if key.is_section}
    said = {key for key, value in _dotted(preset_says) if isinstance(value, Mapping)}

    def by_key(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            key = f"{prefix}{name}" if prefix else name
            is_section = key in sections and isinstance(value, Mapping) and "." not in name
            if is_section and (value or not sections[key].may_be_null or key in said):
                yield from by_key(value, f"{key}.")
            else:
                yield key, value

    return dict(by_key(given, ""))


def _changed(values: dict[str, Any], changes: Mapping[str, Any]) -> list[Fault]:
    """Set values by dotted key, in order, and return what is wrong with the keys."""
    faults = []
    for key, value in changes.items():
        try:
            _set(values, key, value)
        except ConfigError as error:
            faults.append(Fault(str(error), {}))
    return faults


def _fixed(values: Mapping[str, Any], changes: Mapping[str, Any], data: str | None) -> tuple[frozenset[str], ...]:
    """Return which sizes are kept, and which where that cannot be, if the run has data or sizes of its own."""
    set_here = _leaves(changes)
    mine = frozenset(set_here & set(KEYS))
    other_data = (data is not None and not data.startswith("dataset/")) or any(
        f"{key}.".startswith(f"{name}.") for key in set_here for name in _DATA
    )
    in_preset = _leaves(values) & set(BATCHES if other_data else KEYS)
    as_in_the_preset = data is None and not other_data and not set_here & {*KEYS, *_OF_BATCHES}
    if as_in_the_preset:
        return (mine | in_preset,)
    return mine | (in_preset - {MICRO}), mine  # a micro-batch changes rounding alone, and gives way


def _sizes(values: Mapping[str, Any], fixed: tuple[frozenset[str], ...]) -> Sizes | None:
    """Return the sizes that are asked for; None where one of them is no size, which the configuration refuses."""
    asked = {key: _value(values, key) for key in (*KEYS, *_OF_BATCHES, _PAIRS)}
    lowest = dict.fromkeys(asked, 1) | dict.fromkeys((*SPLIT_SIZES, "ppo.buffer_limit"), 0)
    pairs = asked.pop(_PAIRS)
    try:
        found = {key: _NUMBER.validate_python(value) for key, value in asked.items()}
        most_pairs = None if pairs is None else _NUMBER.validate_python(pairs)
    except ValidationError:
        return None
    if any(value < lowest[key] for key, value in found.items()) or (most_pairs is not None and most_pairs < 1):
        return None
    samples, trainers, tp, pp, sp, limit = (found[key] for key in _OF_BATCHES)
    # a number of trainers that this does not divide, the configuration refuses
    of_one_model = Parts(tp, pp, sp, _value(values, "ppo.sp_mode")).number
    return Sizes({key: found[key] for key in KEYS}, fixed, samples, max(1, trainers // of_one_model), limit, most_pairs)


def _value(values: Mapping[str, Any], key: str) -> Any:
    """Return what a configuration has under a dotted key: its own value, or the default."""
    model: Any = PipelineConfig
    inner: Any = values
    for part in key.split("."):
        field = model.model_fields[part]
        if isinstance(inner, Mapping):
            inner = inner.get(part, field.default)
        elif isinstance(inner, BaseModel):
            inner = getattr(inner, part)
        else:
            return None  # what is no section is refused by the configuration
        inner = SplitsConfig() if inner is None and field.annotation is SplitsConfig else inner  # null clears it
        model = field.annotation
    return inner


def _leaves(values: Mapping[str, Any]) -> set[str]:
    """Return the dotted key of every value that is no mapping."""
    return {key for key, value in _dotted(values) if not isinstance(value, Mapping)}


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key, a mapping before what is in it."""
    for key, value in values.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")


def preset_values(preset: str) -> dict[str, Any]:
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
    if not any(key == each.name or (each.is_free and key.startswith(f"{each.name}.")) for each in keys()):
        raise ConfigError(no_such_key(key))
    *path, last = key.split(".")
    for part in path:
        inner = values.get(part)
        if part == "lint" and isinstance(inner, str | bool):  # a word alone is the default of all rules
            inner = {"default": inner}
        values[part] = dict(inner) if isinstance(inner, dict) else {}
        values = values[part]
    values[last] = value


def _complaints(error: ValidationError) -> list[str]:
    """Return all complaints in words, one for a key."""
    # unknown keys come first: what else is missing may stand under a wrong name
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    told: dict[str, str] = {}
    for each in errors:
        # pydantic names in brackets which member of a union it tried
        place = ".".join(str(part) for part in each["loc"] if "[" not in str(part))
        told.setdefault(place, _complaint(each, place))
    return list(told.values())


def _complaint(error: ErrorDetails, place: str) -> str:
    given = "null" if error["input"] is None else f"{error['input']!r:.200}"
    if error["type"] == "extra_forbidden":
        text = no_such_key(place)
    elif error["type"] == "value_error":
        text = error["msg"].removeprefix("Value error, ")
    elif error["type"] == "missing":
        text = f"{place} is missing"
    elif error["type"] == "model_type":
        inner = [key.name for key in keys() if key.name.startswith(f"{place}.")][:3]
        such = f", such as {', '.join(inner)}" if inner else ""
        text = f"{place} must be a mapping of its keys{such}, but it is {given}"
    else:
        problem = error["msg"][0].lower() + error["msg"][1:]
        text = f"{place}: {problem}, but it is {given}"
    return text + ("; null clears only a list, a free mapping or an option" if error["input"] is None else "")
