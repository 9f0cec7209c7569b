"""What a run's page in Prefect shows. Its server keeps text only, so a picture is an address that holds it.

The tab "Artifacts" shows the first line of each artifact's description and, behind a click, all of it above the body;
a picture in that line is seen at once. Prefect's own kind of artifact for images writes the picture's long address out
below it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from re import Match
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.context import root_flow_run
from tasks.report.markdown import PICTURE_LINE, picture


def show_markdown(key: str, markdown: str, *, seen_at_once: str) -> None:
    """Put markdown on the page of the run that is going on; nothing outside a run."""
    if root_flow_run() is not None:
        create_markdown_artifact(key=key, markdown=markdown, description=seen_at_once)


def show_table(key: str, rows: list[dict[str, Any]], *, seen_at_once: str) -> None:
    """Put a table on the page of the run that is going on; nothing outside a run."""
    if root_flow_run() is not None:
        create_table_artifact(key=key, table=rows, description=seen_at_once)


def inline(alt: str, png: bytes) -> str:
    """Return a picture that needs no file."""
    return picture(alt, f"data:image/png;base64,{b64encode(png).decode()}")


def with_pictures(text: str, pictures: Mapping[str, bytes]) -> str:
    """Return a report whose pictures need no files: only lines that are a picture and nothing else are touched.

    A picture that is not among those handed in is left out.
    """

    def held(line: Match[str]) -> str:
        alt, name = line.groups()
        return inline(alt, pictures[name]) if name in pictures else ""

    return PICTURE_LINE.sub(held, text)
