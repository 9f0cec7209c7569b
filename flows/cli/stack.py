"""`rlhf up`, `down`, `status`, `doctor`, `tidy`: the local stack. `deploy`, `automations`: for another server."""

from __future__ import annotations

import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli import output
from flows.cli.output import Flag, Json, write_json
from rlhf_core.escaping import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from infra.settings import Settings

_PROGRAM = str(Path(sys.executable).with_name("rlhf"))
_MIB = 2**20
_STYLES = {"running": "green", "well": "green", "warning": "yellow", "none": "dim", "stopped": "dim"}


def up(
    *,
    new_password: Flag = False,
    supervise: Flag = False,
    systemd: Flag = False,
    again: Annotated[Flag, Parameter(show=False)] = False,
) -> int:
    """Start the local stack, or what is missing of it.

    Object store, Prefect server, work pool, worker and all deployments of prefect.yaml; what runs already is
    left alone, what has died is started again. All state lies under RLHF_HOME (.rlhf in the checkout).

    Args:
        new_password: have the Prefect server ask for another password from now on; not while flow runs are at work.
        supervise: go on in the foreground, and start again what dies or does not answer, until `rlhf down`.
        systemd: with --supervise, start nothing: write a unit of your systemd that does it, also after a reboot.
        again: start what does not work for the supervisor that calls this.
    """
    from infra import services
    from infra.errors import ServiceError
    from infra.process_record import ProcessRecord
    from infra.settings import settings

    console = output.console()
    known, tell = settings(), _teller(console)
    if systemd:
        if not supervise or new_password:
            raise ServiceError("--systemd goes with --supervise alone")
        return _write_unit(console)
    if supervise or again:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # ends what was being started, as Ctrl-C does
    if again:
        services.bring_back(known, tell, supervisor=ProcessRecord.of(os.getppid()))
        return 0
    us = ProcessRecord.of(os.getpid()) if supervise else None
    state = services.up(known, tell, new_password=new_password, supervisor=us)
    console.print("the stack is up: rlhf status, rlhf doctor, rlhf down")
    how = services.how_to_open_the_ui(known, state.services["server"].address)
    console.print(how, soft_wrap=True)
    if supervise:
        services.supervise(tell, [_PROGRAM, "up", "--again"])
    return 0


def _write_unit(console: Console) -> int:
    from infra import services
    from infra.settings import settings

    path = services.write_unit(settings(), _teller(console), [_PROGRAM, "up", "--supervise"])
    lines = (
        f"written: {path}",
        "now, and at each login:       systemctl --user daemon-reload",
        f"                              systemctl --user enable --now {services.UNIT}",
        "at each boot, before a login: loginctl enable-linger",
        f"what it does:                 journalctl --user --unit {services.UNIT} --follow",
        f"never again:                  systemctl --user disable {services.UNIT}; rlhf down",
    )
    console.print("\n".join(lines), soft_wrap=True)
    return 0


def down() -> int:
    """End everything of the local stack, its flow runs and their Ray clusters included; data are kept."""
    from infra import services
    from infra.clusters import reap_orphans
    from infra.settings import settings

    console = output.console()
    known = settings()
    ended = services.down(known, _teller(console))
    if known.clusters_dir.is_dir():
        reap_orphans(known.clusters_dir)  # their processes are gone; this clears away their files
    console.print("everything has ended; data are kept" if ended else "nothing was running")
    return 0


def status(*, as_json: Json = False) -> int:
    """Show what runs, where, and how much memory it takes.

    The exit status is 0 when every service runs, else 1. Memory is the proportional set size: the lines add up.

    Args:
        as_json: print JSON.
    """
    from infra import services
    from infra.settings import settings

    known = settings()
    lines = services.status(known)
    console = output.console()
    if as_json:
        write_json([{**line._asdict(), "log": line.log and str(line.log)} for line in lines])
    else:
        rows = [
            (line.name, line.state, line.address, str(line.pid or ""), f"{line.memory_bytes / _MIB:,.0f} MiB")
            for line in lines
        ]
        total = sum(line.memory_bytes for line in lines)
        _print_table(console, ("service", "state", "address", "process", "memory"), rows)
        console.print(f"together {total / _MIB:,.0f} MiB")
        for name, log in ((line.name, line.log) for line in lines if line.log is not None):
            console.print(f"log of the {name}: {log}", soft_wrap=True)
        for server in (line for line in lines if line.name == "server" and line.pid is not None):
            how = services.how_to_open_the_ui(known, server.address)
            console.print(how, soft_wrap=True)
            if server.state == "running":
                _tell_what_was_set(known, console)
                _tell_of_notices(f"{server.address}/api", console)
    return 0 if all(line.state in {"running", "none"} for line in lines) else 1


def _tell_what_was_set(known: Settings, console: Console) -> None:
    from infra import services
    from infra.errors import ServiceError

    try:
        found = services.set_in_prefect(known)
    except ServiceError as error:  # such as a prefect.yaml that somebody is just editing
        console.print(f"what was set in Prefect is not known: {error}", soft_wrap=True)
        return
    for name, told in found.items():
        console.print(f"{name}, as set in Prefect: {'; '.join(told)}", soft_wrap=True)


def _tell_of_notices(api_url: str, console: Console) -> None:
    from infra.errors import ServiceError
    from infra.services import notices

    try:
        found = notices.channels(api_url)
    except ServiceError as error:
        console.print(f"where notices go is not known: {error}", soft_wrap=True)
        return
    told = "; ".join(f"{each.name} ({each.last if each.is_on else 'switched off'})" for each in found)
    console.print(f"notices: {visible(told) or 'none (rlhf notify add)'}", soft_wrap=True)


def doctor(*, as_json: Json = False) -> int:
    """Look for what would keep the stack or a run from working, and say what to do about it.

    Args:
        as_json: print JSON.
    """
    from infra import services
    from infra.settings import settings

    findings = services.diagnose(settings())
    console = output.console()
    if as_json:
        write_json([finding._asdict() for finding in findings])
    else:
        rows = [(each.name, each.verdict, each.seen, each.advice) for each in findings]
        _print_table(console, ("check", "verdict", "seen", "what to do"), rows)
    return 1 if any(finding.verdict == "wrong" for finding in findings) else 0


def deploy(*, pool: str = "rlhf", image: str | None = None) -> int:
    """Register all deployments of prefect.yaml with the Prefect server of PREFECT_API_URL.

    It is for a server that `rlhf up` did not start: that one's are registered by `rlhf up`. Their runs go to the work
    pool. One of type process runs them where its worker has this checkout, at this path; one of type docker or
    kubernetes runs each in a container of an image. The server also starts crashed runs again from then on, as by
    `rlhf automations`.

    Args:
        pool: name of the work pool; `rlhf`, of type process, is made if it is not there.
        image: built from infra/deploy/Dockerfile, for a pool that runs containers.
    """
    from infra.services.deploy_elsewhere import deploy_elsewhere
    from infra.settings import settings

    deploy_elsewhere(settings(), pool, image, _teller(output.console()))
    return 0


def tidy() -> int:
    """Delete what nobody needs any longer under RLHF_HOME and in the artifact store. The worker does so once a day.

    Long logs of services begin anew (RLHF_LOG_LIMIT_MB); what killed processes left, and failed batches after a while
    (RLHF_BATCHES_KEPT_DAYS), go; the store is collected as by `rlhf artifacts collect --delete` (RLHF_RETENTION). The
    Prefect server deletes old runs by itself (RLHF_RUNS_KEPT_DAYS). Nothing of a live run is touched.
    """
    from infra.settings import settings
    from tasks.tidy import tidy as delete_old

    delete_old(settings(), _teller(output.console()))
    return 0


def automations() -> int:
    """Have the Prefect server of PREFECT_API_URL start crashed runs again, as `rlhf up` has its own do.

    It is for a server that `rlhf up` did not start. Automations of that server are made or brought up to date; who does
    not want them switches them off, or deletes them, on its page Automations.
    """
    from infra.errors import ServiceError
    from infra.services.automations import install
    from infra.settings import settings

    api_url = settings().prefect_api_url
    if api_url is None:
        raise ServiceError("no Prefect server is known here; set PREFECT_API_URL to the address of its API")
    output.console().print(f"{api_url}: {install(api_url)}", soft_wrap=True)
    return 0


def _teller(console: Console) -> Callable[[str], None]:
    from rich.text import Text

    def tell(line: str) -> None:
        said = Text.assemble((f"{datetime.now().astimezone():%H:%M:%S}", "dim"), " ", visible(line))
        console.print(said, soft_wrap=not console.is_terminal)

    return tell


def _print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head == "memory" else "left", overflow="fold")
    for row in rows:
        table.add_row(
            *(Text(visible(cell), style=_STYLES.get(cell, "red") if at == 1 else "") for at, cell in enumerate(row))
        )
    console.print(table)
