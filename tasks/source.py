"""The digest of the code that a stage's numbers depend on.

A comment, a docstring or a line break in Python is no part of it.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from infra.lock_file import locked_packages
from infra.settings import CHECKOUT

_OTHER_IN_OTHER_VERSIONS = frozenset(["ctx", "kind", "type_comment", "type_ignores"])
"""Parts of Python's syntax tree that say nothing of their own: where a name stands, how a string was prefixed."""


@cache
def source_digest(*task_files: str) -> str:
    """Return the SHA-256 of the code that a stage's numbers depend on, committed or not.

    It is the same with Python 3.11, 3.12 and 3.13, where the lock file names the same packages for them.

    Args:
        task_files: names of the stage's modules in `tasks/`.

    Raises:
        SyntaxError: a file of ours is no Python.
    """
    files = [CHECKOUT / "tasks" / f"{name}.py" for name in task_files]
    return hashlib.sha256(
        "\n".join([_core(), *(f"{_name(file)} {_code(file)}" for file in files)]).encode()
    ).hexdigest()


@cache
def _core() -> str:
    """Return what all stages share: the code of the core, and the packages that the lock file names for this Python."""
    files = sorted((CHECKOUT / "rlhf_core").rglob("*.py"))
    packages = sorted(f"{each.name}{each.specifier}" for each in locked_packages(CHECKOUT / "requirements.txt"))
    kernels = sorted((CHECKOUT / "rlhf_core").rglob("*.cpp"))
    code = [f"{_name(file)} {_code(file)}" for file in files]
    code += [f"{_name(file)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in kernels]
    return "\n".join([*code, *packages])


def _name(file: Path) -> str:
    return file.relative_to(CHECKOUT).as_posix()


def _code(file: Path) -> str:
    parts: list[str] = []
    _write(ast.parse(file.read_bytes()), parts)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _write(value: Any, parts: list[str]) -> None:
    """Write a part of a syntax tree in a form of our own: `ast.dump` differs from version to version of Python."""
    if isinstance(value, ast.AST):
        parts.append(f"{type(value).__name__}(")
        for name in value._fields:
            child = getattr(value, name, None)
            if (
                name in _OTHER_IN_OTHER_VERSIONS or child is None or child == []
            ):  # newer versions have more, empty, fields
                continue
            parts.append(f"{name}=")
            _write(_pieces(child) if isinstance(value, ast.JoinedStr) else child, parts)
        parts.append(")")
    elif isinstance(value, list):
        parts.append("[")
        for each in value:
            if not _is_docstring(each):
                _write(each, parts)
        parts.append("]")
    else:  # with its type: 1, 1.0 and True are equal
        parts.append(f"{type(value).__name__} {value!a} ")


def _is_docstring(node: object) -> bool:
    """Whether it is a string that stands alone: a docstring, one under a field, or one that does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _pieces(values: list[ast.expr]) -> list[ast.expr]:
    """Return the pieces of an f-string with neighbouring texts joined: versions of Python cut them differently."""
    joined: list[ast.expr] = []
    for is_text, group in groupby(values, key=lambda each: isinstance(each, ast.Constant)):
        if is_text:
            text = "".join(str(each.value) for each in group if isinstance(each, ast.Constant))
            joined += [ast.Constant(text)] if text else []
        else:
            joined += group
    return joined
