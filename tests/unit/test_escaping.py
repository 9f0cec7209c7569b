"""Whatever somebody wrote is shown as it is, and obeyed by no renderer of markdown and no terminal."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape
from re import findall, sub

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from rlhf_core.escaping import block, code, one_line, prose, table, visible
from tests.hostile_pages import PAGES
from tests.hostile_texts import HARMFUL, HOSTILE, ORDINARY

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
ordinary = pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY)
ANYTHING = st.lists(
    st.sampled_from(
        ["|", "\\", "`", "``", "```", "\n", "\r", " ", "~~~", "*", "_", "[", "](//a.b)", "!", "<img src=x>"]
    )
    | st.sampled_from(
        ["&lt;", "http://a.b", "www.a.b", "a@b.c", "a", "1.", "#", "-", "\t", "\x1b[", "\u202e", "\ud800"]
    )
    | st.characters()
).map("".join)


def tokens(markdown: str) -> list[Token]:
    return [token for each in READER.parse(markdown) for token in (each, *(each.children or []))]


def plain(markdown: str) -> str:
    """Return what a page that is nothing but words and code says."""
    found = tokens(markdown)
    assert {token.type for token in found} <= {"paragraph_open", "paragraph_close", "inline", "text", "code_inline"}
    return "".join(token.content for token in found if token.type in {"text", "code_inline"})


def cells(markdown: str) -> list[str]:
    return findall(r"<td>(.*?)</td>", READER.render(markdown))


def shown(text: str, limit: int | None = None) -> str:
    return one_line(text, limit) if one_line(text).strip() else "(blank)" if text else "(empty)"


@hostile
def test_in_code_it_is_words(text: str) -> None:
    assert plain(f"response: {code(text)}, and `more`") == f"response: {shown(text, 300)}, and more"
    if text.isprintable() and text.strip() and len(text) <= 300:
        assert plain(code(text)) == text


@hostile
def test_in_prose_it_is_words(text: str) -> None:
    told = plain(f"of {prose(text)}, and more")
    words = one_line(text.strip(), 300)
    assert told in {f"of {words}, and more", f"of {shown(text, 300)}, and more"}
    assert plain(prose(text)) == told.removeprefix("of ").removesuffix(", and more")


@hostile
@pytest.mark.parametrize("written", [code, prose])
def test_in_a_table_it_is_one_cell(text: str, written: Callable[[str], str]) -> None:
    made = table(["a", "b", "c"], [[written(text), written(text), "after"], ["1", "2", "3"]])
    html = READER.render(made)
    assert (html.count("<tr>"), html.count("<td>")) == (3, 6)
    assert not findall(r"<(?!/?(?:table|thead|tbody|tr|t[dh]|code)>)", html)
    assert [cells(made)[at] for at in (2, 3, 4, 5)] == ["after", "1", "2", "3"]
    told = unescape(sub("<.*?>", "", cells(made)[0]))
    assert told.strip() == plain(written(text)).replace("|", "│").strip()


@hostile
def test_in_a_block_it_is_a_line(text: str) -> None:
    found = tokens(block(["first", text, "last"]))
    assert [token.type for token in found] == ["fence"]
    assert found[0].content == f"first\n{one_line(text)}\nlast\n"
    assert found[0].info == ""


@hostile
def test_it_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    for written in (visible, one_line, code, prose, lambda text: table([text], [[text]]), lambda text: block([text])):
        assert not HARMFUL.search(written(text)), written
        written(text).encode()
    assert visible(visible(text)) == visible(text)


@pytest.mark.parametrize("made", PAGES.values(), ids=PAGES)
def test_a_report_is_words_whatever_is_in_it(made: Callable[[], str]) -> None:
    page = made()
    harmless = ("paragraph", "heading", "list", "list_item", "bullet_list", "table", "thead", "tbody", "tr", "td", "th")
    parts = {token.type.removesuffix("_open").removesuffix("_close") for token in tokens(page)}
    assert parts <= {*harmless, "inline", "text", "code_inline", "strong", "fence", "text_special"}
    assert not HARMFUL.search(page)


@given(ANYTHING)
def test_no_text_at_all_leaves_its_place(text: str) -> None:
    assert plain(f"a {code(text)} b") == f"a {shown(text, 300)} b"
    assert plain(f"a {prose(text)} b").startswith("a ")
    for written in (code, prose):
        found = cells(table(["a", "b"], [[written(text), "after"], ["1", "2"]]))
        assert (len(found), found[1:]) == (4, ["after", "1", "2"])
        assert not HARMFUL.search(written(text))
    assert [token.type for token in tokens(block([text, text]))] == ["fence"]


@ordinary
def test_what_people_write_looks_as_they_wrote_it(text: str) -> None:
    assert visible(text) == one_line(text) == plain(code(text)) == plain(prose(text)) == text


@pytest.mark.parametrize("name", ["bare link", "bare host", "bare mail", "bare link in brackets", "link in angles"])
def test_an_address_in_prose_stands_in_code_as_renderers_link_it_elsewhere(name: str) -> None:
    assert [token.type for token in tokens(prose(HOSTILE[name])) if token.content] == ["inline", "code_inline"]


def test_lines_and_tabs_stay_what_they_are_where_there_is_room_for_lines() -> None:
    assert visible("a\r\n\tb\rc\n") == "a\n        b\nc\n"
    assert one_line("a\n\n\nb") == "a ⏎⏎⏎ b"


def test_a_name_reads_well_in_the_markdown_too() -> None:
    for name in ("policy/quickstart@12", "zero2", "0.500", "learn", "JSON lines: preferences"):
        assert prose(name) == name
    assert prose("a*b") == r"a\*b"
