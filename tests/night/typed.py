"""The `rlhf` command with shorter times: what a year in small does not wait for; a control leaves one out."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from infra.services import automations, bring_up
from infra.services.service import Service
from infra.settings import CHECKOUT

LOST_AFTER_S = 75.0
"""A flow's heart beats every 30 s, here as ever; a busy machine delays one."""
QUIET_S = 10.0
"""Prefect takes no less."""
WITHOUT_ORDER = "NIGHT_WITHOUT_ORDER"
"""Variable: the server is to put events in order as Prefect's own does, and nothing is caught up with."""
_ORDER = "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING"


def shorten() -> None:
    """Have every later call without times mean the short ones."""
    (automations.wanted.__kwdefaults__ or {}).update(lost_after_s=LOST_AFTER_S, quiet_s=QUIET_S)


def leave_order_out() -> None:
    """Start the server with Prefect's own order of events."""
    known = bring_up.prefect_server

    def with_prefects_own(*args: object) -> Service:
        service: Service = known(*args)  # type: ignore[arg-type]
        assert _ORDER in service.environment, f"the server is not told {_ORDER} any longer: nothing is left out"
        others = {_ORDER: "tests.night.prefects_order", "PYTHONPATH": str(CHECKOUT)}
        return replace(service, environment={**service.environment, **others})

    bring_up.prefect_server = with_prefects_own
    automations.catch_up = lambda *_, **__: []


if __name__ == "__main__":
    shorten()
    if os.environ.get(WITHOUT_ORDER):
        leave_order_out()
    sys.path.insert(0, os.getcwd())
    from flows.cli import main

    sys.exit(main(sys.argv[1:]))
