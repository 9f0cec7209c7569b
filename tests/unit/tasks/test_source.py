"""What of the code counts as the same: a night is not trained again for a comment, and is for a number."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.settings import CHECKOUT
from tasks import ppo, source, supervised
from tasks.report import write
from tasks.source import source_digest

CORE = """
'''A module.'''
from pydantic import BaseModel


class Config(BaseModel):
    '''A config.'''

    lr: float = 1e-5
    '''The learning rate.'''

    def told(self, *words: str) -> str:
        '''Tell it.'''
        return f"lr {self.lr:.{3}e} " f"of {self!r}é\\u2fff"
"""
SAME = """
from pydantic import (
    BaseModel,  # of pydantic
)
class Config(BaseModel):
    lr: float = 0.00001


    # a line for a person
    def told(self, *words: str) -> str:
        return f'lr {self.lr:.{3}e} of {self!r}\\u00e9\\u2fff'
"""
DIGEST = "57f50508e5c50642160b506382da78e50cba8335a2332b9e9facf0ce3ffcb797"
"""Of CORE, as Python 3.11.7, 3.12.1 and 3.13.0 found it."""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in ("rlhf_core/data/a.py", "tasks/sft.py", "tasks/ppo.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(CORE)
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(source, "CHECKOUT", tmp_path)
    return tmp_path


@pytest.fixture
def digest(checkout: Path) -> Iterator[Callable[[], str]]:
    """Return the digest of what lies in the checkout now."""
    del checkout

    def fresh() -> str:
        source_digest.cache_clear()
        source._core.cache_clear()
        return source_digest("sft")

    yield fresh
    source_digest.cache_clear()
    source._core.cache_clear()


@pytest.mark.parametrize("file", ["rlhf_core/data/a.py", "tasks/sft.py"])
def test_comments_docstrings_and_formatting_are_no_part_of_it(
    checkout: Path, digest: Callable[[], str], file: str
) -> None:
    before = digest()
    (checkout / file).write_text(SAME)
    assert digest() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1e-5", "2e-5"),
        ("float = 1e-5", "float = 1"),
        ("lr: float", "lr: int"),
        ("told", "tell"),
        ("*words", "words"),
        ("!r", "!s"),
        (".{3}e", ".{4}e"),
        ("Config(BaseModel)", "Config"),
        ("        return", "        pass\n        return"),
    ],
)
def test_whatever_a_number_may_depend_on_changes_it(
    checkout: Path, digest: Callable[[], str], old: str, new: str
) -> None:
    before = digest()
    assert old in CORE
    (checkout / "rlhf_core/data/a.py").write_text(CORE.replace(old, new))
    assert digest() != before


@pytest.mark.parametrize(
    ("one", "other"), [("a = 1", "a = 1.0"), ("a = 1", "a = True"), ("a = 'b'", "a = b'b'"), ("a = None", "a = ...")]
)
def test_constants_of_different_types_differ(checkout: Path, digest: Callable[[], str], one: str, other: str) -> None:
    (checkout / "tasks/sft.py").write_text(one)
    before = digest()
    (checkout / "tasks/sft.py").write_text(other)
    assert digest() != before


def test_it_covers_the_core_the_stage_and_the_lock_file_and_no_other_stage(
    checkout: Path, digest: Callable[[], str]
) -> None:
    before = digest()
    (checkout / "tasks/ppo.py").write_text("another = 1")
    assert digest() == before
    (checkout / "rlhf_core/data/b.py").write_text("")
    assert digest() != before


def test_a_lock_file_counts_as_it_is_resolved_for_this_python(checkout: Path, digest: Callable[[], str]) -> None:
    before = digest()
    lock = checkout / "requirements.txt"
    lock.write_text("# made by pip\ntoml==1.0; python_version < '3'\ntorch==2.13.0  # the same\n")
    assert digest() == before
    lock.write_text("torch==2.13.1\n")
    assert digest() != before


@pytest.mark.usefixtures("checkout")
def test_every_version_of_python_finds_the_same(digest: Callable[[], str]) -> None:
    assert digest() == DIGEST


def test_no_two_files_of_the_core_are_taken_for_one() -> None:
    """Held against Python's own dump of the tree without its docstrings."""
    seen: dict[str, str] = {}
    for file in sorted((CHECKOUT / "rlhf_core").rglob("*.py")):
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            for name, value in ast.iter_fields(node):
                if isinstance(value, list):
                    setattr(node, name, [each for each in value if not source._is_docstring(each)])
        dumped = ast.dump(tree)
        assert seen.setdefault(source._code(file), dumped) == dumped
    assert len(seen) > 100


def test_every_file_that_a_stage_names_is_there() -> None:
    named = [*ppo.MODULES, *supervised.MODULES, "sft", "reward_model", *(f"report/{name}" for name in write.MODULES)]
    assert [name for name in named if not (CHECKOUT / "tasks" / f"{name}.py").is_file()] == []
