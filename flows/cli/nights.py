"""`rlhf nights`: what each night learnt, what it cost, and what it decided, from the store alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flows.cli.output import Json, console, print_rows, write_json
from rlhf_core.counting import counted
from rlhf_core.escaping import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infra.artifacts import ArtifactStore, Manifest

_LONGEST_DECISION = 90
_FIGURES = ("new_files", "bad_files", "new_rows", "known_rows", "learnt_rows", "old_rows", "waiting_rows")


def nights(name: str | None = None, /, *, as_json: Json = False) -> None:
    """List the nights, oldest first: data, time by stage, decision. A night without a report has not ended well.

    Args:
        name: of the artifacts, as in `policy/NAME`; all when left out.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    found = nights_of(store, name)
    if as_json:
        return write_json(found)
    screen = console()
    if not found:
        screen.print(f"{store.url} holds no night{f' of {name}' if name else ''}")
        return None
    header = ("night", "run", "data", "time", "decision")
    print_rows(screen, [header, *([one_line(cell) for cell in _cells(each)] for each in found)])
    return None


def nights_of(store: ArtifactStore, name: str | None) -> list[dict[str, Any]]:
    """Return the nights as plain values, oldest first: those with a report, and datasets that no report names.

    Args:
        store: where they are.
        name: of the artifacts; None takes all.
    """
    datasets = {each.uri: each for each in store.list("dataset", name)}
    reports = store.list("run", name)
    seconds = {each.uri: each for kind in ("sft", "reward-model", "policy") for each in store.list(kind, name)}
    told = [_ended(each, datasets, seconds) for each in reports]
    named = {night["dataset"] for night in told}
    told += [_open(each) for uri, each in datasets.items() if uri not in named and "new_files" in each.metrics]
    return sorted(told, key=lambda night: str(night["ended"]))


def _ended(report: Manifest, datasets: dict[str, Manifest], made: dict[str, Manifest]) -> dict[str, Any]:
    parents = [parent.uri for parent in report.parents]
    dataset = next((datasets[uri] for uri in parents if uri in datasets), None)
    figures: dict[str, Any] = dict(report.metrics if report.metrics.get("nothing_new") else {})
    figures = figures or dict(dataset.metrics if dataset else {})
    by_stage: Any = report.metrics.get("seconds")
    if by_stage is None:  # of an earlier release: also what it found in the store
        by_stage = {made[uri].kind: made[uri].metrics.get("seconds", 0) for uri in parents if uri in made}
    nothing, promoted = bool(report.metrics.get("nothing_new")), bool(report.metrics.get("promoted"))
    return {
        "night": report.metrics.get("night") or f"{report.created.astimezone():%Y-%m-%d}",
        "name": report.name,
        "report": report.uri,
        "flow_run": report.flow_run,
        "ended": report.created.isoformat(),
        "dataset": dataset and dataset.uri,
        "data": {key: figures[key] for key in _FIGURES if key in figures},
        "problems": sum(int(str(value)) for key, value in figures.items() if key.startswith("problems_")),
        "wall_s": report.metrics.get("wall_s"),
        "seconds": {} if nothing else by_stage,
        "decision": "nothing new" if nothing else "promoted" if promoted else "not promoted",
        "reason": report.metrics.get("reason"),
        "champion": report.metrics.get("champion"),
    }


def _open(dataset: Manifest) -> dict[str, Any]:
    return {
        "night": f"{dataset.created.astimezone():%Y-%m-%d}",
        "name": dataset.name,
        "report": None,
        "flow_run": dataset.flow_run,
        "ended": dataset.created.isoformat(),
        "dataset": dataset.uri,
        "data": {key: dataset.metrics[key] for key in _FIGURES if key in dataset.metrics},
        "problems": sum(int(str(value)) for key, value in dataset.metrics.items() if key.startswith("problems_")),
        "wall_s": None,
        "seconds": {},
        "decision": "not ended",
        "reason": "it has failed, or is still at work; what it took in is new to the next night",
        "champion": None,
    }


def _cells(night: dict[str, Any]) -> Sequence[str]:
    from tasks.progress import duration

    data = night["data"]
    if data:
        told = f"{counted(data['new_files'], 'file')}, {counted(data['new_rows'], 'row')}"
        told += f", {data['bad_files']} in quarantine" if data["bad_files"] else ""
        told += f", {data['old_rows']} old" if data.get("old_rows") else ""
        told += f", {data['waiting_rows']} wait" if data.get("waiting_rows") else ""
    else:
        told = counted(night["problems"], "row")
    spent = [f"{stage} {duration(float(seconds))}" for stage, seconds in night["seconds"].items()]
    wall = [duration(night["wall_s"])] if night["wall_s"] is not None else []
    reason = one_line(str(night["reason"] or ""), _LONGEST_DECISION)
    decision = f"{night['decision']}{': ' + reason if reason else ''}"
    where = night["report"] or night["dataset"]
    return night["night"], str(where), told, ": ".join([*wall, ", ".join(spent)]) if spent else "".join(wall), decision
