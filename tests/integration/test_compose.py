"""The programs of the compose file, with their environment, as processes on a file system that they cannot change.

What Docker does beside it (images, networks, users, limits, order of starts) is not seen here.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from uuid import UUID

import psutil
import pytest
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.workers.base import BaseJobConfiguration

from infra.artifacts import S3Options, open_store
from infra.process_record import marked_processes
from infra.services import prefect_api, processes, seaweed
from infra.services.deploy_elsewhere import IN_THE_IMAGE
from infra.services.ports import free_port
from infra.services.prefect_yaml import read_prefect_yaml
from infra.services.worker import WORK_POOL
from infra.settings import CHECKOUT, inherited_environment
from tests.integration.local_stack import TINY_FLOWS, wait_for
from tests.unit.deploy.compose_file import services

pytestmark = [pytest.mark.integration, pytest.mark.stack]
SECRETS = {
    "POSTGRES_PASSWORD": "p@ss/w:rd",
    "PREFECT_API_AUTH_STRING": "rlhf:a-password-of-the-tests",
    "RLHF_S3_SECRET_KEY": "a-secret-of-the-tests",
}
SECRET_BLOCK = "rlhf-store"
SET_DIRECTORY = "prefect.deployments.steps.set_working_directory"
ENDED = {"COMPLETED", "FAILED", "CRASHED"}
POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), None)
SEALED = """
mount --make-rprivate / && mount --bind /tmp /tmp && mount -t tmpfs tmpfs /opt && mkdir /opt/rlhf &&
mount --bind "$1" /opt/rlhf && mount -o remount,bind,ro /opt/rlhf && mount --bind /opt/rlhf "$1" &&
mount -o remount,bind,ro /opt && mount -o remount,bind,ro / && cd "$2" && shift 2 &&
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
"""As the image and Docker's `read_only`, `cap_drop` and `no-new-privileges`: $1 is the checkout, $2 the folder."""


@dataclass
class Containers:
    """What stands in for Docker: names of services are the loopback address, and each port is a free one."""

    directory: Path
    """Stands in for all volumes and tmpfs."""
    ports: Mapping[str, int]
    until_the_end: ExitStack

    @property
    def variables(self) -> dict[str, str]:
        return {**SECRETS, "UI_PORT": str(self.ports["4200"])}

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['4200']}/api"

    def here(self, word: str) -> str:
        """Return a word of the file as it is on this machine."""
        word = re.sub(r"\b(server|store|database)(?=:\d)|^database$", "127.0.0.1", word)
        word = re.sub(r"\b(4200|5432|8333|8080)\b", lambda found: str(self.ports[found[0]]), word)
        return re.sub(r"^/tmp\b", str(self.directory / "tmp"), word)

    def environment(self, name: str) -> dict[str, str]:
        bare = inherited_environment(without_prefixes=("RLHF_", "PREFECT_", "AWS_", "WEED_"))
        told: dict[str, str] = services(self.variables)[name].get("environment", {})
        return {
            **bare,
            "PATH": f"{Path(sys.executable).parent}:{bare['PATH']}",
            "HOME": str(self.directory / "home"),
            "TMPDIR": str(self.directory / "tmp"),
            "RLHF_HOME": str(self.directory / name),  # as the image says
            "RLHF_ENV_FILE": str(self.directory / "none"),
            **{key: self.here(value) for key, value in told.items()},
        }

    def command(self, name: str, words: Sequence[str] | None = None, cwd: str | None = None) -> list[str]:
        service = services(self.variables)[name]
        folder = cwd or (self.here(service["working_dir"]) if "working_dir" in service else str(CHECKOUT))
        sealed = ["unshare", "--mount", "sh", "-c", SEALED, "sh", str(CHECKOUT), folder]
        return [*sealed, *(self.here(word) for word in words or service["command"])]

    def start(self, name: str) -> psutil.Process:
        log = self.until_the_end.enter_context((self.directory / f"{name}.log").open("wb"))
        process = psutil.Popen(
            self.command(name), env=self.environment(name), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        self.until_the_end.callback(lambda: processes.end(processes.tree(process), grace_s=20))
        wait_for(lambda: process.poll() is not None or self.is_healthy(name), f"a healthy {name}", timeout_s=180)
        assert process.poll() is None, self.log(name)
        return process

    def is_healthy(self, name: str) -> bool:
        how, *words = services(self.variables)[name]["healthcheck"]["test"]
        command = self.command(name, words if how == "CMD" else ["sh", "-c", *words])
        return subprocess.run(command, env=self.environment(name), check=False, capture_output=True).returncode == 0

    def run(self, name: str, words: Sequence[str] | None = None, cwd: str | None = None) -> str:
        """Run a service that ends, or another command in its place, and return what it said."""
        result = subprocess.run(
            self.command(name, words, cwd),
            env=self.environment(name),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def create_run(self, deployment: str, job_variables: Mapping[str, Any] | None = None, **parameters: Any) -> str:
        found: Any = prefect_api.deployment(self.api_url, deployment)
        body = {"parameters": parameters, "job_variables": job_variables}
        return str(prefect_api.call(self.api_url, "POST", f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def state(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = prefect_api.call(self.api_url, "GET", f"/flow_runs/{run}")["state"]
        return found

    def job(self, run: str, pool: str) -> BaseJobConfiguration:
        """Return what a worker of this pool would start for a run."""

        async def resolved() -> BaseJobConfiguration:
            async with get_client() as client:
                flow_run, work_pool = await client.read_flow_run(UUID(run)), await client.read_work_pool(pool)
                return await BaseJobConfiguration.resolve_for_flow_run(
                    flow_run, client=client, work_pool=work_pool, worker_name="any"
                )

        with self.prefect_settings():
            return asyncio.run(resolved())

    @contextmanager
    def prefect_settings(self) -> Iterator[None]:
        """Have Prefect's client in this process talk to the server."""
        access = {PREFECT_API_URL: self.api_url, PREFECT_API_AUTH_STRING: SECRETS["PREFECT_API_AUTH_STRING"]}
        with temporary_settings(access):
            yield

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-4000:]


def seconds(text: str) -> int:
    assert text.endswith("m")
    return int(text.removesuffix("m")) * 60


@contextmanager
def postgres(containers: Containers) -> Iterator[None]:
    """Run Debian's Postgres as the image would, with what the file tells it; it runs for no root."""
    assert POSTGRES is not None
    told = services(containers.variables)["database"]["environment"]
    data, port = containers.directory / "postgres", containers.ports["5432"]
    data.mkdir(mode=0o700)
    (data / "password").write_text(told["POSTGRES_PASSWORD"])
    as_user = []
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        for path in (data, data / "password"):
            os.chown(path, user.pw_uid, user.pw_gid)
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]

    def call(program: str, *words: str) -> None:
        environment = {**os.environ, "PGPASSWORD": told["POSTGRES_PASSWORD"]}
        subprocess.run([*as_user, str(POSTGRES / program), *words], check=True, capture_output=True, env=environment)

    options = [f"--username={told['POSTGRES_USER']}", f"--pwfile={data / 'password'}", "--auth=scram-sha-256"]
    call("initdb", f"--pgdata={data / 'data'}", *options, *told["POSTGRES_INITDB_ARGS"].split())
    words = ["-D", str(data / "data"), "-p", str(port), "-h", "127.0.0.1", "-k", str(data)]
    with (data / "log").open("wb") as log:
        server = psutil.Popen([*as_user, str(POSTGRES / "postgres"), *words], stdout=log, stderr=log)
    try:
        _, _, *ready = services(containers.variables)["database"]["healthcheck"]["test"]
        is_ready = [str(POSTGRES / "pg_isready"), f"--port={port}", *ready]
        wait_for(lambda: subprocess.run(is_ready, check=False, capture_output=True).returncode == 0, "Postgres")
        where = ["--host=127.0.0.1", f"--port={port}", f"--username={told['POSTGRES_USER']}"]
        call("createdb", *where, told["POSTGRES_DB"])
        yield
    finally:
        assert processes.end(processes.tree(server), grace_s=20) == []


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    if POSTGRES is None:
        pytest.skip("Debian's postgresql is not installed")
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can have mounts of its own")
    directory = Path(tempfile.mkdtemp(prefix="rlhf-", dir="/tmp"))
    directory.chmod(0o755)  # Postgres is another user
    try:
        for name in ("tmp", "home"):
            (directory / name).mkdir()
        ports: dict[str, int] = {}
        for name in ("4200", "5432", "8333", "8080"):
            ports[name] = free_port(ports.values())
        with ExitStack() as until_the_end:
            found = Containers(directory, ports, until_the_end)
            until_the_end.enter_context(postgres(found))
            variables = until_the_end.enter_context(pytest.MonkeyPatch.context())  # for `prefect_api`
            variables.setenv("PREFECT_API_URL", found.api_url)
            variables.setenv("PREFECT_API_AUTH_STRING", SECRETS["PREFECT_API_AUTH_STRING"])
            yield found
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def stack(containers: Containers) -> Containers:
    """Server and store, with the deployments of the image."""
    containers.start("server")
    containers.start("store")
    containers.run("deployments")
    return containers


def test_a_run_goes_through_all_programs(stack: Containers) -> None:
    found: Any = prefect_api.deployment(stack.api_url, "pipeline/quickstart")
    assert found["work_pool_name"] == WORK_POOL
    worker = stack.start("worker")
    stack.run("deployments", ["prefect", "--no-prompt", "deploy", "--all"], cwd=str(TINY_FLOWS))
    run = stack.create_run("tiny/tiny")
    wait_for(lambda: stack.state(run)["type"] in ENDED, "the run to end", timeout_s=120)
    assert stack.state(run)["type"] == "COMPLETED", stack.log("worker")
    told = stack.environment("worker")
    options = S3Options(told["RLHF_S3_ENDPOINT_URL"], told["RLHF_S3_ACCESS_KEY"], told["RLHF_S3_SECRET_KEY"])
    store = open_store(told["RLHF_STORE_URL"], cache_dir=stack.directory / "cache", s3=options)
    assert store.list("policy") == []
    assert worker.poll() is None
    with urlopen(f"http://127.0.0.1:{stack.ports['4200']}/ui-settings", timeout=30) as answer:
        page = json.load(answer)
    assert page["api_url"] == stack.api_url
    assert set(page["available_uis"]) == {"v1", "v2"}  # their files could be copied
    long = stack.create_run("tiny/tiny", sleep_s=600)
    wait_for(lambda: stack.state(long)["type"] == "RUNNING", "the run to begin", timeout_s=120)
    worker.terminate()
    worker.wait(timeout=seconds(services()["worker"]["stop_grace_period"]))
    assert marked_processes("PREFECT__FLOW_RUN_ID", long) == []  # the server hears nothing of the run from now on


@pytest.mark.parametrize("kind", ["kubernetes", "docker"])
def test_a_pool_of_containers_takes_every_deployment(stack: Containers, kind: str) -> None:
    template = f"infra/deploy/pools/{kind}.json"
    make = ["prefect", "work-pool", "create", f"my-{kind}", "--type", kind, "--base-job-template", template]
    stack.run("deployments", make)
    stack.run("deployments", ["rlhf", "deploy", "--pool", f"my-{kind}", "--image", f"REGISTRY/{kind}:1"])
    for name in read_prefect_yaml(CHECKOUT):
        found: Any = prefect_api.deployment(stack.api_url, name)
        # The image is another than that of the pool before.
        assert (found["work_pool_name"], found["job_variables"]) == (f"my-{kind}", {"image": f"REGISTRY/{kind}:1"})
        assert found["pull_steps"] == [{SET_DIRECTORY: {"directory": IN_THE_IMAGE}}]


def test_what_a_docker_worker_would_start_finds_code_and_store(stack: Containers) -> None:
    keys = {"access_key": seaweed.ACCESS_KEY, "secret_key": SECRETS["RLHF_S3_SECRET_KEY"]}
    with stack.prefect_settings():
        Secret(value=json.dumps(keys)).save(SECRET_BLOCK, overwrite=True)
    where = {name: stack.environment("worker")[name] for name in ("RLHF_STORE_URL", "RLHF_S3_ENDPOINT_URL")}
    run = stack.create_run("pipeline/quickstart", {"env": where}, model="/no/such/model")
    job = stack.job(run, "my-docker")
    assert job.env["RLHF_S3_CREDENTIALS_BLOCK"] == SECRET_BLOCK
    said = subprocess.run(
        stack.command("worker", (job.command or "").split(), cwd=IN_THE_IMAGE),
        env={**stack.environment("deployments"), **job.env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert stack.state(run)["type"] == "FAILED", said.stdout + said.stderr
    assert "/no/such/model" in stack.state(run)["message"], stack.state(run)
