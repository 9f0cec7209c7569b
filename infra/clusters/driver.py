"""Makes this process a driver of a leased cluster, and lets it go again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]

from infra.clusters.lease import call_before_end
from infra.clusters.manifest import ClusterManifest
from infra.errors import ClusterError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # Ray ends this whole process when the control server has been away for so long (60 s by default). The flow is to
    # live on, see the loss and start another cluster; but calls that Ray never gives up must not hang for ever.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    # Tries of `ray.init`, each of up to 40 s; the probe before it has its own deadline.
    "RAY_gcs_server_port_wait_time_s": "1",
}


def connect(manifest: ClusterManifest, timeout_s: float = 30.0) -> None:
    """Connect this process to a cluster as a Ray driver; done already is fine.

    The handlers of SIGTERM and SIGINT stay what they were (Ray would replace the first, and a cancelled flow would
    crash), and Ray's settings are in the environment only while this function runs.

    Args:
        manifest: of the cluster.
        timeout_s: longest wait for the cluster's first answer.

    Raises:
        ClusterError: if the cluster does not answer, or this process is connected to another.
    """
    _check_manifest(manifest)  # also when connected: Ray does not say that a cluster has gone
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if connected == manifest.address:
            return
        raise ClusterError(
            f"this process is connected to the cluster at {connected}, not to {_described(manifest)}; "
            "call disconnect() first"
        )
    with _credentials(manifest), _signal_handlers():
        _probe(manifest, timeout_s)
        try:
            ray.init(
                address=manifest.address,
                namespace=manifest.namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"{_described(manifest)} does not take this process as a driver: {_first_line(error)}; "
                f"see {manifest.log_dir}"
            ) from error
    call_before_end(manifest, disconnect)


def disconnect(timeout_s: float = 60.0) -> None:
    """Leave the cluster; detached actors stay. Not connected is fine.

    Raises:
        ClusterError: if Ray does not let go in time, as can happen when the control server died under a call.
    """
    if not ray.is_initialized():
        return
    thread = threading.Thread(target=ray.shutdown, name="leave-cluster", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ClusterError(
            f"Ray did not let this process leave its cluster within {timeout_s:g} s (the cluster has probably died); "
            "the process cannot connect to another and must be started again"
        )


def _check_manifest(manifest: ClusterManifest) -> None:
    """Refuse at once a cluster that is known not to run: Ray would try for many minutes.

    Raises:
        ClusterError: if it has not started, or lacks a process or its token.
    """
    fault = None
    if not manifest.address:
        fault = "has not finished starting"
    elif not manifest.is_running:
        fault = "is gone: its processes have ended"
    elif not manifest.token.is_file():
        fault = f"cannot be reached: its token file {manifest.token} is not there"
    if fault:
        raise ClusterError(f"{_described(manifest)} {fault}; see {manifest.log_dir}, or lease it again")


def _probe(manifest: ClusterManifest, timeout_s: float) -> None:
    """Ask the control server for its id, within a deadline that `ray.init` does not have.

    Raises:
        ClusterError: if it does not answer or refuses.
    """
    failures: list[Exception] = []

    def ask() -> None:
        try:
            host, _, port = manifest.address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
            GcsClient(address=manifest.address)
        except Exception as error:  # whatever it is, it is told
            failures.append(error)

    # Left behind when it is late: Ray's own call ends by itself within a minute, and cannot be interrupted.
    thread = threading.Thread(target=ask, name="probe-cluster", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ClusterError(
            f"{_described(manifest)} did not answer within {timeout_s:g} s (its control server runs, but is stopped "
            f"or overloaded); see {manifest.log_dir}"
        )
    if failures:
        raise ClusterError(
            f"{_described(manifest)} does not answer: {_first_line(failures[0])}; see {manifest.log_dir}"
        ) from failures[0]


@contextmanager
def _credentials(manifest: ClusterManifest) -> Iterator[None]:
    """Set what Ray takes from the environment alone, and have it look again: it remembers an earlier cluster's."""
    wanted = {**_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(manifest.token)}
    hidden = ("RAY_AUTH_TOKEN", *wanted)  # Ray would prefer the token to its path
    before = {key: os.environ.pop(key) for key in hidden if key in os.environ}
    os.environ.update(wanted)
    try:
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        yield
    finally:
        for key in wanted:
            os.environ.pop(key, None)
        os.environ.update(before)


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Put back this process's signal handlers; Python allows that, and Ray its change, in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by something other than Python, out of reach
                signal.signal(number, handler)


def _described(manifest: ClusterManifest) -> str:
    where = f" at {manifest.address}" if manifest.address else ""
    return f"Ray cluster {manifest.name!r}{where}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
