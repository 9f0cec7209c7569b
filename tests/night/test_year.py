"""Three hundred nights, struck often: each is completed, or skipped or failed with a sentence, and none twice."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.local_stack import wait_for
from tests.night.books import Books
from tests.night.mishaps import MAY_FAIL, Mishap, flow_mishaps, service_mishaps
from tests.night.sites import Site
from tests.night.stages import STAGES
from tests.night.table import kills_table, sentences, show, table
from tests.night.year import HELD_TIMEOUT_S, Deed, Year, drawn, failed_for_nothing, kills, restarted_for_nothing, year

pytestmark = [pytest.mark.night, pytest.mark.timeout(3600)]

BAD_DAYS = 5
SITES, PERIOD_S = 12, 58.0
NIGHTS = int(os.environ.get("NIGHTS", "300"))
"""At least so many are due; fewer for a short look, which still meets every mishap."""
KILLS = 10
SEED = 16
LEAST_AHEAD_S = 2.0


class Played(NamedTuple):
    """A year that is over."""

    books: Books
    deeds: list[Deed]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The year that all tests look at."""
    chance = drawn(SEED)
    services, flows = service_mishaps(chance), flow_mishaps(chance)
    names = [f"site-{number:02d}" for number in range(1, SITES + 1)]
    with year(tmp_path_factory.mktemp("year"), names, period_s=PERIOD_S, starts={}, bad_days=BAD_DAYS) as made:
        books = play(made, services, flows, nights=NIGHTS)
        keep(made, books)
    return Played(books, made.deeds)


def test_no_night_of_a_year_is_lost_or_doubled(played: Played) -> None:
    assert len(played.books.nights) >= NIGHTS
    assert played.books.faults == []


def test_each_mishap_after_which_a_night_may_fail_has_made_one_fail(played: Played) -> None:
    says = [night.says for night in played.books.nights]
    assert {cause for told, cause in MAY_FAIL.items() for each in says if each.startswith(told)} == {*MAY_FAIL.values()}


def test_the_flow_and_every_service_were_killed_often_and_in_every_stage(played: Played) -> None:
    for victim, counts in kills(played.deeds).items():
        assert counts.total() >= KILLS, f"{victim} was killed {counts.total()} times"
        assert set(counts) >= set(STAGES), f"{victim} was killed in {', '.join(counts)} alone"


def play(made: Year, services: list[Mishap], flows: list[Mishap], *, nights: int) -> Books:
    """Let nights pass while mishaps come, until there were enough of both; return the books."""
    troubles: list[BaseException] = []
    over = threading.Event()
    began = max(site.first_s for site in made.sites)

    def strike(mishaps: Iterator[Mishap], sites: list[Site], *, alone: bool) -> None:
        try:
            made.await_the_first_nights()
            first = 0 if alone else len(flows) // 2  # a flow's mishap takes long where services are down every minute
            wait_for(lambda: over.is_set() or len(made.deeds) >= first, "flows' mishaps", timeout_s=HELD_TIMEOUT_S)
            for mishap in mishaps:
                if over.is_set():
                    return
                site = made.next_site(sites, least_s=LEAST_AHEAD_S)
                with made.deed(
                    mishap.kind,
                    mishap.stage,
                    site if alone else None,
                    killed=mishap.killed,
                    spares_flows=mishap.spares_flows,
                ):
                    mishap.strike(made, site, mishap.stage)
        except BaseException as error:
            troubles.append(error)
            over.set()

    # whoever is free takes the next mishap; flows are struck at every second site, services at the others
    flows_to_come, services_to_come = iter(flows), iter(services)
    struck = [(flows_to_come, [site], True) for site in made.sites[::2]]
    struck += [(services_to_come, made.sites[first::4], False) for first in (1, 3)]
    threads = [
        threading.Thread(target=strike, args=(mishaps, sites), kwargs={"alone": alone}, daemon=True)
        for mishaps, sites, alone in struck
    ]
    for thread in threads:
        thread.start()

    def is_over() -> bool:
        passed = (time.time() - began) // made.sites[0].period_s * len(made.sites)
        return over.is_set() or (passed >= nights and not any(thread.is_alive() for thread in threads))

    made.keep_the_days(is_over)
    for thread in threads:
        thread.join(HELD_TIMEOUT_S)  # a strike under way ends: it starts again what it has killed or stopped
    if troubles:
        raise troubles[0]
    made.end()
    made.settle()
    books = made.books(may_fail=MAY_FAIL)
    books.faults += restarted_for_nothing(made.deeds, books) + failed_for_nothing(made.deeds, books, MAY_FAIL)
    return books


def keep(made: Year, books: Books) -> None:
    """Print the tables, and put all nights and deeds where a person can look for what went wrong."""
    show(table(made.deeds, books))
    show(kills_table(made.deeds))
    show([*sentences(books), f"champions moved {books.promotions} times", *books.faults])
    if told := os.environ.get("NIGHT_BOOKS"):
        Path(told).write_text("\n".join(json.dumps(vars(each)) for each in (*books.nights, *made.deeds)))
