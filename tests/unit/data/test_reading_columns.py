"""Other people's columns under our names."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhf_core.config.data import SourceConfig
from rlhf_core.data import PreferencePair, Problem
from rlhf_core.data.reading import Access, detect_role
from rlhf_core.errors import DataError
from tests.unit.data.reading_files import read, refusal, rows, write, written

ODD = {"Task": "2 + 2?", "Solution": "4", "level": 1}


def test_a_column_map_puts_columns_under_our_names(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ODD)
    assert rows(path, columns={"question": "Task", "answer": "Solution"}) == [Problem("2 + 2?", "4")]
    assert rows(path, "prompts", columns={"prompt": "Task"}) == [Problem("2 + 2?")]
    [shown] = rows(path, "demonstrations", columns={"prompt": "Task", "response": "Solution"})
    assert (shown.prompt, shown.demonstration) == ("2 + 2?", "4")


def test_a_column_map_works_for_csv_and_parquet(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"Task": ["2 + 2?"], "Solution": [4]}), tmp_path / "p.parquet")
    path = written(tmp_path, b"Task,Solution\n2 + 2?,4\n", "p.csv")
    columns = {"question": "Task", "answer": "Solution"}
    assert rows(path, columns=columns) == rows(tmp_path / "p.parquet", columns=columns) == [Problem("2 + 2?", "4")]


def test_a_mapped_column_goes_before_one_that_has_our_name(tmp_path: Path) -> None:
    row = {"question": "old", "text": "new", "answer": "4"}
    assert rows(write(tmp_path / "p.jsonl", row), columns={"question": "text"}) == [Problem("new", "4")]


def test_a_column_map_says_which_form_is_meant(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "statement": "s", "proof": r"\boxed{1}"}
    columns = {"problem": "statement", "solution": "proof"}
    assert rows(write(tmp_path / "p.jsonl", row), columns=columns) == [Problem("s", "1")]


def test_columns_may_change_places(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "chosen": "worse", "rejected": "better"})
    columns = {"chosen": "rejected", "rejected": "chosen"}
    assert rows(path, "preferences", columns=columns) == [PreferencePair("a", "better", "worse")]


def test_a_map_that_names_no_column_lists_the_columns_and_a_near_one(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ODD)
    message = refusal(path, columns={"question": "task", "answer": "Solution"})
    assert f"takes 'question' from 'task', but {path} has no such column (did you mean 'Task'?)" in message
    assert "its columns are 'Task', 'Solution', 'level'" in message


def test_a_column_that_some_rows_lack_is_a_column(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = write(tmp_path / "p.jsonl", pair, {**pair, "chosen": "d", "sure": 2})
    assert [each.margin for each in rows(path, "preferences", columns={"margin": "sure"})] == [0.0, 2.0]


def test_a_map_of_a_field_that_there_is_not_lists_the_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ODD)
    with pytest.raises(
        DataError, match=r"maps 'questoin', which is no field of problems \(did you mean 'question'\?\)"
    ):
        read(path, columns={"questoin": "Task"})
    with pytest.raises(DataError, match="its fields are prompt, chosen, rejected, margin, both_well_formed"):
        read(path, "preferences", columns={"question": "Task"})
    with pytest.raises(DataError, match="which no form of problems has together"):
        read(path, columns={"question": "Task", "solution": "Solution"})


def test_a_map_that_leaves_a_field_unnamed_shows_what_there_is(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "p.jsonl", ODD), columns={"question": "Task"})
    assert "it has 'Task', 'Solution', 'level' (with the column map: Solution, level, question)" in message


def test_the_role_of_mapped_columns_is_detected(tmp_path: Path) -> None:
    source = SourceConfig(
        path=str(write(tmp_path / "p.jsonl", ODD)), columns={"question": "Task", "answer": "Solution"}
    )
    assert detect_role(source, Access(tmp_path)) == "problems"
