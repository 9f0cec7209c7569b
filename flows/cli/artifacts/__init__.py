"""`rlhf artifacts`: look into the artifact store, take things out of it, and keep it in order."""

from __future__ import annotations

from cyclopts import App

from flows.cli.artifacts.keeping import collect, verify
from flows.cli.artifacts.looking import fetch, list_artifacts, show
from flows.cli.artifacts.moving import promote, rollback
from flows.cli.artifacts.tracing import diff, lineage, plan

app = App(name="artifacts", help="Look into the artifact store, take things out of it, and keep it in order.")
app.command(list_artifacts, name="list")
for verb in (show, fetch, lineage, plan, diff, promote, rollback, verify, collect):
    app.command(verb)
