"""What a flow's parameters may be, as a JSON schema: Prefect draws its form from it, and refuses by it.

The configuration's own types are the one source of ranges, choices and help. No default stands in the schema: a form
that sent one would win over the preset.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from flows.presets import preset_names
from rlhf_core.config import PipelineConfig

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
_NUMBERS = {"integer", "number"}
_NUMBER_AS_TEXT = r"^[-+.eE\d]+$"
_NO_KEY = {"not": {"description": "there is no configuration key of this name"}}
_NOT_DRAWN = ("name", "preset", "seed")
"""Parameters of their own; among the overrides they are allowed, too."""


class _Drawn:
    """Gives a parameter the schema that a function returns, when it is asked for; values stay as they are.

    So a wrong value that comes past the server is told by the run, in its own sentence.
    """

    def __init__(self, schema: Callable[[], Schema]) -> None:
        self.schema = schema

    def __get_pydantic_json_schema__(self, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return deepcopy(self.schema())  # pydantic writes into it


@cache  # of the thirty deployments that `rlhf up` registers in one process
def overrides_schema() -> Schema:
    """Return the schema of `overrides`: the sections as a form, and every dotted key."""
    sections = _configuration()["properties"]
    patterns: dict[str, list[str]] = defaultdict(list)
    for key, schema in _by_dotted_key(sections):
        patterns[json.dumps(schema)].append(key)
    return {
        "type": "object",
        "properties": {name: each for name, each in sections.items() if name not in _NOT_DRAWN},
        "patternProperties": {f"^({'|'.join(keys)})$": json.loads(schema) for schema, keys in patterns.items()},
        "additionalProperties": _NO_KEY,  # false would name all patterns in its refusal
    }


def _range(section: str | None, name: str) -> Schema:
    fields = _configuration()["properties"]
    found = fields[name] if section is None else fields[section]["properties"][name]
    return {key: value for key, value in found.items() if key not in {"title", "description"}}


@cache
def _configuration() -> Schema:
    """Return the configuration's schema with nothing required, no default, and each type where it is used."""
    whole = PipelineConfig.model_json_schema(ref_template="{model}")
    return _optional(whole, whole["$defs"])


def _optional(schema: Mapping[str, Any], types: Mapping[str, Any]) -> Schema:
    if "$ref" in schema:
        said = {key: value for key, value in schema.items() if key != "$ref"}
        return _optional({**types[schema["$ref"]], **said}, types)
    plain: Schema = {
        key: value for key, value in schema.items() if key not in {"$defs", "default", "required", "title"}
    }
    if "description" in plain:
        plain["description"] = " ".join(plain["description"].split())
    for bound in ("minimum", "maximum"):  # a form refuses by these alone, and two refusals would be told as neither
        if (end := plain.pop(f"exclusive{bound.title()}", None)) is not None:
            plain[bound] = end
            plain["not"] = {"enum": [*plain.get("not", {"enum": []})["enum"], end]}
    if "properties" in plain:
        plain["properties"] = {
            name: {"title": name, **_field(name, _optional(each, types))} for name, each in schema["properties"].items()
        }
    for key in ("anyOf", "prefixItems"):
        if key in plain:
            plain[key] = [_optional(each, types) for each in plain[key]]
    for key in ("items", "additionalProperties"):
        if isinstance(plain.get(key), Mapping):
            plain[key] = _optional(plain[key], types)
    return plain


def _field(name: str, schema: Schema) -> Schema:
    """Return a field's schema with what its validators take besides: null that empties, a path for a source."""
    said = {"description": schema.pop("description")} if "description" in schema else {}
    kind, rest = schema.get("type"), schema
    if {"type": "boolean"} in schema.get("anyOf", [schema]):  # a box that is not ticked would be sent as false
        return {"enum": [True, False, *([None] if "anyOf" in schema else [])], **said}
    if kind == "array" and "path" in schema.get("items", {}).get("properties", {}):
        path, source = {"type": "string", "minLength": 1}, schema["items"]
        each = {"anyOf": [path, _without_help(source)]}
        rest = {"anyOf": [path, source, {"type": "array", "items": each}, NULL]}
    elif name == "lint" and "properties" in schema:
        words = schema["properties"]["default"]["enum"]
        rest = {"anyOf": [schema, {"type": "string", "enum": words}, {"type": "boolean"}, NULL]}
    elif kind == "array" or (kind == "object" and "properties" not in schema) or name == "splits":
        rest = {"anyOf": [schema, NULL]}
    return {**rest, **said}


def _by_dotted_key(fields: Mapping[str, Schema], above: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield a regular expression of each dotted key, and its schema: without help, as no form draws it."""
    for name, field in fields.items():
        key = f"{above}{re.escape(name)}"
        if above or "properties" not in field:
            yield key, _of_dotted(field, key)
        for kind in field.get("anyOf", [field]):
            if "properties" in kind:
                yield from _by_dotted_key(kind["properties"], rf"{key}\.")
            elif isinstance(free := kind.get("additionalProperties"), dict) and "properties" in free:
                yield rf"{key}\.[^.]+", _of_dotted(free, key)
                yield from _by_dotted_key(free["properties"], rf"{key}\.[^.]+\.")
            elif isinstance(free, bool | dict) and free is not False:
                yield rf"{key}\..+", _of_dotted(free, key) if isinstance(free, dict) else {}


def _of_dotted(schema: Mapping[str, Any], key: str) -> Schema:
    """Return a schema without help, and with what files in YAML hold: `1e-5` is text there, and `off` is false."""

    def as_in_yaml(plain: Schema) -> Schema:
        if plain.get("type") in _NUMBERS:
            return {**plain, "type": [plain["type"], "string"], "pattern": _NUMBER_AS_TEXT}
        if key.startswith(r"data\.lint") and "enum" in plain:
            return {"enum": [*plain["enum"], True, False]}
        return plain

    return _without_help(schema, as_in_yaml)


def _without_help(schema: Mapping[str, Any], change: Callable[[Schema], Schema] = dict) -> Schema:
    plain = {name: value for name, value in schema.items() if name not in {"title", "description"}}
    if "properties" in plain:
        plain["properties"] = {name: _without_help(each, change) for name, each in schema["properties"].items()}
    if "anyOf" in plain:
        plain["anyOf"] = [_without_help(each, change) for each in schema["anyOf"]]
    for name in ("items", "additionalProperties"):
        if isinstance(plain.get(name), Mapping):
            plain[name] = _without_help(schema[name], change)
    return change(plain)


# A flow of these has no `from __future__ import annotations`: Prefect would look for their names where its last
# decorator is defined.
Preset = Annotated[str, _Drawn(lambda: {"type": "string", "enum": preset_names()})]
"""The name of a preset that is there."""
Episodes = Annotated[int, _Drawn(lambda: _range("ppo", "episodes"))]
"""As `ppo.episodes`."""
Seed = Annotated[int, _Drawn(lambda: _range(None, "seed"))]
"""As the configuration's `seed`."""
Overrides = Annotated[dict[str, Any], _Drawn(overrides_schema)]
"""Values by section (`{"ppo": {"lr": 1e-5}}`) or by dotted key (`{"ppo.lr": 1e-5}`)."""
