"""The `rlhf` command: verbs are loaded when they are called, so that help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from cyclopts import App

from infra.errors import InfraError
from rlhf_core.errors import RlhfError
from rlhf_core.escaping import visible

_INTERRUPTED = 130  # as a shell reports a program that SIGINT ended

app = App(
    name="rlhf",
    help="The night shift that keeps a language model aligned.",
    version=lambda: version("rlhf-flows"),
    result_action="return_int_as_exit_code_else_zero",
    suppress_keyboard_interrupt=False,
)
app.command("flows.cli.stack:up", name="up", help="Start the local stack, or what is missing of it.")
app.command("flows.cli.run:run", name="run", help="Run a deployment of the pipeline, follow it, show its report.")
app.command(
    "flows.cli.train:train_ppo",
    name="train-ppo",
    help="Train by PPO without the stack, with coati's flags.",
    help_flags=(),  # the flags are not cyclopts's: their help is argparse's
    version_flags=(),
)
app.command(
    "flows.cli.train_prompts_on_ray:train_prompts_on_ray",
    name="train-prompts-on-ray",
    help="Train by PPO on four groups of Ray actors without the stack, with coati's flags.",
    help_flags=(),
    version_flags=(),
)
app.command("flows.cli.stack:status", name="status", help="Show what runs, where, and how much memory it takes.")
app.command("flows.cli.stack:doctor", name="doctor", help="Look for what would keep things from working.")
app.command("flows.cli.stack:down", name="down", help="End everything of the local stack; data are kept.")
app.command("flows.cli.stack:deploy", name="deploy", help="Register the deployments with another Prefect server.")
app.command("flows.cli.stack:tidy", name="tidy", help="Delete what is old and what killed processes have left.")
app.command(
    "flows.cli.stack:automations", name="automations", help="Have another Prefect server start crashed runs again."
)
app.command("flows.cli.notify:app", name="notify", help="Send word of each night by webhook, Slack or e-mail.")
app.command("flows.cli.artifacts:app", name="artifacts", help="Look into the artifact store, and keep it in order.")
app.command("flows.cli.nights:nights", name="nights", help="List the nights: their data, cost and decision.")
app.command("flows.cli.backfill:backfill", name="backfill", help="Make the nights that were missed, day by day.")
app.command("flows.cli.page:page", name="page", help="Show a run's report as one page in your browser.")
app.command("flows.cli.page:compare", name="compare", help="Compare two policies, or the policies of two runs.")
app.command("flows.cli.data:app", name="data", help="Look at data before a run does.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a user's mistake is one sentence, never a traceback."""
    try:
        return int(app(arguments))
    except (RlhfError, InfraError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", status=_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        sentence = _validation_sentence(error)
        if sentence is None:
            raise
        return _fail(sentence)


def _validation_sentence(error: ValueError) -> str | None:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return None
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or error.title
    return f"{where}: {first['msg'].removeprefix('Value error, ')} (got {first['input']!r:.120})"


def _fail(sentence: str, *, status: int = 1) -> int:
    sys.stderr.write(f"rlhf: {visible(sentence)}\n")
    return status
