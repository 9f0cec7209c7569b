"""Room that was asked for and not had is given back, whatever ended the wait for it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from rlhf_core.errors import NoRoomError
from rlhf_core.ray_tools import placement


@pytest.mark.parametrize(("ends", "told"), [(KeyboardInterrupt(), KeyboardInterrupt), (False, NoRoomError)])
def test_room_that_is_not_had_is_given_back(
    monkeypatch: pytest.MonkeyPatch, ends: BaseException | bool, told: type[BaseException]
) -> None:
    def wait(_: float) -> bool:
        if isinstance(ends, BaseException):
            raise ends
        return ends

    reserved, removed = SimpleNamespace(wait=wait), []
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: reserved)
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    monkeypatch.setattr(placement, "_free", lambda: "nothing")
    with pytest.raises(told):
        placement.place({"trainer": {"num_cpus": 1}}, group="ppo", timeout_s=0.05)
    assert removed == [reserved]


def test_room_that_becomes_free_within_the_time_is_had(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, False, True])
    reserved = SimpleNamespace(wait=lambda _: next(looks))
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: reserved)
    assert placement.reserve([{"CPU": 1}], strategy="PACK", timeout_s=60) is reserved


def test_rays_warning_of_what_is_meant_is_not_passed_on_and_others_are(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ray.actor")
    logger.addFilter(placement._is_news)
    try:
        logger.warning("Scheduling a restartable detached actor with a placement group is not recommended because")
        logger.warning("something else")
    finally:
        logger.removeFilter(placement._is_news)
    assert caplog.messages == ["something else"]
