"""What notices say: rendered by Prefect's own templates, from what our flows tell."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import pytest
from apprise import Apprise
from prefect.server.events.actions import CallWebhook, JinjaTemplateAction, SendNotification
from prefect.server.events.schemas.automations import AutomationCreate
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.utilities.user_templates import render_user_template

from infra.errors import ServiceError, SettingsError
from infra.services import notices, prefect_api
from infra.services.notices import KEPT, ROLLED_BACK, Mail
from tasks.events import event_of

URL = "http://127.0.0.1:1/api"
HOSTILE = '</script> "<!channel>" & {{ event }} \\" \n* 数学'


class Server:
    """Keeps blocks and automations."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[str, Any]] = {}
        self.automations: list[dict[str, Any]] = []
        self.refuses = False

    def call(self, _: str, method: str, path: str, body: Any = None) -> Any:
        kind, _, which = path.strip("/").partition("/")
        return {"DELETE": self.delete, "GET": self.block_type, "POST": self.post}[method](kind, which, body)

    def block_type(self, kind: str, which: str, _: Any) -> Any:
        return {"id": which.removeprefix("slug/")} if kind == "block_types" else None

    def delete(self, _: str, which: str, __: Any) -> Any:
        self.blocks.pop(which, None)
        self.automations = [each for each in self.automations if each["id"] != which]
        return {}

    def post(self, kind: str, which: str, body: Any) -> Any:
        found = {
            "events/filter": lambda: {"events": []},
            "block_schemas/filter": lambda: [{"id": f"of {body['block_schemas']['block_type_id']['any_'][0]}"}],
            "automations/filter": lambda: self.automations[::-1],
            "automations/": lambda: self.automate(body),
            "block_documents/": lambda: self.keep(body),
        }
        return found[f"{kind}/{which}"]()

    def automate(self, body: dict[str, Any]) -> Any:
        made = AutomationCreate.model_validate(body)
        self.automations.append({**body, "id": f"a{len(self.automations)}", "enabled": made.enabled})

    def keep(self, body: dict[str, Any]) -> Any:
        if self.refuses:
            raise ServiceError(f"the Prefect server answered 422 to POST /block_documents/: {body['data']}")
        self.blocks[body["name"]] = body
        return {"id": str(uuid5(NAMESPACE_DNS, body["name"]))}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(prefect_api, "call", found.call)
    return found


def rendered(template: str, event: dict[str, Any]) -> str:
    received = ReceivedEvent.model_validate({**event, "received": event["occurred"]})
    JinjaTemplateAction._register_filters_if_needed()
    return asyncio.run(render_user_template(template, {"event": received, "flow_run": None}))


def test_hostile_text_is_text_in_every_kind_of_notice(server: Server) -> None:
    for kind in ("webhook", "slack"):
        notices.add(URL, kind, "https://example.org/hook")
    notices.add(URL, "email", "anna@example.org", mail=Mail("smtp.example.org", "nights@example.org"))
    event = event_of(KEPT, "x", HOSTILE, page="http://h/1", facts={"note": HOSTILE})
    told = event["payload"]["verdict"]
    webhook, slack, email = (each["actions"][0] for each in server.automations)
    assert json.loads(rendered(CallWebhook.model_validate(webhook).payload, event)) == {
        "event": KEPT, "title": "x: kept the champion", "text": told, "page": "http://h/1", "facts": {"note": HOSTILE},
    }  # fmt: skip
    text = json.loads(rendered(slack["payload"], event))["text"]
    plain = told.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert text == f"x: kept the champion\n{plain}\nhttp://h/1"
    mail = SendNotification.model_validate(email)
    assert rendered(mail.subject, event) == "x: kept the champion"
    assert rendered(mail.body, event) == f"{told}\n\nhttp://h/1"


def test_a_rollback_by_hand_has_no_page_and_a_state_its_message(server: Server) -> None:
    notices.add(URL, "webhook", "https://example.org/hook")
    payload = server.automations[0]["actions"][0]["payload"]
    assert json.loads(rendered(payload, event_of(ROLLED_BACK, "x", "again")))["page"] == ""
    state = event_of(KEPT, "x", "") | {"payload": {}, "related": []}
    state["resource"] = {
        "prefect.resource.id": "prefect.flow-run.1", "prefect.resource.name": "calm-crow",
        "prefect.state-message": "The run crashed.",
    }  # fmt: skip
    said = json.loads(rendered(payload, state))
    assert (said["title"], said["text"], said["facts"]) == ("calm-crow: failed", "The run crashed.", {})


@pytest.mark.usefixtures("server")
def test_each_way_has_a_name_of_its_own_until_it_is_removed() -> None:
    assert [notices.add(URL, "slack", "https://hooks.slack.com/services/T/B/x").name for _ in range(2)] == [
        "slack",
        "slack-2",
    ]
    with pytest.raises(SettingsError, match="'slack' already"):
        notices.add(URL, "webhook", "https://example.org", name="slack")
    assert [(each.to, each.is_well) for each in notices.channels(URL)] == [("hooks.slack.com", True)] * 2
    notices.remove(URL, "slack")
    assert [each.name for each in notices.channels(URL)] == ["slack-2"]
    with pytest.raises(SettingsError, match="no notices of the name 'mail'; there are: slack-2"):
        notices.remove(URL, "mail")


@pytest.mark.parametrize(
    ("mail", "expected"),
    [
        (
            Mail("smtp.example.org", "n@example.org", "u@example.org", "p@s/s:w", "tls"),
            ("smtp.example.org", 465, "u@example.org", "p@s/s:w", "ssl", True),
        ),
        (Mail("mx.example.org:2525", "n@example.org"), ("mx.example.org", 2525, None, None, "starttls", True)),
        (Mail("127.0.0.1", "n@example.org", security="none"), ("127.0.0.1", 25, None, None, "insecure", False)),
    ],
)
def test_mail_goes_to_the_server_that_was_named_as_it_was_said(
    server: Server, mail: Mail, expected: tuple[object, ...]
) -> None:
    notices.add(URL, "email", "anna@example.org", mail=mail)
    client = Apprise()
    assert client.add(server.blocks["rlhf-notices-email"]["data"]["url"])
    sender: Any = client[0]
    found = (sender.smtp_host, sender.port, sender.user, sender.password, sender.secure_mode, sender.secure)
    assert found == expected
    assert ([to for _, to in sender.targets], sender.from_addr[1]) == (["anna@example.org"], "n@example.org")


@pytest.mark.parametrize(
    ("kind", "target", "mail"),
    [
        ("webhook", "SECRET", None),
        ("slack", "ftp://example.org/SECRET", None),
        ("webhook", "https://example.org:port/SECRET", None),
        ("email", "anna", Mail("smtp.example.org", "n@example.org")),
        ("email", "a@example.org,b@example.org", Mail("smtp.example.org", "n@example.org")),
        ("email", "anna@example.org", Mail("user:SECRET@smtp.example.org", "n@example.org")),
        ("email", "anna@example.org", None),
    ],
)
def test_what_can_be_no_target_is_refused(server: Server, kind: Any, target: str, mail: Mail | None) -> None:
    with pytest.raises(SettingsError) as refused:
        notices.add(URL, kind, target, mail=mail)
    assert kind == "email" or "SECRET" not in str(refused.value)
    assert server.automations == []


def test_a_refusal_of_the_server_does_not_repeat_the_address(server: Server) -> None:
    server.refuses = True
    with pytest.raises(ServiceError) as refused:
        notices.add(URL, "webhook", "https://example.org/SECRET")
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    ("event", "payload", "said"),
    [
        ("executed", {"status_code": 204}, ""),
        ("executed", {}, ""),
        ("executed", {"status_code": 410}, ": the receiver answered 410"),
        ("failed", {"reason": "Webhook call failed"}, ": Webhook call failed"),
        ("failed", {"reason": "Notification failed", "notification_log": "one\nno route\n"}, ": no route"),
    ],
)
def test_what_became_of_a_notice_is_said(event: str, payload: dict[str, Any], said: str) -> None:
    assert notices._fault({"event": f"prefect.automation.action.{event}", "payload": payload}) == said
