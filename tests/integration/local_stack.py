"""A stack of the tests' own: in a temporary home, on free ports, gone when the tests are."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from infra import prefect_access
from infra.artifacts import ArtifactStore, S3Options, open_store
from infra.clusters import ClusterRecord
from infra.errors import ServiceError
from infra.forked_processes import forking_python
from infra.process_record import marked_processes
from infra.services import prefect_api, processes
from infra.services.state import StackState
from infra.services.worker import WORK_POOL
from infra.settings import CHECKOUT, inherited_environment, read_env_file
from tests.warm import with_forked_actors

T = TypeVar("T")
S = TypeVar("S", bound="LocalStack")
PROGRAMS = Path(sys.executable).parent
TINY_FLOWS = Path(__file__).parent / "tiny_flows"
HOLDING = '''
import time

import ray
from prefect import flow

from infra.clusters import connect, lease_cluster, release_cluster
from infra.settings import settings
from rlhf_core.ray_tools.calls import wait_for_all
from tasks.task_errors import in_one_sentence, stage_task


@ray.remote
class Actor:
    def work(self, seconds):
        time.sleep(seconds)


@stage_task(name="work")
def work():
    known = settings()
    record = lease_cluster(
        "held",
        directory=known.clusters_dir,
        num_cpus=1,
        object_store_mb=80,
        environment=known.child_environment(),
    )
    connect(record)
    actor = Actor.options(name="held", lifetime="detached", num_cpus=1).remote()
    wait_for_all({actor.work.remote(0): "actor"}, 60, what="the actor", setting="none")
    (known.home / "actor-lives").touch()
    while True:
        wait_for_all({actor.work.remote(2): "actor"}, 60, what="the actor", setting="none")


@flow
@in_one_sentence
def inside():
    try:
        work()
    finally:
        release_cluster("held")


@flow
@in_one_sentence
def holding():
    """Work on a cluster of its own until somebody ends it, as the pipeline does while its ppo runs."""
    inside()
'''
HOLDING_DEPLOYMENT = """
deployments:
  - name: holding
    entrypoint: holding.py:holding
    tags: [resumes]
    work_pool: {name: rlhf}
"""
_USERS_OWN = ("RLHF_", "PREFECT_", "AWS_")


@dataclass(frozen=True)
class LocalStack:
    """A running stack, and how to talk to it from a test."""

    home: Path
    env_file: Path
    """Plays the part of `.env` in the checkout; `prefect`, typed in its directory, reads it."""

    def __post_init__(self) -> None:
        prefect_access.know_stack_of(self.home)  # the test process's own calls to its server carry its password

    @property
    def password(self) -> str:
        """What the Prefect server asks for, as user:password."""
        return (self.home / prefect_access.PASSWORD_FILE).read_text().strip()

    @property
    def prefect_variables(self) -> dict[str, str]:
        """What Prefect's own programs and client need in order to reach the server."""
        return {"PREFECT_API_URL": self.api_url, "PREFECT_API_AUTH_STRING": self.password}

    @contextmanager
    def prefect_settings(self) -> Iterator[None]:
        """Have Prefect's client in this process talk to the server."""
        with temporary_settings({PREFECT_API_URL: self.api_url, PREFECT_API_AUTH_STRING: self.password}):
            yield

    @property
    def environment(self) -> dict[str, str]:
        """A shell's environment, in which nothing but the home and the env file are told."""
        bare = inherited_environment(without_prefixes=_USERS_OWN)
        path = f"{PROGRAMS}:{bare.get('PATH', '')}"  # as after `source .venv/bin/activate`
        return {**bare, "PATH": path, "RLHF_HOME": str(self.home), "RLHF_ENV_FILE": str(self.env_file)}

    @property
    def state(self) -> StackState:
        return StackState.load(self.home)

    @property
    def api_url(self) -> str:
        if (server := self.state.services.get("server")) is None:
            raise ServiceError("the stack has no server, or is about to replace it")
        return f"{server.address}/api"

    def store(self, cache: Path) -> ArtifactStore:
        """Open the stack's artifact store where it is now.

        Args:
            cache: directory for what is fetched.
        """
        known = read_env_file(self.home / "stack.env")
        options = S3Options(known["RLHF_S3_ENDPOINT_URL"], known["RLHF_S3_ACCESS_KEY"], known["RLHF_S3_SECRET_KEY"])
        return open_store(known["RLHF_STORE_URL"], cache_dir=cache, s3=options)

    def type(
        self, *command: str, cwd: Path = CHECKOUT, timeout_s: float = 300.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line as a user would, in turn if it starts or ends services, and return what it said."""
        with turn() if command[:2] in {("rlhf", "up"), ("rlhf", "down")} else nullcontext():
            return subprocess.run(
                command,
                cwd=cwd,
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )

    def up(self) -> str:
        """Bring the stack up, or what is missing of it, and return what the command said."""
        return self._succeed("up")

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Have the stack supervised; what the supervisor says is in `supervisor.out`."""
        said = self.home / "supervisor.out"
        with said.open("wb") as out:
            command = ("rlhf", "up", "--supervise")
            process = subprocess.Popen(
                command, cwd=CHECKOUT, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            wait_for(lambda: "is supervised" in said.read_text() or process.poll(), "supervision", timeout_s=300)
            assert process.poll() is None, said.read_text()
            yield
        finally:
            process.terminate()
            process.wait(timeout=120)

    def down(self) -> str:
        """Take the stack down, and return what the command said."""
        return self._succeed("down")

    def _succeed(self, verb: str) -> str:
        result = self.type("rlhf", verb)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    @contextmanager
    def forked_flows(self, warm: Path) -> Iterator[None]:
        """Have flows, and their actors, forked from a server's process.

        What a flow forgets to import, and what it costs to import it, is not seen then; and the worker of Prefect
        starts a command that it is given by another way than its own.

        Args:
            warm: address of the server.
        """
        path = f"/work_pools/{WORK_POOL}"
        usual = prefect_api.call(self.api_url, "GET", path)["base_job_template"]
        forking = deepcopy(usual)
        variables = forking["variables"]["properties"]
        variables["command"]["default"] = f"{forking_python(warm)} -mprefect.engine"
        variables["env"]["default"] = with_forked_actors(warm)
        prefect_api.call(self.api_url, "PATCH", path, {"base_job_template": forking})
        try:
            yield
        finally:
            prefect_api.call(self.api_url, "PATCH", path, {"base_job_template": usual})

    def pids(self) -> dict[str, int]:
        """Return the process of each service that runs."""
        return {name: record.pid for name, record in self.state.services.items() if record.process()}

    def service_states(self) -> dict[str, str]:
        """Return what `rlhf status` says of each service."""
        return {line["name"]: line["state"] for line in read_json(self.type("rlhf", "status", "--json"))}

    def works(self) -> bool:
        """Whether all services do."""
        return self.service_states().items() >= dict.fromkeys(("store", "server", "worker"), "running").items()

    def processes(self) -> list[psutil.Process]:
        return processes.marked(self.state.id)

    def deploy_tiny_flows(self, directory: Path = TINY_FLOWS, file: str = "prefect.yaml") -> None:
        words = ("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file)
        result = self.type(*words, cwd=directory, **self.prefect_variables)
        assert result.returncode == 0, result.stdout + result.stderr

    def start_cluster_run(self, directory: Path) -> tuple[str, ClusterRecord]:
        """Start a run that leases a Ray cluster, and return its id and the cluster once an actor lives there.

        Args:
            directory: an empty one, for the flow's source.
        """
        (directory / "holding.py").write_text(HOLDING)
        (directory / "prefect.yaml").write_text(HOLDING_DEPLOYMENT)
        self.deploy_tiny_flows(directory)
        run = self.start_run("holding/holding")
        told = self.home / "actor-lives"
        wait_for(told.exists, f"the actor of run {run}", timeout_s=120)
        told.unlink()
        return run, ClusterRecord.load(self.home / "clusters" / "held.json")

    def start_run(
        self, deployment: str, *, at: str | None = None, job: Mapping[str, Any] | None = None, **parameters: Any
    ) -> str:
        """Start a run of a deployment, now or at a time, with job variables, and return its id."""
        found = prefect_api.deployment(self.api_url, deployment)
        assert found is not None, deployment
        body: dict[str, Any] = {"parameters": parameters, "job_variables": job}
        if at:
            body["state"] = {"type": "SCHEDULED", "state_details": {"scheduled_time": at}}
        return str(prefect_api.call(self.api_url, "POST", f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def cancel(self, run_id: str) -> None:
        """Cancel a run as the UI does, and wait until it has ended."""
        path = f"/flow_runs/{run_id}/set_state"
        prefect_api.call(self.api_url, "POST", path, {"state": {"type": "CANCELLING"}})
        ended = {"CANCELLED", "CRASHED", "FAILED", "COMPLETED"}
        # a run that does not end by itself is killed after 30 s, and its cluster may take 25 s to end
        wait_for(lambda: self.run_state(run_id) in ended, "the cancelled run to end", timeout_s=120)

    def processes_of(self, run_id: str) -> list[psutil.Process]:
        """Return the processes of a run, those of its cluster included: the worker tells each whose it is."""
        return marked_processes("PREFECT__FLOW_RUN_ID", run_id)

    def holders_of(self, secret: str) -> set[str]:
        """Return the files of the home that hold a secret; in the object store's own lies what users put there."""
        found = {path: path.relative_to(self.home) for path in self.home.rglob("*") if path.is_file()}
        ours = {path: inside for path, inside in found.items() if inside.parts[0] != "store"}
        return {str(inside) for path, inside in ours.items() if secret.encode() in path.read_bytes()}

    def set_state(self, run_id: str, state: str, **further: Any) -> None:
        """Put a run into a state, whatever it is in."""
        body = {"state": {"type": state, **further}, "force": True}
        prefect_api.call(self.api_url, "POST", f"/flow_runs/{run_id}/set_state", body)

    def history(self, run_id: str) -> list[str]:
        """Return the names of the states that a run has had."""
        return [str(state["name"]) for state in self.states(run_id)]

    def states(self, run_id: str) -> list[dict[str, Any]]:
        """Return the states that a run has had, first to last."""
        states = prefect_api.call(self.api_url, "GET", f"/flow_run_states/?flow_run_id={run_id}")
        return sorted(states, key=lambda state: str(state["timestamp"]))

    def message(self, run_id: str) -> str:
        """Return what a run's state says."""
        return str(prefect_api.call(self.api_url, "GET", f"/flow_runs/{run_id}")["state"]["message"])

    def delete_run(self, run_id: str) -> None:
        prefect_api.call(self.api_url, "DELETE", f"/flow_runs/{run_id}")

    def children(self, run_id: str) -> list[dict[str, Any]]:
        """Return the runs of a run's subflows."""
        where = {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}}
        found: list[dict[str, Any]] = prefect_api.call(self.api_url, "POST", "/flow_runs/filter", where)
        return found

    def log(self, run_id: str) -> list[str]:
        """Return the lines of a run's page, those of its subflows not among them."""
        where = {"logs": {"flow_run_id": {"any_": [run_id]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        return [line["message"] for line in prefect_api.call(self.api_url, "POST", "/logs/filter", where)]

    def task_names(self, run_id: str) -> list[str]:
        """Return the names of a run's tasks, in the order in which they began."""
        where = {"flow_runs": {"id": {"any_": [run_id]}}, "sort": "EXPECTED_START_TIME_DESC"}
        found: list[dict[str, Any]] = prefect_api.call(self.api_url, "POST", "/task_runs/filter", where)
        return [str(each["name"]) for each in reversed(found)]

    def artifact_keys(self) -> set[str]:
        """Return the keys of all pages."""
        found: list[dict[str, Any]] = prefect_api.call(self.api_url, "POST", "/artifacts/filter", {"limit": 200})
        return {str(each["key"]) for each in found if each["key"]}

    def is_over(self, run_id: str) -> bool:
        """Whether a run has ended; one that crashed is started again."""
        return self.run_state(run_id) in {"COMPLETED", "FAILED", "CANCELLED"}

    def run_state(self, run_id: str) -> str:
        return str(prefect_api.call(self.api_url, "GET", f"/flow_runs/{run_id}")["state"]["type"])


def wait_for(look: Callable[[], T | None], what: str, *, timeout_s: float = 60.0, every_s: float = 0.2) -> T:
    """Return what is seen as soon as it is true.

    Args:
        look: returns it.
        what: is awaited.
        timeout_s: longest wait.
        every_s: from look to look.

    Raises:
        AssertionError: if it was not in time; names what was awaited.
    """
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(every_s)
    return seen


_turn = threading.local()
"""Whether this thread has it."""


@contextmanager
def turn() -> Iterator[None]:
    """Let one thread of one test process take and leave the usual ports: two would find one free, or leave it too soon.

    Within its turn a thread may take it again.
    """
    if getattr(_turn, "is_ours", False):
        yield
        return
    with socket.socket(socket.AF_UNIX) as held:

        def taken() -> bool:
            with suppress(OSError):  # another has it
                held.bind("\0rlhf-flows-tests-up")
                return True
            return False

        wait_for(taken, "another test to have its stack up or down", timeout_s=300)
        _turn.is_ours = True
        try:
            yield
        finally:
            _turn.is_ours = False


@contextmanager
def run_local_stack(directory: Path) -> Iterator[LocalStack]:
    """Run a stack whose files are in a directory of its own."""
    with running(LocalStack(directory / "home", directory / ".env")) as stack:
        yield stack


@contextmanager
def running(stack: S) -> Iterator[S]:
    """Bring a stack up with `rlhf up`; take it down with `rlhf down`, and see that nothing is left."""
    try:
        stack.up()
        yield stack
    finally:
        try:
            stack.down()
        finally:
            left = stack.processes()
            processes.end(left, grace_s=0)  # a failure of `down` must not burden the tests that follow
        assert left == [], "`rlhf down` left processes behind"


@contextmanager
def run_beside_usual_ports(directory: Path) -> Iterator[LocalStack]:
    """Run a stack that came up while the usual ports were occupied; they are free afterwards."""
    with ExitStack() as until_the_end:
        with turn(), usual_ports_occupied():  # one turn for both: who has them now may leave them in its own
            stack = until_the_end.enter_context(run_local_stack(directory))
        yield stack


@contextmanager
def usual_ports_occupied() -> Iterator[None]:
    """Occupy the ports that people expect, unless somebody else does."""
    with ExitStack() as held:
        with turn():
            for port in (4200, 8333):
                listener = held.enter_context(socket.socket())
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    listener.bind(("127.0.0.1", port))
                    listener.listen()
                except OSError:
                    continue
        yield


def read_json(result: subprocess.CompletedProcess[str]) -> Any:
    """Return what a command printed as JSON."""
    return json.loads(result.stdout)
