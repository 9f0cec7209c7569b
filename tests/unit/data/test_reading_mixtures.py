"""Several sources: one after the other, or in the proportions of their weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import SourceConfig
from rlhf_core.data.reading import Access, ReadSet, read_set
from rlhf_core.data.reading.reader import mixed_order
from rlhf_core.errors import DataError
from tests.unit.data.reading_files import write


def source(path: Path, name: str, count: int, **fields: Any) -> SourceConfig:
    rows = [{"prompt": f"{name}{number}"} for number in range(count)]
    return SourceConfig(path=str(write(path / f"{name}.jsonl", *rows)), **fields)


def read(*sources: SourceConfig) -> ReadSet[Any]:
    return read_set(sources, "prompts", access=Access(Path("unused")), bad_rows="refuse")


def test_without_weights_sources_follow_each_other(tmp_path: Path) -> None:
    found = read(source(tmp_path, "b", 2), source(tmp_path, "a", 1))
    assert [row.prompt for row in found.rows] == ["b0", "b1", "a0"]
    assert [(facts.rows, facts.kept, facts.weight) for facts in found.sources] == [(2, 2, None), (1, 1, None)]


def test_with_weights_rows_alternate_until_a_source_has_no_more(tmp_path: Path) -> None:
    found = read(source(tmp_path, "a", 100, weight=3), source(tmp_path, "b", 3, weight=1))
    assert "".join(row.prompt[0] for row in found.rows) == "aabaaabaaabaaa"
    assert [(facts.rows, facts.kept) for facts in found.sources] == [(100, 11), (3, 3)]
    assert [row.prompt for row in found.rows if row.prompt[0] == "b"] == ["b0", "b1", "b2"]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.1, 0.2], [5, 3, 2], [1, 1, 1, 97], [0.31, 0.17, 0.29, 0.11, 0.12]])
def test_every_beginning_has_the_weights_proportions_to_within_one_row(weights: list[float]) -> None:
    order = mixed_order([400] * len(weights), weights)
    bound = 1 - 1 / (2 * len(weights) - 2) + 1e-9  # Tijdeman's
    counts = [0] * len(weights)
    for turn, chosen in enumerate(order, start=1):
        counts[chosen] += 1
        assert all(
            abs(count - turn * weight / sum(weights)) <= bound for count, weight in zip(counts, weights, strict=True)
        )
    assert max(counts) == 400


def test_a_row_of_an_earlier_source_is_a_duplicate(tmp_path: Path) -> None:
    found = read(source(tmp_path / "x", "a", 3), source(tmp_path / "y", "a", 5))
    assert (len(found.rows), found.duplicates) == (5, 3)
    assert [facts.kept for facts in found.sources] == [3, 2]


def test_a_mixture_whose_second_source_repeats_the_first_has_no_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the mixture has no row: .*a\.jsonl gives none"):
        read(source(tmp_path / "x", "a", 3, weight=1), source(tmp_path / "y", "a", 3, weight=9))


def test_a_limit_takes_the_first_rows_of_a_source_over_its_files(tmp_path: Path) -> None:
    for name in "abc":
        source(tmp_path / "many", name, 4)
    found = read(SourceConfig(path=str(tmp_path / "many"), limit=6))
    assert [row.prompt for row in found.rows] == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert found.sources[0].files == tuple(str(tmp_path / "many" / f"{name}.jsonl") for name in "ab")


def test_rows_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\nno json\n')
    assert len(read(SourceConfig(path=str(path), limit=1)).rows) == 1


def test_the_digest_is_of_content_and_settings_and_not_of_places(tmp_path: Path) -> None:
    digests = [
        read(source(tmp_path / "x", "a", 3)).digest,
        read(source(tmp_path / "x", "a", 3, limit=2)).digest,
        read(source(tmp_path / "x", "a", 4)).digest,
        read(source(tmp_path / "x", "a", 3, weight=1), source(tmp_path, "b", 3, weight=1)).digest,
        read(source(tmp_path / "x", "a", 3, weight=1), source(tmp_path, "b", 3, weight=2)).digest,
        read(source(tmp_path / "x", "a", 3), source(tmp_path, "b", 3)).digest,
        read(source(tmp_path, "b", 3), source(tmp_path / "x", "a", 3)).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert all(a != b for a, b in pairwise(digests))
    assert read(source(tmp_path / "elsewhere", "a", 3)).digest == digests[0]


def test_no_source_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.prompts names no source"):
        read()
