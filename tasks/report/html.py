"""The report as one page: it needs no other file, asks nobody, and opens without a network.

What models and users wrote is text in it and nothing else: markup is escaped, the rows for the script are JSON that
cannot end their element, and a policy in the page forbids every other script, style, picture and request.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from math import isfinite, nan
from pathlib import Path
from typing import Any

from rlhf_core.escaping import visible
from tasks.pictures.panels import CONSTANT, START, Panel, Reference, curves
from tasks.pictures.svg import ancestry_svg, panel_svg, scores_svg
from tasks.progress import duration
from tasks.report.cells import (
    BROKEN,
    CHANGES,
    HACK,
    Cells,
    change_cells,
    condition_cells,
    cost_cells,
    episodes_told,
    evaluation_cells,
    moved_counts,
    paid_cells,
    with_interval,
)
from tasks.report.costs import WHOLE
from tasks.report.facts import OTHER, Facts, judged_by_model, levels
from tasks.report.samples import FELL, GAINED, LOST, ROSE

MOST_BYTES = 1_200_000
"""Of the answers that a page holds, so that all of it stays below 2 MB; what is left out is counted."""
LONGEST_TEXT = 4000
"""Characters of a prompt or an answer; of a longer one beginning and end are there."""
_HERE = Path(__file__).parent
_GOOD = {GAINED: True, ROSE: True, LOST: False, FELL: False}
_CHAMPION, _MARKED = "champion, greedy", {"SFT start, greedy": "l1", "start, greedy": "l1"}
_LEVELS = {START: "l0", **_MARKED, CONSTANT: "l2", _CHAMPION: "l3", f"{OTHER}, greedy": "l3"}
"""Classes of the style sheet by what a level is."""


def page_of_facts(facts: Facts) -> str:
    """Return the page."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    sections = [(name, title, body) for name, title, body in _sections(facts) if body]
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    links = "".join(f'<a href="#{name}">{shown(title)}</a>' for name, title, _ in sections)
    bodies = "".join(f'<section id="{name}"><h2>{shown(title)}</h2>{body}</section>' for name, title, body in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{shown(_title(facts))}</title><style>{style}</style></head>"
        f"<body><main>{_head(facts)}<nav>{links}</nav>{bodies}</main>"
        + (f"{_data(facts)}<script>{script}</script>" if facts.moved and facts.moved["rows"] else "")
        + "</body></html>\n"
    )


def shown(text: str) -> str:
    r"""Return text that is words and nothing else within HTML.

    >>> shown("<b> & \x1b[2J")
    '&lt;b&gt; &amp; \\x1b[2J'
    """
    return escape(visible(text))


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _title(facts: Facts) -> str:
    if facts.compares:
        return f"{facts.decision.policy} against {facts.decision.incumbent}"
    return f"{facts.name}: {'promoted' if facts.decision.promote else 'not promoted'}"


def _head(facts: Facts) -> str:
    """Return the verdict, and the figures that one wants to see first."""
    mood = "good" if facts.decision.promote else "bad" if _is_alarming(facts) else ""
    link = f' · <a href="{shown(facts.page)}">the run in Prefect</a>' if facts.page else ""
    tiles = "".join(
        f'<div class="tile {tone}"><b>{shown(value)}</b><span>{shown(name)}</span></div>'
        for name, value, tone in _tiles(facts)
    )
    now = "" if facts.compares else f'<p class="soft">Champion now: {shown(facts.champion or "none")}</p>'
    return (
        f'<header class="{mood}"><small>{shown(facts.name)}{link}</small><h1>{shown(facts.verdict)}.</h1>'
        f'<div class="tiles">{tiles}</div>{now}</header>'
    )


def _is_alarming(facts: Facts) -> bool:
    return any(row["is_hacked"] for row in facts.paid) or any(not each.holds for each in facts.decision.conditions)


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """Return name, value and tone of each."""
    tiles = []
    figure = "score" if judged_by_model(facts.evaluations) else "accuracy"
    what = "mean score" if figure == "score" else "right"
    against = facts.moved["role"] if facts.moved else None
    for role, name in ((facts.decided_role, f"{what}, {_side(facts)}"), (against, f"{what}, {against}")):
        if role in facts.evaluations:
            tiles.append((name, with_interval(facts.evaluations[role].metrics, figure).partition(" ")[0], ""))
    if facts.moved:
        tones = {CHANGES[kind]: "good" if is_good else "bad" for kind, is_good in _GOOD.items()}
        tiles += [(kind, str(count), tones[kind]) for kind, count in moved_counts(facts.moved).items() if kind in tones]
    whole = next((row for row in facts.costs if row["stage"] == WHOLE), None)
    if whole:
        spent = f", cost {whole['money']:.2f}" if whole["money"] else ""
        tiles.append((f"took{spent}", duration(whole["seconds"]), ""))
    word = "finding" if len(facts.reasons) == 1 else "findings"
    tiles.append((word, str(len(facts.reasons)), "bad" if facts.reasons else ""))
    return tiles


def _side(facts: Facts) -> str:
    """Return what the policy that was decided about is called."""
    return "new policy" if facts.decided_role == "ppo" else facts.decided_role


def _sections(facts: Facts) -> list[tuple[str, str, str]]:
    """Return name, title and body of each; one without a body is left out."""
    differs, moved = facts.differs, facts.moved
    return [
        ("why", "Why, and what to do", _findings(facts)),
        ("moved", f"What moved against {moved['against']} ({moved['role']})" if moved else "", _moved(facts)),
        ("conditions", "Conditions of the gate", _conditions(facts)),
        ("scores", "Held-out problems, greedy answers", _scores(facts)),
        ("curves", "PPO by episode", _curves(facts)),
        ("rewards", "Rewards by source, first episode to last", html_table(paid_cells(facts.paid))),
        ("differs", f"What differs from {differs['against']}" if differs else "", _differs(facts)),
        ("cost", "What it cost", html_table(cost_cells(facts.costs), last_is_total=True)),
        ("lineage", "What the policy came from", _lineage(facts)),
    ]


def html_table(cells: Cells, *, last_is_total: bool = False) -> str:
    """Return a table without the columns that are empty everywhere; empty without rows."""
    if not cells.rows:
        return ""
    kept = [at for at, _ in enumerate(cells.header) if any(row[at] for row in cells.rows)]
    figures = {at for at in kept if at and all(not row[at] or row[at][0] in "0123456789-+" for row in cells.rows)}

    def cell(tag: str, row: Sequence[str], at: int) -> str:
        classes = [*(["figure"] if at in figures else []), *(["broken"] if row[at] in {BROKEN, HACK} else [])]
        classes += ["holds"] if row[at] == "holds" else []
        return f'<{tag} class="{" ".join(classes)}">{shown(row[at])}</{tag}>'

    head = "".join(cell("th", cells.header, at) for at in kept)
    rows = "".join(
        f'<tr class="{"total" if last_is_total and row is cells.rows[-1] else ""}">'
        + "".join(cell("td", row, at) for at in kept)
        + "</tr>"
        for row in cells.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _findings(facts: Facts) -> str:
    return "".join(
        f'<div class="finding"><p><b>{shown(each.cause)}</b></p><p>{shown(each.told)}</p>'
        f"<p>To do: {shown(each.advice)}.</p></div>"
        for each in facts.reasons
    )


def _moved(facts: Facts) -> str:
    if not facts.moved:
        return ""
    counts = moved_counts(facts.moved)
    total = sum(counts.values())
    chips = f'<button data-kind="">all {total}</button>' + "".join(
        f'<button data-kind="{at}">{shown(name)} {count}</button>' for at, (name, count) in enumerate(counts.items())
    )
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    if not facts.moved["rows"]:
        return "<p>No problem was put to both.</p>"
    left_out = total - len(_rows(facts.moved))
    rest = (
        f" {left_out} answers are left out of this page: outcomes.jsonl of the evaluations has them."
        if left_out
        else ""
    )
    return (
        f"<p>{shown(told)}, of {total} problems.{shown(rest)}</p>"
        f'<div id="moved-controls" hidden><div class="controls">{chips}'
        '<input id="moved-search" type="search" placeholder="Search prompts and answers" aria-label="Search"></div>'
        '<p class="soft" id="moved-told" aria-live="polite"></p></div><div id="moved-list"></div>'
        '<button class="more" id="moved-more" hidden>Show more</button>'
    )


def _data(facts: Facts) -> str:
    """Return the answers for the script; no text in them can end the element."""
    assert facts.moved is not None
    kinds = list(moved_counts(facts.moved))
    data = {"kinds": kinds, "sides": [facts.moved["role"], _side(facts)], "rows": _rows(facts.moved)}
    return f'<script type="application/json" id="moved-data">{_harmless(data)}</script>'


def _harmless(data: Any) -> str:
    r"""Return JSON in which nothing is markup.

    >>> _harmless("</script>&")
    '"\\u003c/script\\u003e\\u0026"'
    """
    text = json.dumps(data, separators=(",", ":"))  # of ASCII: line ends of other scripts are written out, too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rows(moved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the answers that the page holds, in the order in which a person wants to see them."""
    kinds = [kind for kind in CHANGES if kind in moved["counts"]]
    rows, size = [], 0
    for row in sorted(moved["rows"], key=lambda each: kinds.index(each["kind"])):
        before, after = row["before"], row["after"]
        made = {
            "kind": kinds.index(row["kind"]),
            "prompt": _text(before["prompt"].strip()),
            "answer": _text(before.get("answer") or ""),
            "category": _text(after.get("category") or ""),
            "texts": [_text(each["response"]) for each in (before, after)],
            "marks": [_mark(each, row["kind"]) for each in (before, after)],
        }
        if row["kind"] in _GOOD:
            made["good"] = _GOOD[row["kind"]]
        size += len(_harmless(made))
        if size > MOST_BYTES:
            break
        rows.append(made)
    return rows


def _text(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n… {len(text) - LONGEST_TEXT} characters …\n{text[-half:]}"
    return visible(text)


def _mark(outcome: Mapping[str, Any], kind: str) -> str:
    if CHANGES[kind].startswith("score"):
        return f"score {outcome['score']:.2f}"
    return "right" if outcome["correct"] else "wrong"


def _conditions(facts: Facts) -> str:
    cells = condition_cells(facts.decision)
    told = "".join(f"<li>{shown(each.name)}: {shown(each.told)}</li>" for each in facts.decision.conditions)
    reason = "" if facts.compares else f"<p>{shown(facts.decision.reason)}.</p>"
    return reason + html_table(cells) + (f'<ul class="soft">{told}</ul>' if told else "")


def _scores(facts: Facts) -> str:
    by_model = judged_by_model(facts.evaluations)
    rows = []
    for role, result in facts.evaluations.items():
        value = result.metrics.get("score" if by_model else "accuracy", nan)
        if isfinite(value):
            rows.append((role, value, *(result.metrics.get(end, nan) for end in ("low", "high"))))
    if not rows:
        return ""
    constants = [each.metrics for each in facts.evaluations.values() if "constant_accuracy" in each.metrics]
    constant = Reference(CONSTANT, float(constants[0]["constant_accuracy"])) if constants and not by_model else None
    policies = ", ".join(f"{role} is {each.metrics.get('policy')}" for role, each in facts.evaluations.items())
    return (
        f'<figure class="scores">{scores_svg(rows, constant, share=not by_model)}</figure>'
        f'<p class="soft">{shown(policies)}.</p>' + html_table(evaluation_cells(facts.evaluations, by_model=by_model))
    )


def _curves(facts: Facts) -> str:
    panels = curves(facts.episodes, evaluations=levels(facts.evaluations)) if facts.episodes else []
    if not panels:
        return ""
    drawn = {level.name for panel in panels for level in panel.references}
    known = {name: style for name, style in _LEVELS.items() if name in drawn}
    known |= {name: "l4" for name in sorted(drawn) if name.startswith("kept")}
    legend = "".join(
        f'<span><svg viewBox="0 0 28 8"><line class="level {style}" x1="0" x2="28" y1="4" y2="4"/></svg>'
        f"{shown(name)}</span>"
        for name, style in known.items()
    )
    figures = "".join(_figure(panel, known) for panel in panels)
    told = episodes_told(facts.policy.metrics)
    return (f"<p>{shown(told)}.</p>" if told else "") + (
        f'<div class="legend">{legend}</div><div class="panels">{figures}</div>'
    )


def _figure(panel: Panel, known: Mapping[str, str]) -> str:
    names = "".join(
        f'<span class="c{at % 6}"><i></i>{shown(line.name.replace("_", " "))}</span>'
        for at, line in enumerate(panel.lines)
    )
    legend = f'<div class="legend">{names}</div>' if len(panel.lines) > 1 else ""
    caption = f"<figcaption>{shown(panel.title)} <span>{shown(panel.unit)}</span></figcaption>"
    return f"<figure>{caption}{panel_svg(panel, known)}{legend}</figure>"


def _differs(facts: Facts) -> str:
    if facts.differs is None:
        return ""
    parts = []
    for name, title in (("config", "Configuration"), ("data", "Data"), ("code", "Code"), ("seconds", "Seconds of PPO")):
        rows = change_cells(facts.differs[name])
        same = "<p>The same.</p>"
        parts.append(f"<h3>{title}</h3>" + (html_table(Cells(("", "before", "now"), list(rows))) or same))
    return "".join(parts)


def _lineage(facts: Facts) -> str:
    if facts.ancestry is None:
        return ""
    left_out = facts.ancestry["left_out"]
    rest = (
        f'<p class="soft">And {left_out} earlier: rlhf artifacts lineage {shown(facts.decision.policy)}</p>'
        if left_out
        else ""
    )
    return f'<div class="wide">{ancestry_svg(facts.ancestry)}</div>{rest}'
