"""`rlhf artifacts`: look into the artifact store, take things out of it, and keep it in order."""

from __future__ import annotations

from cyclopts import App

app = App(name="artifacts", help="Look into the artifact store, take things out of it, and keep it in order.")
_VERBS = {
    "list": ("looking:list_artifacts", "List what the store holds."),
    "show": ("looking:show", "Show one artifact: its files, parents, figures and configuration."),
    "fetch": ("looking:fetch", "Put an artifact's files into a directory, each checked against its hash."),
    "lineage": ("tracing:lineage", "Show what an artifact was made from, or what was made from it."),
    "diff": ("tracing:diff", "Show what is different between two artifacts."),
    "promote": ("moving:promote", "Point an alias at a version."),
    "rollback": ("moving:rollback", "Point an alias at the version before."),
    "verify": ("keeping:verify", "Look for anything that is not as it should be."),
    "collect": ("keeping:collect", "Show what is not needed any longer, or delete it in two phases."),
}
for _verb, (_place, _help) in _VERBS.items():
    app.command(f"flows.cli.artifacts.{_place}", name=_verb, help=_help)
