"""Prefect's own order of events, for a server that has all of ours but that."""

from __future__ import annotations

from prefect.server.events.ordering.memory import CausalOrdering

from infra.sqlite_server import collect_in_a_thread, count_requests_alone

__all__ = ["CausalOrdering"]

collect_in_a_thread()
count_requests_alone()
