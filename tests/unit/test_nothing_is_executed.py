"""Nothing that is read is unpickled or run: no source of ours could, but for a few that are named with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for package in ("flows", "tasks", "rlhf_core", "infra") for path in (ROOT / package).rglob("*.py")
)
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
MAY_PICKLE = {
    "rlhf_core/rewards/process.py": "asks its own child over a pipe, which answers",
    "rlhf_core/rewards/model.py": "hands that child a function of the running program",
}
UNPICKLERS = {
    "torch.load",
    "numpy.load",
    "np.load",
    "pandas.read_pickle",
    "pd.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
}
RUNNERS = {"eval", "exec", "compile", "__import__"}
EVALUATORS = {"sympify", "parse_expr"}
"""Functions of sympy that evaluate a text as Python, by any path."""
AUTO = ("AutoModel", "AutoTokenizer", "AutoConfig", "AutoProcessor")
PACKAGED = "rlhf_core/models/smollm2.py"
"""Reads a GGUF file out of an installed package: a format without code."""


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def offences(source: str) -> list[str]:
    """What a source does that could run or unpickle what it reads."""
    tree = ast.parse(source)
    found = [f"imports {module}" for module in imports(tree) if module in PICKLES]
    for function, call in calls(tree):
        if function in UNPICKLERS or function in RUNNERS:
            found.append(f"calls {function}")
        if function.rpartition(".")[2] in EVALUATORS:
            found.append(f"calls {function}")
        trusted = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
        if any(not (isinstance(value, ast.Constant) and value.value is False) for value in trusted):
            found.append(f"calls {function} with trust_remote_code")
        if function.startswith(AUTO) and function.endswith(".from_pretrained") and not trusted:
            found.append(f"calls {function} without trust_remote_code=False")
    found += [
        "names trust_remote_code elsewhere"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code"
    ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_source_unpickles_or_runs_what_it_reads(path: Path) -> None:
    found = offences(path.read_text())
    if name(path) in MAY_PICKLE:
        found = [offence for offence in found if not offence.startswith("imports ")]
    if name(path) == PACKAGED:
        found = [offence for offence in found if "without trust_remote_code" not in offence]
    assert found == []


def test_what_may_pickle_does() -> None:
    for path in MAY_PICKLE:
        assert PICKLES & set(imports(parsed(ROOT / path))), f"{path} needs no exception any more"


def test_every_model_is_loaded_from_safetensors_alone() -> None:
    """A class that is named by a variable is transformers' too; our own take a directory and a dtype."""
    for path in SOURCES:
        for function, call in calls(parsed(path)):
            given = {keyword.arg for keyword in call.keywords}
            if function == "kind.from_pretrained" and given:
                assert "use_safetensors" in given, name(path)
                assert "check_harmless(directory)" in path.read_text(), name(path)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x')",
        "eval('1')",
        "import sympy\nsympy.sympify('1')",
        "from sympy import parse_expr\nparse_expr('1')",
        "AutoModel.from_pretrained('x')",
        "AutoTokenizer.from_pretrained('x', trust_remote_code=True)",
        "load(trust_remote_code=flag)",
        "load(**{'trust_remote_code': True})",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert offences(source)
