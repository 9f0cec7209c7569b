"""HH-RLHF's rows, of which a reader judged some: the linter spares clean ones and accuses most of the others."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from infra.settings import settings
from rlhf_core.config import SourceConfig
from rlhf_core.config.lint import LintConfig
from rlhf_core.data.linting import LintSet, lint_set
from rlhf_core.data.reading import Access, read_set

JUDGED = Path(__file__).resolve().parents[4] / "bench" / "data_lint" / "judged.txt"
TAKEN = 400
"""Rows of the file that are looked at, of which some hundred are judged."""


def test_rows_that_a_reader_judged_are_judged_alike(tmp_path: Path) -> None:
    directory = settings().data_dir
    path = None if directory is None else directory / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    if path is None or not path.is_file():
        pytest.skip("RLHF_DATA_DIR names no directory with hh-rlhf/ in it")
    source = SourceConfig(path=str(path), limit=TAKEN)
    read = read_set([source], "preferences", access=Access(tmp_path), bad_rows="drop")
    found = lint_set(LintSet.of("preferences", read), LintConfig())
    accused = {int(where.split()[1]) for each in found for where in each.named}
    verdicts = dict(line.split() for line in JUDGED.read_text().splitlines())
    with gzip.open(path) as lines:
        rows = [json.loads(next(lines)) for _ in range(TAKEN)]
    names = [hashlib.sha256(f"{row['chosen']}\0{row['rejected']}".encode()).hexdigest()[:16] for row in rows]
    numbers = {number: verdicts.get(name) for number, name in enumerate(names, start=1)}
    clean = [number for number, verdict in numbers.items() if verdict == "clean"]
    faulty = [number for number, verdict in numbers.items() if verdict not in {None, "clean", "blank"}]
    assert len(clean) > 50
    assert len(faulty) > 5
    assert sum(number in accused for number in clean) <= 0.02 * len(clean)
    assert sum(number in accused for number in faulty) >= 0.8 * len(faulty)
