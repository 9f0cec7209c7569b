"""The curves, scores and lineage of a run as SVG within a page: its style sheet gives the colours, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, isfinite, log10
from typing import Any

from rlhf_core.escaping import one_line
from tasks.pictures.panels import Line, Panel, Reference

WIDTH, HEIGHT = 320, 170
"""Of a panel, in the units of its own coordinates."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 22
_COLOURS = 6
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 176, 40, 36, 14
_MOST_MARKED = 30
"""Points of a line that are marked and tell their value: of a long run, they would be most of the page."""


def panel_svg(panel: Panel, levels: Mapping[str, str]) -> str:
    """Return the curves of one quantity.

    Args:
        panel: what is drawn.
        levels: the style's class of each level that the page's legend has, by name; another is drawn as a thin line.
    """
    count = max(len(line.values) for line in panel.lines)
    low, high = _range(panel)

    def x(at: float) -> float:
        inner = WIDTH - _LEFT - _RIGHT
        return _LEFT + (inner * at / (count - 1) if count > 1 else inner / 2)

    def y(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low)
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - share)

    parts = []
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{tick:g}</text>')
    for at in sorted({0, (count - 1) // 2, count - 1}):
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{at + 1}</text>')
    for level in panel.references:
        style = f"level {levels[level.name]}" if level.name in levels else "zero"
        height = f"{y(level.value):.1f}"
        told = _title(f"{level.name}: {level.value:.3f}")
        parts.append(
            f'<line class="{style}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{height}" y2="{height}">{told}</line>'
        )
    for at, line in enumerate(panel.lines):
        parts += _line(line, f"c{at % _COLOURS}", x, y)
    return _svg(WIDTH, HEIGHT, f"{panel.title}, by episode", "".join(parts))


def _line(line: Line, colour: str, x: Any, y: Any) -> list[str]:
    parts = []
    known = [at for at, value in enumerate(line.values) if isfinite(value)]
    ends = [at for at in known if line.low and isfinite(line.low[at])]
    if len(ends) > 1:
        edge = [f"{x(at):.1f},{y(line.high[at]):.1f}" for at in ends]
        edge += [f"{x(at):.1f},{y(line.low[at]):.1f}" for at in reversed(ends)]
        parts.append(f'<polygon class="band {colour}" points="{" ".join(edge)}"/>')
    points = " ".join(f"{x(at):.1f},{y(line.values[at]):.1f}" for at in known)
    parts.append(f'<polyline class="curve {colour}" points="{points}"/>')
    for at in known if len(known) <= _MOST_MARKED else []:
        told = _title(f"{line.name.replace('_', ' ')}, episode {at + 1}: {line.values[at]:.4g}")
        parts.append(
            f'<circle class="dot {colour}" cx="{x(at):.1f}" cy="{y(line.values[at]):.1f}" r="2.2">{told}</circle>'
        )
    return parts


def _range(panel: Panel) -> tuple[float, float]:
    """Return the ends of the vertical axis, which holds all that is drawn."""
    values = [each for line in panel.lines for column in (line.values, line.low, line.high) for each in column]
    values += [level.value for level in panel.references]
    known = [value for value in values if isfinite(value)]
    low = min(known) if panel.floor is None else panel.floor
    high = max(known) if panel.ceiling is None else panel.ceiling
    if high <= low:
        high, low = low + (abs(low) or 1.0) * 0.5, low - (abs(low) or 1.0) * 0.5 if panel.floor is None else low
    margin = 0.05 * (high - low)
    return low - (margin if panel.floor is None else 0), high + (margin if panel.ceiling is None else 0)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers within a range, three to six of them.

    >>> _ticks(0.0, 1.0), _ticks(-0.13, 1.6)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 1.0, 1.5])
    """
    raw = (high - low) / 4
    power = 10.0 ** floor(log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * 0.999)
    first = -floor(1e-9 - low / step)
    return [round(at * step, 10) for at in range(first, floor(high / step + 1e-9) + 1)]


def scores_svg(rows: Sequence[tuple[str, float, float, float]], constant: Reference | None, *, share: bool) -> str:
    """Return a point with its interval for each policy.

    Args:
        rows: name, figure, and the ends of its interval; the last two may be nan.
        constant: the best constant answer, as a line; None without one.
        share: whether figures are shares, from 0 to 1.
    """
    left, width, step = 84, 640, 34
    height = _TOP + step * len(rows) + _BOTTOM
    ends = [each for row in rows for each in row[1:] if isfinite(each)] + ([constant.value] if constant else [])
    low, high = (0.0, 1.0) if share else (min(ends), max(ends))
    low, high = (low, high) if high > low else (low - 1, high + 1)

    def x(value: float) -> float:
        return left + (width - left - 24) * (value - low) / (high - low)

    parts = []
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick:g}</text>')
    if constant:
        at = f"{x(constant.value):.1f}"
        told = _title(f"{constant.name}: {constant.value:.3f}")
        parts.append(f'<line class="level l2" x1="{at}" x2="{at}" y1="{_TOP}" y2="{height - _BOTTOM}">{told}</line>')
    for place, (name, value, lower, upper) in enumerate(rows):
        y, colour = _TOP + step * (place + 0.62), "c1" if name == "ppo" else "c0"
        parts.append(f'<text class="name" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{_shown(name)}</text>')
        if isfinite(lower) and isfinite(upper):
            parts.append(
                f'<line class="interval {colour}" x1="{x(lower):.1f}" x2="{x(upper):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        parts.append(f'<circle class="dot {colour}" cx="{x(value):.1f}" cy="{y:.1f}" r="4.5"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{y - 8:.1f}" text-anchor="middle">{value:.3f}</text>')
    return _svg(width, height, "Held-out answers of each policy", "".join(parts))


def ancestry_svg(found: Mapping[str, Any]) -> str:
    """Return boxes and arrows, as `tasks.report.ancestry` lays them out."""
    boxes = found["boxes"]
    columns, rows = (1 + max(box[side] for box in boxes) for side in ("column", "row"))
    width, height = columns * (_BOX_WIDTH + _GAP_X) - _GAP_X + 4, rows * (_BOX_HEIGHT + _GAP_Y) - _GAP_Y + 4
    corners = [(2 + box["column"] * (_BOX_WIDTH + _GAP_X), 2 + box["row"] * (_BOX_HEIGHT + _GAP_Y)) for box in boxes]
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    ]
    parts.append('<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>')
    for parent, child in found["arrows"]:
        x, y = corners[parent][0] + _BOX_WIDTH, corners[parent][1] + _BOX_HEIGHT / 2
        end_x, end_y = corners[child][0] - 1, corners[child][1] + _BOX_HEIGHT / 2
        bend = (x + end_x) / 2
        parts.append(
            f'<path class="arrow" marker-end="url(#tip)" d="M{x} {y} C{bend} {y} {bend} {end_y} {end_x} {end_y}"/>'
        )
    for at, (box, (left, top)) in enumerate(zip(boxes, corners, strict=True)):
        style = "box own" if at == 0 else "box"
        middle = left + _BOX_WIDTH / 2
        parts.append(f'<g>{_title(box["uri"])}<rect class="{style}" x="{left}" y="{top}" width="{_BOX_WIDTH}" ')
        parts.append(f'height="{_BOX_HEIGHT}" rx="6"/><text class="name" x="{middle}" y="{top + 17}" ')
        parts.append(f'text-anchor="middle">{_shown(box["name"])}</text>')
        parts.append(f'<text x="{middle}" y="{top + 32}" text-anchor="middle">{_shown(box["told"])}</text></g>')
    return _svg(width, height, "What the policy came from", "".join(parts), natural=True)


def _svg(width: float, height: float, told: str, inner: str, *, natural: bool = False) -> str:
    """Return a picture that is as wide as its place; a natural one keeps its size, and its place scrolls."""
    size = f' width="{width}" height="{height}"' if natural else ""
    return f'<svg viewBox="0 0 {width} {height}"{size} role="img" aria-label="{_shown(told)}">{inner}</svg>'


def _title(text: str) -> str:
    return f"<title>{_shown(text)}</title>"


def _shown(text: str) -> str:
    return escape(one_line(text))
