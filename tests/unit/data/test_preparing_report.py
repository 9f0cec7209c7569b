"""What is told of a dataset, and what of it a run refuses before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlhf_core.data import Problem
from rlhf_core.data.preparing import TokenMeter, prepare, refuse_unfit, report_to_markdown
from rlhf_core.data.preparing.lengths import TokenCounts, bin_names, spark, token_counts
from rlhf_core.data.preparing.requirements import ask_about
from rlhf_core.data.reading import RejectedRow
from rlhf_core.data.verifiers import Verdict
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.verifying import Answered
from tests.tiny_llama import tiny_tokenizer
from tests.unit.data.read_sets import (
    CHATML,
    SIZES,
    config,
    demonstrations,
    meter,
    pairs,
    problems,
    prompts,
    read,
    template,
)

REJECTED = (
    RejectedRow("row 3 of p.jsonl", "not valid JSON", "row 3 of p.jsonl is not valid JSON"),
    RejectedRow("row 4 of p.jsonl", "blank question", "row 4 of p.jsonl: field 'question' is blank"),
    RejectedRow("row 9 of p.jsonl", "blank question", "row 9 of p.jsonl: field 'question' is blank"),
)


class Judging:
    """A judge who finds right what it is told to."""

    def __init__(self, right: Sequence[bool]) -> None:
        self._right = right

    def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
        return [Verdict(float(self._right[place % len(self._right)]), True) for place, _ in enumerate(rows)]

    def close(self) -> None:
        pass


def test_lengths_fall_into_bins_that_end_at_powers_of_two() -> None:
    counts = token_counts([1, 8, 9, 16, 17, 4096, 4097])
    assert counts is not None
    assert dict(zip(bin_names(), counts.bins, strict=True)) | {} == {
        **dict.fromkeys(bin_names(), 0), "1-8": 2, "9-16": 2, "17-32": 1, "2049-4096": 1, "4097+": 1,
    }  # fmt: skip
    assert token_counts([]) is None


def test_percentiles_are_by_nearest_rank() -> None:
    counts = token_counts(range(1, 201))  # the value is its own rank
    assert counts == TokenCounts(200, (8, 8, 16, 32, 64, 72, 0, 0, 0, 0, 0), 1, 100, 180, 198, 200)
    assert spark([0, 0]) == "  "


def test_the_report_tells_rejections_duplicates_lengths_and_the_majority() -> None:
    rows = [*problems(20), *[Problem(f"Odd {n}?", "7") for n in range(400)]]
    sets = {"problems": read(rows, "p.jsonl", REJECTED, copies=2)}
    made = prepare(config({"problems": "p.jsonl"}), sets, meter=meter())
    facts = json.loads(json.dumps(made.report.as_dict()))
    [read_facts] = facts["sets"]
    assert read_facts["reasons"] == {"blank question": 2, "not valid JSON": 1}
    assert (read_facts["rejected"], read_facts["duplicates"], read_facts["kept"]) == (3, 2, 420)
    assert facts["splits"]["evaluation"]["majority"]["answer"] == "7"
    answers = [problem.answer for problem in made.splits["evaluation"]]
    assert facts["splits"]["evaluation"]["majority"]["share"] == answers.count("7") / len(answers)
    assert facts["verifier"] == {"verifier": "exact", "asked": 6, "accepted": 6, "split": "sft", "share": 1.0}
    assert [row["where"] for row in made.report.rejected_rows] == [row.where for row in REJECTED]
    sft = facts["splits"]["sft"]["response_tokens"]
    assert sft["longest"] == max(len(f"<answer>{p.answer}</answer>") + 1 for p in made.splits["sft"])


def test_the_page_names_what_was_left_out() -> None:
    sets = {"problems": read(problems(40), "p.jsonl", REJECTED, copies=2)}
    text = report_to_markdown(prepare(config({"problems": "p.jsonl"}), sets, meter=meter()).report)
    for part in (
        "* blank question: 2; the first: `row 4 of p.jsonl: field 'question' is blank`",
        "Repetitions of an earlier row of `problems` that were left out: 2.",
        "Verifier: exact accepts 6 of 6 demonstrations (100%)",
        "| SFT, prompts |",
        "No prompt is in two splits.",
    ):
        assert part in text


def test_at_most_a_thousand_rejected_rows_are_kept_and_all_are_counted() -> None:
    sets = {"problems": read(problems(40), rejected=REJECTED * 500)}
    made = prepare(config({"problems": "p"}), sets, meter=None)
    assert len(made.report.rejected_rows) == 1000
    assert made.report.sets[0].rejected == 1500


def test_a_verifier_that_accepts_nothing_disagrees_with_the_data() -> None:
    with pytest.raises(
        DataError, match=r"exact accepts none of 4 demonstrations, such as '<answer>0</answer>' for "
    ) as e:
        ask_about(Judging([False]), "exact", problems(4), template())
    assert "\n" not in str(e.value)
    assert ask_about(Judging([False, True]), "exact", problems(4), template()).accepted == 2


def test_demonstrations_without_tags_are_refused_before_training() -> None:
    rows = [Problem(f"What is {n}?", str(n), demonstration=f"It is {n}.") for n in range(40)]
    sets = {"problems": read(problems(40, first=100)), "demonstrations": read(rows)}
    data = {"problems": "p", "demonstrations": "d"}
    with pytest.raises(DataError, match="the data and the verifier disagree: exact accepts none of 6 demonstrations"):
        prepare(config(data, seed=1), sets, meter=meter())


def test_worked_solutions_in_tags_of_another_form_are_refused() -> None:
    worked = [
        Problem(row.prompt, row.answer, None, f"<think>So.</think><answer>{row.answer}</answer>")
        for row in problems(40)
    ]
    sets, given = {"demonstrations": read(worked)}, config({"demonstrations": "d"})
    other = {"result_start": "<result>", "answer_start": "<answer>", "answer_end": "</answer>"}
    for fields in (
        {"answer_tag": "result"},
        {"tags": {name: {"text": text} for name, text in other.items()}},
    ):
        scale = TokenMeter(template(prompt=CHATML, **fields))
        made = prepare(given, sets, meter=scale)
        with pytest.raises(
            DataError, match=r"are learnt as <think>...</think><answer>...</answer>, but .* form is <res"
        ):
            refuse_unfit(made.splits, made.pairs, given, scale, reads=("sft",))
        refuse_unfit(made.splits, made.pairs, given, scale, reads=())
    made = prepare(given, sets, meter=meter())
    refuse_unfit(made.splits, made.pairs, given, meter(), reads=("sft",))


def test_a_model_without_a_chat_template_is_refused_with_what_to_set() -> None:
    from rlhf_core.config import TemplateConfig
    from rlhf_core.data import PromptTemplate

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    bare = PromptTemplate(tokenizer, TemplateConfig())
    with pytest.raises(ConfigError, match=r"template\.prompt .* or template\.chat_template"):
        prepare(config({"problems": "p"}), {"problems": read(problems(40))}, meter=TokenMeter(bare))


JUDGED = {"ppo": {"reward": {"verifier": 0.0, "reward_model": 1.0}}, "evaluation": {"judge": "reward_model"}}


@pytest.mark.parametrize(
    ("data", "changes", "reads", "told"),
    [
        ("prompts", {}, ("ppo",), r"8 of 8 PPO prompts have no answer, but ppo\.reward\.verifier = 1 .*reward_model=1"),
        ("prompts", {}, ("evaluation",), r"5 of 5 held-out prompts .* set evaluation\.judge=reward_model"),
        ("prompts", JUDGED, ("sft",), r"nothing to learn.*data\.demonstrations.*`actor`"),
        ("prompts", JUDGED, ("preferences",), r"neither data\.preferences nor problems with answers.*`reward_model`"),
        ("demonstrations", JUDGED, ("preferences",), r"neither data\.preferences nor problems"),
        (
            "problems",
            {"sft": {"max_length": 50}},
            ("sft",),
            r"6 of 6 demonstrations .* sft\.max_length = 50 ",
        ),
        ("problems", {"ppo": {"max_prompt_tokens": 9}}, ("ppo",), r"8 of 8 PPO prompts .* ppo\.max_prompt_tokens = 9"),
        (
            "problems",
            {"evaluation": {"max_new_tokens": 8}},
            ("evaluation",),
            r"5 of 5 held-out answers .*tokens = 8 tokens, the longest 2\d \(its prompt begins 'W.*too_long=drop",
        ),
        (
            "preferences",
            {"reward_model": {"max_length": 9}},
            ("preferences",),
            r"15 of 15 preference pairs .* 9 tokens",
        ),
    ],
)
def test_what_a_stage_could_not_use_is_refused_where_it_is_read(
    data: str, changes: dict[str, object], reads: tuple[str, ...], told: str
) -> None:
    rows = {"prompts": prompts, "demonstrations": demonstrations, "problems": problems, "preferences": pairs}[data](40)
    given = config({data: f"{data}.jsonl"}, **changes)
    made = prepare(given, {data: read(rows)}, meter=meter())
    with pytest.raises(DataError, match=told) as error:
        refuse_unfit(made.splits, made.pairs, given, meter(), reads=reads)
    assert "\n" not in str(error.value)


def test_answers_that_nobody_compares_with_are_refused() -> None:
    given = config({"demonstrations": "demonstrations.jsonl"})
    rows = [replace(row, demonstration="<answer>7</answer>", answer="7") for row in demonstrations(40)]
    made = prepare(given, {"demonstrations": read(rows)}, meter=meter())
    with pytest.raises(DataError) as refused:
        refuse_unfit(made.splits, made.pairs, given, meter(), reads=tuple(SIZES))
    assert "rows of preferences, evaluation have answers, and no verifier is named" in str(refused.value)
    refuse_unfit(made.splits, made.pairs, config({"demonstrations": "a.jsonl"}), meter(), reads=("ppo",))  # exact pays
    named = config({"demonstrations": "demonstrations.jsonl", "verifier": "exact"})
    made = prepare(named, {"demonstrations": read(rows)}, meter=meter())
    refuse_unfit(made.splits, made.pairs, named, meter(), reads=tuple(SIZES))


@pytest.mark.parametrize(
    ("data", "changes", "reads"),
    [
        ("problems", {}, tuple(SIZES)),
        ("preferences", JUDGED, tuple(SIZES)),
        ("demonstrations", JUDGED, ("sft", "ppo", "evaluation")),
        ("prompts", JUDGED, ("ppo", "evaluation")),
    ],
)
def test_each_role_serves_the_runs_that_it_can(data: str, changes: dict[str, object], reads: tuple[str, ...]) -> None:
    rows = {"prompts": prompts, "demonstrations": demonstrations, "problems": problems, "preferences": pairs}[data](40)
    given = config({data: f"{data}.jsonl"}, **changes)
    made = prepare(given, {data: read(rows)}, meter=meter())
    refuse_unfit(made.splits, made.pairs, given, meter(), reads=reads)
    assert len(made.splits["ppo"]) == SIZES["ppo"]
