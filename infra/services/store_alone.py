"""The local object store by itself, in the foreground, for a container: `python -m infra.services.store_alone`.

It is the store of `rlhf up`, with the same flags and keys. But it listens on every address, and RLHF_S3_SECRET_KEY is
its secret key. Other containers reach the ports of its parts too, which refuse whoever has not its keys.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from infra.errors import InfraError, ServiceError
from infra.services import seaweed
from infra.services.state import make_home, write_private
from infra.settings import Settings, inherited_environment, settings

READY_FILE = "store.ready"
"""In the home directory while the store takes requests, and every write reaches the disk before it is acknowledged."""
_PURGE_EVERY_S = 24 * 3600.0


def serve(known: Settings) -> int:
    """Run the store until it ends or this process is asked to end, and return its exit status.

    Raises:
        ServiceError: if there is no secret key, or the store does not start.
    """
    if known.s3_secret_key is None:
        raise ServiceError("the object store has no secret key; set RLHF_S3_SECRET_KEY")
    make_home(known.home)
    ready = known.home / READY_FILE
    ready.unlink(missing_ok=True)
    write_private(known.home / seaweed.SECRET_FILE, known.s3_secret_key.get_secret_value())
    seaweed.prepare(known.home, _say, is_down=True)
    ports = seaweed.choose_ports({}, demanded=known.s3_port, usual_first=True, taken=())
    with tempfile.TemporaryDirectory(prefix="rlhf-") as sockets:
        service = seaweed.seaweed(known.home, ports, Path(sockets), bind="0.0.0.0")
        environment = {**inherited_environment(without_prefixes=("WEED_",)), **service.environment}
        process = subprocess.Popen(service.command, cwd=service.cwd, env=environment)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: process.terminate())
        try:
            seaweed.configure(known.home, ports)
            ready.touch()
            _say(f"the object store takes requests at port {ports['s3']}")
            while True:
                try:
                    return process.wait(_PURGE_EVERY_S)
                except subprocess.TimeoutExpired:
                    _purge(known.home, ports)
        finally:
            process.terminate()
            process.wait()
            seaweed.remove_sockets(ports)


def _purge(home: Path, ports: Mapping[str, int]) -> None:
    try:
        seaweed.purge_log(home, ports)
    except ServiceError as error:  # tomorrow again
        _say(str(error))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    try:
        sys.exit(serve(settings()))
    except InfraError as error:
        sys.exit(f"rlhf: {error}")
