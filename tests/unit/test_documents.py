"""Documents name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_test_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    assert "@@" not in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (document.parent / link).exists(), link
    for path, name in re.findall(r"`((?:tests|bench|flows|tasks|rlhf_core|infra)/[\w/.]+?\.\w+)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), name
    for directory in re.findall(r"`((?:tests|flows|tasks|rlhf_core|infra)/[\w/]*/)`", text):
        assert (ROOT / directory).is_dir(), directory
