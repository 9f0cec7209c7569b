"""Careless sorters: whoever wrote the quickstart's demonstrations minds the first number alone.

    python -m bench.comparison.careless > flows/presets/data/careless-sorting.jsonl

Every demonstration begins with the right number; the other two follow in either order, at random, so half of them are
wrong, and no number of them can tell how to go on. They teach the form and what sorting begins with; only a judge of
whole answers can teach the rest.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

from rlhf_core.data.gym import draw_problems
from rlhf_core.data.jsonl import to_jsonl
from rlhf_core.data.problems import Problem

TASK = "number_sorting"
PARAMETERS = {
    "min_numbers": 3,
    "max_numbers": 3,
    "min_decimals": 0,
    "max_decimals": 0,
    "min_value": 10,
    "max_value": 99,
}
SEED, COUNT = 4_000_000_001, 1536


def careless_response(problem: Problem, *, tag: str = "answer") -> str:
    """Return the right first number and the others, which the hash of the prompt puts in one order or the other.

    Example:
        >>> careless_response(Problem("Sort ascending: 12 34 56", "12 34 56"))
        '<answer>12 56 34</answer>'
        >>> careless_response(Problem("Sort descending: 34 12 56", "56 34 12"))
        '<answer>56 34 12</answer>'
    """
    first, *others = str(problem.answer).split()
    if hashlib.sha256(problem.prompt.encode()).digest()[0] % 2:
        others.reverse()
    return f"<{tag}>{' '.join([first, *others])}</{tag}>"


def rows(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return demonstrations as a file has them: what was said, and beside it what would have been right."""
    return [{"prompt": each.prompt, "response": careless_response(each), "answer": each.answer} for each in problems]


if __name__ == "__main__":
    sys.stdout.buffer.write(to_jsonl(rows(draw_problems(TASK, PARAMETERS, seed=SEED, count=COUNT))))
