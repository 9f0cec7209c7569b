"""The automations that start a crashed run again: as the same flow run, a few times, and then no more.

They live in the Prefect server, so that no process of ours has to survive what ended the run. A crash first becomes
`Restarting`, and `Scheduled` only after a quiet time: Prefect's worker reports each crash twice, seconds apart, and
without our plugin the second report would crash the run that has just begun again. Prefect itself counts how often a
run was started, and each crash event has that count. There is one automation for each count, which acts on a run once,
because a server that follows a killed one may handle an event again. An event may also be lost, when a trigger reads
its count before it writes it and others write meanwhile. So the triggers that wait for silence ignore crashes, and
those that get them write first. A server that is killed may lose a crash that it was about to handle: `catch_up`
handles it when the next server has started. A run that ended as Failed (a mistake, which a restart repeats) or
Cancelled (a person's decision) is never touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from infra.services import prefect_api

RESUMES = "resumes"
"""Tag of the deployments whose crashed runs are started again: their flows go on from what the store holds."""
RESTARTING = "Restarting"
"""Name of the state of a crashed run that is about to be started again; its type is CRASHED."""
SKIPPED = "Skipped"
"""Name of the state, of type CANCELLED, of a run that was due while another of its deployment was not done."""
RESTARTS = 3
QUIET_S = 30.0
"""From a crash to the restart: the watchdog of the run's Ray cluster is done by then. Our workers report each crash
once (`infra/prefect_plugin.py`); others do so again, after seconds."""
LOST_AFTER_S = 1200.0
"""Silence after which a run counts as crashed. Flows tell the server every 30 s that they live, and wait sixteen
minutes for a server that is away. With a shorter time such runs would count as dead when the server comes back, if it
does not know that it was away (`infra/event_ordering.py`). `rlhf up` after a loss does not wait so long."""
_OURS = "rlhf-flows:restarts"
"""Tag of our automations: we may change and delete whatever has it."""
_FORMER = "rlhf"
"""Their tag in earlier versions, which a user's own may have too: of those, only what has one of our names is ours."""
_SETTLED_S = 15.0
"""The server looks for silence every five seconds, and sets a state in less."""
_YEAR_S = 365 * 24 * 3600.0
_STATE = "prefect.flow-run."
_ENDS = ("Completed", "Failed", "Failed: *", "Refused: *", "TimedOut", "Cancelled", SKIPPED)
"""How states are called in which a run ends, Crashed apart: a flow of ours gives a failure its name (`ends_as`)."""
_WAITS = ("Paused", "Suspended")
"""Of a run that waits for a person, perhaps without a process."""
_TIMES = ("before it began", "once", "twice", "three times")
"""In the names of automations. A server knows its automations by name, so the word stays; it counts starts."""
_RESTART = "A crashed run is started again"
_END = "A run that crashes again and again is given up"
GIVEN_UP = "Failed: crashed in every start"
"""Name of the state in which such a run ends."""
_NOT_STARTED_AGAIN = {
    "type": "CRASHED",
    "message": "The run crashed, and the local stack was ended before it was started again.",
}
_ENDED = {"type": "CRASHED", "message": "The process of this run ended with the local stack."}


def wanted(*, lost_after_s: float = LOST_AFTER_S, quiet_s: float = QUIET_S) -> list[dict[str, Any]]:
    """Return the automations as the server takes them.

    Args:
        lost_after_s: silence after which a run counts as crashed.
        quiet_s: from a crash to the restart; Prefect takes no less than 10.
    """
    ours = f"A run of a deployment with the tag {RESUMES!r}"
    crashes = [
        _automation(
            _crash_name(starts),
            f"{ours} that crashed {_when(starts)} is started again soon, as the same run.",
            _at_crash(starts),
            {
                "state": "CRASHED",
                "name": RESTARTING,
                "force": True,  # to Prefect it is crashed already
                "message": f"The run crashed {_when(starts)}. It is started again in {quiet_s:g} s.",
            },
        )
        for starts in range(RESTARTS + 1)
    ]
    restart = _automation(
        _RESTART,
        f"{ours} that has been {RESTARTING} for {quiet_s:g} s is started again, as the same run.",
        _at_silence(quiet_s, after=(RESTARTING,), signs=("Scheduled", "Pending", "Submitting", "Running", *_ENDS)),
        {"state": "SCHEDULED", "message": "Started again after a crash: as it began, and from its last commit."},
    )
    end = _automation(
        _END,
        f"{ours} that crashed {_when(RESTARTS + 1)} is not started again.",
        _at_crash(RESTARTS + 1),
        {
            "state": "FAILED",
            "name": GIVEN_UP,
            "message": f"The run crashed {_when(RESTARTS + 1)} and is not started again by itself: look for the "
            "reason in its log and the worker's, then start a run with the same parameters, which goes on from the "
            "last commit.",
        },
    )
    lost = _automation(
        "A run that was lost with its worker has crashed",
        f"{ours} that has given no sign of life for {lost_after_s:g} s counts as crashed: its worker, which would have "
        "said so, is gone too.",
        _at_silence(lost_after_s, after=("heartbeat",), signs=("heartbeat", "Scheduled", *_WAITS, *_ENDS)),
        {
            "state": "CRASHED",
            "message": f"The run gave no sign of life for {lost_after_s:g} s: its process and its worker are gone.",
        },
    )
    return [*crashes, restart, end, lost]


def install(api_url: str, automations: list[dict[str, Any]] | None = None) -> str:
    """Make the server's automations what they should be, and return what was done, for people.

    One that is as it should be stays as it is, its counts included; so does one that a person switched off.

    Args:
        api_url: the Prefect server's.
        automations: what they should be; None: `wanted()`.

    Raises:
        ServiceError: if the server does not answer, or refuses.
    """
    should_be = {each["name"]: each for each in (wanted() if automations is None else automations)}
    changed = 0
    for found in _found(api_url):
        new = should_be.pop(found["name"], None)
        if new is None:  # of an earlier version, or there twice
            prefect_api.call(api_url, "DELETE", f"/automations/{found['id']}")
        elif not _agrees(new, found):
            prefect_api.call(api_url, "PUT", f"/automations/{found['id']}", {**new, "enabled": found["enabled"]})
        else:
            continue
        changed += 1
    for new in should_be.values():
        prefect_api.call(api_url, "POST", "/automations/", new)
    if changed or should_be:
        return "crashed runs are started again from now on, by automations of the Prefect server"
    return "the automations that start crashed runs again are as they should be"


def catch_up(api_url: str, *, server_began: float) -> list[str]:
    """Do what a server that was killed had still to do about crashes, and return the names of their runs.

    It may have died between a crash and the action of its automations, and nothing tells the next server. Crashes that
    were handled are left alone, and so are those from before the automations were there: `remove` ended their waiting.

    Args:
        api_url: the Prefect server's.
        server_began: when it started, as seconds since the epoch; it handles later crashes itself.

    Raises:
        ServiceError: if the server does not answer.
    """
    if not (found := enabled(api_url)):
        return []
    runs = _crashed(api_url, found, before_s=server_began)
    restart = found.get(_RESTART)
    waiting = [run for run in runs if run["state"]["name"] == RESTARTING and _is_older(restart, run["state"])]
    done = []
    for run in runs:
        if run["state"]["name"] != RESTARTING and (state := _due(api_url, run, found)):
            _set_state(api_url, run, state)
            done.append(str(run["name"]))
    if restart and waiting:
        for run in _still_waiting(api_url, waiting, quiet_s=restart["trigger"]["within"]):
            _set_state(api_url, run, _state_of(restart))  # its trigger has not heard of them
            done.append(str(run["name"]))
    return done


def _crashed(api_url: str, found: dict[str, Any], *, before_s: float) -> list[dict[str, Any]]:
    """Return the runs that have crashed since the first of our automations was there, and before a time."""
    ended = {
        "after_": min(each["created"] for each in found.values()),
        "before_": datetime.fromtimestamp(before_s, UTC).isoformat(),
    }
    where = {"state": {"name": {"any_": ["Crashed", RESTARTING]}}, "end_time": ended}
    return prefect_api.flow_runs(api_url, {"flow_runs": where, "deployments": {"tags": {"all_": [RESUMES]}}})


def _still_waiting(api_url: str, runs: list[dict[str, Any]], *, quiet_s: float) -> Iterator[dict[str, Any]]:
    """Yield the runs that are `Restarting` although the server has had the time to start them again.

    The server knows most of them, and starts them again within seconds once their quiet time is over. One that is
    scheduled here in the same moment would start twice, so all are left alone until well after it.
    """
    since = max(datetime.fromisoformat(run["state"]["timestamp"]).timestamp() for run in runs)
    quiet_left_s = min(max(since + quiet_s - time.time(), 0.0), quiet_s)  # whatever the clock says
    deadline = time.monotonic() + quiet_left_s + _SETTLED_S
    while runs and time.monotonic() < deadline:
        time.sleep(0.5)
        runs = [run for run in runs if _is_as_it_was(api_url, run)]
    yield from (run for run in runs if _is_as_it_was(api_url, run))


def _is_as_it_was(api_url: str, run: dict[str, Any]) -> bool:
    now = prefect_api.call(api_url, "GET", f"/flow_runs/{run['id']}")
    return now is not None and bool(now["state"]["id"] == run["state"]["id"])


def _due(api_url: str, run: dict[str, Any], found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state that follows a crash, or None where the run is to stay as it is."""
    its = found.get(_crash_name(run["run_count"]) if run["run_count"] <= RESTARTS else _END)
    if its is None or not _is_older(its, run["state"]):
        return None
    states = prefect_api.call(api_url, "GET", f"/flow_run_states/?flow_run_id={run['id']}")
    for state in sorted(states, key=lambda state: str(state["timestamp"]), reverse=True):
        if state["name"] == RESTARTING:
            return None  # it crashed again before it could begin again
        if state["type"] == "RUNNING":
            break
    return _state_of(its)


def _state_of(automation: dict[str, Any]) -> dict[str, Any]:
    """Return the state that an automation gives to a run."""
    action = automation["actions"][0]
    return {"type": action["state"], **{key: action[key] for key in ("name", "message") if action[key]}}


def _set_state(api_url: str, run: dict[str, Any], state: dict[str, Any]) -> None:
    prefect_api.call(api_url, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


def _is_older(automation: Any, crash: dict[str, Any]) -> bool:
    """Whether an automation was there when a run crashed."""
    if automation is None:
        return False
    return datetime.fromisoformat(automation["created"]) < datetime.fromisoformat(crash["timestamp"])


def enabled(api_url: str) -> dict[str, Any]:
    """Return our automations by name, without those that a person switched off.

    Raises:
        ServiceError: if the server does not answer.
    """
    return {each["name"]: each for each in _found(api_url) if each["enabled"]}


def remove(api_url: str) -> None:
    """Remove our automations, and let no run wait for them; one that a person switched off stays.

    Raises:
        ServiceError: if the server does not answer, or refuses.
    """
    for each in enabled(api_url).values():
        prefect_api.call(api_url, "DELETE", f"/automations/{each['id']}")
    for run in prefect_api.flow_runs(api_url, {"flow_runs": {"state": {"name": {"any_": [RESTARTING]}}}}):
        _set_state(api_url, run, _NOT_STARTED_AGAIN)


def give_up(api_url: str, removed: dict[str, Any], *, ended_since: float) -> None:
    """Say of each run that crashed and is not seen to by automations any more that it is not started again.

    A crash may be told just before they are removed, or later, as the runs are ended. Call this when nobody tells of
    crashes any more.

    Args:
        api_url: the Prefect server's.
        removed: what `enabled` returned before they were removed.
        ended_since: when the processes of runs began to be ended, as seconds since the epoch.

    Raises:
        ServiceError: if the server does not answer, or refuses.
    """
    for run in _crashed(api_url, removed, before_s=time.time()) if removed else []:
        state: dict[str, Any] | None = run["state"]
        if run["state"]["name"] == RESTARTING:
            pass  # told so by an automation that was at work when it was removed
        elif datetime.fromisoformat(run["state"]["timestamp"]).timestamp() >= ended_since:
            state = _ENDED
        else:
            state = _due(api_url, run, removed)
        if state:
            _set_state(api_url, run, _NOT_STARTED_AGAIN if state.get("name") == RESTARTING else state)


def faults(api_url: str) -> list[str]:
    """Return what is not as it should be with the automations, a phrase for each.

    Raises:
        ServiceError: if the server does not answer.
    """
    found = {each["name"]: each for each in _found(api_url)}
    told = []
    for new in wanted():
        name = new["name"]
        if name not in found:
            told.append(f"{name!r} is missing")
        elif not _agrees(new, found[name]):
            told.append(f"{name!r} is not as it should be")
        elif not found[name]["enabled"]:
            told.append(f"{name!r} is switched off")
    return told


def _crash_name(starts: int) -> str:
    return f"A run that crashed {_TIMES[starts]} is to be started again"


def _when(starts: int) -> str:
    """Return in which start a run crashed. A start that only waited for another process counts, but is no crash."""
    return f"in start {starts}" if starts else "before it began"


def _automation(name: str, description: str, trigger: dict[str, Any], action: dict[str, Any]) -> dict[str, Any]:
    change = {"type": "change-flow-run-state", **action}
    return {"name": name, "description": description, "tags": [_OURS], "trigger": trigger, "actions": [change]}


def _at_crash(starts: int) -> dict[str, Any]:
    """Return a trigger that fires when a run crashes in its start of this number, and then not again for a year.

    It fires once: a run that crashes again before it could begin stays as it is, or it would be started for ever.
    """
    return _trigger(posture="Reactive", run_count=str(starts), expect=_events("Crashed"), threshold=1, within=_YEAR_S)


def _at_silence(silence_s: float, *, after: tuple[str, ...], signs: tuple[str, ...]) -> dict[str, Any]:
    """Return a trigger that fires when none of the signs has come for so long after one of the first."""
    return _trigger(posture="Proactive", after=_events(*after), expect=_events(*signs), threshold=1, within=silence_s)


def _trigger(run_count: str | None = None, **further: Any) -> dict[str, Any]:
    """Return a trigger that looks at each run of our deployments separately.

    Subflows have no deployment: it is the run around them that is started again.
    """
    starts = {"prefect.run-count": run_count} if run_count else {}
    return {
        "type": "event",
        "match": {"prefect.resource.id": f"{_STATE}*", **starts},
        "match_related": [
            {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"},
            {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{RESUMES}"},
        ],
        "for_each": ["prefect.resource.id"],
        **further,
    }


def _events(*names: str) -> list[str]:
    return [f"{_STATE}{name}" for name in names]


def _found(api_url: str) -> list[dict[str, Any]]:
    """Return the automations of this stack that the server has, oldest first."""
    body = {"sort": "CREATED_DESC", "limit": 200}
    every: list[dict[str, Any]] = prefect_api.call(api_url, "POST", "/automations/filter", body) or []
    names = {each["name"] for each in wanted()}
    return [
        each for each in reversed(every) if _OURS in each["tags"] or (_FORMER in each["tags"] and each["name"] in names)
    ]


def _agrees(new: Any, found: Any) -> bool:
    """Whether the server's answer has all that was sent; it adds ids and defaults, and keeps no order in sets."""
    if isinstance(new, dict):
        return isinstance(found, dict) and all(_agrees(value, found.get(key)) for key, value in new.items())
    if isinstance(new, list):
        if not isinstance(found, list) or len(new) != len(found):
            return False
        if all(isinstance(value, str) for value in new):
            return sorted(new) == sorted(found)
        return all(map(_agrees, new, found))
    return bool(new == found)
