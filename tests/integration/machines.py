"""Several machines on one: each has its own network, processes, host name, shared memory and temporary folder.

They are namespaces without names, held by one process each that ends with this one, so that nothing of them can be left
behind: the kernel ends all processes of a machine with its first one, and its network with its last. A switch, one more
network of its own, joins them; none of them reaches anything else.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from infra.clusters import leftover_processes
from infra.clusters.ray_head import SILENT_NODE
from infra.clusters.record import MARK_VARIABLE

ROOT = Path(__file__).parents[2]
PORT = 6379
ENDED_WITHIN_S = 20.0

# The first process of a machine: says that it is there, buries what ended, and ends with whoever holds its pipe.
HOLDER = """
import signal, subprocess, sys
for command in sys.argv[1:]:
    subprocess.run(command.split(), check=True, stdin=subprocess.DEVNULL)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


class Node(NamedTuple):
    """What a machine gives to the cluster."""

    num_cpus: int
    num_gpus: int = 0
    """Logical ones; an actor that asks for none avoids a machine that has some."""


class Machine:
    """One machine, and everything that runs on it."""

    def __init__(self, name: str, address: str, hardware: str, folder: Path) -> None:
        self.name, self.address, self.hardware, self.folder = name, address, hardware, folder
        self.mark = f"machine-{secrets.token_hex(8)}"
        folder.mkdir(parents=True)
        own = ["mount -t tmpfs -o size=512m tmpfs /dev/shm", f"hostname {name}", "ip link set lo up"]
        self._holder = hold("--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc", commands=own)
        self.pid = inner(self._holder)

    def run(self, *command: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on this machine; what it prints can be read, and it can be written to."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", *command]
        return subprocess.Popen(
            inside,
            cwd=ROOT,
            env={**environment, "TMPDIR": str(self.folder), MARK_VARIABLE: self.mark, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "errors.log").open("ab"),
            text=True,
            start_new_session=True,
        )

    def kill_all(self) -> None:
        """End all of its processes with SIGKILL; it stays on the network and refuses what comes."""
        self.run("sh", "-c", "kill -KILL -1", environment=os.environ).communicate()
        self.wait_until_gone()

    def end(self) -> None:
        """End it and all that runs on it."""
        self._holder.kill()  # and the kernel its child, the machine's first process, and with that all others
        self._holder.communicate()
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        """Fail unless nothing runs on this machine any more."""
        deadline = time.monotonic() + ENDED_WITHIN_S
        while left := leftover_processes(self.mark):
            assert time.monotonic() < deadline, f"{self.name} was killed {ENDED_WITHIN_S:g} s ago, and {left} run"
            time.sleep(0.1)


class Machines:
    """Machines joined by a switch, on which a Ray cluster runs: the first of them is its head.

    Args:
        nodes: what each gives to the cluster, by name.
        folder: in which each has its temporary folder; short, for Ray's sockets.
    """

    def __init__(self, nodes: Mapping[str, Node], folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.token = folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self.all: dict[str, Machine] = {}
        self._switch = hold("--net", commands=["ip link add bridge type bridge", "ip link set bridge up"])

    @property
    def head(self) -> Machine:
        return next(iter(self.all.values()))

    @property
    def cluster_address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def start(self) -> None:
        """Start the machines and the cluster."""
        for number, name in enumerate(self.nodes, start=1):
            address, hardware = f"10.77.0.{number}", f"02:00:00:00:00:{number:02x}"
            self.all[name] = machine = Machine(name, address, hardware, self.folder / name)
            self._plug_in(machine)
        self._introduce()
        for name, machine in self.all.items():
            self._start_ray(machine, self.nodes[name])

    def environment(self) -> dict[str, str]:
        """Return what a process of the cluster finds set."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {
            **inherited,
            **SILENT_NODE,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_worker_niceness": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # each would take the memory of all of this kernel for its own
            "OMP_NUM_THREADS": "1",
            "SPT_NOENV": "1",
        }

    def cut_off(self, name: str) -> None:
        """Pull a machine's cable at the switch: it goes on, its link stays up, and nothing comes or goes any more."""
        self._at_switch(f"link set dev port-{name} nomaster")

    def join(self, name: str) -> None:
        """Plug a machine's cable in again."""
        self._at_switch(f"link set dev port-{name} master bridge")

    def errors(self) -> str:
        """Return what was written to the standard error of what was run."""
        return "\n".join((machine.folder / "errors.log").read_text() for machine in self.all.values())

    def kill(self, name: str) -> None:
        """End all processes of a machine, as when it is out of memory or started anew."""
        self.all[name].kill_all()

    def end(self) -> None:
        """End everything, and fail unless it is gone."""
        try:
            for machine in self.all.values():
                machine.end()
        finally:
            self._switch.kill()
            self._switch.communicate()

    def _plug_in(self, machine: Machine) -> None:
        port = f"port-{machine.name}"
        cable = f"name lan address {machine.hardware} netns {machine.pid}"
        self._at_switch(f"link add dev {port} type veth peer {cable}", f"link set dev {port} master bridge up")
        _ip(machine.pid, f"address add {machine.address}/24 dev lan", "link set dev lan up")

    def _introduce(self) -> None:
        """Tell each machine the others' hardware addresses: one that is cut off is then silent, not `unreachable`."""
        for machine in self.all.values():
            others = [other for other in self.all.values() if other is not machine]
            _ip(
                machine.pid,
                *(
                    f"neighbour replace {other.address} lladdr {other.hardware} nud permanent dev lan"
                    for other in others
                ),
            )

    def _at_switch(self, *commands: str) -> None:
        _ip(inner(self._switch), *commands)

    def _start_ray(self, machine: Machine, node: Node) -> None:
        command = [sys.executable, "-P", "-m", "infra.clusters.ray_start", "start", "--log-style=record"]
        command += [f"--node-ip-address={machine.address}", f"--temp-dir={machine.folder}/r", "--disable-usage-stats"]
        command += [f"--num-cpus={node.num_cpus}", f"--num-gpus={node.num_gpus}", f"--object-store-memory={128 << 20}"]
        command += ["--include-log-monitor=false"]
        if machine is self.head:
            command += ["--head", f"--port={PORT}", "--no-monitor", "--include-dashboard=false"]
        else:
            command += [f"--address={self.cluster_address}"]
        starter = machine.run(*command, environment=self.environment())
        said, _ = starter.communicate(timeout=120)
        assert starter.returncode == 0, f"Ray did not start on {machine.name}: {said}"


@contextmanager
def machines(nodes: Mapping[str, Node]) -> Iterator[Machines]:
    """Several machines and the cluster on them; skips the test where this user may not make any."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="rm-", dir="/tmp"))  # not in shared memory, of which each has its own
    made = Machines(nodes, folder)
    try:
        made.start()
        yield made
    finally:
        made.end()
        shutil.rmtree(folder)


def why_not() -> str:
    """Return why machines cannot be made here; nothing if they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"machines of their own need {', '.join(missing)}, which this one lacks"
    trial = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    said = subprocess.run(
        [*trial, "sh", "-c", "ip link add one type veth peer name other && ip link add between type bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"this user may not make networks and processes of their own: {said.stderr.strip()}" if said.returncode else ""
    )


def hold(*namespaces: str, commands: list[str]) -> subprocess.Popen[str]:
    """Start a process that holds new namespaces until this process ends, however it ends."""
    fork = ["--fork", "--kill-child"]
    holder = subprocess.Popen(
        ["unshare", *namespaces, *fork, sys.executable, "-I", "-c", HOLDER, *commands],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    return holder


def inner(holder: subprocess.Popen[str]) -> int:
    (inner,) = psutil.Process(holder.pid).children()
    return inner.pid


def _ip(pid: int, *commands: str) -> None:
    """Have `ip` carry out commands in the network of a process."""
    subprocess.run(
        ["nsenter", f"--target={pid}", "--net", "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        text=True,
        check=True,
    )
