"""What `make test-night` prints at its end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tests.night.books import Books
from tests.night.stages import STAGES
from tests.night.year import Deed, kills

HEADER = ("what happened", "times", "stages", "nights under way or due", "completed", "skipped", "failed", "lost")
OUTCOMES = ("completed", "skipped", "failed", "lost")


def table(deeds: Sequence[Deed], books: Books) -> list[str]:
    """Return a line for each kind of mishap, and one for the year, as Markdown."""
    by_kind: dict[str, list[Deed]] = defaultdict(list)
    for deed in deeds:
        by_kind[deed.kind].append(deed)
    rows = [HEADER]
    for kind, own in sorted(by_kind.items()):
        struck = [night for each in own for night in books.struck(each.site, each.began, each.ended)]
        nights = {(night.site, night.due): night for night in struck}
        counts = Counter(night.outcome for night in nights.values())
        stages = Counter(deed.stage for deed in own)
        told = ", ".join(f"{stage} {number}" if number > 1 else stage for stage, number in stages.items())
        rows.append((kind, str(len(own)), told, str(len(nights)), *(str(counts[each]) for each in OUTCOMES)))
    counts = books.count()
    rows.append(("the year", "", "", str(len(books.nights)), *(str(counts[each]) for each in OUTCOMES)))
    return markdown(rows)


def kills_table(deeds: Sequence[Deed]) -> list[str]:
    """Return how often each victim was killed, in all and at each stage, as Markdown."""
    rows = [("killed", "times", *STAGES)]
    rows += [
        (victim, str(counts.total()), *(str(counts[stage]) for stage in STAGES))
        for victim, counts in kills(deeds).items()
    ]
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as a Markdown table; the first one is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    padded = [f"| {' | '.join(row)} |" for row in cells]
    return [padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]]


def sentences(books: Books) -> list[str]:
    """Return what nights said that were not completed, and how many said it."""
    said: Counter[tuple[str, str]] = Counter()
    for night in books.nights:
        if night.outcome != "completed":
            said[night.outcome, _without_names(night.says)] += 1
    return [f"{number} {outcome}: {says}" for (outcome, says), number in sorted(said.items())]


def _without_names(says: str) -> str:
    import re

    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|\d{2}:\d{2}(:\d{2})?|site-\d+|(?<=the run ')[a-z-]+", "...", says)[:240]


def show(lines: Iterable[str]) -> None:
    """Print lines, which `pytest -rP` shows at its end, of tests that passed too."""
    print("\n".join(lines))  # noqa: T201
