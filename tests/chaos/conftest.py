"""The run that most tests play, and the table of kills at the end of a session that made some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.runs import Campaign, campaign, tiny_config
from tests.chaos.table import ROWS, lines


@pytest.fixture(scope="package")
def lockstep(forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """A run of one trainer and two makers in lockstep, played once undisturbed; tests go on with it or begin again."""
    directory = tmp_path_factory.mktemp("lockstep")
    with campaign(tiny_config(directory), directory, environment=forked) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section(f"{len(ROWS)} kills")
        for line in lines(ROWS):
            terminalreporter.write_line(line)
