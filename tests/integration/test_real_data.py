"""GSM8K and HH-RLHF as they were published, where the settings say that they are at hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from infra.settings import settings
from rlhf_core.config.data import SourceConfig
from rlhf_core.data.reading import Access, ReadSet, read_set

pytestmark = pytest.mark.integration


@pytest.fixture
def real_data() -> Path:
    directory = settings().data_dir
    if directory is None or not directory.is_dir():
        pytest.skip("RLHF_DATA_DIR names no directory with gsm8k/ and hh-rlhf/ in it")
    return directory


def read(path: Path, role: Any, **source: Any) -> ReadSet[Any]:
    access = Access(Path("unused"))
    return read_set([SourceConfig(path=str(path), **source)], role, access=access, bad_rows="refuse")


def test_all_of_gsm8k_is_read_as_problems_with_numbers(real_data: Path) -> None:
    sets = {split: read(real_data / "gsm8k", "problems", split=split) for split in ("train", "test")}
    assert {split: (len(found.rows), found.duplicates) for split, found in sets.items()} == {
        "train": (7473, 0),
        "test": (1319, 0),
    }
    assert sets["train"].rows[0].answer == "72"
    assert all(float(problem.answer) is not None for found in sets.values() for problem in found.rows)


def test_all_of_gsm8k_is_read_as_demonstrations_that_end_in_the_answer(real_data: Path) -> None:
    found = read(real_data / "gsm8k" / "train.jsonl", "demonstrations")
    for problem in found.rows:
        assert problem.demonstration.startswith("<think>")
        assert problem.demonstration.endswith(f"</think><answer>{problem.answer}</answer>")
        assert "<<" not in problem.demonstration
        assert "####" not in problem.demonstration


def test_all_of_hh_rlhf_is_read_as_pairs_with_a_common_prompt(real_data: Path) -> None:
    path = real_data / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    found = read(path, "preferences")
    said = [
        row for row in rows if not row["chosen"].rstrip().endswith("\n\nAssistant:")
    ]  # to four, silence was preferred
    assert (len(rows), len(found.rows), len(said)) == (2312, 2308, 2308)
    assert [row.reason for row in found.rejected] == ["blank chosen"] * 4
    for row, pair in zip(said, found.rows, strict=True):
        assert (pair.prompt + " " + pair.chosen).split() == row["chosen"].split()
        assert (pair.prompt + " " + pair.rejected).split() == row["rejected"].split()
