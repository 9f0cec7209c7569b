"""`rlhf up`: start what does not run, register what has changed, write our lines of the checkout's `.env`."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from infra.errors import ServiceError
from infra.prefect_access import PASSWORD_FILE, know_stack_of
from infra.process_record import ProcessRecord, describe
from infra.services import automations, password, postgres, processes, runs, seaweed
from infra.services.deployments import all_present, deploy, differences, source_digest
from infra.services.ports import choose_port
from infra.services.prefect_server import PREFECT_PORT, SQLITE_FILE, prefect_environment, prefect_server
from infra.services.prefect_yaml import DeploymentEntry, read_prefect_yaml
from infra.services.service import Report, Service, stack_environment
from infra.services.state import StackState, exposure_of, is_private_directory, locked, make_home, write_private
from infra.services.take_down import remove_sockets
from infra.services.worker import make_work_pool, worker
from infra.settings import CHECKOUT, STACK_ENV, Settings, env_file, inherited_environment, read_env_file, why

_BEGIN = "# >>> rlhf up: rewritten by it, put your own lines outside"
_END = "# <<< rlhf up"
_OTHERS = 0o077
_RECONNECTED_S = 30.0
"""From a new server's first answer until the worker of the former one must have found it."""
_HUNG_GRACE_S = 5.0
"""What does not answer hardly ever ends when it is asked to."""


def assignment(name: str, value: str) -> str:
    """Return a line of an env file, quoted as python-dotenv writes and reads it."""
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{quoted}'"


def write_block(path: Path, variables: Mapping[str, str]) -> int | None:
    """Put the variables into our block of the file, at its end, so that they win; leave all else as it is.

    One of them is a password: only the owner can read the file from then on.

    Returns:
        The mode that the file had, if others could read or write it; else None.

    Raises:
        ServiceError: if the file cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        kept = _without_block(text)
        lines = [_BEGIN, *(assignment(name, value) for name, value in variables.items()), _END]
        wanted = "\n".join([*kept, *lines]) + "\n"
        if wanted != text or mode & _OTHERS:
            write_private(path, wanted)
    except (OSError, UnicodeDecodeError) as error:
        raise ServiceError(
            f"{path} cannot be read ({why(error)}), and without it the prefect command does not find the server"
        ) from None
    return mode if mode & _OTHERS else None


def _without_block(text: str) -> list[str]:
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if line == _BEGIN:
            inside = True
        if not inside:
            kept.append(line)
        if line == _END:
            inside = False
    return kept


_AUTH = "PREFECT_API_AUTH_STRING"
_SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
_S3_SECRET = "RLHF_S3_SECRET_KEY"


def up(
    settings: Settings,
    report: Report,
    *,
    checkout: Path = CHECKOUT,
    new_password: bool = False,
    supervisor: ProcessRecord | None = None,
) -> StackState:
    """Bring the whole stack up, or what is missing of it; on failure end what this call has started.

    Args:
        settings: as `infra.settings.settings` returns them.
        report: takes a line for each thing that is done.
        checkout: where `prefect.yaml` lies.
        new_password: whether another password is drawn for the Prefect server.
        supervisor: the process that brings services back from now on, if one shall.

    Returns:
        What runs where.

    Raises:
        ServiceError: if anything did not start: one sentence with the end of its log; or if another supervises it.
    """
    make_home(settings.home)
    with locked(settings.home, report):
        bringing = _BringingUp(settings, report, checkout)
        try:
            if supervisor:
                bringing.become_supervised(supervisor)
            bringing.go(read_prefect_yaml(checkout), new_password=new_password)
        except BaseException:  # Ctrl-C as well
            bringing.undo()
            raise
        if bringing.refusal:
            raise bringing.refusal
        return bringing.state


def bring_back(settings: Settings, report: Report, *, supervisor: ProcessRecord) -> None:
    """Start those services of a supervised stack that do not work; what is registered stays as it is.

    If some do not start, those that do stay. If the stack has been taken down meanwhile, nothing is done.

    Args:
        settings: as `infra.settings.settings` returns them.
        report: takes a line for each thing that is done.
        supervisor: the process that asks for it.

    Raises:
        ServiceError: if anything did not start.
    """
    with locked(settings.home, report):
        bringing = _BringingUp(settings, report, CHECKOUT)
        if bringing.state.supervisor != supervisor:
            return
        bringing.keep_database()
        try:
            bringing.go(None)
        except ServiceError:
            raise
        except BaseException:
            bringing.undo()
            raise


class _BringingUp:
    """One call of `up`, while it holds the lock."""

    def __init__(self, settings: Settings, report: Report, checkout: Path) -> None:
        self.settings = settings
        self.home = settings.home
        self.report = report
        self.checkout = checkout
        self.state = StackState.load(self.home)
        self.is_down = not processes.marked(self.state.id)
        """No process of the stack that knows an address lives, so the stack may have the usual addresses again."""
        self.started: list[psutil.Process] = []
        self.password = ""
        self.refusal: ServiceError | None = None
        """What was not done, reported once all else is done."""
        know_stack_of(self.home)

    def become_supervised(self, supervisor: ProcessRecord) -> None:
        former = self.state.supervisor
        if former and former != supervisor and former.process():
            raise ServiceError(
                f"the stack is supervised already, by process {former.pid}; end that one first, or leave it to it"
            )
        self.state.supervisor = supervisor
        self.state.save(self.home)

    def keep_database(self) -> None:
        """Leave the server's database as it is: a person changes it, by `rlhf up`."""
        kept = self.state.database
        if kept in {"sqlite", "postgres"} and kept != self._kind_of_database:
            self.report(f"the Prefect server's database stays {kept}, until `rlhf up` changes it")
            self.settings = self.settings.model_copy(update={"database": kept, "database_url": None})

    def go(self, entries: dict[str, DeploymentEntry] | None, *, new_password: bool = False) -> None:
        """Do it; None in place of the deployments leaves them as they are."""
        former = self._former_database()
        self.password = self._password(new=new_password)
        self._make_directories()
        self._start_database()
        store, server = self._store(), self._server()
        # Both are started before either is waited for.
        new_store = self._spawn_unless_well(store) if store else None
        new_server = self._spawn_unless_well(server)
        if store and new_store:
            self._await(store, new_store)
            seaweed.configure(self.home, self.state.ports)
        if new_server:
            self._await(server, new_server)
        self._leave(former)
        api_url = f"{server.address}/api"
        variables = self._variables(store, api_url)
        self._write_files(variables)
        make_work_pool(api_url)
        its_worker = worker(self.home, self.state.socket_dir or self.home, api_url, variables)
        if new_server:
            its_worker = replace(its_worker, settle_timeout_s=_RECONNECTED_S)
        worker_stays = self._stays(its_worker)
        if not worker_stays:
            for settled in runs.settle_lost_runs(api_url, for_good=False):
                self.report(settled)
        self.report(automations.install(api_url))
        if its_server := self.state.services["server"].process():
            for name in automations.catch_up(api_url, server_began=its_server.create_time()):
                self.report(f"run {name} crashed while the server was killed: this is seen to now")
        new_worker = None if worker_stays else self._spawn(its_worker)
        if entries is not None:
            self._deploy(api_url, entries)
        if new_worker:
            self._await(its_worker, new_worker)

    def undo(self) -> None:
        """End what was started, so that a failure leaves nothing half-started behind."""
        if self.started:
            self.report("ending what was started")
        pids = {process.pid for process in self.started}
        record = self.state.services.get(postgres.NAME)
        others = [process for process in self.started if not record or process.pid != record.pid]
        processes.end([each for process in others for each in processes.tree(process)], grace_s=10.0)
        if record and record.pid in pids and (database := record.process()):
            postgres.end(database)
        self.state.services = {name: each for name, each in self.state.services.items() if each.pid not in pids}
        if not any(record.process() for record in self.state.services.values()):
            remove_sockets(self.state)
        self.state.save(self.home)

    def _password(self, *, new: bool) -> str:
        """Return the password that the server asks for: the user's, a new one, the one that is kept, or a first one.

        Raises:
            ServiceError: if it is none, others may know it, or flow runs live that would not know it.
        """
        theirs = self.settings.prefect_server_api_auth_string
        if theirs and new:
            raise ServiceError(f"{_SERVER_AUTH} is set: the password is yours to change there, or unset it")
        kept = None
        if theirs:
            wanted = password.checked(theirs.get_secret_value(), f"{_SERVER_AUTH}, as it is set,")
        elif new:
            wanted = password.draw()
        else:
            kept = password.read_password(self.home)
            wanted = kept or self._recovered() or password.draw()
        self._check_runs_know(wanted)
        if former := self._without_worker_of_another(wanted):
            return former
        if wanted != kept:
            password.keep_password(self.home, wanted)
        return wanted

    def _without_worker_of_another(self, wanted: str) -> str | None:
        """End a worker that holds another password; return that one if a flow run began in the meantime."""
        record = self.state.services.get("worker")
        process = record.process() if record else None
        former = _held(process) if process else None
        if process is None or former in (None, wanted):
            return None
        processes.end([process], grace_s=0.0)  # from here on no run begins without the new one
        try:
            self._check_runs_know(wanted)
        except ServiceError as error:
            if not former:  # The former stack had no password, and we do not go back to that.
                raise
            self.refusal = error
            return former
        return None

    def _recovered(self) -> str | None:
        """Return the password whose file is lost, from our other file or from a process that holds it."""
        path = self.home / STACK_ENV
        found = None if exposure_of(path) else read_env_file(path).get(_AUTH)
        found = found or next(filter(None, map(_held, processes.marked(self.state.id))), None)
        if found is None:
            return None
        self.report(f"{self.home / PASSWORD_FILE} was lost, and is written again: the password was still known here")
        return password.checked(found, f"what was found in place of {self.home / PASSWORD_FILE}")

    def _check_runs_know(self, wanted: str) -> None:
        """Refuse a password that a live flow run does not hold: the server would refuse that run."""
        others = [run for run in runs.engines(self.state.id) if _held(run) not in (wanted, None)]
        if others:
            held, ended = ("runs hold", "they have") if len(others) > 1 else ("run holds", "it has")
            raise ServiceError(
                f"{len(others)} flow {held} the Prefect server's former password, and would lose the server with "
                f"another; change it when {ended} ended (see `rlhf status`), or end everything with `rlhf down` before"
            )

    def _make_directories(self) -> None:
        for name in ("logs", "prefect", "store", "cache", "models", "clusters"):
            (self.home / name).mkdir(mode=0o700, exist_ok=True)
        if self.state.socket_dir is None or not is_private_directory(self.state.socket_dir):
            self.state.socket_dir = Path(tempfile.mkdtemp(prefix="rlhf-"))
        self.state.save(self.home)

    @property
    def _kind_of_database(self) -> str:
        return "own" if self.settings.database_url else self.settings.database

    def _former_database(self) -> str | None:
        """Return where the server's data were kept until now, if they are kept elsewhere from now on.

        Raises:
            ServiceError: if two databases are asked for, or flow runs live that another one would not know.
        """
        if self.settings.database_url and self.settings.database == "postgres":
            raise ServiceError(
                "RLHF_DATABASE_URL names a database of yours, and RLHF_DATABASE asks for one of the stack's: unset one"
            )
        before = self.state.database
        if before is None:  # of a release that had sqlite, unless the user named another
            is_new = self._kind_of_database == "postgres" and (self.home / SQLITE_FILE).exists()
            before = "sqlite" if is_new else self._kind_of_database
        if before == self._kind_of_database:
            return None
        if count := len(runs.engines(self.state.id)):
            raise ServiceError(
                f"{count} flow run{'s are' if count > 1 else ' is'} at work, of which another database would not know; "
                "change it afterwards (see `rlhf status`), or end everything with `rlhf down` before"
            )
        return before

    def _leave(self, former: str | None) -> None:
        """End the former database, once no server uses it, and report where its data are."""
        self.state.database = self._kind_of_database
        record = self.state.services.get(postgres.NAME)
        if former == "postgres" and record:
            if process := record.process():
                self.report("ending the former database")
                postgres.end(process)
            del self.state.services[postgres.NAME]
        self.state.save(self.home)
        if former:
            places = {"sqlite": self.home / SQLITE_FILE, "postgres": self.home / postgres.DIRECTORY}
            place, setting = places.get(former, "yours"), "RLHF_DATABASE_URL" if former == "own" else "RLHF_DATABASE"
            self.report(
                "the Prefect server has another database now: the runs, schedules and blocks of the former one are in "
                f"{place}, and `rlhf up` with {setting} as it was shows them again"
            )

    def _start_database(self) -> None:
        if self._kind_of_database != "postgres":
            return
        record = self.state.services.get(postgres.NAME)
        running = record.process() if record else None
        database = postgres.postgres(self.home, self.state.socket_dir or self.home, running)
        if new := self._spawn_unless_well(database):
            self._await(database, new)

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
        url = self.settings.database_url
        if self._kind_of_database == "postgres":
            url = postgres.url(self.state.socket_dir or self.home)
        return prefect_server(self.home, ports["prefect"], url, self.password, self.settings.runs_kept_days)

    def _runs(self, name: str, port: int | None, demanded: int | None) -> bool:
        record = self.state.services.get(name)
        return demanded in (None, port) and record is not None and record.process() is not None

    def _spawn_unless_well(self, service: Service) -> psutil.Process | None:
        """Return the new process of a service, or None when the old one works."""
        return None if self._stays(service) else self._spawn(service)

    def _stays(self, service: Service) -> bool:
        """Return whether a service's process works; one that does not is ended."""
        record = self.state.services.get(service.name)
        process = record.process() if record else None
        if record and process:
            grace_s = 15.0
            if record.fingerprint != service.fingerprint:
                if service.name == "worker" and runs.engines(self.state.id) and self._is_well(service, process):
                    self.report("the worker keeps its old settings while it has flow runs; run `rlhf up` after them")
                    return True
                self.report(f"{service.title} has new settings or another version: starting it anew")
            elif self._is_well(service, process):
                self.report(f"{service.title} runs: {record.address}")
                return True
            else:
                self.report(f"{service.title} does not answer: starting it anew")
                grace_s = _HUNG_GRACE_S
            self._end(service, process, grace_s=grace_s)
        return False

    def _spawn(self, service: Service) -> psutil.Process:
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

    def _end(self, service: Service, process: psutil.Process, *, grace_s: float) -> None:
        if service.name == postgres.NAME:
            postgres.end(process)
        # A worker that is asked to end kills its flow runs; one that is killed leaves them to finish.
        doomed = [process] if service.name == "worker" else processes.tree(process)
        if left := processes.end(doomed, grace_s=0.0 if service.name == "worker" else grace_s):
            names = ", ".join(describe(each) for each in left)
            raise ServiceError(f"{service.title} does not end, in spite of SIGKILL: {names}")

    def _await(self, service: Service, process: psutil.Process) -> None:
        service.await_ready(process)
        self.report(f"{service.title} answers: {service.address}")

    def _variables(self, store: Service | None, api_url: str) -> dict[str, str]:
        """Return how everything of this stack finds the server and the artifact store."""
        inherited = self.settings.child_environment()
        variables = {name: value for name, value in inherited.items() if not name.startswith("PREFECT_")}
        variables |= {"PREFECT_API_URL": api_url, _AUTH: self.password}
        if store:
            for name in ("RLHF_S3_SESSION_TOKEN", "RLHF_S3_PROFILE", "RLHF_S3_CREDENTIALS_BLOCK"):
                variables.pop(name, None)  # what they name is unknown here
            variables |= {
                "RLHF_STORE_URL": f"s3://{seaweed.BUCKET}",
                "RLHF_S3_ENDPOINT_URL": store.address,
                "RLHF_S3_ACCESS_KEY": seaweed.ACCESS_KEY,
                _S3_SECRET: seaweed.load_secret(self.home),
                "RLHF_S3_REGION": seaweed.REGION,
            }
        return variables

    def _write_files(self, variables: dict[str, str]) -> None:
        """Write for later commands: everything in our own file, and in `.env` how to reach the server."""
        server = {name: variables[name] for name in ("PREFECT_API_URL", _AUTH)}
        ours = variables if self.settings.wants_local_store else server
        kept = {name: value for name, value in ours.items() if name != "RLHF_HOME"}
        self._write_stack_env(kept)
        told = {**server, "PREFECT_HOME": str(self.home / "prefect")}
        if self.home != Settings.model_fields["home"].default:
            told["RLHF_HOME"] = str(self.home)  # so that `rlhf down` ends this very stack
        before = read_env_file(env_file())
        known_before = self.password in (before.get(_AUTH), before.get(_SERVER_AUTH))
        if (mode := write_block(env_file(), told)) is not None:
            self.report(
                f"{env_file()} could be read by others (its mode was {mode:04o}) and is yours alone now, for it holds "
                f"the password{f', which they may know: {self._another_password()}' if known_before else ''}"
            )
        self._warn_of_exports(told)

    def _write_stack_env(self, variables: Mapping[str, str]) -> None:
        """Write our own file, and report which secrets others could read in the former one."""
        path = self.home / STACK_ENV
        fault = exposure_of(path)
        before = read_env_file(path) if fault else {}
        write_private(path, "".join(f"{assignment(name, value)}\n" for name, value in variables.items()))
        secret = f"`rlhf down`, then delete {self.home / seaweed.SECRET_FILE}, then `rlhf up`"
        advice = {_AUTH: f"the password: {self._another_password()}", _S3_SECRET: f"the store's secret: {secret}"}
        for name, known in advice.items():
            if name in before and before[name] == variables.get(name):
                self.report(f"{path} {fault}; it is yours alone from now on, but they may know {known}")

    def _another_password(self) -> str:
        """Return how the password is changed, for people."""
        return f"change {_SERVER_AUTH}" if self.settings.prefect_server_api_auth_string else password.ANOTHER

    def _warn_of_exports(self, told: dict[str, str]) -> None:
        exported = inherited_environment().get("PREFECT_API_URL")
        if exported not in (None, "", told["PREFECT_API_URL"]):
            self.report(
                f"PREFECT_API_URL is exported as {exported}: `rlhf run` comes here all the same, but unset it, or the "
                "prefect command goes there"
            )
        elif inherited_environment().get(_AUTH) not in (None, "", self.password):
            self.report(
                f"{_AUTH} is exported, and is not this server's: `rlhf` does not mind, but unset it, or the server "
                "refuses the prefect command"
            )

    def _deploy(self, api_url: str, entries: dict[str, DeploymentEntry]) -> None:
        digest = source_digest(self.checkout)
        if self.state.deployed == digest and all_present(api_url, entries):
            self.report(f"{len(entries)} deployments are as they should be")
            return
        self.report(f"registering {len(entries)} deployments")
        told = {**prefect_environment(self.home, api_url), _AUTH: self.password}
        environment = stack_environment(self.state.id, told)
        log = self.home / "logs" / "deploy.log"
        server = hashlib.sha256((self.settings.database_url or self._kind_of_database).encode()).hexdigest()[:16]
        said = self.state.filed.get(server, {})
        self.state.filed[server], refusals = deploy(self.checkout, api_url, environment, log, entries, said)
        self.state.deployed = None if refusals else digest
        self.state.save(self.home)
        if refusals:
            self.refusal = self.refusal or ServiceError("; ".join(refusals))
        for name, kept in differences(api_url, entries).items():
            self.report(f"{name} keeps what was set in Prefect: {'; '.join(kept)}")


def _held(process: psutil.Process) -> str | None:
    """Return the password that a process was started with, perhaps an empty one; None once it is gone."""
    try:
        environment = process.environ()
        return environment.get(_AUTH) or environment.get(_SERVER_AUTH, "")
    except (psutil.Error, OSError):
        return None
