"""Notices of what became of a night, by webhook, Slack or e-mail: automations of the Prefect server, with its blocks.

A channel is one block, which keeps the address with its secrets encrypted in the server's database, and one automation
that sends what our flows tell (`tasks/events.py`) and that a run crashed in every start. Prefect's block for Slack
formats by itself and takes Slack's own host alone; so Slack gets a webhook with the JSON that it wants. There is no
block for SMTP, but the one for Slack hands every other address to Apprise, the library below it, and that sends mail.
Set-up needs no network but the server's.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from infra.errors import ServiceError, SettingsError
from infra.services import prefect_api
from infra.services.automations import GIVEN_UP

PROMOTED, KEPT = "rlhf.champion.promoted", "rlhf.champion.kept"
ROLLED_BACK, ASKED = "rlhf.champion.rolled-back", "rlhf.champion.asked"
FAILED, TEST = "rlhf.run.failed", "rlhf.notice.test"
EVENTS = {
    PROMOTED: "promoted",
    KEPT: "kept the champion",
    ROLLED_BACK: "rolled back",
    ASKED: "waits for an approval",
    FAILED: "failed",
    TEST: "a test",
}
"""What is told, and what it is called."""
Kind = Literal["webhook", "slack", "email"]
Security = Literal["tls", "starttls", "none"]
_CRASHED = f"prefect.flow-run.{GIVEN_UP}"
_TAG = "rlhf-flows:notices"
_PREFIX, _BLOCK = "Notices: ", "rlhf-notices-"
_ACTED = "prefect.automation.action."
_SET = (
    "{% set title = event.payload['title'] or (event.resource['prefect.resource.name'] ~ ': failed') %}"
    "{% set verdict = event.payload['verdict'] or event.resource['prefect.state-message'] %}"
    "{% set page = event.payload['page'] or ((flow_run|ui_url) if flow_run else '') %}"
)
_SUBJECT, _TEXT = _SET + "{{ title }}", _SET + "{{ verdict }}\n\n{{ page }}\n"
_PAYLOADS = {
    "webhook": _SET + '{"event": {{ event.event|tojson }}, "title": {{ title|tojson }}, "text": {{ verdict|tojson }}, '
    '"page": {{ page|tojson }}, "facts": {{ (event.payload["facts"] or {})|tojson }}}',
    # Slack obeys three characters, as in <!channel>
    "slack": _SET + r"{% set text = title ~ '\n' ~ verdict ~ '\n' ~ page %}"
    "{\"text\": {{ text|replace('&', '&amp;')|replace('<', '&lt;')|replace('>', '&gt;')|tojson }}}",
}
_SCHEMES = {"tls": ("mailtos", "ssl"), "starttls": ("mailtos", "starttls"), "none": ("mailto", "insecure")}
_PORTS = {"tls": 465, "starttls": 587, "none": 25}
_DELIVERED = range(200, 300)
_ANSWER_S = 120.0
"""A server that is busy takes a while to act on an event, and a receiver may take fifteen seconds."""
_KEPT = timedelta(days=7)
"""For so long the server keeps events."""


class Mail(NamedTuple):
    """How mail is handed over."""

    server: str
    """host or host:port"""
    sender: str
    user: str | None = None
    password: str | None = None
    security: Security = "starttls"


class Channel(NamedTuple):
    """One way for notices, as it is set up."""

    name: str
    kind: str
    to: str
    """Host or address, without what is secret."""
    is_on: bool
    last: str
    """What became of the last notice, in words."""
    is_well: bool
    """False where the last one was not delivered."""


def add(api_url: str, kind: Kind, target: str, *, name: str | None = None, mail: Mail | None = None) -> Channel:
    """Have notices sent from now on.

    Args:
        api_url: the Prefect server's.
        kind: of receiver.
        target: URL, with its token, or address of e-mail.
        name: of the channel; None: after its kind.
        mail: how mail is handed over; of `email` alone.

    Raises:
        SettingsError: the target cannot be one, or there is a channel of that name.
        ServiceError: if the server does not answer, or refuses.
    """
    there = {each.name for each in channels(api_url)}
    name = name or next(each for each in [kind, *(f"{kind}-{at}" for at in range(2, 1000))] if each not in there)
    if name in there:
        raise SettingsError(f"there are notices of the name {name!r} already; give another with --name")
    if kind == "email":
        to, slug, data = _mail_block(target, mail)
    else:
        to, slug, data = _webhook_block(target)
    block = _create_block(api_url, f"{_BLOCK}{name}", slug, data)
    action: dict[str, Any] = {"block_document_id": block}
    if kind == "email":
        action |= {"type": "send-notification", "subject": _SUBJECT, "body": _TEXT}
    else:
        action |= {"type": "call-webhook", "payload": _PAYLOADS[kind]}
    trigger = {
        "type": "event",
        "posture": "Reactive",
        "match": {"prefect.resource.id": ["rlhf.project.*", "prefect.flow-run.*"]},
        "expect": [*EVENTS, _CRASHED],
        "threshold": 1,
        "within": 0,
    }
    wanted = {"name": f"{_PREFIX}{name}", "description": f"{kind} to {to}", "tags": [_TAG]}
    try:
        prefect_api.call(api_url, "POST", "/automations/", {**wanted, "trigger": trigger, "actions": [action]})
    except ServiceError:
        with suppress(ServiceError):
            prefect_api.call(api_url, "DELETE", f"/block_documents/{block}")
        raise
    return Channel(name, kind, to, is_on=True, last="nothing was sent yet", is_well=True)


def _webhook_block(url: str) -> tuple[str, str, dict[str, Any]]:
    """Return where a webhook leads, without its secret, and its block's type and content."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in {"http", "https"}:
        raise SettingsError("expected the URL of a webhook, such as https://example.org/hook, and got something else")
    return host, "webhook", {"method": "POST", "url": url, "headers": {"Content-Type": "application/json"}}


def _mail_block(address: str, mail: Mail | None) -> tuple[str, str, dict[str, Any]]:
    """Return the address, and the type and content of the block that sends mail there."""
    if mail is None:
        raise SettingsError("mail needs a server that takes it: --smtp HOST:PORT")
    for each in (address, mail.sender):
        if each.count("@") != 1 or any(char.isspace() or char in ",;<>" for char in each):
            raise SettingsError(f"expected one address, such as anna@example.org, and got {each!r}")
    scheme, mode = _SCHEMES[mail.security]
    try:
        server = urlsplit(f"//{mail.server}")
        host, port = server.hostname, server.port or _PORTS[mail.security]
    except ValueError:
        host = None
    if host is not None and server.username is not None:
        raise SettingsError("expected host or host:port of an SMTP server, and a user before it; give --user NAME")
    if host is None or server.path:
        raise SettingsError(f"expected host or host:port of an SMTP server, and got {mail.server!r}")
    login = ""
    if mail.user:
        login = f"{quote(mail.user, safe='')}:{quote(mail.password or '', safe='')}@"
    asked = {"from": mail.sender, "to": address, "smtp": host, "mode": mode, "format": "text"}
    return address, "slack-webhook", {"url": f"{scheme}://{login}{host}:{port}/?{urlencode(asked)}"}


def _create_block(api_url: str, name: str, slug: str, data: dict[str, Any]) -> str:
    """Return the id of a new block; what the server says of a refusal may repeat its content, and is not shown."""
    kind = prefect_api.call(api_url, "GET", f"/block_types/slug/{slug}")
    asked = {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}} if kind else None
    schemas = asked and prefect_api.call(api_url, "POST", "/block_schemas/filter", asked)
    if not schemas:
        raise ServiceError(f"the Prefect server knows no block {slug!r}; upgrade it to the version of requirements.txt")
    wanted = {"name": name, "data": data, "block_type_id": kind["id"], "block_schema_id": schemas[0]["id"]}
    try:
        return str(prefect_api.call(api_url, "POST", "/block_documents/", wanted)["id"])
    except ServiceError as error:
        told = str(error).partition(": ")[0]
        raise ServiceError(f"{told}; the block {name!r} could not be made: is there one of that name?") from None


def channels(api_url: str) -> list[Channel]:
    """Return the ways for notices that are set up.

    Raises:
        ServiceError: if the server does not answer.
    """
    return [_channel(api_url, each) for each in _found(api_url)]


def remove(api_url: str, name: str) -> None:
    """Send no more notices on a way, and forget its secrets.

    Raises:
        SettingsError: there is none of that name.
        ServiceError: if the server does not answer, or refuses.
    """
    found = {each["name"].removeprefix(_PREFIX): each for each in _found(api_url)}
    if name not in found:
        raise SettingsError(f"there are no notices of the name {name!r}; there are: {', '.join(found) or 'none'}")
    for action in found[name]["actions"]:  # first: without the automation nobody would find them
        prefect_api.call(api_url, "DELETE", f"/block_documents/{action['block_document_id']}")
    prefect_api.call(api_url, "DELETE", f"/automations/{found[name]['id']}")


def await_delivery(api_url: str, event: dict[str, Any]) -> list[Channel]:
    """Tell something, and return what became of it on each way once that is known, or after a while.

    Args:
        api_url: the Prefect server's.
        event: as of `tasks.events.event_of`.

    Raises:
        ServiceError: if the server does not answer.
    """
    prefect_api.call(api_url, "POST", "/events", [event])
    ways = [each for each in _found(api_url) if each["enabled"]]
    deadline = time.monotonic() + _ANSWER_S
    while any(_outcome(api_url, each, event) is None for each in ways) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [_channel(api_url, each, event) for each in ways]


def _found(api_url: str) -> list[dict[str, Any]]:
    """Return our automations of notices, oldest first."""
    wanted = {"sort": "CREATED_DESC", "limit": 200, "automations": {"tags": {"all_": [_TAG]}}}
    return list(reversed(prefect_api.call(api_url, "POST", "/automations/filter", wanted) or []))


def _channel(api_url: str, automation: dict[str, Any], event: dict[str, Any] | None = None) -> Channel:
    """Return a way for notices, with what became of the last one, or of that on an event."""
    kind, _, to = automation["description"].partition(" to ")
    outcome = _outcome(api_url, automation, event)
    name = automation["name"].removeprefix(_PREFIX)
    if outcome is None:
        last = f"nothing was sent in {_KEPT.days} days" if event is None else "nothing is known of it yet"
        return Channel(name, kind, to, automation["enabled"], last, is_well=event is None)
    fault = _fault(outcome)
    last = f"{'not delivered' if fault else 'delivered'} {outcome['occurred'][:16].replace('T', ' ')} UTC{fault}"
    return Channel(name, kind, to, automation["enabled"], last, is_well=not fault)


def _outcome(api_url: str, automation: dict[str, Any], event: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the server's event on what became of the last notice, or of that on an event; None if there is none."""
    now = datetime.now(UTC)
    where: dict[str, Any] = {
        "event": {"name": [f"{_ACTED}executed", f"{_ACTED}failed"]},
        "resource": {"id": [f"prefect.automation.{automation['id']}"]},
        "occurred": {"since": (now - _KEPT).isoformat(), "until": (now + timedelta(minutes=1)).isoformat()},
    }
    if event is not None:
        where["related"] = {"id": [f"prefect.event.{event['id']}"], "role": ["triggering-event"]}
    page = prefect_api.call(api_url, "POST", "/events/filter", {"filter": where, "limit": 1})
    return page["events"][0] if page["events"] else None


def _fault(outcome: dict[str, Any]) -> str:
    """Return why a notice was not delivered, to be put behind; nothing if it was."""
    said, status = outcome["payload"], outcome["payload"].get("status_code", HTTPStatus.OK)
    if outcome["event"] == f"{_ACTED}executed":
        return "" if status in _DELIVERED else f": the receiver answered {status}"
    log = str(said.get("notification_log") or "").strip().splitlines()
    return f": {log[-1] if log else said.get('reason')}"
