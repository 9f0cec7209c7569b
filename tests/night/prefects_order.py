"""Prefect's own order of events, for a server that has all of ours but that."""

from __future__ import annotations

from prefect.server.events.ordering.memory import CausalOrdering

from infra.garbage import collect_in_a_thread

__all__ = ["CausalOrdering"]

collect_in_a_thread()
