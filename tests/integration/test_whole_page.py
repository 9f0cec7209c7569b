"""A run's page in a real browser: from a file, without a network, with hostile answers, and used as a person does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.report.html import page_of_facts
from tests.hostile_texts import FOREIGN, HARMFUL, HOSTILE
from tests.integration.browser import browser
from tests.unit.tasks.test_report_text import outcome
from tests.unit.tasks.test_whole_page import compared, hostile

pytestmark = pytest.mark.integration

SEEN = """return {
    articles: document.querySelectorAll("article").length,
    kinds: [...document.querySelectorAll("article h3")].map(each => each.textContent),
    media: document.querySelectorAll("img, iframe, object, video, form, link, a:not([href^='#'])").length,
    scripts: document.querySelectorAll("script").length,
    told: document.getElementById("moved-told").textContent,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
}"""


def test_a_page_of_hostile_answers_asks_nobody_runs_nothing_and_shows_words(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of_facts(hostile()), encoding="utf-8")
    with browser() as window:
        window.open(path.as_uri())
        for _ in range(20):
            window.run("document.getElementById('moved-more').click()")
        seen = window.run(SEEN)
        assert (seen["media"], seen["scripts"], seen["wide"]) == (0, 2, 0)
        assert seen["articles"] > len(HOSTILE)
        assert HOSTILE["tag of an image"] in window.text
        assert not HARMFUL.search(re.sub(r"[\t\xa0]", "", window.text))
        assert not [line for line in window.foreign if FOREIGN in line], "the browser asks others for itself"


def test_a_person_filters_and_searches_the_answers(tmp_path: Path) -> None:
    before = [{**outcome(f"problem {at}", correct=at % 2 == 0), "response": f"old {at}"} for at in range(40)]
    after = [{**row, "correct": at < 20, "response": f"new {at}"} for at, row in enumerate(before)]
    path = tmp_path / "report.html"
    path.write_text(page_of_facts(compared(before, after)), encoding="utf-8")
    with browser() as window:
        window.open(path.as_uri())
        assert window.run(SEEN)["told"] == "5 of 40 shown"
        window.run("document.querySelector('[data-kind=\"1\"]').click()")
        fixed = window.run(SEEN)
        assert (fixed["told"], set(fixed["kinds"])) == ("5 of 10 shown", {"fixed"})
        window.run("document.querySelector('[data-kind=\"\"]').click()")
        assert window.type("#moved-search", "NEW 38")
        found = window.run(SEEN)
        assert (found["told"], found["kinds"]) == ("1 of 1 shown", ["regressed"])
        assert "old 38" in window.text
