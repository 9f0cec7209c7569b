"""What models and rows hold, on pages in both versions of Prefect's UI, and on a terminal: no more than words."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.services import prefect_api
from rlhf_core.escaping import one_line
from tests.hostile_pages import PAGES, TEXTS
from tests.hostile_texts import FOREIGN, HARMFUL, HOSTILE
from tests.integration.browser import Browser, browser
from tests.integration.local_stack import PROGRAMS, LocalStack, wait_for

pytestmark = pytest.mark.integration

SCRIPT_OF_A_PAGE = f"""
    const all = selector => [...document.querySelectorAll(selector)];
    return {{
        words: document.body.innerText,
        code: all("code, .markdown-renderer__codespan, pre").map(each => each.textContent),
        cells: all("td").length,
        links: all("a").map(each => each.href).filter(each => each.includes("{FOREIGN}")),
        media: all("[src]").map(each => each.src).filter(each => !each.startsWith(location.origin)),
        tags: all("script, style, iframe, form, object, video, svg image").filter(
            each => each.closest(".markdown-renderer, .prose, article")).length,
    }};
"""


def put(stack: LocalStack, key: str, markdown: str) -> str:
    """Make an artifact as a run does, and return its id."""
    body = {"key": key, "type": "markdown", "data": markdown, "description": f"Of {key}"}
    return str(prefect_api.call(stack.api_url, "POST", "/artifacts/", body)["id"])


def enter(window: Browser, stack: LocalStack, version: str) -> str:
    """Log in to a version of the UI, and return where it is."""
    home = stack.api_url.removesuffix("/api")
    window.open(home)
    window.run(f"document.cookie = 'prefect_ui_version={version}; path=/'")
    window.open(home)
    wait_for(lambda: window.type("input[type=password]", f"{stack.password}\n"), "the UI to ask for the password")
    wait_for(lambda: "Deployments" in window.text, "the UI to open")
    return f"{home}/v2" if version == "v2" else home


def led_to(window: Browser) -> list[str]:
    return [line for line in window.foreign if FOREIGN in line]


@pytest.mark.stack
@pytest.mark.parametrize("version", ["v2", "v1"])
def test_a_page_of_hostile_texts_asks_nobody_and_shows_them_in_their_places(
    stack: LocalStack, tmp_path: Path, version: str
) -> None:
    with browser() as window:
        home = enter(window, stack, version)
        for name, made in PAGES.items():
            page = put(stack, f"hostile-{name}", f"{made()}\n\nThe end of the page.\n")
            window.open(f"{home}/artifacts/artifact/{page}")
            wait_for(lambda: "The end of the page." in window.text, f"page {name} of {version}")
            seen = window.run(SCRIPT_OF_A_PAGE)
            window.resize(9_000)
            window.picture(tmp_path / f"{version}-{name}.png")
            window.resize(900)
            assert (seen["links"], seen["media"], seen["tags"]) == ([], [], 0), name
            assert not HARMFUL.search(re.sub("[\t\u200b]", "", seen["words"])), name
            shown = set(seen["code"])
            for what, text in TEXTS.items():
                words = one_line(text.strip() if name == "data" else text, 300)
                assert not words.strip() or {words, words.replace("|", "│")} & shown, (name, what)
            if name == "cells":
                assert seen["cells"] == 4 * len(TEXTS)
        assert led_to(window) == []
        raw = put(
            stack, "hostile-raw", "\n\n".join(text.encode(errors="replace").decode() for text in HOSTILE.values())
        )
        window.open(f"{home}/artifacts/artifact/{raw}")
        wait_for(lambda: led_to(window), "what nobody escaped to be asked for: else nothing was tried")


@pytest.mark.stack
@pytest.mark.parametrize("version", ["v2", "v1"])
def test_the_page_of_a_run_with_a_hostile_name_log_and_state_asks_nobody(
    stack: LocalStack, tmp_path: Path, version: str
) -> None:
    texts = [text.encode(errors="replace").decode().replace("\0", "") for text in HOSTILE.values() if len(text) < 2000]
    told = "\n".join(texts)
    flow = prefect_api.call(stack.api_url, "POST", "/flows/", {"name": "hostile"})["id"]
    body = {"flow_id": flow, "name": HOSTILE["tag of an image"], "tags": [HOSTILE["image"], HOSTILE["script"]]}
    run = prefect_api.call(stack.api_url, "POST", "/flow_runs/", body)["id"]
    stamp = datetime.now(UTC).isoformat()
    lines = [
        {"name": "n", "level": 40, "message": f"line {at}: {text}", "timestamp": stamp, "flow_run_id": run}
        for at, text in enumerate(texts)
    ]
    prefect_api.call(stack.api_url, "POST", "/logs/", lines)
    state = {"state": {"type": "FAILED", "name": HOSTILE["tag of an image"], "message": told}, "force": True}
    prefect_api.call(stack.api_url, "POST", f"/flow_runs/{run}/set_state", state)
    with browser() as window:
        home = enter(window, stack, version)
        window.resize(6_000)
        window.open(f"{home}/runs/flow-run/{run}")
        wait_for(lambda: f"line 0: {HOSTILE['image']}" in window.text, f"the log of the run in {version}")
        window.picture(tmp_path / f"{version}-run.png")
        assert window.run(SCRIPT_OF_A_PAGE)["media"] == []  # of addresses in a log's lines, Prefect makes links
        assert led_to(window) == []


def on_a_terminal(*command: str, **variables: str) -> str:
    """Run a command on a terminal of its own, and return every byte that it wrote there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color", **variables}
    ):
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the last that had it open has ended
                break
            if not part:
                break
            written += part
    os.close(ours)
    return written.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


def test_a_check_of_hostile_rows_writes_words_and_colours_and_nothing_else_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "rows\x1b]52;c;eA==\x07\u202e[bold].jsonl"
    texts = [HOSTILE["clipboard"] + HOSTILE["clipboard in 8 bits"], HOSTILE["title"] + HOSTILE["turned around"]]
    rows = [{"question": f"{text}?", "answer": text} for text in (*texts, HOSTILE["other screen"])]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"question": texts, texts[0]: "a"}]))
    out = on_a_terminal(
        str(PROGRAMS / "rlhf"), "data", "check", str(path), "--preset", "llama7b", RLHF_HOME=str(tmp_path / "home")
    )
    (tmp_path / "terminal").write_text(out, errors="surrogateescape")
    assert r"\x1b]52;c;cm0gLXJmIH4=\x07\x9d52;c;cm0gLXJmIH4=\x9c?" in out, "there was something to see"
    assert "\x1b[1m" in out, "this is a terminal"
    assert not HARMFUL.search(re.sub(r"\x1b\[[\d;]*m", "", out))
