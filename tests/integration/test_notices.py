"""Notices by webhook, Slack and e-mail: a real Prefect server's automations, and receivers on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from infra.services import prefect_api
from infra.services.automations import GIVEN_UP
from infra.services.notices import KEPT
from tasks.events import LONGEST_VERDICT, event_of
from tests.integration.local_stack import LocalStack, read_json, wait_for
from tests.integration.receivers import Hooks, hooks, mails

pytestmark = [pytest.mark.integration, pytest.mark.stack]
TOKEN, PASSWORD = "T0KEN-of-the-hook-8461", "p@ss/word-of-the-mail-7305"
HOSTILE = '</script> "<!channel>" & {{ event }}\r\nBcc: all@example.org \x1b[2J'


def notify(stack: LocalStack, *words: str, **variables: str) -> str:
    done = stack.type("rlhf", "notify", *words, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def notified(stack: LocalStack, receiver: Hooks) -> Iterator[None]:
    """Have notices go to a webhook and to Slack, which has an address of its own here."""
    notify(stack, "add", "webhook", receiver.url(f"/hook/{TOKEN}"))
    notify(stack, "add", "slack", receiver.url(f"/slack/{TOKEN}"))
    try:
        yield
    finally:
        for name in ("webhook", "slack"):
            notify(stack, "remove", name)


def tell(stack: LocalStack, **event: Any) -> dict[str, Any]:
    told = event_of(KEPT, "quickstart", **event)
    prefect_api.call(stack.api_url, "POST", "/events", [told])
    return told


def test_one_command_sets_notices_up_and_what_is_sent_has_the_verdict_and_the_page_and_no_secret(
    stack: LocalStack,
) -> None:
    page = "http://127.0.0.1:4200/runs/flow-run/1"
    with hooks() as receiver, mails() as mail, notified(stack, receiver):
        added = notify(
            stack, "add", "email", "anna@example.org", "--smtp", f"127.0.0.1:{mail.port}", "--security", "none",
            "--from", "nights@example.org",
        )  # fmt: skip
        assert added == "email: notices go by email to anna@example.org; try it with `rlhf notify test`\n"
        told = tell(stack, verdict=f"not promoted: {HOSTILE}{'x' * 5000}", page=page, facts={"p_value": 0.5})
        wait_for(lambda: len(receiver.posted) == 2 and mail.received, "three notices", timeout_s=60)

        verdict = told["payload"]["verdict"]
        assert len(verdict) < LONGEST_VERDICT + 50
        assert verdict.startswith(
            'not promoted: </script> "<!channel>" & {{ event }} ⏎ Bcc: all@example.org \\x1b[2Jxxx'
        )
        title = "quickstart: kept the champion"
        [hook] = receiver.at(f"/hook/{TOKEN}")
        assert hook == {"event": KEPT, "title": title, "text": verdict, "page": page, "facts": {"p_value": 0.5}}
        [slack] = receiver.at(f"/slack/{TOKEN}")
        escaped = verdict.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert slack == {"text": f"{title}\n{escaped}\n{page}"}
        [(to, message)] = mail.received
        assert (to, message["to"], message["from"]) == ("anna@example.org", "anna@example.org", "nights@example.org")
        assert (message["subject"], message["bcc"], message.get_content_type()) == (title, None, "text/plain")
        assert message.get_content().split() == [*verdict.split(), page]

        tested = stack.type("rlhf", "notify", "test", "--json")
        ways = {each["name"]: each for each in read_json(tested)}
        assert (tested.returncode, set(ways)) == (0, {"webhook", "slack", "email"})
        assert all(each["last"].startswith("delivered 20") for each in ways.values())
        assert (ways["webhook"]["to"], ways["email"]["to"]) == ("127.0.0.1", "anna@example.org")

        receiver.refuses = True
        refused = stack.type("rlhf", "notify", "test")
        assert refused.returncode == 1
        assert refused.stdout.count(": the receiver answered 410") == 2
        said = stack.type("rlhf", "status").stdout
        assert "notices: webhook (not delivered 20" in said
        findings = {each["name"]: each for each in read_json(stack.type("rlhf", "doctor", "--json"))}
        assert (findings["notices"]["verdict"], TOKEN in said + refused.stdout) == ("warning", False)
        notify(stack, "remove", "email")
    assert notify(stack, "list") == "nobody gets notices; `rlhf notify add webhook|slack|email ...`\n"
    assert "notices: none (rlhf notify add)" in stack.type("rlhf", "status").stdout


def test_secrets_of_receivers_are_in_no_file_log_or_answer_of_the_server(stack: LocalStack) -> None:
    notify(
        stack, "add", "email", "anna@example.org", "--smtp", "127.0.0.1:9", "--user", "night",
        RLHF_SMTP_PASSWORD=PASSWORD,
    )  # fmt: skip
    notify(stack, "add", "webhook", f"http://127.0.0.1:9/{TOKEN}")
    told = stack.type("rlhf", "notify", "test")
    assert told.returncode == 1
    lines = told.stdout.splitlines()
    assert ["not delivered" in line for line in lines] == [True, True], told.stdout
    everything = told.stdout + told.stderr
    for path in ("/block_documents/filter", "/automations/filter", "/events/filter"):
        everything += json.dumps(prefect_api.call(stack.api_url, "POST", path, {}))
    for secret in (TOKEN, PASSWORD, "p%40ss"):
        assert secret not in everything
        assert stack.holders_of(secret) == set()
    notify(stack, "remove", "webhook")
    notify(stack, "remove", "email")


def test_a_run_that_crashed_in_every_start_is_told_by_its_state(stack: LocalStack) -> None:
    stack.deploy_tiny_flows()
    run = stack.start_run("tiny/tiny", at="2100-01-01T00:00:00Z")
    with hooks() as receiver, notified(stack, receiver):
        stack.set_state(run, "FAILED", name=GIVEN_UP, message="The run crashed in start 4.")
        wait_for(lambda: len(receiver.posted) == 2, "two notices", timeout_s=60)
        [hook] = receiver.at(f"/hook/{TOKEN}")
        assert hook["text"] == "The run crashed in start 4."
        assert hook["page"].endswith(f"/runs/flow-run/{run}")
        assert hook["title"].endswith(": failed")
    stack.delete_run(run)


def test_a_target_that_can_be_none_is_refused_in_a_sentence_without_it(stack: LocalStack) -> None:
    for words in (("webhook", TOKEN), ("slack", f"ftp://example.org/{TOKEN}"), ("email", "anna@example.org")):
        done = stack.type("rlhf", "notify", "add", *words)
        assert (done.returncode, done.stderr.count("\n"), TOKEN in done.stderr) == (1, 1, False), done.stderr
