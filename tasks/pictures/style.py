"""How every picture looks, and the way to a PNG; nothing global is set, and pyplot is not used."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image  # comes with matplotlib

# Okabe and Ito 2008: told apart by people with any of the common colour deficiencies.
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE)
INK, FAINT = "#333333", "#D9D9D9"
WIDTH_INCHES, DPI = 8.0, 120  # 960 pixels; still read where a page shows it at 700
SMALL, TITLE = 8.0, 9.0  # points
_COLOURS_KEPT = 128
MOST_MARKED = 30
"""Points of a line that are marked one by one; more run together."""


def new_figure(height_inches: float) -> Figure:
    """Return an empty figure of the width that all pictures have, white on any page."""
    return Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI, layout="constrained", facecolor="white")


def small_multiples(panels: int, *, columns: int, row_inches: float = 1.9) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of as many axes as there are panels, at least one."""
    rows = max(1, -(-panels // columns))
    figure = new_figure(row_inches * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in grid[max(1, panels) :]:
        spare.remove()
    return figure, list(grid[: max(1, panels)])


def dress(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Give axes a title, labels with units, and no more lines than are read."""
    axes.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=SMALL, color=INK)
    axes.set_ylabel(y, fontsize=SMALL, color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    plain = FuncFormatter(lambda value, _: f"{round(value, 10):g}")  # no offset to add or factor to multiply
    axes.yaxis.set_major_formatter(plain)
    axes.xaxis.set_major_formatter(plain)


def count_along(axes: Axes, first: float, last: float) -> None:
    """Let the x axis count from first to last, in whole numbers, wide enough for a single one."""
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def marker(points: int) -> str:
    """Return the marker of a line with this many points."""
    return "o" if points <= MOST_MARKED else ""


def legend(axes: Axes, entries: int, place: Literal["best", "lower right"] = "best") -> None:
    """Name the lines of axes where there is more than one thing to tell apart."""
    if entries > 1:
        axes.legend(fontsize=SMALL - 1, frameon=False, labelcolor=INK, handlelength=1.6, borderaxespad=0.1, loc=place)


def shared_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Name above all panels what means the same in each of them."""
    if handles:
        figure.legend(
            list(handles), list(labels), loc="outside upper left", ncols=3, fontsize=SMALL, frameon=False,
            labelcolor=INK,
        )  # fmt: skip


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG of few colours, a third of the size; the same figure gives the same bytes."""
    canvas, packed = FigureCanvasAgg(figure), BytesIO()
    canvas.draw()  # type: ignore[no-untyped-call]
    drawn = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    flat = drawn.convert("RGB").quantize(
        _COLOURS_KEPT, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    )  # other methods let rare colours fall together, and a legend then lies
    flat.save(packed, format="png", optimize=True)
    return packed.getvalue()
