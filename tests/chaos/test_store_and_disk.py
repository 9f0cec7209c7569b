"""The object store away for half a minute, and the disk full, in the midst of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.chaos.plan import Aim
from tests.chaos.runs import Campaign, campaign
from tests.integration.seaweed import Seaweed, seaweed_server

__all__ = ["seaweed_server"]

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(1800)]

AWAY_S = 30.0
DISK_MB = 256
DEED_TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def on_seaweed(
    lockstep: Campaign, forked: dict[str, str], seaweed: Seaweed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Campaign]:
    directory = tmp_path_factory.mktemp("seaweed")
    environment = {
        **forked,
        "RLHF_STORE_URL": f"s3://{seaweed.bucket}/chaos",
        "RLHF_S3_ENDPOINT_URL": seaweed.endpoint_url,
        "RLHF_S3_ACCESS_KEY": seaweed.access_key,
        "RLHF_S3_SECRET_KEY": seaweed.secret_key,
        "RLHF_S3_REGION": "us-east-1",
    }
    lockstep.driver.end()
    with campaign(lockstep.config, directory, environment=environment, known=lockstep) as made:
        yield made


@pytest.mark.parametrize(
    ("phase", "occurrence", "number"),
    [
        ("lease", 1, signal.SIGKILL),
        ("upload", 2, signal.SIGKILL),
        ("manifest", 1, signal.SIGKILL),
        ("upload", 1, signal.SIGSTOP),
    ],
)
def test_a_store_that_is_away_for_half_a_minute_delays_a_run(
    on_seaweed: Campaign, seaweed: Seaweed, phase: str, occurrence: int, number: signal.Signals
) -> None:
    aim = Aim("store", phase, occurrence)  # type: ignore[arg-type]
    assert seaweed.process is not None
    started = time.time()
    on_seaweed.driver.order("play", on_seaweed.due, aim, {"targets": (seaweed.process.pid,), "signal": int(number)})
    _await_deed(on_seaweed, started)
    if number is signal.SIGKILL:
        seaweed.process.wait(DEED_TIMEOUT_S)
        seaweed.process = None
    time.sleep(AWAY_S)
    if number is signal.SIGKILL:
        seaweed.start()
    else:
        seaweed.signal(signal.SIGCONT)
    played = on_seaweed.driver.answer()
    assert played is not None
    row = on_seaweed.judge(aim, played, started)
    assert played.failures == ()
    assert row.seconds > AWAY_S  # until the episode's state was stored


@pytest.fixture(scope="module")
def on_a_small_disk(
    lockstep: Campaign, forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Campaign]:
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    directory = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", directory], check=True)
    try:
        lockstep.driver.end()
        with campaign(lockstep.config, directory, environment=forked, known=lockstep) as made:
            yield made
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)  # this process holds locks of the cache there


@pytest.mark.parametrize("phase", ["upload", "manifest", "snapshot", "lease"])
def test_a_full_disk_stops_a_run_with_one_sentence_and_room_lets_it_go_on(
    on_a_small_disk: Campaign, phase: str
) -> None:
    small, aim = on_a_small_disk, Aim("disk", phase)  # type: ignore[arg-type]
    ballast = small.directory / "ballast"
    started = time.time()
    small.driver.order("play", small.due, aim, {"fill": str(ballast)})
    played = small.driver.answer()
    assert played is not None
    assert not played.is_done
    (sentence,) = played.failures
    assert "No space left on device" in sentence
    assert "\n" not in sentence
    ballast.unlink()
    small.judge(aim, small.play(small.due), started)


def _await_deed(campaign: Campaign, started: float) -> None:
    deadline = time.monotonic() + DEED_TIMEOUT_S
    while not any("deed" in event for event in campaign.folder.events(started)):
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.05)
