"""Rows of several nights as one set: what its report counts."""

from __future__ import annotations

from rlhf_core.data import Problem
from rlhf_core.data.arriving import as_set
from rlhf_core.data.arriving.reading import NewRows


def test_the_rows_of_each_source_are_counted_less_those_that_clash_or_are_dropped() -> None:
    waits, old = Problem("waits"), Problem("0", demonstration="old")
    new = [Problem(f"{n}") for n in range(4)]
    read = as_set("problems", NewRows(rows=new, read=5), [waits, *new[:3], old])  # the fourth clashes
    assert [(source.rows, source.kept) for source in read.sources] == [(5, 3), (2, 2)]
    left = read.without({0: ("lint: empty", "why"), 1: ("lint: empty", "why")})
    assert [source.kept for source in left.sources] == [2, 1]
