"""Pairs that prefer nothing, and rows that contradict each other."""

from __future__ import annotations

from collections import defaultdict
from os.path import commonprefix
from typing import TYPE_CHECKING

from rlhf_core.data.linting.findings import Accused, quoted
from rlhf_core.data.linting.rows import normalised

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from rlhf_core.data.linting.rows import LintRow, LintSet
    from rlhf_core.data.preparing.lengths import TokenMeter


def equal(given: LintSet) -> Iterator[Accused]:
    """Yield the pairs whose responses say the same, as they are written or as far as the stage reads them."""
    for place, row in enumerate(given.rows):
        if not row.is_pair:
            continue
        if row.response_ids[0] == row.response_ids[1]:
            yield Accused(place, f"both say {quoted(row.responses[0])}, but for case, spaces and punctuation")
        elif (
            given.meter is not None
            and given.max_length is not None
            and _is_equal_cut(row, given.max_length, given.meter)
        ):
            yield Accused(place, f"both are the same up to {given.max_length:,} tokens, where the stage stops to read")


_ADDED = 256
"""Tokens that a template adds to a prompt at most, as a rule."""


def _is_equal_cut(row: LintRow, limit: int | None, meter: TokenMeter) -> bool:
    shared = commonprefix(row.responses)  # noqa: RUF071 - of texts, not of paths
    most_tokens = len((row.prompt + shared).encode("utf-8", "surrogatepass"))  # each has a byte at least
    if limit is None or most_tokens + _ADDED < limit:
        return False
    asked, said = meter.template.count_tokens([meter.template.prompt_text(row.prompt), shared])
    return asked < limit < asked + said  # the last token of what is shared may differ


def contradictory(given: LintSet) -> Iterator[Accused]:
    """Yield pairs that prefer in a circle (A to B and B to A, or A to B to C to A), and problems of two answers."""
    better = {row.response_ids[0] for row in given.rows if row.is_pair}
    worse = {row.response_ids[1] for row in given.rows if row.is_pair}
    by_prompt: defaultdict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(given.rows):
        # in a circle each response is once the better and once the worse one
        if row.answer is not None or (row.is_pair and row.response_ids[0] in worse and row.response_ids[1] in better):
            by_prompt[row.prompt_id].append(place)
    for places in by_prompt.values():
        if len(places) > 1:
            rows = {place: given.rows[place] for place in places}
            yield from _circles(rows)
            yield from _two_answers(rows)


def _circles(rows: Mapping[int, LintRow]) -> Iterator[Accused]:
    edges = {place: (row.response_ids[0], row.response_ids[1]) for place, row in rows.items() if row.is_pair}
    part = strong_components(edges.values())
    circles: defaultdict[int, list[int]] = defaultdict(list)
    for place, (better, worse) in edges.items():
        if better != worse and part[better] == part[worse]:
            circles[part[better]].append(place)
    for places in circles.values():
        for place in places:
            other = places[0] if place != places[0] else places[1]
            yield Accused(place, f"prefers {quoted(rows[place].responses[0])}, against {rows[other].where}")


def _two_answers(rows: Mapping[int, LintRow]) -> Iterator[Accused]:
    answers = {place: normalised(row.answer) for place, row in rows.items() if row.answer is not None}
    if len(set(answers.values())) > 1:
        for place, answer in answers.items():
            other = next(each for each, theirs in answers.items() if theirs != answer)
            yield Accused(place, f"has the answer {quoted(answer)}, and {rows[other].where} {quoted(answers[other])}")


def strong_components(edges: Collection[tuple[int, int]]) -> dict[int, int]:
    """Return a name for the strong component of each node of a directed graph.

    Source:
        Sharir 1981, A strong-connectivity algorithm and its applications in data flow analysis.

    Example:
        >>> found = strong_components([(1, 2), (2, 1), (2, 3)])
        >>> found[1] == found[2], found[2] == found[3]
        (True, False)
    """
    after: defaultdict[int, list[int]] = defaultdict(list)
    before: defaultdict[int, list[int]] = defaultdict(list)
    for one, other in edges:
        after[one].append(other)
        before[other].append(one)
    seen: set[int] = set()
    finished = [node for start in [*after, *before] for node in _walked(start, after, seen)]
    seen.clear()
    return {node: start for start in reversed(finished) for node in _walked(start, before, seen)}


def _walked(start: int, graph: Mapping[int, Iterable[int]], seen: set[int]) -> Iterator[int]:
    """Yield the nodes that are reached and not yet seen, each after those that are reached from it."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(graph.get(start, ())))]
    while path:
        node, further = path[-1]
        fresh = next((each for each in further if each not in seen), None)
        if fresh is None:
            path.pop()
            yield node
        else:
            seen.add(fresh)
            path.append((fresh, iter(graph.get(fresh, ()))))
