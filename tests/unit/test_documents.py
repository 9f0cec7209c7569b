"""Documents name what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flows.cli import app
from infra.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
GROUPS = ("artifacts", "data")
"""Commands that have commands of their own."""
MOST_WORDS = 25_000
"""Of all documents together."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_test_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    assert "@@" not in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (document.parent / link).exists(), link
    for name in re.findall(r"(?<![\w/.-])([A-Z]+\.md)\b", text):
        assert (ROOT / name).exists(), name
    for path, name in re.findall(r"`((?:tests|bench|flows|tasks|rlhf_core|infra)/[\w/.]+?\.\w+)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), name
    for directory in re.findall(r"`((?:tests|flows|tasks|rlhf_core|infra)/[\w/]*/)`", text):
        assert (ROOT / directory).is_dir(), directory


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_is_shown_exists(document: Path) -> None:
    for line in re.findall(r"^rlhf ([^#\n]+)", document.read_text(), re.MULTILINE):
        commands, words = app, re.sub(r"\[[^]]*\]", "", line)
        first, _, rest = words.partition(" ")
        if first in GROUPS:
            commands, words = app[first], rest
        for verb in words.split(" | "):
            assert verb.split()[0] in list(commands), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_setting_that_is_named_exists(document: Path) -> None:
    for name in re.findall(r"`(RLHF_[A-Z0-9_]+)\b", document.read_text()):
        assert name.removeprefix("RLHF_").lower() in Settings.model_fields, name


def test_all_documents_together_keep_to_their_limit_of_words() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, check=True).stdout
    names = tracked.decode().split("\0")[:-1]
    assert "README.md" in names
    words = sum(len((ROOT / name).read_bytes().split()) for name in names)  # as `wc -w` counts them
    assert words <= MOST_WORDS, "cut what is said twice"
