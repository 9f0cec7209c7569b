"""A browser without a window, driven over Chromium's own protocol, for what only a browser shows.

What it asks of any other machine than this one goes to a proxy that notes it and answers nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import ClientConnection, connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--window-size=1300,900",
    "--remote-debugging-port=0",
)
_DEADLINE_S = 120


class Browser:
    """One window of it.

    Args:
        socket: to the window.
        foreign: the first line of each request to another machine.
    """

    def __init__(self, socket: ClientConnection, foreign: list[str]) -> None:
        self.foreign = foreign
        self._socket, self._calls, self._has_loaded = socket, 0, False
        self._call("Page.enable")

    def open(self, url: str) -> None:
        """Go to a page, and wait until it has loaded."""
        self._has_loaded = False
        self._call("Page.navigate", url=url)
        deadline = time.monotonic() + _DEADLINE_S
        while not self._has_loaded:
            self._hear(deadline)

    @property
    def text(self) -> str:
        """What a person reads on the page."""
        return str(self.run("return document.body.innerText"))

    def run(self, script: str) -> Any:
        """Run a script in the page and return what it returns."""
        told = self._call("Runtime.evaluate", expression=f"(() => {{{script}}})()", returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def type(self, selector: str, text: str) -> bool:
        """Type into the first field that a selector finds; return whether there is one."""
        if not self.run(
            f"const field = document.querySelector({json.dumps(selector)}); field?.focus(); return Boolean(field)"
        ):
            return False
        self._call("Input.insertText", text=text.removesuffix("\n"))
        if text.endswith("\n"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
            self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
            self._call("Input.dispatchKeyEvent", type="keyUp", **key)
        return True

    def click(self, element: str) -> bool:
        """Click on what a script returns, as a mouse does; return whether it is there."""
        script = """
            const found = (() => {%s})();
            found?.scrollIntoView({block: "center"});
            const box = found?.getBoundingClientRect();
            return box && {x: box.x + box.width / 2, y: box.y + box.height / 2};
        """
        if (place := self.run(script % element)) is None:
            return False
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
        return True

    def resize(self, height: int) -> None:
        """Make the window so high, as pages scroll within themselves."""
        self._call("Emulation.setDeviceMetricsOverride", width=1300, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        """Keep what the window shows."""
        path.write_bytes(b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        deadline = time.monotonic() + _DEADLINE_S
        while (heard := self._hear(deadline)).get("id") != self._calls:
            pass
        assert "error" not in heard, heard["error"]
        return dict(heard["result"])

    def _hear(self, deadline: float) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(self._socket.recv(timeout=deadline - time.monotonic()))
        self._has_loaded |= heard.get("method") == "Page.loadEventFired"
        return heard


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it; where there is none, skip the test."""
    if PROGRAM is None:
        pytest.skip("there is no Chromium here")
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile, _proxy() as (proxy, foreign):
        program = subprocess.Popen(
            [PROGRAM, *_ARGUMENTS, f"--user-data-dir={profile}", f"--proxy-server=127.0.0.1:{proxy}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_window(Path(profile)), max_size=None, open_timeout=30) as socket:
                yield Browser(socket, foreign)
        finally:
            program.terminate()
            program.wait(timeout=30)


@contextmanager
def _proxy() -> Iterator[tuple[int, list[str]]]:
    """Yield the port of a proxy, and what it was asked for."""
    asked: list[str] = []

    class Noting(StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode("latin-1").strip())
            self.wfile.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Noting) as server:
        server.daemon_threads = True
        serving = Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()
            serving.join(timeout=30)


def _window(profile: Path) -> str:
    """Return the address of the first window, once there is one."""
    told, deadline = profile / "DevToolsActivePort", time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "Chromium did not show a window within 60 s"
        if told.exists() and (lines := told.read_text().splitlines()):
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=30) as answer:
                for each in json.loads(answer.read()):
                    if each["type"] == "page":
                        return str(each["webSocketDebuggerUrl"])
        time.sleep(0.1)
