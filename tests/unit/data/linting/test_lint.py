"""What a run does about its linter's findings: it tells, refuses, drops or does not look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.config.lint import LintConfig
from rlhf_core.data import PreferencePair, Problem
from rlhf_core.data.preparing import prepare, report_to_markdown
from rlhf_core.data.problems import problem_key
from rlhf_core.data.reading import Access, read_set
from rlhf_core.errors import DataError
from tests.unit.data.read_sets import config, pairs, problems, read

MARKED = PreferencePair("\n\nHuman: Ask more\n\nAssistant:", "Kind.<|im_end|>", "Rude.")


def prepared(lint: Any, rows: list[Any] | None = None) -> Any:
    given = {"preferences": read([MARKED, *pairs(80)] if rows is None else rows, "h.jsonl")}
    return prepare(config({"preferences": "h.jsonl", "lint": lint}), given, meter=None)


def test_by_default_findings_are_told_and_no_row_changes() -> None:
    made, unseen = prepared({}), prepared("off")
    assert (made.splits, made.pairs, made.sizes) == (unseen.splits, unseen.pairs, unseen.sizes)
    assert [(each.rule, each.named) for each in made.report.findings if each.rule == "template"] == [
        ("template", ("row 1",))
    ]
    assert unseen.report.findings == ()
    assert "* `template`: 1 of 81 rows of data.preferences hold" in report_to_markdown(made.report)
    assert made.report.as_dict()["lint"][0]["accused"][0]["where"] == "row 1"


def test_drop_leaves_accused_rows_out_and_counts_them() -> None:
    made = prepared({"default": "off", "template": "drop"})
    assert MARKED.prompt not in {row.prompt for rows in made.splits.values() for row in rows}
    assert MARKED not in made.pairs
    [facts] = made.report.sets
    assert facts.reasons == {"lint: template": 1}
    assert (facts.kept, facts.sources[0].kept) == (80, 80)
    assert made.report.rejected_rows[0]["detail"].startswith("row 1: chosen holds the mark '<|im_end|>'")


def test_refuse_ends_the_run_with_the_row() -> None:
    with pytest.raises(DataError, match=r"1 of 81 rows of data\.preferences hold .* row 1: .*data\.lint refuses templ"):
        prepared({"template": "refuse"})


def test_a_set_of_which_every_row_is_dropped_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.lint drops every row of data\.preferences"):
        prepared("drop", [MARKED])


def test_a_rule_for_sets_drops_nothing() -> None:
    rows = [PreferencePair(f"Ask {n}", "A longer response.", "Short.") for n in range(80)]
    made = prepared("drop", rows)
    assert [each.action for each in made.report.findings if each.rule == "length_bias"] == ["warn"]
    assert made.report.sets[0].kept == 80


@pytest.mark.parametrize(("given", "default"), [("drop", "drop"), (False, "off"), (None, "warn"), ({}, "warn")])
def test_a_word_stands_for_all_rules(given: Any, default: str) -> None:
    assert LintConfig.model_validate(given).action("markup") == default  # YAML reads an unquoted off as false


def near(text: str) -> str:
    return text.replace("old", "ancient")


def test_a_prompt_that_nearly_is_a_held_out_one_is_an_overlap() -> None:
    text = "Which of the old ships that lie in the harbour of Hamburg was built before all of the others?"
    held_out = [Problem(text, "x"), *problems(9, first=90)]
    sets = {"problems": read([Problem(near(text), "x"), *problems(40)]), "evaluation": read(held_out)}
    data = {"problems": "p.jsonl", "evaluation": "e.jsonl"}
    made = prepare(config(data), sets, meter=None)
    [found] = made.report.findings
    assert (found.rule, found.role, found.named) == ("overlap", "problems", ("row 1",))
    made = prepare(config(data | {"lint": {"overlap": "drop"}}), sets, meter=None)
    assert problem_key(near(text)) not in {row.key for rows in made.splits.values() for row in rows}
    assert made.report.sets[1].kept == 10, "what is held out stays"


def test_findings_name_rows_of_files_and_the_annotators_column(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "Hi", "chosen": "Hello!", "rejected": "No.", "annotator": 7, "margn": 1}\n'
        '{"prompt": "Hi", "chosen": "Hello!", "rejected": "No.", "annotator": 7}\n\n'
        '{"prompt": "Ho", "chosen": "Hello!", "rejected": "No.", "annotator": null}\n'
    )
    found = read_set([SourceConfig(path=str(path))], "preferences", access=Access(tmp_path), bad_rows="refuse")
    assert [origin._asdict() for origin in found.origins] == [
        {"where": f"row 1 of {path}", "annotator": "7"},
        {"where": f"row 4 of {path}", "annotator": None},
    ]
    assert found.misspelt == (("margn", "margin"),)


def test_a_set_of_a_misspelt_column_is_refused_with_the_right_name(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Hi", "choosen": "Hello!", "rejected": "No."}\n')
    with pytest.raises(DataError, match=r"it has 'prompt', 'choosen', 'rejected' \(did you mean 'chosen'\?\)"):
        read_set([SourceConfig(path=str(path))], "preferences", access=Access(tmp_path), bad_rows="refuse")
