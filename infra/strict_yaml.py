"""YAML in which no mapping has a key twice: the usual loaders silently keep the last one. And `1e-5` is a number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, at any depth; `<<` may add a key that the mapping has itself."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands here and in line {lines[name]}; keep one of them",
                    problem_mark=key.start_mark,
                )
            lines[name] = line
        return node


_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
"""As YAML 1.2 and JSON have it; YAML 1.1, which PyYAML reads, wants a dot and a sign as well."""
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def load_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not YAML, or a key stands twice: one sentence with file and line.
    """
    text = path.read_bytes()
    try:
        return _Loader(text).get_single_data()
    except yaml.constructor.ConstructorError as error:
        raise ValueError(f"{path}, {_line(error)}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{path} is not YAML: {_line(error)}: {error.problem}") from None
    except yaml.YAMLError as error:  # bytes that are no text
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _line(error: yaml.MarkedYAMLError) -> str:
    return f"line {error.problem_mark.line + 1}" if error.problem_mark else "some line"
