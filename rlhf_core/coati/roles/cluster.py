"""The cluster of one command: one that runs, or one that ends with it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import grpc
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address

from rlhf_core.coati.roles.flags import ROLES, processes_of
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

_ANSWER_S = 10.0
OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Experience alone goes through it: tokens and a few numbers for each."""


@contextmanager
def connected(args: Namespace) -> Iterator[None]:
    """Run the block as a driver of a cluster.

    It is the one that this process is connected to; else that of `--address`, or of RAY_ADDRESS; else one that ends
    with the block.

    Raises:
        ConfigError: if nothing answers at the address.
        TimeoutError: if what answers there says no more in time.
    """
    if ray.is_initialized():
        yield
        return
    address = address_of(args)
    try:
        if address:
            _attach(address, args.start_timeout_s)
        else:
            _start(args)
        yield
    finally:
        ray.shutdown()


def address_of(args: Namespace) -> str | None:
    """Return the address of the running cluster that the user names; None for one that ends with the run."""
    return args.address or os.environ.get("RAY_ADDRESS") or None


def check_alone(args: Namespace) -> None:
    """See that a cluster of this machine alone can have the groups.

    Raises:
        ConfigError: if one of them wants more machines.
    """
    for role in ROLES:
        machines = getattr(args, f"num_{role}_nodes")
        if machines > 1:
            raise ConfigError(
                f"--num_{role}_nodes {machines} wants as many machines, but without --address the cluster is this one "
                "alone; start Ray on all of them and give --address"
            )


def _attach(address: str, timeout_s: float) -> None:
    try:
        found = canonicalize_bootstrap_address(address) if address == "auto" else address
        _check_answers(found or address, timeout_s)
        ray.init(address=found, log_to_driver=False, logging_level=logging.WARNING)
    except ConfigError:
        raise
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"the Ray cluster at {address} does not take this process as a driver: {reason}; start one with "
            "`ray start --head`, or leave --address out"
        ) from error


def _check_answers(address: str, timeout_s: float) -> None:
    """See that a control server speaks at an address: `ray.init` has no deadline.

    Raises:
        ConfigError: if nothing takes a connection there.
        TimeoutError: if what does is silent.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}); give --address as host:port of its control server"
        ) from error
    with closing(init_grpc_channel(address)) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout_s)
        except grpc.FutureTimeoutError as error:
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for the Ray cluster at {address}, and nothing was said there; is it the "
                "control server's address, and does it live?"
            ) from error


def _start(args: Namespace) -> None:
    check_alone(args)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # or Ray would leave one in the home directory
    ray.init(
        num_cpus=max(os.cpu_count() or 1, sum(processes_of(args).values()) * args.threads),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
