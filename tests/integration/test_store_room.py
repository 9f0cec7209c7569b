"""The local store gives back the room of what was deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.services import seaweed
from tests.integration import stranger
from tests.integration.local_stack import wait_for
from tests.integration.test_store_keys import home, of_this_release, running

__all__ = ["home"]

pytestmark = [pytest.mark.integration, pytest.mark.stack]

BYTES = 4_000_000
"""Of an object that compression, which the store may do, leaves as large."""
LONGEST_S = 180.0


def test_room_is_given_back_within_minutes_and_more_than_once(home: Path) -> None:
    def held() -> int:
        return sum(file.stat().st_size for file in (home / "store").glob("*.dat"))

    with running(home, of_this_release) as address:
        key = (seaweed.ACCESS_KEY, seaweed.load_secret(home))
        for name in ("first", "second"):  # it looks once when it has started, whatever it is told
            path = f"{address}/{seaweed.BUCKET}/{name}"
            assert stranger.s3(path, "PUT", *key, body=os.urandom(BYTES).hex()) == "200"
            assert held() > BYTES
            assert stranger.s3(path, "DELETE", *key) == "204"
            wait_for(lambda: held() < BYTES, f"the room of the {name} object", timeout_s=LONGEST_S)
