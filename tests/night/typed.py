"""The `rlhf` command with shorter times: what a year in small does not wait for."""

from __future__ import annotations

import os
import sys

from infra.services import automations

LOST_AFTER_S = 60.0
"""Twice the beat of a flow's heart, which is the product's."""
QUIET_S = 10.0
"""Prefect takes no less."""


def shorten() -> None:
    """Have every later call without times mean the short ones, or none at all where a control wants so."""
    known = automations.wanted
    known.__kwdefaults__.update(lost_after_s=LOST_AFTER_S, quiet_s=QUIET_S)


if __name__ == "__main__":
    shorten()
    sys.path.insert(0, os.getcwd())
    from flows.cli import main

    sys.exit(main(sys.argv[1:]))
