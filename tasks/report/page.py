"""What a run's page in Prefect shows. Its server keeps text only, so a picture is an address that holds it.

The tab "Artifacts" shows the first line of each artifact's description and, behind a click, all of it above the body;
a picture in that line is seen at once. Prefect's own kinds of artifact do not serve: that for images writes the
picture's long address out below it, that for tables breaks no line and has no column left out.

A page breaks lines in paragraphs and lists, never in a table's cell or a block of code: a table wider than the page is
cut off at the right. So a table here has few columns of a known width, and what somebody wrote stands in a list.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from re import Match

from prefect.artifacts import create_markdown_artifact

from infra.artifacts.ref import parse_reference
from rlhf_core.escaping import PICTURE_LINE, picture
from tasks.context import root_flow_run


def show_markdown(what: str, reference: str, markdown: str, *, seen_at_once: str) -> None:
    """Put markdown on the page of the run that is going on; nothing outside a run.

    Its key is the same in every run of a project, and another in another project: the server lists keys with the latest
    artifact of each.

    Args:
        what: it shows, such as `report`.
        reference: of the artifact that it tells of, which is named after its project.
        markdown: the page.
        seen_at_once: the description; its first line is seen without a click.
    """
    if root_flow_run() is not None:
        create_markdown_artifact(key=page_key(what, reference), markdown=markdown, description=seen_at_once)


def page_key(what: str, reference: str) -> str:
    """Return the key of a page; Prefect allows lower-case letters, digits and dashes in one.

    Example:
        >>> page_key("report", "run/quickstart@12"), page_key("data", "dataset/my_own.v2@1")
        ('quickstart-report', 'my-own-v2-data')
    """
    name = re.sub("[^a-z0-9]+", "-", parse_reference(reference).name)
    return f"{name}-{what}"


def inline(alt: str, png: bytes | None) -> str:
    """Return a picture that needs no file; nothing where there is none."""
    return "" if png is None else picture(alt, f"data:image/png;base64,{b64encode(png).decode()}")


def with_pictures(text: str, pictures: Mapping[str, bytes]) -> str:
    """Return a report whose pictures need no files: only lines that are a picture and nothing else are touched.

    A picture that is not among those handed in is left out.
    """

    def held(line: Match[str]) -> str:
        alt, name = line.groups()
        return inline(alt, pictures[name]) if name in pictures else ""

    return PICTURE_LINE.sub(held, text)
