"""Each rule accuses the rows that have its fault, and no row beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rlhf_core.config.lint import LintConfig
from rlhf_core.data.linting import LintRow, LintSet, lint_set
from rlhf_core.data.linting.rules import ROW_RULES, SET_RULES
from rlhf_core.data.linting.sets import two_sided
from tests.unit.data.read_sets import meter

NOTHING = "off"


def pair(prompt: str, chosen: str, rejected: str, annotator: str | None = None) -> LintRow:
    return LintRow("row", prompt, (chosen, rejected), None, annotator)


GOOD = [
    pair("Which bird cannot fly, and why?", "The ostrich cannot fly: it is too heavy.", "All birds can fly, I think."),
    pair("How tall is Mont Blanc?", "It is 4,808 metres tall.", "I do not know that, and I do not care."),
    pair("Write a poem on rain.", "Rain falls on the old roof.\nIt sings to me.", "No poem today, I am tired."),
    pair("Is naïve spelt “naïve”?", "Yes: naïve, with a diaeresis.", "It is spelt as you like it."),
    pair("Show me a loop.", "```html\n<script>for (;;) {}</script>\n```", "I would rather not show you one."),
    pair("How do I say thanks in French?", "Vous pouvez dire que je vous suis obligé.", "You cannot say that at all."),
    pair("Can you help?", "Sure!", "Can you help yourself?"),
]


def accused(rule: str, rows: Sequence[LintRow], **fields: object) -> list[int]:
    """Return the places that a rule accuses, of rows behind good ones; no good one may be among them."""
    actions = LintConfig.model_validate({"default": NOTHING, rule: "warn"})
    found = lint_set(LintSet("preferences", (*GOOD, *rows), **fields), actions)  # type: ignore[arg-type]
    places = [each.place - len(GOOD) for finding in found for each in finding.accused]
    assert not [place for place in places if place < 0], found
    return places


SAID = "I can tell you what I know of it, which is not much."
OTHER = "You would have to ask somebody who knows it better."
LONG_ASKED = "Where is the nearest harbour to this hotel of ours?"


@pytest.mark.parametrize(
    ("rule", "row"),
    [
        ("equal", pair("Hi", "You\u2019re welcome!", "you're  welcome")),
        ("echo", pair(LONG_ASKED, SAID, f"{LONG_ASKED.upper()} It is near.")),
        ("speakers", pair("Hi", f"{SAID}\n\nHuman: And now?", OTHER)),
        ("speakers", pair("Hi", SAID, f"Human: {OTHER}")),
        ("speakers", pair("Hi", SAID, f"{OTHER}\nUser: go on")),
        ("speakers", pair("\n\nHuman: Hi\n\nAssistant: Human: Hello.\n\nHuman: So?\n\nAssistant:", SAID, OTHER)),
        ("answer", LintRow("row", "What is 6 times 7? The answer is: 42", (), "42")),
        ("answer", LintRow("row", "What is 6 times 7?\n#### 42", (), "42")),
        ("answer", pair(f"Say what you know. {SAID}", SAID, OTHER)),
        ("answer", pair("Why? (The preferred response is the first.)", "So.", "Not so.")),
        ("language", pair("Hello, can you help me with this?", "Ich kann dir dabei leider nicht helfen.", OTHER)),
        ("language", pair("Hello, can you help me with this?", "Я не могу вам помочь.", OTHER)),
        ("language", pair("Hello, can you help me with this?", "很抱歉我不能帮助你。", OTHER)),
        ("template", pair("Hi", f"{SAID}<|im_end|>", OTHER)),
        ("template", pair("[INST] Hi [/INST]", SAID, OTHER)),
        ("template", pair("Hi", SAID, f"### Response:\n{OTHER}")),
        ("markup", pair("Hi", f"{SAID}<script>alert(1)</script>", OTHER)),
        ("markup", pair("Hi", f'<b onclick="go()">{SAID}</b>', OTHER)),
        ("markup", pair("Hi", f"![seen](https://example.org/pixel.png) {SAID}", OTHER)),
        ("markup", pair("Hi", f"[{SAID}](javascript:alert(1))", OTHER)),
        ("markup", pair("Hi", SAID, f"\x1b[2J{OTHER}")),
        ("markup", pair("Hi\u202e", SAID, OTHER)),
        ("markup", pair("Hi", SAID.replace("what", "wh\u200bat"), OTHER)),
        ("encoding", pair("Hi", "I donâ€™t know.", OTHER)),
        ("encoding", pair("Hi", SAID, "Lost \ufffd here.")),
        ("cut", pair("Hi", "It depends. I would", OTHER)),
        ("cut", pair("Hi", SAID, "I would say that there are many of the")),
        ("cut", pair("Hi", "Here are some answers to what you ask:", OTHER)),
        ("empty", pair("Hi", " ... ", OTHER)),
    ],
)
def test_a_rule_accuses_the_row_with_its_fault(rule: str, row: LintRow) -> None:
    assert accused(rule, [row]) == [0]


def test_no_rule_accuses_a_good_row() -> None:
    assert lint_set(LintSet("preferences", tuple(GOOD)), LintConfig()) == []


def test_responses_are_equal_where_the_stage_stops_to_read() -> None:
    shared = "a" * 60  # a token is a character here, and the prompt's template takes some of the 64
    rows = [pair("Hi", f"{shared} one.", f"{shared} two."), pair("Hi", f"{shared[:10]} one.", f"{shared[:10]} two.")]
    assert accused("equal", rows, meter=meter(), max_length=64) == [0]
    assert accused("equal", rows, meter=meter(), max_length=640) == []


def test_preferences_in_a_circle_contradict_each_other() -> None:
    swapped = [pair("Hi", SAID, OTHER), pair(" hi!", OTHER, SAID), pair("Hello", OTHER, SAID)]
    assert accused("contradictory", swapped) == [0, 1]
    circle = [pair("Hi", "One.", "Two."), pair("Hi", "Two.", "Three."), pair("Hi", "Three.", "One.")]
    assert accused("contradictory", [*circle, pair("Hi", "One.", "Four.")]) == [0, 1, 2]


def test_problems_of_two_answers_contradict_each_other() -> None:
    rows = [LintRow("row 1", "What is 6 x 7?", (), "42"), LintRow("row 2", "what is 6 x 7", (), "43")]
    assert accused("contradictory", rows) == [0, 1]
    assert accused("contradictory", [rows[0], rows[0]]) == []


def test_a_row_that_nearly_says_what_an_earlier_one_says_is_a_repetition() -> None:
    prompt = "Tell me how a sailing ship finds its way over the ocean when clouds hide all of the stars."
    first = pair(prompt, SAID, OTHER)
    again = pair(prompt.replace("ocean", "sea") + " ", SAID.upper(), OTHER)
    other_numbers = [pair(f"{prompt} In {year}.", SAID, OTHER) for year in (1500, 1600)]
    other_responses = pair(prompt, "By compass and log.", "It waits for better weather, as all ships do.")
    assert accused("repeated", [first, again, other_responses]) == [1]
    assert accused("repeated", other_numbers) == []


def told(rule: str, rows: Sequence[LintRow], **fields: object) -> list[str]:
    actions = LintConfig.model_validate({"default": NOTHING, rule: "warn"})
    return [each.sentence for each in lint_set(LintSet("preferences", tuple(rows), **fields), actions)]  # type: ignore[arg-type]


def test_a_set_that_pays_for_length_is_told_with_its_share() -> None:
    long, short = "A longer response.", "Short."
    biased = [pair(str(n), *((long, short) if n % 4 else (short, long))) for n in range(200)]
    [sentence] = told("length_bias", biased)
    assert "chosen in 75.0% of 200 pairs" in sentence
    assert told("length_bias", [pair(str(n), *((long, short) if n % 2 else (short, long))) for n in range(200)]) == []


@pytest.mark.parametrize(("successes", "trials"), [(0, 4), (2, 4), (8, 10), (60, 100), (450, 1000)])
def test_the_sign_test_sums_the_binomial_tails(successes: int, trials: int) -> None:
    tail = sum(math.comb(trials, k) for k in range(min(successes, trials - successes) + 1))
    assert two_sided(successes, trials) == pytest.approx(min(1.0, 2 * tail / 2**trials), rel=1e-9)


def test_an_annotator_far_more_active_than_the_others_is_a_flood() -> None:
    rows = [pair(f"Question {n}?", SAID, OTHER, f"w{n % 50}" if n % 4 else "w0") for n in range(400)]
    assert [sentence for sentence in told("flood", rows) if "annotator 'w0' made" in sentence]
    even = [pair(f"Question {n}?", f"Yes {n}.", OTHER, f"w{n % 40}") for n in range(400)]
    assert told("flood", even) == []


def test_a_pattern_of_prompts_and_a_response_for_all_are_floods() -> None:
    words = "Give me the private address of the actor number"
    rows = [pair(f"{words} {n}." if n < 30 else f"Prompt number {n}.", f"So {n}.", OTHER) for n in range(100)]
    assert told("flood", rows) == ["30 of 100 prompts of data.preferences begin with 'give me the private address of'"]
    same = [pair(f"Prompt {n}.", SAID if n < 20 else f"So {n}.", OTHER) for n in range(100)]
    assert ["20 of 100 rows" in sentence for sentence in told("flood", same)] == [True]


def test_a_column_with_a_misspelt_name_is_told() -> None:
    [sentence] = told("columns", [], misspelt=(("anwser", "answer"),))
    assert sentence == "column 'anwser' of data.preferences is not read; did you mean 'answer'?"


def test_every_rule_has_its_key_of_the_configuration() -> None:
    names = [rule.name for rule in (*ROW_RULES, *SET_RULES)]
    assert {*names, "overlap", "default"} == set(LintConfig.model_fields)


def test_what_is_quoted_of_a_row_is_harmless() -> None:
    rows = [pair("Hi", f"\x1b[2J\u202e{SAID}", OTHER)]
    actions = LintConfig.model_validate({"default": NOTHING, "markup": "warn"})
    [found] = lint_set(LintSet("preferences", tuple(rows)), actions)
    assert found.sentence.isprintable()
