"""Fixtures that several integration tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.equality import ROWS, lines
from tests.integration.local_stack import LocalStack, run_local_stack, usual_ports_occupied


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A whole local stack for the session, brought up while the usual ports are occupied; do not take it down."""
    with usual_ports_occupied(), run_local_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("beside PPOTrainer, from one seed")
        for line in lines(ROWS):
            terminalreporter.write_line(line)
