"""`rlhf notify`: word of a night by webhook, Slack or e-mail, sent by the Prefect server."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from flows.cli.output import Json, console, print_rows, write_json
from infra.services.notices import Kind, Security

if TYPE_CHECKING:
    from infra.services.notices import Channel

app = App(name="notify", help="Send word of each night by webhook, Slack or e-mail.")
_PASSWORD = "RLHF_SMTP_PASSWORD"


def add(
    kind: Kind,
    target: str,
    /,
    *,
    name: str | None = None,
    smtp: str | None = None,
    sender: Annotated[str | None, Parameter(name="--from")] = None,
    user: str | None = None,
    security: Security = "starttls",
) -> None:
    """Have the Prefect server send notices: of promotions, kept champions, rollbacks, failures, and approvals to give.

    Args:
        kind: of receiver.
        target: URL of the webhook, or of Slack's; address of e-mail. `-` reads it from standard input, so that no
            history of a shell has its token.
        name: of this way for notices; default: its kind.
        smtp: of e-mail: host or host:port of the server that takes it.
        sender: of e-mail: the sender's address; default: the receiver's.
        user: of e-mail: who logs in there; the password is read from the variable RLHF_SMTP_PASSWORD.
        security: of e-mail: TLS from the start, STARTTLS, or none.
    """
    from infra.services import notices

    target = sys.stdin.readline().strip() if target == "-" else target
    mail = None
    if smtp is not None:
        mail = notices.Mail(smtp, sender or target, user, os.environ.get(_PASSWORD), security)
    made = notices.add(_server(), kind, target, name=name, mail=mail)
    console().print(f"{made.name}: notices go by {made.kind} to {made.to}; try it with `rlhf notify test`")


def show(*, as_json: Json = False) -> int:
    """List where notices go, and whether the last one was delivered.

    Args:
        as_json: print JSON.
    """
    from infra.services import notices

    return _tell(notices.channels(_server()), as_json=as_json)


def try_out(*, as_json: Json = False) -> int:
    """Send a notice everywhere, and wait until it is known whether it was delivered.

    Args:
        as_json: print JSON.
    """
    from infra.services import notices
    from tasks.events import event_of

    event = event_of(notices.TEST, "rlhf-flows", "this is a test: notices of nights arrive here")
    return _tell(notices.await_delivery(_server(), event), as_json=as_json)


def remove(name: str, /) -> None:
    """Send no more notices there, and forget the address with its secrets.

    Args:
        name: as `rlhf notify list` has it.
    """
    from infra.services import notices

    notices.remove(_server(), name)
    console().print(f"{name}: no more notices")


def _server() -> str:
    from infra.errors import ServiceError
    from infra.services import running_api_url
    from infra.settings import settings

    known = settings()
    if api_url := running_api_url(known) or known.prefect_api_url:
        return api_url
    raise ServiceError("no Prefect server is known here; start one with `rlhf up`, or set PREFECT_API_URL")


def _tell(found: list[Channel], *, as_json: bool) -> int:
    if as_json:
        write_json([each._asdict() for each in found])
    elif not found:
        console().print("nobody gets notices; `rlhf notify add webhook|slack|email ...`")
    else:
        rows = [(each.name, each.kind, each.to, each.last if each.is_on else "switched off") for each in found]
        print_rows(console(), rows)
    return 0 if all(each.is_well for each in found) else 1


app.command(add, name="add")
app.command(show, name="list")
app.command(try_out, name="test")
app.command(remove, name="remove")
