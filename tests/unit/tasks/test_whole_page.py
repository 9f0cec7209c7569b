"""The report as one page: nothing foreign, nothing that a model wrote is obeyed, and no figure is made twice."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from rlhf_core.config import BudgetConfig
from rlhf_core.gating.conditions import Condition
from tasks.pictures.figures import draw_ancestry
from tasks.pictures.style import png
from tasks.report.cells import MOST_CHANGES, change_cells, condition_cells
from tasks.report.costs import REST, WHOLE, Machine, costs_of
from tasks.report.facts import Facts
from tasks.report.findings import Finding
from tasks.report.html import LONGEST_TEXT, page_of_facts
from tasks.report.html import MOST_BYTES as MOST_ANSWERS
from tasks.report.samples import counts_of, moved
from tasks.report.text import report_text
from tasks.results import Approval
from tests.hostile_texts import FOREIGN, HARMFUL, HOSTILE, ORDINARY
from tests.unit.tasks.episodes import episode, size
from tests.unit.tasks.test_report_text import HTML, evaluation, facts, outcome, stage

MOST_BYTES = 2_000_000


class Tags(HTMLParser):
    """What a page consists of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def held(page: str) -> Any:
    """Return what the page's script reads."""
    found = re.search(r'<script type="application/json" id="moved-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]], **changed: Any) -> Facts:
    """Return a night's facts with what moved, and with each thing that a page can show."""
    rows = moved(before, after, by_model=False)
    roles = {"sft": evaluation("sft/a@1"), "champion": evaluation("policy/a@1"), "ppo": evaluation("policy/a@2")}
    boxes = [
        {"uri": f"policy/{name}", "name": name, "told": "now", "column": at, "row": 0} for at, name in enumerate("ab")
    ]
    told: dict[str, Any] = {
        "evaluations": roles,
        "episodes": [episode(at) for at in range(4)],
        "moved": {"against": "policy/a@1", "role": "champion", "counts": counts_of(rows, by_model=False), "rows": rows},
        "paid": [{"source": "mine:f", "raw": [0.1, 0.9], "share": [0.1, 0.8], "is_hacked": True}],
        "differs": {"against": "policy/a@1", "config": [["ppo.lr", 1e-4, 3e-4]], "data": [], "code": [], "seconds": []},
        "ancestry": {"boxes": boxes, "arrows": [[0, 1]], "left_out": 3},
        "findings": [Finding("The critic is idle", "it explains 0.010", "raise ppo.critic_lr")],
    }
    return facts(**{**told, **changed})


def hostile() -> Facts:
    texts = {**HOSTILE, **ORDINARY}
    rows = [
        {**outcome(name), "prompt": text, "answer": text, "response": text, "category": text[:100]}
        for name, text in texts.items()
    ]
    names = [text[:200] for text in HOSTILE.values()]
    decision = facts().decision.model_copy(
        update={
            "promote": False, "reason": " ".join(names), "p_value": 0.5, "level": 0.01,
            "conditions": tuple(Condition(name, 1.0, 0.5, holds=False, told=name) for name in names),
        }
    )  # fmt: skip
    changes = [[name, name, name] for name in names]
    boxes = [{"uri": name, "name": name, "told": name, "column": 0, "row": at} for at, name in enumerate(names)]
    return compared(
        rows, [{**row, "correct": True} for row in rows], decision=decision, name=HOSTILE["script"],
        paid=[{"source": name, "raw": [0.1], "share": [0.1], "is_hacked": False} for name in names],
        differs={"against": names[0], "config": changes, "data": changes, "code": changes, "seconds": changes},
        ancestry={"boxes": boxes, "arrows": [], "left_out": 0},
        findings=[Finding(name, name, name) for name in names],
        stages=[stage(name) for name in names],
        evaluations={"champion": evaluation(names[0]), "ppo": evaluation(names[1])},
    )  # fmt: skip


def test_what_models_and_users_wrote_is_words_on_the_page_and_nothing_else() -> None:
    page = page_of_facts(hostile())
    ours = Tags(page_of_facts(compared([outcome("a")], [outcome("a", correct=True)]))).tags
    allowed = {tag for tag, _ in ours} | {"tr", "td", "li", "ul"}
    assert {tag for tag, _ in Tags(page).tags} <= allowed
    for _, attributes in Tags(page).tags:
        assert not any(name.startswith("on") or name in {"src", "style"} for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert page.count("<script") == page.count("</script>") == 2
    assert not HARMFUL.search(page.replace("\t", ""))
    assert FOREIGN in page, "there was something to obey"


def test_the_same_words_are_words_in_markdown() -> None:
    found = hostile()
    safe = {"stages": [stage("ppo")], "evaluations": {}, "name": "test", "moved": None}  # references have a pattern
    told = facts(**{**vars(found), **safe, "differs": {**(found.differs or {}), "against": "policy/a@1"}})
    html = HTML(report_text(told, {}))
    assert not re.search(r"<(img|a|script|iframe|style|form|svg)\b", html)
    assert FOREIGN in html


def test_the_rows_for_the_script_are_what_was_written_less_what_nobody_sees() -> None:
    rows = held(page_of_facts(hostile()))["rows"]
    assert len(rows) == len(HOSTILE) + len(ORDINARY)
    texts = {row["texts"][0] for row in rows}
    assert HOSTILE["script"] in texts
    assert ORDINARY["Persian with joiners"] in texts
    assert not any(HARMFUL.search(text) for text in texts)


def test_the_page_allows_no_script_style_or_request_but_its_own() -> None:
    page = page_of_facts(compared([outcome("a")], [outcome("a")]))
    policies = [tag["content"] for name, tag in Tags(page).tags if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policies[0]
    assert "http" not in re.sub(r"http-equiv|<script.*?</script>", "", page, flags=re.DOTALL)


def test_a_page_of_very_many_long_answers_stays_small_and_counts_what_it_leaves_out() -> None:
    before = [{**outcome(str(at)), "prompt": "<" * 9000, "response": "&" * 9000} for at in range(400)]
    page = page_of_facts(compared(before, [{**row, "correct": int(row["key"]) > 390} for row in before]))
    assert len(page.encode()) < MOST_BYTES
    data = held(page)
    assert [row["kind"] for row in data["rows"][:9]] == [1] * 9, "what changed comes first"
    assert f"{400 - len(data['rows'])} answers are left out of this page" in page
    assert len(data["rows"][0]["prompt"]) < LONGEST_TEXT + 100


def test_the_page_of_a_long_run_stays_small() -> None:
    found = compared([outcome("a")], [outcome("a")], episodes=[episode(at) for at in range(3000)])
    page = page_of_facts(found)
    assert page.count("<polyline") > 1
    assert len(page.encode()) < MOST_BYTES - MOST_ANSWERS


def test_both_forms_of_the_report_show_the_same_figures() -> None:
    found = compared([outcome("a", correct=True), outcome("b")], [outcome("a"), outcome("b", correct=True)])
    costs = costs_of(
        found.stages,
        found.evaluations,
        stored={},
        wall_s=3600.0,
        machine=Machine(8, 2),
        budget=BudgetConfig(cost_per_hour=3),
    )
    found = facts(**{**vars(found), "costs": costs})
    page = unescape(re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", page_of_facts(found), flags=re.DOTALL))
    text = unescape(re.sub("<[^>]+>", " ", HTML(report_text(found, {}))))
    for told in ("1 regressed", "1 fixed", "The critic is idle", "raise ppo.critic_lr", "a reward hack", "0.0003",
                 "0.100 to 0.900", "8.00", "2.00", "3.00", "0.500 [0.400, 0.600]", found.verdict):  # fmt: skip
        assert told in " ".join(page.split()), told
        assert told in " ".join(text.split()), told


def test_a_run_without_most_things_still_has_a_page() -> None:
    page = page_of_facts(facts(evaluations={}, episodes=[], champion=None))
    assert "Champion now: none" in page
    assert "moved-data" not in page
    assert page.count("<section") == 1, "the gate's reason"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"promote": True}, "policy/test@1 was promoted: +0.100 [+0.050, +0.150] right answers against sft/test@1"),
        ({"p_value": 0.2, "level": 0.01}, "was not promoted, as the gain may be chance: +0.100"),
        ({"p_value": 0.9, "level": 0.01, "difference": -0.1}, "was not promoted, as it is not better: -0.100"),
        ({"conditions": (Condition("length", 2.0, 1.5, holds=False, told=""),), "p_value": 0.001, "level": 0.01},
         "was not promoted, as length broke: "),
        ({"approval": Approval(is_given=False, who="Ann", why="too long"), "p_value": 0.001, "level": 0.01},
         "was not promoted, as it was not approved by Ann: too long; the gain was +0.100"),
        ({"reason": "it was made for another task"}, "was not promoted: it was made for another task"),
    ],
)  # fmt: skip
def test_the_verdict_is_a_sentence_with_its_reason(changed: dict[str, Any], told: str) -> None:
    decision = facts().decision.model_copy(update={"promote": False, **changed})
    assert told in facts(decision=decision, champion=None).verdict


def test_a_stage_of_another_night_costs_nothing_and_the_whole_run_costs_its_hours() -> None:
    stages = [stage("sft", reused=True, seconds=3600.0), stage("ppo", seconds=1800.0)]
    prices = BudgetConfig(cost_per_hour=1, cost_per_gpu_hour=2)
    rows = costs_of(stages, {}, stored={"ppo/test@1": 7}, wall_s=3600.0, machine=Machine(4, 2), budget=prices)
    by_stage = {row["stage"]: row for row in rows}
    assert (by_stage["sft"]["money"], by_stage["sft"]["core_hours"]) == (0.0, 0.0)
    assert (by_stage["ppo"]["money"], by_stage["ppo"]["core_hours"], by_stage["ppo"]["gpu_hours"]) == (2.5, 2.0, 1.0)
    assert by_stage[REST]["seconds"] == 1800.0
    assert (by_stage[WHOLE]["money"], by_stage[WHOLE]["bytes"]) == (5.0, 7)


def test_the_gain_is_the_first_condition() -> None:
    decision = facts().decision.model_copy(update={"p_value": 0.2, "level": 0.01})
    assert condition_cells(decision).rows[0] == ("gain (p: as large by chance)", "0.2", "at most 0.01", "may be chance")


def test_of_a_long_difference_the_first_lines_are_shown_and_the_rest_is_counted() -> None:
    cells = change_cells([[str(at), None, "x" * 500] for at in range(MOST_CHANGES + 2)])
    assert len(cells) == MOST_CHANGES + 1
    assert cells[-1][0] == "and 2 more"
    assert len(cells[0][2]) < 100


def test_the_picture_of_the_lineage_takes_any_name() -> None:
    names = ["policy/$a$@1", "policy/\\alpha@2"]
    boxes = [{"uri": name, "name": name, "told": "now", "column": at, "row": at} for at, name in enumerate(names)]
    assert size(png(draw_ancestry({"boxes": boxes, "arrows": [[0, 1]], "left_out": 2})))[0] == 960
