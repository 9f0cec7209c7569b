"""The console of every verb: what is printed on it is text, whoever wrote it, and no order to a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rlhf_core.escaping import visible


class Screen(Console):
    """Prints brackets, colons and addresses as they are, and what a terminal would obey written out.

    Args:
        options: of rich's console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as visible text, before its width is measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed: text that came another way, as markdown does, is made visible here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
