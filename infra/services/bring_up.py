"""`rlhf up`: start what does not run, register what has changed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from infra.errors import ServiceError
from infra.process_record import describe
from infra.services import automations, processes, runs, seaweed
from infra.services.deployments import all_present, deploy, source_digest
from infra.services.env_file import assignment, write_block
from infra.services.ports import choose_port
from infra.services.prefect_server import PREFECT_PORT, prefect_environment, prefect_server
from infra.services.prefect_yaml import DeploymentEntry, read_prefect_yaml
from infra.services.service import Report, Service, stack_environment
from infra.services.state import StackState, locked, make_home, write_private
from infra.services.take_down import remove_sockets
from infra.services.worker import make_work_pool, worker
from infra.settings import CHECKOUT, STACK_ENV, Settings, env_file, inherited_environment


def up(settings: Settings, report: Report, *, checkout: Path = CHECKOUT) -> StackState:
    """Bring the whole stack up, or what is missing of it; on failure end what this call has started.

    Args:
        settings: as `infra.settings.settings` returns them.
        report: takes a line for each thing that is done.
        checkout: where `prefect.yaml` lies.

    Returns:
        What runs where.

    Raises:
        ServiceError: if anything did not start: one sentence with the end of its log.
    """
    make_home(settings.home)
    with locked(settings.home, report):
        bringing = _BringingUp(settings, report, checkout)
        try:
            bringing.go()
        except BaseException:  # Ctrl-C as well
            bringing.undo()
            raise
        return bringing.state


class _BringingUp:
    """One call of `up`, while it holds the lock."""

    def __init__(self, settings: Settings, report: Report, checkout: Path) -> None:
        self.settings = settings
        self.home = settings.home
        self.report = report
        self.checkout = checkout
        self.state = StackState.load(self.home)
        self.is_down = not processes.marked(self.state.id)
        """Nothing of the stack lives that knows an address, so that it may have the usual ones back."""
        self.started: list[psutil.Process] = []

    def go(self) -> None:
        entries = read_prefect_yaml(self.checkout)
        self._make_directories()
        store, server = self._store(), self._server()
        # Both are started before either is waited for.
        new_store = self._spawn_unless_well(store) if store else None
        new_server = self._spawn_unless_well(server)
        if store and new_store:
            self._await(store, new_store)
            seaweed.configure(self.home, self.state.ports)
        if new_server:
            self._await(server, new_server)
        api_url = f"{server.address}/api"
        variables = self._variables(store, api_url)
        self._write_files(variables)
        make_work_pool(api_url)
        its_worker = worker(self.home, api_url, variables)
        if not self._runs("worker", None, None):
            for name in runs.settle_lost_runs(api_url):
                self.report(f"run {name} had lost its process: it now counts as crashed")
        self.report(automations.install(api_url))
        new_worker = self._spawn_unless_well(its_worker)
        self._deploy(api_url, entries)
        if new_worker:
            self._await(its_worker, new_worker)

    def undo(self) -> None:
        """End what was started, so that a failure leaves nothing half-started behind."""
        if self.started:
            self.report("ending what was started")
        pids = {process.pid for process in self.started}
        processes.end([each for process in self.started for each in processes.tree(process)], grace_s=10.0)
        self.state.services = {name: each for name, each in self.state.services.items() if each.pid not in pids}
        if not any(record.process() for record in self.state.services.values()):
            remove_sockets(self.state)
        self.state.save(self.home)

    def _make_directories(self) -> None:
        for name in ("logs", "prefect", "store", "cache", "models", "clusters"):
            (self.home / name).mkdir(mode=0o700, exist_ok=True)
        if self.state.socket_dir is None or not self.state.socket_dir.is_dir():
            self.state.socket_dir = Path(tempfile.mkdtemp(prefix="rlhf-"))
        self.state.save(self.home)

    def _store(self) -> Service | None:
        if not self.settings.wants_local_store:
            self.report(f"the object store is yours: {self.settings.store_url}")
            return None
        seaweed.prepare(self.home, self.report, is_down=self.is_down)
        ports = self.state.ports
        if not self._runs("store", ports.get("s3"), self.settings.s3_port):
            taken = [port for name, port in ports.items() if name == "prefect"]
            demanded = self.settings.s3_port
            ports.update(seaweed.choose_ports(ports, demanded=demanded, usual_first=self.is_down, taken=taken))
        return seaweed.seaweed(self.home, ports, self.state.socket_dir or self.home)

    def _server(self) -> Service:
        ports = self.state.ports
        if not self._runs("server", ports.get("prefect"), self.settings.prefect_port):
            preferred = [ports.get("prefect"), PREFECT_PORT]
            ports["prefect"] = choose_port(
                "the Prefect server",
                demanded=self.settings.prefect_port,
                variable="RLHF_PREFECT_PORT",
                preferred=preferred[::-1] if self.is_down else preferred,
                taken=[port for name, port in ports.items() if name != "prefect"],
            )
        return prefect_server(self.home, ports["prefect"], self.settings.database_url)

    def _runs(self, name: str, port: int | None, demanded: int | None) -> bool:
        record = self.state.services.get(name)
        return demanded in (None, port) and record is not None and record.process() is not None

    def _spawn_unless_well(self, service: Service) -> psutil.Process | None:
        """Return the new process of a service, or None when the old one is well."""
        record = self.state.services.get(service.name)
        process = record.process() if record else None
        if record and process:
            if record.fingerprint != service.fingerprint:
                if service.name == "worker" and runs.engines(self.state.id):
                    self.report("the worker keeps its old settings while it has flow runs; run `rlhf up` after them")
                    return None
                self.report(f"{service.title} has new settings: starting it anew")
            elif self._is_well(service, process):
                self.report(f"{service.title} runs: {record.address}")
                return None
            else:
                self.report(f"{service.title} does not answer: starting it anew")
            self._end(service, process)
        self.report(f"starting {service.title}: {service.address}")
        new = service.spawn(self.state.id)
        self.started.append(new)
        self.state.services[service.name] = service.record(new)
        self.state.save(self.home)
        return new

    def _is_well(self, service: Service, process: psutil.Process) -> bool:
        try:
            service.await_ready(process, timeout_s=service.settle_timeout_s)
        except ServiceError:
            return False
        return True

    def _end(self, service: Service, process: psutil.Process) -> None:
        # A worker that is asked to end kills its flow runs; one that is killed leaves them to finish.
        doomed = [process] if service.name == "worker" else processes.tree(process)
        if left := processes.end(doomed, grace_s=0.0 if service.name == "worker" else 15.0):
            names = ", ".join(describe(each) for each in left)
            raise ServiceError(f"{service.title} does not end, in spite of SIGKILL: {names}")

    def _await(self, service: Service, process: psutil.Process) -> None:
        service.await_ready(process)
        self.report(f"{service.title} answers: {service.address}")

    def _variables(self, store: Service | None, api_url: str) -> dict[str, str]:
        """Return how everything of this stack finds the server and the artifact store."""
        variables = {**self.settings.child_environment(), "PREFECT_API_URL": api_url}
        if store:
            for name in ("RLHF_S3_SESSION_TOKEN", "RLHF_S3_PROFILE", "RLHF_S3_CREDENTIALS_BLOCK"):
                variables.pop(name, None)  # whoever they name is a stranger here
            variables |= {
                "RLHF_STORE_URL": f"s3://{seaweed.BUCKET}",
                "RLHF_S3_ENDPOINT_URL": store.address,
                "RLHF_S3_ACCESS_KEY": seaweed.ACCESS_KEY,
                "RLHF_S3_SECRET_KEY": seaweed.load_secret(self.home),
                "RLHF_S3_REGION": seaweed.REGION,
            }
        return variables

    def _write_files(self, variables: dict[str, str]) -> None:
        """Tell the commands that are typed later: secrets in our own file, the server's address in `.env`."""
        ours = variables if self.settings.wants_local_store else {"PREFECT_API_URL": variables["PREFECT_API_URL"]}
        kept = {name: value for name, value in ours.items() if name != "RLHF_HOME"}
        write_private(self.home / STACK_ENV, "".join(f"{assignment(name, value)}\n" for name, value in kept.items()))
        told = {
            "PREFECT_API_URL": variables["PREFECT_API_URL"],
            "PREFECT_HOME": str(self.home / "prefect"),
        }
        if self.home != Settings.model_fields["home"].default:
            told["RLHF_HOME"] = str(self.home)  # so that `rlhf down` ends this very stack
        write_block(env_file(), told)
        exported = inherited_environment().get("PREFECT_API_URL")
        if exported not in (None, told["PREFECT_API_URL"]):
            self.report(
                f"PREFECT_API_URL is exported as {exported}: `rlhf run` comes here all the same, but unset it, or the "
                "prefect command goes there"
            )

    def _deploy(self, api_url: str, entries: dict[str, DeploymentEntry]) -> None:
        digest = source_digest(self.checkout)
        if self.state.deployed == digest and all_present(api_url, entries):
            self.report(f"{len(entries)} deployments are as they should be")
            return
        self.report(f"registering {len(entries)} deployments")
        environment = stack_environment(self.state.id, prefect_environment(self.home, api_url))
        log = self.home / "logs" / "deploy.log"
        said = deploy(self.checkout, api_url, environment, log, entries, self.state.schedules)
        self.state.schedules, self.state.deployed = said, digest
        self.state.save(self.home)
