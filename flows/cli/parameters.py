"""The parameters of `rlhf run` as a person types them: read, judged before there is a run, and paths made absolute."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, DataError, ModelError

_WORDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": """a mapping such as '{"ppo.lr": 1e-5}'""",
    "null": "null",
}
_PARAMETER_OF = {"name": "name", "model.path": "model", "ppo.episodes": "episodes", "seed": "seed"}
_OF_CONFIGURATION = {"preset", "episodes", "seed", "overrides"}
_LONGEST_SHOWN, _LONGEST_REASON = 120, 300


def read_parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """Return parameters by name, given as NAME=VALUE with VALUE as JSON, or else as text.

    Raises:
        ConfigError: a pair is not NAME=VALUE, a name or a key within JSON stands twice, or a number is none.
    """
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"a parameter is written NAME=VALUE, but {pair!r} came")
        if name in parameters:
            raise ConfigError(f"the parameter {name} is given twice; give it once, with all that it is to say")
        parameters[name] = _value(name, text)
    return parameters


def _value(name: str, text: str) -> Any:
    def mapping(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        for place, (key, _) in enumerate(items):
            if key in dict(items[:place]):
                raise ConfigError(f"{name}: the key {key!r} stands twice; keep one of them")
        return found

    def number(digits: str) -> float:
        if not math.isfinite(float(digits)):
            raise ConfigError(f"{name}: {digits} is no number that JSON has")
        return float(digits)

    try:
        return json.loads(text, object_pairs_hook=mapping, parse_float=number, parse_constant=number)
    except ValueError:  # not JSON, or a number of thousands of digits
        return text


def check_parameters(
    deployment: str, parameters: Mapping[str, Any], schema: Mapping[str, Any], *, configured: bool = False
) -> None:
    """Refuse what a deployment's schema refuses, as the server would, but in words.

    Args:
        deployment: its name.
        parameters: by name, as they were given.
        schema: of the deployment's parameters, as the server has it.
        configured: whether `check_configuration` follows: what is of the right kind is left to its sentences.

    Raises:
        ConfigError: which parameter, what is expected, what came.
    """
    from jsonschema.exceptions import best_match
    from prefect.utilities.schema_tools.validation import validate

    known = schema.get("properties", {})
    for name, value in parameters.items():
        if name not in known:
            raise ConfigError(_unknown(deployment, name, value, known))
        wrong = best_match(validate({name: value}, {**schema}, ignore_required=True))
        kinds = [{"type": each["type"]} for each in _kinds(known[name]) if "type" in each]
        if wrong is None:
            continue
        if not kinds or validate({name: value}, {"properties": {name: {"anyOf": kinds}}}):
            raise ConfigError(f"{deployment}: {name} must be {_wanted(known[name])}, but it is {_given(value)}")
        if not (configured and name in _OF_CONFIGURATION):
            where = ".".join(map(str, wrong.absolute_path))
            raise ConfigError(f"{deployment}: {where} is not as it must be: {wrong.message:.{_LONGEST_REASON}}")


def _unknown(deployment: str, name: str, value: Any, known: Mapping[str, Any]) -> str:
    from flows.presets import SOURCES
    from flows.presets.keys import meant
    from infra.artifacts.ref import did_you_mean

    flat = _PARAMETER_OF | {f"data.{role}": "data" for role in SOURCES}
    keys = meant(name) if "overrides" in known and not get_close_matches(name, known, cutoff=0.8) else []
    own = list(dict.fromkeys(flat[key] for key in keys if flat.get(key) in known))
    if own:
        hint = f" (did you mean {' or '.join(own)}?)"
    elif keys:
        others = "".join(f", or {key}" for key in keys[1:])
        hint = f" (did you mean -p overrides='{json.dumps({keys[0]: value})}'{others}?)"
    else:
        hint = did_you_mean(name, known)
    return f"{deployment} has no parameter {name!r}{hint}; its parameters are {', '.join(known) or 'none'}"


def _kinds(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(schema.get("anyOf", [schema]))


def _wanted(schema: Mapping[str, Any]) -> str:
    """Return in words what a parameter takes."""
    kinds = [str(each.get("type")) for each in _kinds(schema)]
    return " or ".join(_WORDS.get(kind, f"of the form {json.dumps(schema)}") for kind in kinds)


def _given(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            json.loads(value)
        except ValueError as error:
            return f"{shown:.{_LONGEST_SHOWN}}, which is not JSON: {error}"
    return f"{shown:.{_LONGEST_SHOWN}}"


def check_configuration(parameters: Mapping[str, Any], tags: Sequence[str] = ()) -> None:
    """Refuse parameters that the run would refuse at once; for a run that reads the presets of this checkout.

    Args:
        parameters: the deployment's own, and over them those that were given.
        tags: the deployment's.

    Raises:
        ConfigError: the preset or a key is unknown, a value is out of its range, or no data are named. Sizes that
            exclude each other are left to the run: it tells them together with what is wrong with the data.
    """
    from flows.presets import draft_of
    from tasks.nights import check_data_are_named

    names = ("data", "name", "model", "episodes", "seed", "overrides")
    draft = draft_of(parameters["preset"], **{name: parameters[name] for name in names if name in parameters})
    check_data_are_named(tags, draft.config, parameters.get("data"))


def placed(parameters: Mapping[str, Any], *, here: bool) -> dict[str, Any]:
    """Return the parameters with the paths of data and model made absolute, as seen from the current folder.

    A worker reads them in a folder of its own. What exists here is meant, but a packaged model's name; so is what
    begins with `.` or `~`, a pattern, and a name with a data file's suffix. Other names may be the hub's, and stay.

    Args:
        parameters: by name.
        here: whether the run is on this machine: then what is not here is nowhere.

    Raises:
        DataError: a path of data can only be this folder's, and is not there.
        ModelError: the same of the model.
    """
    from flows.presets import SOURCES, with_paths

    def data(path: str) -> str:
        return _data_path(path, here=here)

    def model(path: Any) -> Any:
        return _model_path(path, here=here) if isinstance(path, str) else path

    def in_overrides(key: str, value: Any) -> Any:
        section, _, rest = key.partition(".")
        if not rest and isinstance(value, dict):
            return {name: in_overrides(f"{section}.{name}", inner) for name, inner in value.items()}
        if section == "data" and rest.removesuffix(".path") in SOURCES:
            return with_paths(value, data)
        return model(value) if key == "model.path" else value

    changed: dict[str, Callable[[Any], Any]] = {
        "data": lambda path: path if _is_reference(path) else with_paths(path, data),
        "model": model,
        "overrides": lambda given: (
            {key: in_overrides(key, value) for key, value in given.items()} if isinstance(given, dict) else given
        ),
    }
    try:
        return {name: changed[name](value) if name in changed else value for name, value in parameters.items()}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None


def _is_reference(path: Any) -> bool:
    from rlhf_core.data.reading.places import is_data_name

    return isinstance(path, str) and path.startswith("dataset/") and not is_data_name(path)


def _data_path(path: str, *, here: bool) -> str:
    from rlhf_core.data.reading.places import files_of_pattern, is_hub_name, is_pattern, missing

    if not path or "://" in path:
        return path
    file = Path(path).expanduser().absolute()
    if file.exists():
        return str(file)
    if is_hub_name(path):
        return path
    if is_pattern(path):
        file = Path(glob.escape(str(Path.cwd())), Path(path).expanduser())
    if here and is_pattern(path):
        files_of_pattern(str(file))
    elif here:
        raise DataError(missing(file))
    return str(file) if here or path.startswith(".") else path


def _model_path(path: str, *, here: bool) -> str:
    if not path:
        raise ModelError("the parameter model is empty; name a packaged model, a directory, or a model of the hub")
    directory = Path(path).expanduser().absolute()
    if directory.exists():
        from rlhf_core.models.locating import PACKAGED  # seconds, for a directory alone

        return path if path in PACKAGED else str(directory)
    if here and path.startswith((".", "~", "/")):
        raise ModelError(f"model {path!r} does not exist: there is no directory {directory}")
    return str(directory) if path.startswith(".") else path
