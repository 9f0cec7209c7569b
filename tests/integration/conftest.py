"""Fixtures that several integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.behind_proxies import proxy_of_store
from tests.integration.equality import ROWS, lines
from tests.integration.flaky_proxy import FlakyProxy, flaky_proxy
from tests.integration.local_stack import TINY_FLOWS, LocalStack, run_beside_usual_ports


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A whole local stack for the session, brought up while the usual ports are occupied; do not take it down."""
    with run_beside_usual_ports(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="session")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack whose services may be stopped and killed, and whose password may change; each test leaves it up.

    Nobody takes the port of a server that was killed, as it is none of the usual ones.
    """
    with run_beside_usual_ports(tmp_path_factory.mktemp("own")) as running:
        running.deploy_tiny_flows()
        running.deploy_tiny_flows(TINY_FLOWS, "resuming.yaml")
        yield running


@pytest.fixture(scope="module")
def forked_flows(stack: LocalStack, warm: Path) -> Iterator[None]:
    """Have the stack's flows and their actors run in forked processes; elsewhere they start as in production."""
    with stack.forked_flows(warm):
        yield


@pytest.fixture
def store_proxy(stack: LocalStack) -> Iterator[FlakyProxy]:
    """What stands before the stack's S3 server."""
    with proxy_of_store(stack) as proxy:
        yield proxy


@pytest.fixture
def server_proxy(stack: LocalStack) -> Iterator[FlakyProxy]:
    """What stands before the stack's Prefect server."""
    with flaky_proxy(stack.api_url) as proxy:
        yield proxy


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("beside PPOTrainer, from one seed")
        for line in lines(ROWS):
            terminalreporter.write_line(line)
