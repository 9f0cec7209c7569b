"""A browser without a window, driven as the W3C's WebDriver has it, for what only a browser shows."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

DRIVER = shutil.which("chromedriver")
_ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,900"]


class Browser:
    """One window of it."""

    def __init__(self, driver: str) -> None:
        self._driver, self._session = driver, ""
        options = {"args": _ARGUMENTS}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self._session = f"/session/{self._call('POST', '/session', wanted)['sessionId']}"

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    @property
    def text(self) -> str:
        """What a person reads on the page."""
        return str(self.run("return document.body.innerText"))

    def run(self, script: str) -> Any:
        """Run a script in the page and return what it returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def type(self, selector: str, text: str) -> bool:
        """Type into the first field that a selector finds; return whether there is one."""
        try:
            found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        except HTTPError:
            return False
        self._call("POST", f"/element/{next(iter(found.values()))}/value", {"text": text})
        return True

    def picture(self, path: Path) -> None:
        """Keep what the window shows."""
        path.write_bytes(b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        self._call("DELETE", "")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = Request(f"{self._driver}{self._session}{path}", data=data, method=method)
        with urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it; where there is none, skip the test."""
    if DRIVER is None:
        pytest.skip("there is no chromedriver here")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(lambda: _answers(f"http://127.0.0.1:{port}/status"))
        window = Browser(f"http://127.0.0.1:{port}")
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait(timeout=20)


def _answers(url: str) -> bool:
    with suppress(OSError), urlopen(url, timeout=5):
        return True
    return False


def _await(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not look():
        assert time.monotonic() < deadline, "chromedriver did not answer within 30 s"
        time.sleep(0.1)
