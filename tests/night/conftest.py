"""The table of a year, at the end of a session that had one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.night.table import LINES

collect_ignore = ["prefects_order.py", "stub.py", "without.py"]
"""What other processes import: it changes the process that imports it, and so would all other tests."""


_OUTPUT = "night"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_OUTPUT] = LINES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LINES.extend(getattr(node, "workeroutput", {}).get(_OUTPUT, []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("a year in small")
        for line in LINES:
            terminalreporter.write_line(line)
