"""The timeline: a line for each process, a bar for each span."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.coati.roles.spans import Span, Spans, draw_timeline, write_timeline

SPANS = [
    Span("actor", 0, "load", 0.0, 90.0),
    Span("reward", 0, "scores", 103.0, 104.0),
    Span("actor", 0, "generate", 100.0, 102.0),
    Span("actor", 1, "generate", 100.5, 102.5),
]


def test_each_process_has_a_line_in_the_order_of_the_roles_and_time_begins_with_the_first_work() -> None:
    figure = draw_timeline(SPANS)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["actor 0", "actor 1", "reward 0"]
    bars = [patch for container in axes.containers for patch in container]
    assert sorted((bar.get_x(), bar.get_width()) for bar in bars) == [(0.0, 2.0), (0.5, 2.0), (3.0, 1.0)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["generate", "scores"]


def test_it_is_written_as_png_even_if_nothing_happened(tmp_path: Path) -> None:
    for number, spans in enumerate((SPANS, [])):
        write_timeline(spans, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_spans_are_kept_after_an_error_too() -> None:
    spans = Spans("critic", 1)
    with pytest.raises(RuntimeError), spans.busy("learn"):
        raise RuntimeError
    (kept,) = spans.kept
    assert kept[:3] == ("critic", 1, "learn")
    assert 0 <= kept.end - kept.start < 5
