"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("flows", "infra", "rlhf_core", "tasks")
    for file in (ROOT / package).rglob("*.py")
    if re.search(r"^ *>>> ", file.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_are_true(module: str) -> None:
    failed, tried = doctest.testmod(import_module(module))
    assert tried > 0
    assert failed == 0, "what was printed says which"
