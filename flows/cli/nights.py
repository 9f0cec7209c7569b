"""`rlhf nights`: what each night learnt, what it cost, and what it decided, from the store alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flows.cli.output import Json, console, write_json, write_lines
from infra.errors import StoreError
from rlhf_core.config.budget import HOUR_S
from rlhf_core.counting import counted
from rlhf_core.escaping import one_line

if TYPE_CHECKING:
    from infra.artifacts import ArtifactStore, Manifest

_INDENT = 12 * " "
_LONGEST_REASON = 200
_DECIDED = {"nothing_new": "nothing new", "budget_spent": "budget spent", "promoted": "promoted"}
"""What a report's figures say was decided, the first that is true."""
_GOES_ON = ", and goes on"
"""Of a night that its budget ended before PPO's last episode."""
_SPENT = ("hours", "gpu_hours", "cost")
_FIGURES = ("new_files", "bad_files", "new_rows", "known_rows", "learnt_rows", "old_rows", "waiting_rows")


def nights(name: str | None = None, /, *, as_json: Json = False) -> None:
    """List the nights, oldest first: data, time by stage, cost, decision. A night without a report has not ended well.

    Args:
        name: of the artifacts, as in `policy/NAME`; all when left out.
        as_json: print JSON.

    Raises:
        StoreError: if there is none of this name.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    found = nights_of(store, name)
    if name is not None and not found:
        others = sorted({night["name"] for night in nights_of(store, None)})
        raise StoreError(
            f"{store.url} holds no night of {name}; "
            + (f"it has those of {', '.join(others)}" if others else "it has none")
        )
    if as_json:
        return write_json(found)
    if not found:
        console().print(f"{store.url} holds no night")
    write_lines(line for each in found for line in _lines(each))
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
    told += [_open(each) for uri, each in datasets.items() if uri not in named and _is_of_night(each)]
    return sorted(told, key=lambda night: str(night["ended"]))


def _ended(report: Manifest, datasets: dict[str, Manifest], made: dict[str, Manifest]) -> dict[str, Any]:
    parents = [parent.uri for parent in report.parents]
    dataset = next((datasets[uri] for uri in parents if uri in datasets), None)
    figures: dict[str, Any] = dict(report.metrics if report.metrics.get("nothing_new") else {})
    figures = figures or dict(dataset.metrics if dataset else {})
    by_stage: Any = report.metrics.get("seconds")
    if by_stage is None:  # of an earlier release: also what it found in the store
        by_stage = {made[uri].kind: made[uri].metrics.get("seconds", 0) for uri in parents if uri in made}
    nothing = bool(report.metrics.get("nothing_new"))
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
        "spent": {key: report.metrics[key] for key in _SPENT if key in report.metrics},
        "decision": next((told for key, told in _DECIDED.items() if report.metrics.get(key)), "not promoted"),
        "unfinished": bool(report.metrics.get("unfinished")),
        "reason": report.metrics.get("reason"),
        "champion": report.metrics.get("champion"),
    }


def _is_of_night(dataset: Manifest) -> bool:
    """Return whether a night made a dataset; earlier releases do not say, so that all of theirs with arrivals count."""
    return "new_files" in dataset.metrics and bool(dataset.metrics.get("of_night", True))


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
        "spent": {},
        "decision": "not ended",
        "unfinished": True,
        "reason": "it has failed, or is still at work; what it took in is new to the next night",
        "champion": None,
    }


def _lines(night: dict[str, Any]) -> list[str]:
    """Return a night in lines: when, where, decision and time; then its data; then why it was decided so."""
    from tasks.progress import duration

    where = night["report"] or night["dataset"]
    by_stage = ", ".join(f"{stage} {duration(float(seconds))}" for stage, seconds in night["seconds"].items())
    spent = night["spent"]
    # hours of work are those of all starts; in reports of earlier releases wall_s is that of the last
    worked_s = HOUR_S * spent.get("hours", 0) or night["wall_s"]
    figures = "" if worked_s is None else f"  {duration(worked_s)}"
    figures += f"  ({by_stage})" if by_stage else ""
    figures += f"  {spent['gpu_hours']:.2f} GPU hours" if spent.get("gpu_hours") else ""
    figures += f"  cost {spent['cost']:.2f}" if spent.get("cost") else ""
    decided = night["decision"] + _GOES_ON * (night["unfinished"] and night["report"] is not None)
    lines = [f"{night['night']}  {where}  {decided}{figures}", f"{_INDENT}{_told(night)}"]
    if night["reason"]:
        lines.append(_INDENT + one_line(str(night["reason"]), _LONGEST_REASON))
    return lines


def _told(night: dict[str, Any]) -> str:
    """Return what a night learnt."""
    data = night["data"]
    if not data:
        return counted(night["problems"], "row")
    parts = [counted(data["new_files"], "new file"), counted(data["new_rows"], "new row")]
    parts += [f"{data['bad_files']} in quarantine"] if data["bad_files"] else []
    parts += [f"{data['old_rows']} old beside them"] if data.get("old_rows") else []
    parts += [f"{data['waiting_rows']} wait"] if data.get("waiting_rows") else []
    return ", ".join(parts)
