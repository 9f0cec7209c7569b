"""A task's record of a problem survives JSON, kinds included."""

from __future__ import annotations

from rlhf_core.data import problems_from_jsonl, problems_to_jsonl
from rlhf_core.data.gym import draw_problems, entry_from_json, entry_to_json


def test_tuples_sets_and_keys_that_are_no_text_come_back_as_they_were() -> None:
    record = {
        "answer": "1",
        "metadata": {"grid": ((1, 2), [3, (4,)]), "names": {"b", "a"}, "table": {1: "x", (0, 1): None}},
    }
    text = entry_to_json(record)
    assert text is not None
    assert entry_from_json(text) == record


def test_a_record_that_json_cannot_tell_is_left_out() -> None:
    assert entry_to_json({"answer": object()}) is None


def test_problems_carry_their_record_through_the_store() -> None:
    problems = draw_problems("countdown", {}, seed=1, count=2)
    back = problems_from_jsonl(problems_to_jsonl(problems))
    assert back == problems
    assert [problem.entry for problem in back] == [problem.entry for problem in problems]
    assert entry_from_json(back[0].entry or "")["answer"].replace(" ", "") == problems[0].answer
