"""Whatever way text takes to the terminal, nothing of it is obeyed there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from flows import cli
from flows.cli.output import console, print_rows, write_json, write_lines
from flows.cli.stack import _print_table, _teller
from infra.errors import StoreError
from tests.hostile_texts import HARMFUL, HOSTILE, ORDINARY

WAYS: dict[str, Callable[[Console, str], Any]] = {
    "printed": lambda screen, text: screen.print(text),
    "styled": lambda screen, text: screen.print(text, style="bold"),
    "several": lambda screen, text: screen.print(Text(text), text, Padding(text)),
    "markdown": lambda screen, text: screen.print(Markdown(text, hyperlinks=False)),
    "code": lambda screen, text: screen.print(Markdown(f"~~~~~~python\n{text}\n", hyperlinks=False)),
    "JSON for people": lambda screen, text: screen.print_json(data={"key": text.encode(errors="replace").decode()}),
    "rows": lambda screen, text: print_rows(screen, [("a", text, "b"), (text,)]),
    "a table of the stack": lambda screen, text: _print_table(screen, ("check", "seen"), [(text, text)]),
    "a line of the stack": lambda screen, text: _teller(screen)(text),
    "lines": lambda _, text: write_lines([text]),
    "JSON": lambda _, text: write_json({"key": text}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_hostile_text_reaches_the_terminal_as_more_than_words(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Console, str], Any],
    is_terminal: bool,
) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    for name, text in HOSTILE.items():
        way(console(), text)
        out = capsys.readouterr().out
        assert not HARMFUL.search(re.sub(r"\x1b\[[\d;]*m", "", out)), name


@pytest.mark.parametrize("text", [*ORDINARY.values(), HOSTILE["markup of rich"]])
def test_what_people_write_is_printed_as_they_wrote_it(capsys: pytest.CaptureFixture[str], text: str) -> None:
    console().print(text)
    print_rows(console(), [(text,)])
    write_lines([text])
    assert capsys.readouterr().out == f"{text}\n" * 3


def test_what_is_written_out_has_its_room_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(console(), [("\x1b" * 10, "after"), ("a", "b")])
    assert capsys.readouterr().out.splitlines()[0] == r"\x1b" * 10 + "  after"


def test_a_sentence_of_an_error_is_no_order_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> int:
        raise StoreError("".join(HOSTILE.values()).replace("\n", ""))

    monkeypatch.setattr(cli, "app", fail)
    assert cli.main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith("rlhf: ")
    assert not HARMFUL.search(said)
