"""A user who has a cluster and runs something on it, and a process that holds a run of ours there."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest
import ray

from infra.clusters import ClusterRecord, driver, ray_head
from infra.clusters.control_server import ControlServer
from infra.clusters.existing import WATCHERS
from infra.process_record import ProcessRecord
from tests.integration.cluster_processes import GONE_WITHIN_S, run, says

DRIVER = """
import logging, os, sys, time
import ray
from infra.clusters import lease_existing, output_of, release_cluster
from rlhf_core.ray_tools.placement import place
from infra.errors import ClusterError
address, stalled_after_s = sys.argv[1:]
before = dict(os.environ)
try:
    lease = lambda: lease_existing(
        "night", address=address, environment={"STORE_SECRET": "xyz"}, stalled_after_s=float(stalled_after_s)
    )
    assert lease() == lease()
except ClusterError as error:
    print(error, flush=True)
    sys.exit(1)
assert dict(os.environ) == before

output = output_of(lease())

@ray.remote
class Guest:
    def facts(self):
        logging.getLogger("rlhf_core").info("facts are told")
        return os.getpid(), os.environ.get("STORE_SECRET"), os.environ.get("OWN")

own = {"runtime_env": {"env_vars": {"OWN": "own"}}}
placed = place({"trainer": {"num_cpus": 1, **own}}, group="ppo", timeout_s=30)
trainer = Guest.options(name="trainer", lifetime="detached", **placed["trainer"]).remote()
nameless = Guest.options(num_cpus=0).remote()
facts = ray.get([trainer.facts.remote(), nameless.facts.remote()], timeout=60)
assert [fact[1:] for fact in facts] == [("xyz", "own"), ("xyz", None)], facts
heard, deadline = [], time.monotonic() + 60
while sum("facts are told" in line for each in heard for line in each.lines) < 2:
    assert time.monotonic() < deadline, heard
    heard += output.read()
    time.sleep(0.1)
assert {each.process.split()[0] for each in heard} == {str(fact[0]) for fact in facts}, heard
assert any(" INFO trainer rlhf_core: facts are told" in line for each in heard for line in each.lines), heard
print(*(fact[0] for fact in facts), flush=True)
then = input()
if then == "raise":
    raise RuntimeError("as it may happen")
if then == "release":
    release_cluster("night")
    assert not ray.is_initialized()
    print("released", flush=True)
    input()
if then == "again":
    lease()
    print(ray.get(Guest.options(num_cpus=0).remote().facts.remote(), timeout=60)[0], flush=True)
    input()
"""


@ray.remote(num_cpus=1)
class Bystander:
    def pid(self) -> int:
        sys.stderr.write("what others say\n")
        return os.getpid()


class User(NamedTuple):
    """Whose cluster it is, and what he has on it."""

    cluster: ClusterRecord
    server: ControlServer
    pid: int

    def there(self) -> dict[str, list[str]]:
        """The actors by namespace."""
        found: dict[str, list[str]] = {}
        for actor in self.server.actors(lambda _: True):
            found.setdefault(actor.ray_namespace, []).append(actor.name)
        return found

    def watcher_pid(self) -> int:
        (watcher,) = self.server.actors(lambda actor: actor.ray_namespace == WATCHERS)
        return int(watcher.pid)

    def groups(self) -> list[str]:
        """The placement groups that are not removed."""
        return [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]

    def has_all_his_own(self) -> bool:
        bystander = ray.get_actor("trainer")
        return bool(
            self.cluster.is_running
            and ray.get(bystander.pid.remote(), timeout=30) == self.pid
            and self.groups().count("ppo") >= 1
        )

    def is_alone(self) -> bool:
        return self.there() == {"rlhf": ["trainer"]} and self.groups() == ["ppo"] and self.has_all_his_own()


@contextmanager
def as_users_start_them() -> Iterator[None]:
    """Have clusters that are leased in this block be as one that a user starts.

    It is on the host's address, with a token, and publishes what actors write.
    """
    ours = ray_head._command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_head, "ON_LOOPBACK", {})
        patch.setattr(driver, "_at_its_address", lambda _: nullcontext())
        patch.setattr(ray_head, "_command", lambda *all_of_it: [*ours(*all_of_it), "--include-log-monitor=true"])
        both = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
        secrets = property(lambda record: dict(zip(both, ("token", str(record.token)), strict=True)))
        patch.setattr(ClusterRecord, "secrets", secrets)
        yield


class Driver:
    """A process that holds run `night` on the user's cluster."""

    def __init__(self, user: User, stalled_after_s: float, host: str | None) -> None:
        own, _, port = user.cluster.address.rpartition(":")
        self.process = run(DRIVER, f"{host or own}:{port}", str(stalled_after_s))
        self.said = says(self.process)
        self.actors: list[ProcessRecord] = []

    def holds(self) -> "Driver":
        assert self.said.replace(" ", "").isdigit(), self.said
        self.actors = [ProcessRecord.of(int(pid)) for pid in self.said.split()]
        return self

    def do(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return says(self.process)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, f"{holds} did not come true within {GONE_WITHIN_S:g} s"
        time.sleep(0.1)


def are_gone(driver: Driver) -> Callable[[], bool]:
    return lambda: not any(actor.process() for actor in driver.actors)
