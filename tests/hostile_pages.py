"""Pages as a run makes them, full of hostile texts and ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlhf_core.data.preparing.report import DataReport, Sample, describe_problems, describe_set, report_to_markdown
from rlhf_core.data.reading import RejectedRow
from rlhf_core.escaping import block, code, prose, table
from tasks.report.samples import changes, samples_document
from tests.hostile_texts import HOSTILE, ORDINARY
from tests.unit.data.read_sets import problems, read

TEXTS = {**ORDINARY, **HOSTILE}


def report_of_data() -> str:
    rejected = tuple(RejectedRow(f"row {at}", f"reason {at}: {text}", text) for at, text in enumerate(HOSTILE.values()))
    rows = replace(
        describe_problems(problems(1), HOSTILE["code ends before an image"], []),
        sample=tuple(Sample(text, text, text) for text in TEXTS.values()),
    )
    empty = replace(rows, rows=0, sample=())
    splits = {"sft": rows, "preferences": empty, "ppo": empty, "evaluation": empty}
    sets = (describe_set("problems", read(problems(1), HOSTILE["image after a norm of LaTeX"], rejected)),)
    return report_to_markdown(DataReport("test", 0, HOSTILE["image"], sets, splits, (), None, ()))


def report_of_samples() -> str:
    outcomes = [
        {"key": name, "prompt": text, "answer": text, "response": text, "correct": at % 2 == 0, "score": 0.0}
        for at, (name, text) in enumerate(TEXTS.items())
    ]
    found = changes(outcomes, [{**row, "correct": True} for row in outcomes], by_model=False, seed=0)
    chosen = [{"why": "random", "score": 0.0, "kl": 0.0, "length": 1, **row} for row in outcomes]
    return samples_document(chosen, found, policy="policy/test@1")


def report_of_cells() -> str:
    rows = [[prose(name), code(text), prose(text), "after"] for name, text in TEXTS.items()]
    named = "\n".join(f"* {prose(text)}: {code(text)}, after" for text in TEXTS.values())
    return f"{table(['what', 'code', 'prose', 'after'], rows)}\n\n{named}\n\n{block(TEXTS.values())}\n"


PAGES: dict[str, Callable[[], str]] = {
    "data": report_of_data,
    "samples": report_of_samples,
    "cells": report_of_cells,
}
