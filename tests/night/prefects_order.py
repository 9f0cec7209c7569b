"""Prefect's own order of events, for a server that has all of ours but that."""

from __future__ import annotations

from prefect.server.events.ordering.memory import CausalOrdering

from infra.server_database import (
    ask_later_while_it_is_away,
    collect_in_a_thread,
    count_requests_alone,
    write_in_turn,
)

__all__ = ["CausalOrdering"]

collect_in_a_thread()
count_requests_alone()
write_in_turn()
ask_later_while_it_is_away()
