"""Connecting this process to a leased cluster as its driver, and leaving the cluster again."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

import ray
from ray._private import auto_init_hook, ray_constants
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from infra.clusters.control_server import ControlServer
from infra.clusters.lease import call_before_end
from infra.clusters.record import JOB_CONFIG_VARIABLE, ClusterRecord
from infra.errors import ClusterError, ClusterNotReadyError
from infra.forked_processes import forking_python

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ENVIRONMENT = {
    # Ray ends this whole process when the control server has been away for so long (60 s by default). The flow should
    # live on, see the loss and start another cluster; but calls that Ray never gives up must not hang for ever.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    # Tries of `ray.init`, each of up to 40 s; the probe before it has its own deadline.
    "RAY_gcs_server_port_wait_time_s": "1",
}
# Else a call of Ray's in a process that is not connected, before it is or after, would start another cluster.
auto_init_hook.enable_auto_connect = False


def connect(record: ClusterRecord, timeout_s: float = 30.0, environment: Mapping[str, str] | None = None) -> None:
    """Connect this process to a cluster as a Ray driver; do nothing if it is connected.

    The handlers of SIGTERM and SIGINT stay what they were (Ray would replace the first, and a cancelled flow would
    crash), and Ray's settings are in the environment only while this function runs.

    Args:
        record: of the cluster.
        timeout_s: longest wait for the cluster's first answer.
        environment: variables of this driver's actors, for a cluster that was not started with them.

    Raises:
        ClusterError: if the cluster does not answer, or this process is connected to another.
    """
    _check_record(record)  # also when connected: Ray does not say that a cluster has gone
    if ray.is_initialized():
        _check_connection(record)
        return
    ours = record if record.kind == "local" else None
    with credentials(ours), _for_ray(), _at_its_address(record), _signal_handlers():
        _probe(record, timeout_s)
        try:
            ray.init(
                address=record.address,
                namespace=record.namespace,
                runtime_env=_runtime_env(record, environment),
                log_to_driver=ours is None,  # one of ours has no log monitors, which would cost 100 MB
                logging_level=logging.WARNING,
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            away = isinstance(error, ConnectionError | ray.exceptions.RayError)  # the others: versions that differ
            raise (ClusterNotReadyError if away else ClusterError)(
                f"{_described(record)} does not take this process as a driver: {_in_one_line(error)}; see {record.logs}"
            ) from error
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")  # `infra.clusters.output` takes the lines
    if record.kind == "local":
        call_before_end(record, disconnect)


def disconnect(timeout_s: float = 60.0) -> None:
    """Leave the cluster, if connected; detached actors stay.

    Raises:
        ClusterError: if Ray does not leave in time, as can happen when the control server died during a call.
    """
    if not ray.is_initialized():
        return
    thread = threading.Thread(target=ray.shutdown, name="leave-cluster", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ClusterNotReadyError(
            f"Ray did not let this process leave its cluster within {timeout_s:g} s (the cluster has probably died); "
            "the process cannot connect to another and must be started again"
        )


@contextmanager
def credentials(ours: ClusterRecord | None) -> Iterator[None]:
    """Make Ray use the secrets of a cluster while this runs, and remember them.

    Ray takes them only from the environment. A connected process keeps those that it connected with.

    Args:
        ours: a cluster that was started here; None takes what the user has set: RAY_USE_TLS and its variables,
            RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, `~/.ray/auth_token`. A token is sent without a mode only
            if no mode was set.

    Raises:
        ClusterError: if the user's token cannot be read.
    """
    if ray.is_initialized():
        yield
        return
    wanted, hidden = {"RAY_AUTH_MODE": "token"}, ["RAY_AUTH_MODE"]
    if ours is not None:
        wanted = ours.secrets
        hidden = [*wanted, "RAY_AUTH_TOKEN"]  # Ray would prefer the token to its path
    elif "RAY_AUTH_MODE" in os.environ or not _has_token():
        wanted, hidden = {}, []
    with _variables(wanted, hidden):
        _read_environment()
        yield


def _has_token() -> bool:
    _read_environment()
    try:
        return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
    except ray.exceptions.AuthenticationError as error:
        raise ClusterError(
            f"Ray's token cannot be read: {_in_one_line(error).partition('. ')[0]}; correct RAY_AUTH_TOKEN_PATH"
        ) from error


def _read_environment() -> None:
    """Make Ray read its token again: it remembers an earlier cluster's."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _for_ray() -> AbstractContextManager[None]:
    return _variables(_ENVIRONMENT, _ENVIRONMENT)


@contextmanager
def _at_its_address(record: ClusterRecord) -> Iterator[None]:
    """Make Ray use the loopback address of a cluster of ours, and listen there itself.

    By default it uses the host's address; it read the variable that changes this (`ray_head.ON_LOOPBACK`) when Ray was
    imported.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and record.kind != "local"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _runtime_env(record: ClusterRecord, environment: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Return how this driver's actors start; None leaves it to Ray, or to whoever set the job's configuration."""
    found: dict[str, Any] = {}
    is_free = JOB_CONFIG_VARIABLE not in os.environ
    if record.kind == "local" and record.fork_socket.exists() and is_free:
        found["py_executable"] = forking_python(record.fork_socket)
    if environment or is_free:  # not as `env_vars`: Ray writes those into its logs and on workers' command lines
        found["worker_process_setup_hook"] = _setup(environment or {})
    return found or None


def _setup(environment: Mapping[str, str]) -> Callable[[], None]:
    """Return what each worker runs before its first task; it travels whole, so that nodes without our code can too."""
    told = dict(environment)

    def set_up() -> None:
        os.environ.update(told)
        with suppress(ImportError):
            from infra.clusters.actor_log import log_to_stderr  # noqa: PLC0415 - in the worker

            log_to_stderr()

    return set_up


@contextmanager
def _variables(wanted: Mapping[str, str], hidden: Iterable[str]) -> Iterator[None]:
    before = {key: os.environ.pop(key) for key in hidden if key in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key in wanted:
            os.environ.pop(key, None)
        os.environ.update(before)


def _check_record(record: ClusterRecord) -> None:
    """Refuse a cluster at once that is known not to run: Ray would try for many minutes.

    Raises:
        ClusterError: if it has not started, or lacks a process or its token.
    """
    if record.kind == "existing":
        return  # only its owner sees its processes and its token
    fault = None
    if not record.address:
        fault = "has not finished starting"
    elif not record.is_running:
        fault = "is gone: its processes have ended"
    elif not record.token.is_file():
        fault = f"cannot be reached: its token file {record.token} is not there"
    elif not record.certificate.is_file():
        fault = f"cannot be reached: its certificate {record.certificate} is not there"
    if fault:
        raise ClusterNotReadyError(f"{_described(record)} {fault}; see {record.logs}, or lease it again")


def _check_connection(record: ClusterRecord) -> None:
    """Raise unless this process is connected as the record says.

    Raises:
        ClusterError: if it is not.
    """
    context = ray.get_runtime_context()
    if record.kind == "local":
        is_it, as_what = context.gcs_address == record.address, ""
    else:  # the address may have another name of the host, but no other cluster has the namespace
        is_it, as_what = context.namespace == record.namespace, f" as run {record.name!r}"
    if not is_it:
        raise ClusterError(
            f"this process is connected to the cluster at {context.gcs_address} in the namespace "
            f"{context.namespace!r}, not to {_described(record)}{as_what}; call disconnect() first"
        )


def _probe(record: ClusterRecord, timeout_s: float) -> None:
    """Ask the control server for its nodes, within a deadline that `ray.init` does not have.

    Raises:
        ClusterError: if it does not answer or refuses.
    """
    try:
        with closing(ControlServer(record.address, called=_described(record), timeout_s=timeout_s)) as server:
            server.nodes()
    except ClusterError as error:
        raise type(error)(f"{error}; see {record.logs}") from error


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restore this process's signal handlers, and let them handle a signal that came while Ray's were set.

    Python allows that only in the main thread, and Ray changes them only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    except SystemExit as end:
        _put_back(before)
        if end.code in _SIGNALS:  # Ray's handler of SIGTERM leaves with its number, and a cancelled flow would crash
            signal.raise_signal(end.code)
        raise
    finally:
        _put_back(before)


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # None: not set by Python, so it cannot be restored
            signal.signal(number, handler)


def _described(record: ClusterRecord) -> str:
    if record.kind == "existing":
        return f"the Ray cluster at {record.address}"
    where = f" at {record.address}" if record.address else ""
    return f"Ray cluster {record.name!r}{where}"


def _in_one_line(error: Exception) -> str:
    """Return Ray's message up to its first empty line, such as both sides of a mismatch of versions."""
    return " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
