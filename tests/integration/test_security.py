"""What another user of this machine can do with a stack and runs of it: nothing but see that they live.

Every port and every socket is listed from the kernel: one that this test does not know fails it. The stack has a
network of its own, so that nothing else listens there, with an address that is not the loopback's, and with a home that
anybody may enter. What was tried, and what came of it, is the table in docs/security.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from infra.certificate import own_certificate
from infra.clusters import ClusterRecord, leftover_processes
from infra.clusters.control_server import ControlServer
from infra.clusters.driver import credentials
from infra.services import seaweed
from infra.services.seaweed import KEYS_FILE, keys_environment
from infra.settings import CHECKOUT
from tests.integration import stranger
from tests.integration.local_stack import LocalStack, run_local_stack, wait_for
from tests.integration.machines import hold, inner, why_not
from tests.integration.stranger import NO_ANSWER, UID
from tests.integration.test_chain import small
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.integration, pytest.mark.stack]

OUTSIDE = "10.88.0.1"
"""An address of this machine that others could reach."""
DOCUMENT = CHECKOUT / "docs" / "security.md"
RUN = '''
import time

import ray
from prefect import flow

from infra.clusters import connect, lease_cluster, release_cluster
from infra.settings import settings
from rlhf_core.ray_tools.group import form_group
from rlhf_core.ray_tools.group import RankActor


@flow
def exposed():
    """Hold a cluster with a group of two trainers."""
    known = settings()
    try:
        record = lease_cluster(
            "exposed",
            directory=known.clusters_dir,
            num_cpus=2,
            object_store_mb=80,
            environment=known.child_environment(),
        )
        connect(record)
        ranks = {f"rank-{n}": RankActor.options(name=f"rank-{n}", num_cpus=1).remote(None) for n in range(2)}
        form_group(ranks, start_timeout_s=120, collective_timeout_s=120)
        (known.home / "group-stands").touch(mode=0o600)
        while True:
            ray.get([rank.ping.remote() for rank in ranks.values()], timeout=60)
            time.sleep(0.5)
    finally:
        release_cluster("exposed")
'''
DEPLOYMENT = """
deployments:
  - name: exposed
    entrypoint: exposed.py:exposed
    work_pool: {name: rlhf}
"""
EPISODES = 1000
"""More than are made."""
PPO = small(**{"ppo.reward": {"verifier": 1.0, "reward_model": 0.0}, "ppo.cluster.num_makers": 2})
SERVER, WORKER = "Prefect's server", "Prefect's worker, to its runs"
S3, VOLUME = "Store: S3", "Store: volume server"
STORE_PARTS, STORE_CALLS = "Store: master, filer and admin", "Store: calls between its parts (gRPC)"
RAY, RAY_AGENT, TRAINERS = "Ray: all calls (gRPC)", "Ray: agent", "Trainers of a run, to each other"
SOCKETS, FILES = "Unix sockets", "Files and processes"
ROWS = (SERVER, WORKER, S3, VOLUME, STORE_PARTS, STORE_CALLS, RAY, RAY_AGENT, TRAINERS, SOCKETS, FILES)
TRAINERS_PORTS = 3
"""Two trainers meet at one, and each has one for the other."""
PREFECT_SOCKETS = (
    "events/in",
    "events/out",
    "logs/out",
    "task_runs/subscriptions/scheduled",
    "work_pools/rlhf/workers/connect",
)
STORE_METHODS = {
    "master_grpc": (
        "/master_pb.Seaweed/Assign",
        "/master_pb.Seaweed/VolumeList",
        "/master_pb.Seaweed/CollectionDelete",
    ),
    "filer_grpc": ("/filer_pb.SeaweedFiler/ListEntries", "/filer_pb.SeaweedFiler/DeleteEntry"),
    "volume_grpc": ("/volume_server_pb.VolumeServer/ReadAllNeedles", "/volume_server_pb.VolumeServer/DeleteCollection"),
    "s3_grpc": (
        "/s3_lifecycle_pb.SeaweedS3LifecycleInternal/LifecycleDelete",
        "/iam_pb.SeaweedIdentityAccessManagement/ListUsers",
    ),
    "admin_grpc": ("/worker_pb.WorkerService/WorkerStream", "/plugin_pb.PluginControlService/WorkerStream"),
}
RAY_METHODS = {
    "the nodes": "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "a job": "/ray.rpc.JobInfoGcsService/AddJob",
    "an actor's end": "/ray.rpc.ActorInfoGcsService/KillActorViaGcs",
    "the control server's store": "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "a worker": "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "a task": "/ray.rpc.CoreWorkerService/PushTask",
    "an object": "/ray.rpc.ObjectManagerService/Pull",
    "Ray's own health check": "/grpc.health.v1.Health/Check",
    "`StartSync`, which without a certificate ended the control server": "/ray.rpc.syncer.RaySyncer/StartSync",
}


STORES_SOCKETS = "/tmp/seaweedfs-"
HARMLESS = {
    "master_grpc": "/master_pb.Seaweed/VolumeList",
    "filer_grpc": "/filer_pb.SeaweedFiler/ListEntries",
    "volume_grpc": "/volume_server_pb.VolumeServer/ReadAllNeedles",
    "s3_grpc": "/iam_pb.SeaweedIdentityAccessManagement/ListUsers",
    "admin_grpc": "/worker_pb.WorkerService/WorkerStream",
    RAY: RAY_METHODS["the nodes"],
}
"""What the owner himself may call, with nothing in it, and do no harm."""


class Port(NamedTuple):
    """What listens."""

    row: str
    name: str
    """Of a part of the store, a service, or the run's cluster."""
    address: str
    port: int


class Try(NamedTuple):
    """What the other user tries, and what should come of it."""

    row: str
    title: str
    """In the table; several tries may share one."""
    expected: Collection[str]
    how: str
    """A function of `stranger`."""
    arguments: tuple[Any, ...]
    is_open: bool = False
    """Whether it is answered by intent."""


class Exposed(NamedTuple):
    """A stack with two live runs."""

    stack: LocalStack
    old_password: str
    runs: tuple[str, ...]
    """One with a group of two trainers and nothing else; PPO with one trainer, two makers and a reward function."""
    clusters: tuple[ClusterRecord, ...]
    """Theirs."""

    def processes(self) -> list[psutil.Process]:
        marked = {process.pid: process for process in self.stack.processes()}
        for cluster in self.clusters:
            marked.update((each.pid, each) for each in leftover_processes(cluster.mark, cluster.head))
        return list(marked.values())


@contextmanager
def network_of_its_own() -> Iterator[None]:
    """Put this thread, and all that it starts, into a network where nothing else is."""
    commands = [
        "ip link set lo up",
        "ip link add outside type veth peer name far",
        f"ip address add {OUTSIDE}/24 dev outside",
    ]
    holder = hold(
        "--net",
        commands=[*commands, "ip link set far up", "ip link set outside up", "ip route add default dev outside"],
    )
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{inner(holder)}/ns/net", os.O_RDONLY)
    try:
        assert libc.setns(there, 0) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(here, 0) == 0, os.strerror(ctypes.get_errno())
        for descriptor in (here, there):
            os.close(descriptor)
        holder.kill()
        holder.communicate()


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exposed]:
    """A stack whose password was changed once, and runs on clusters of their own; everybody may enter its home."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if reason := why_not():
        pytest.skip(reason)
    place = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    source = tmp_path_factory.mktemp("source")
    (source / "exposed.py").write_text(RUN)
    (source / "prefect.yaml").write_text(DEPLOYMENT)
    for folder in (place, place / "home"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    try:
        with network_of_its_own(), run_local_stack(place) as stack:
            old = stack.password
            changed = stack.type("rlhf", "up", "--new-password")
            assert changed.returncode == 0, changed.stdout + changed.stderr
            stack.deploy_tiny_flows(source)
            group = stack.start_run("exposed/exposed")
            wait_for((stack.home / "group-stands").exists, "the run's group of trainers", timeout_s=180)
            model = write_tiny_llama(source / "tiny")
            ppo = stack.start_run("ppo/quickstart", model=str(model), episodes=EPISODES, overrides=PPO)
            wait_for(lambda: any("episode 1/" in line for line in stack.log(ppo)), "PPO's first episode", timeout_s=180)
            records = sorted((stack.home / "clusters").glob("*.json"))
            yield Exposed(stack, old, (group, ppo), tuple(map(ClusterRecord.load, records)))
    finally:
        shutil.rmtree(place)


def ports_of(exposed: Exposed) -> list[Port]:
    """Return everything that listens on a port, as the kernel tells it.

    Raises:
        AssertionError: if there is something that nobody knows.
    """
    known = known_ports(exposed)
    found, strange = [], []
    for socket in psutil.net_connections("inet"):
        if socket.status != psutil.CONN_LISTEN and not (socket.type == 2 and not socket.raddr):
            continue
        address, port = socket.laddr.ip.removeprefix("::ffff:"), socket.laddr.port
        row, name = known.get((socket.pid, port)) or known.get((socket.pid, 0)) or known.get((None, port)) or ("", "")
        found.append(Port(row, name, address, port))
        if not row:
            strange.append(f"{address}:{port} of {psutil.Process(socket.pid).cmdline()}")
    assert not strange, f"nobody knows these ports: {strange}; say in this test what they are, and what they answer"
    return found


def known_ports(exposed: Exposed) -> dict[tuple[int | None, int], tuple[str, str]]:
    """Return the rows of ports by process and number: 0 is each of a process's, None whichever process has it."""
    ports = exposed.stack.state.ports
    store = {"s3": S3, "volume": VOLUME}
    known: dict[tuple[int | None, int], tuple[str, str]] = {
        (exposed.stack.pids()["store"], ports[name]): (
            STORE_CALLS if name.endswith("_grpc") else store.get(name, STORE_PARTS),
            name,
        )
        for name in seaweed.PORT_NAMES
    }
    admin = ports["admin"] + seaweed.ADMIN_GRPC_OFFSET
    known[exposed.stack.pids()["store"], admin] = STORE_CALLS, "admin_grpc"
    known[None, ports["prefect"]] = SERVER, "server"  # a child of the service's process may have it
    known[exposed.stack.pids()["worker"], 0] = WORKER, "worker"
    for cluster in exposed.clusters:
        known |= rays_ports(cluster)
    return known


def rays_ports(cluster: ClusterRecord) -> dict[tuple[int | None, int], tuple[str, str]]:
    """Return the rows of a cluster's ports, as `known_ports` does: those that Ray's own record has, and trainers'."""
    row = RAY, cluster.name
    known: dict[tuple[int | None, int], tuple[str, str]] = {(None, int(cluster.address.rpartition(":")[2])): row}
    for process in leftover_processes(cluster.mark, cluster.head):
        if process.name().startswith("ray::RankActor"):
            known[process.pid, 0] = TRAINERS, cluster.name
    with credentials(cluster), closing(ControlServer(cluster.address)) as server:
        for node in server.nodes():
            known |= {(None, port): row for port in (node.node_manager_port, node.object_manager_port)}
            known[None, node.runtime_env_agent_port] = RAY_AGENT, cluster.name
        for actor in server.actors(lambda _: True):
            known[actor.pid, actor.address.port] = row
    with credentials(cluster), closing(init_grpc_channel(cluster.address)) as channel:
        asked = gcs_service_pb2_grpc.JobInfoGcsServiceStub(channel).GetAllJobInfo
        for job in asked(gcs_service_pb2.GetAllJobInfoRequest(), timeout=30).job_info_list:
            known[job.driver_pid, job.driver_address.port] = row
    return known


def unix_sockets() -> list[tuple[str, int]]:
    """Return name and kind of the Unix sockets that have a name in this network, as the kernel tells it."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return sorted({(words[7], int(words[4], 16)) for line in lines if len(words := line.split()) > 7})


def store_object(exposed: Exposed) -> str:
    """Store something, and return the id under which the volume server has its bytes."""
    url = f"http://127.0.0.1:{exposed.stack.state.ports['s3']}/rlhf/precious"
    mine = (seaweed.ACCESS_KEY, seaweed.load_secret(exposed.stack.home))
    assert stranger.s3(url, "PUT", *mine, body="precious" * 100) == "200"
    assert stranger.s3(url, "GET", *mine) == "200"
    ports = exposed.stack.state.ports
    said = subprocess.run(
        [str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "shell", *shell_arguments(ports)],
        input="fs.meta.cat /buckets/rlhf/precious\n",
        env={**os.environ, **keys_environment(exposed.stack.home)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    found = re.search(r'"fileId":\s*"(\d+,[0-9a-f]+)"', said)
    assert found, said
    return found.group(1)


def shell_arguments(ports: dict[str, int]) -> list[str]:
    return [f"-{part}=127.0.0.1:{ports[part]}.{ports[f'{part}_grpc']}" for part in ("master", "filer")]


def prefect_tries(exposed: Exposed) -> Iterator[Try]:
    port = exposed.stack.state.ports["prefect"]
    for path in ("/api/health", "/api/ready"):
        yield Try(SERVER, f"`{path}`", {"200"}, "http", (f"http://127.0.0.1:{port}{path}",), is_open=True)
    for path in ("/", "/ui-settings"):
        title = "the UI's files and settings"
        yield Try(SERVER, title, {"200", "307"}, "http", (f"http://127.0.0.1:{port}{path}",), is_open=True)
    for path in ("/docs", "/redoc", "/openapi.json"):
        yield Try(SERVER, "the API's description", {"200"}, "http", (f"http://127.0.0.1:{port}{path}",), is_open=True)
    passwords = {"no password": "", "a wrong password": "rlhf:" + "x" * 20, "the former password": exposed.old_password}
    for title, password in passwords.items():
        basic = f"Basic {b64encode(password.encode()).decode()}"
        headers = {"Content-Type": "application/json"} | ({"Authorization": basic} if password else {})
        for method, path, body in (
            ("POST", "deployments/filter", "{}"),
            ("POST", "flow_runs/filter", "{}"),
            ("GET", "admin/settings", ""),
            ("POST", "events", "[]"),
            ("POST", "work_pools/", '{"name": "mine", "type": "process"}'),
        ):
            arguments = (f"http://127.0.0.1:{port}/api/{path}", method, headers, body)
            yield Try(SERVER, f"API and web sockets with {title}", {"401"}, "http", arguments)
        for path in PREFECT_SOCKETS:
            arguments = (f"ws://127.0.0.1:{port}/api/{path}", password)
            yield Try(SERVER, f"API and web sockets with {title}", {"closed 1008"}, "listen", arguments)
    for path in PREFECT_SOCKETS:
        arguments = (f"ws://127.0.0.1:{port}/api/{path}", "", "other")
        yield Try(SERVER, "web sockets of another protocol", {NO_ANSWER, "closed 1002"}, "listen", arguments)
    asks = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    arguments = (f"http://127.0.0.1:{port}/api/deployments/filter", "OPTIONS", asks)
    yield Try(SERVER, "a foreign origin's preflight", {"400"}, "http", arguments)


def s3_tries(exposed: Exposed) -> Iterator[Try]:
    at = f"http://127.0.0.1:{exposed.stack.state.ports['s3']}"
    for path in ("/healthz", "/readyz", "/status"):
        yield Try(S3, "that it lives", {"200"}, "http", (at + path,), is_open=True)
    keys = {"no key": None, "a wrong key": ("me", "mine"), "a wrong secret": (seaweed.ACCESS_KEY, "mine")}
    for title, key in keys.items():
        for method, path in (("GET", "/"), ("GET", "/rlhf?list-type=2"), ("GET", "/rlhf/precious"), ("PUT", "/rlhf/x")):
            how, arguments = ("s3", (at + path, method, *key)) if key else ("http", (at + path, method))
            yield Try(S3, f"reads, lists and writes with {title}", {"403"}, how, arguments)
    for action in ("ListUsers", "AssumeRoleWithWebIdentity&RoleArn=r&RoleSessionName=me&WebIdentityToken=t"):
        url = f"{at}/?Action={action}&Version=2011-06-15"
        yield Try(S3, "users and roles", {"403", "405"}, "http", (url, "POST"))
    asks = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "GET"}
    yield Try(S3, "a foreign origin's preflight", {"403"}, "http", (f"{at}/rlhf/precious", "OPTIONS", asks))


def volume_tries(exposed: Exposed, file_id: str) -> Iterator[Try]:
    at = f"http://127.0.0.1:{exposed.stack.state.ports['volume']}"
    for path in ("/healthz", "/readyz", "/status", "/favicon.ico"):
        title = "that it lives; the sizes of its volumes and of the disk, and where they lie (`/status`)"
        yield Try(VOLUME, title, {"200"}, "http", (at + path,), is_open=True)
    for method in ("GET", "POST", "DELETE"):
        title = "a read, a write and a deletion by file id"
        yield Try(VOLUME, title, {"401"}, "http", (f"{at}/{file_id}", method))
    for path in ("/", "/ui/index.html", "/metrics", "/stats/counter", "/admin/assign_volume"):
        yield Try(VOLUME, "anything else", {"401"}, "http", (at + path,))


def store_part_tries(exposed: Exposed, file_id: str) -> Iterator[Try]:
    ports = exposed.stack.state.ports
    asked = {
        "master": ("/dir/assign", "/vol/grow?count=1", "/col/delete?collection=x", f"/{file_id}", "/cluster/status"),
        "filer": ("/buckets/rlhf/", "/buckets/rlhf/precious", "/healthz", "/.tus/", "/favicon.ico"),
        "admin": ("/metrics", "/health", "/"),
    }
    for part, paths in asked.items():
        for path in paths:
            title = f"{part}: `{paths[0]}` and all else"
            yield Try(STORE_PARTS, title, {"400"}, "http", (f"http://127.0.0.1:{ports[part]}{path}",))
            yield Try(STORE_PARTS, title, {NO_ANSWER}, "http", (f"https://127.0.0.1:{ports[part]}{path}",))


def store_call_tries(exposed: Exposed, folder: Path) -> Iterator[Try]:
    ports = exposed.stack.state.ports
    trusted = public_part(exposed.stack.home / KEYS_FILE)
    for part, methods in STORE_METHODS.items():
        address = f"127.0.0.1:{ports['admin'] + seaweed.ADMIN_GRPC_OFFSET if part == 'admin_grpc' else ports[part]}"
        for method in methods:
            yield from without_certificate(STORE_CALLS, "every part", address, method, trusted)
    weed = shutil.copy(Path(sys.executable).with_name("weed"), folder)
    arguments = (weed, "fs.ls /buckets/rlhf\n", {}, "-logtostderr=true", "shell", *shell_arguments(ports))
    yield Try(STORE_CALLS, "`weed shell`", {NO_ANSWER}, "shell", arguments)


def ray_tries(exposed: Exposed, ports: list[Port]) -> Iterator[Try]:
    trusted = {cluster.name: public_part(cluster.certificate) for cluster in exposed.clusters}
    for port in ports:
        if port.row == RAY:
            for title, method in RAY_METHODS.items():
                yield from without_certificate(RAY, title, f"127.0.0.1:{port.port}", method, trusted[port.name])
            for scheme in ("http", "https"):
                yield Try(
                    RAY, "HTTP, which it does not speak", {NO_ANSWER}, "http", (f"{scheme}://127.0.0.1:{port.port}/",)
                )
        elif port.row == RAY_AGENT:
            for path in ("get_or_create_runtime_env", "delete_runtime_env_if_possible", "get_runtime_envs_info", ""):
                for title, headers in (("no token", {}), ("a wrong one", {"Authorization": f"Bearer {'0' * 64}"})):
                    arguments = (f"http://127.0.0.1:{port.port}/{path}", "POST", headers)
                    yield Try(RAY_AGENT, f"anything with {title}", {"401", "403"}, "http", arguments)
        elif port.row == TRAINERS:
            title = "connections, see below"
            yield Try(TRAINERS, title, {"open"}, "reach", ("127.0.0.1", port.port), is_open=True)


def worker_tries(ports: list[Port]) -> Iterator[Try]:
    for port in ports:
        if port.row == WORKER:
            for token in ("", "0" * 32):
                yield Try(WORKER, "a line without a run's token", {"closed"}, "say", (port.port, token))


def without_certificate(row: str, title: str, address: str, method: str, trusted: str) -> Iterator[Try]:
    """A call in plain, over TLS without a certificate and with one's own, with no token and with a wrong one."""
    for token in ("", "0" * 64):
        for own in (("", ""), (trusted, ""), (trusted, own_certificate("mine"))):
            yield Try(row, title, {NO_ANSWER}, "call", (address, method, token, *own))


def public_part(pem: Path) -> str:
    """Return the certificate of a file, which a server shows to everybody, without its key."""
    return pem.read_text().partition("-----BEGIN PRIVATE KEY-----")[0]


def other_tries(exposed: Exposed, ports: list[Port]) -> Iterator[Try]:
    for port in ports:
        yield Try(port.row, "everything from another machine", {NO_ANSWER}, "reach", (OUTSIDE, port.port))
    for path, kind in sorted(unix_sockets(), key=lambda each: not each[0].startswith(STORES_SOCKETS)):
        title = "SeaweedFS's in `/tmp`" if path.startswith(STORES_SOCKETS) else "all others"
        yield Try(SOCKETS, title, {NO_ANSWER}, "unix", (path.replace("@", "\0", 1), kind))
    processes = exposed.processes()
    seen = {Path(process.cwd()) for process in processes} - {Path("/"), CHECKOUT}
    for process in processes:
        seen |= {Path(file.path) for file in process.open_files()}
        seen |= {Path(each.path) for each in process.memory_maps() if each.path.startswith("/")}
    public = [Path("/tmp"), Path("/dev/shm")]
    common = [path for path in seen if any(map(path.is_relative_to, public)) and not path.is_relative_to(CHECKOUT)]
    roots = [exposed.stack.home, exposed.stack.env_file, exposed.stack.state.socket_dir]
    roots += [cluster.temp_dir for cluster in exposed.clusters]
    title = "all files of `RLHF_HOME`, of the run, and those that their processes have open in `/tmp`"
    for root in {*roots, *common}:
        yield Try(FILES, title, {"nothing"}, "files", ([str(root)],))
    title = "environment, memory and open files of every process"
    yield Try(FILES, title, {"nothing"}, "processes", ([process.pid for process in processes],))


def owners_tries(exposed: Exposed, ports: list[Port]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The same, with what the other user does not have: each must come to something, or he was refused for nothing."""
    store, keys = exposed.stack.state.ports, exposed.stack.home / KEYS_FILE
    clusters = {cluster.name: cluster for cluster in exposed.clusters}
    for port in ports:
        at = f"127.0.0.1:{port.port}"
        if port.row == STORE_CALLS:
            yield "call", (at, HARMLESS[port.name], "", public_part(keys), keys.read_text())
        elif port.row == RAY:
            token, pem = clusters[port.name].token.read_text(), clusters[port.name].certificate
            yield "call", (at, HARMLESS[RAY], token, public_part(pem), pem.read_text())
    weed = str(Path(sys.executable).with_name("weed"))
    words = ("-logtostderr=true", "shell", *shell_arguments(store))
    yield "shell", (weed, "fs.ls /buckets/rlhf\n", keys_environment(exposed.stack.home), *words)
    for path, kind in unix_sockets():
        if path.startswith(STORES_SOCKETS):
            yield "unix", (path, kind)
    for root in (exposed.stack.home, *(cluster.temp_dir for cluster in exposed.clusters)):
        yield "files", ([str(root)],)
    for process in exposed.processes():
        yield "processes", ([process.pid],)


def came_of(tries: list[tuple[str, tuple[Any, ...]]], *who: str) -> list[str]:
    """Have another user, or the owner, try everything, and return what came of each."""
    done = subprocess.run(
        [sys.executable, "-m", stranger.__name__, *who],
        input=json.dumps(tries),
        cwd=CHECKOUT,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},  # or every refusal is told
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def table(tries: list[Try]) -> list[str]:
    """Return the lines of the table."""
    lines = ["| what listens | answers anyone | tried by another user, and refused |", "|---|---|---|"]
    for row in ROWS:
        cells = [
            "; ".join(dict.fromkeys(each.title for each in tries if each.row == row and each.is_open is is_open))
            for is_open in (True, False)
        ]
        lines.append(f"| {row} | {cells[0] or 'nothing'} | {cells[1]} |")
    return lines


def test_the_owner_gets_something_by_each_way_that_another_user_tries(exposed: Exposed) -> None:
    store_object(exposed)
    ports = ports_of(exposed)
    tries = list(owners_tries(exposed, ports))
    assert {how for how, _ in tries} == {"call", "shell", "unix", "files", "processes"}
    assert {port.name for port in ports if port.row == STORE_CALLS} == HARMLESS.keys() - {RAY}
    came = came_of(tries, "owner")
    vain = (NO_ANSWER, "nothing", "DEADLINE_EXCEEDED", "UNAUTHENTICATED")
    wrong = [(each, said) for each, said in zip(tries, came, strict=True) if said in vain or said.startswith("raised")]
    assert not wrong, wrong


def test_another_user_gets_nothing_from_any_port_socket_file_or_process(
    exposed: Exposed, capsys: pytest.CaptureFixture[str]
) -> None:
    file_id = store_object(exposed)
    ports = ports_of(exposed)
    assert {port.row for port in ports} == set(ROWS) - {SOCKETS, FILES}, "something of the stack does not listen"
    assert sum(port.row == TRAINERS for port in ports) == TRAINERS_PORTS
    folder = Path(tempfile.mkdtemp(prefix="his-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        tries = [
            *prefect_tries(exposed),
            *s3_tries(exposed),
            *volume_tries(exposed, file_id),
            *store_part_tries(exposed, file_id),
            *store_call_tries(exposed, folder),
            *worker_tries(ports),
            *ray_tries(exposed, ports),
            *other_tries(exposed, ports),
        ]
        found = came_of([(each.how, each.arguments) for each in tries])
    finally:
        shutil.rmtree(folder)
    wrong = [f"{each}: {came}" for each, came in zip(tries, found, strict=True) if came not in each.expected]
    lines = table(tries)
    with capsys.disabled():
        print(f"\nuser {UID}, {len(tries)} tries on {len(ports)} ports", *lines, sep="\n")  # noqa: T201
    assert not wrong, "\n".join(wrong)
    assert [exposed.stack.run_state(run) for run in exposed.runs] == ["RUNNING", "RUNNING"]
    assert all(cluster.is_running for cluster in exposed.clusters)
    assert "\n".join(lines) in DOCUMENT.read_text(), f"copy the table into {DOCUMENT}"
