"""Which answers a person is shown: the extremes of PPO's last episode, and what changed on held-out problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rlhf_core.counting import counted
from rlhf_core.escaping import SHOWN_LENGTH, code
from rlhf_core.rewards.abstaining import told_of

SHOWN_RANDOM, SHOWN_CHANGES, SHOWN_IN_REPORT = 3, 4, 3
GAINED, LOST, BOTH_RIGHT, BOTH_WRONG = "wrong → right", "right → wrong", "both right", "both wrong"
ROSE, FELL, SAME = "score rose", "score fell", "score unchanged"
_KINDS = ((GAINED, LOST, BOTH_RIGHT, BOTH_WRONG), (ROSE, FELL, SAME))


def chosen_samples(samples: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the best, worst, longest and some random samples, each once, with why it was chosen.

    Args:
        samples: of one episode.
        seed: of the random ones.
    """
    if not samples:
        return []
    places = range(len(samples))
    judged = [at for at in places if not samples[at].get("abstains")] or places
    why: dict[int, list[str]] = {}
    why.setdefault(max(judged, key=lambda at: samples[at]["score"]), []).append("best")
    why.setdefault(min(judged, key=lambda at: samples[at]["score"]), []).append("worst")
    why.setdefault(max(places, key=lambda at: samples[at]["length"]), []).append("longest")
    rest = [at for at in places if at not in why]
    for at in Random(seed).sample(rest, min(SHOWN_RANDOM, len(rest))):
        why[at] = ["random"]
    return [{"why": ", ".join(names), **samples[at]} for at, names in why.items()]


def moved(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], *, by_model: bool
) -> list[dict[str, Any]]:
    """Return what became of the answer to each problem that both policies were judged on.

    Args:
        before: outcomes of one policy.
        after: outcomes of the other.
        by_model: a reward model scored the answers, so that none is simply right.

    Returns:
        Rows with the `kind` of change and both outcomes, `before` and `after`.
    """
    later = {row["key"]: row for row in after}
    return [
        {"kind": _kind(row, later[row["key"]], by_model=by_model), "before": row, "after": later[row["key"]]}
        for row in before
        if row["key"] in later and not (row.get("failure") or later[row["key"]].get("failure"))
    ]


def counts_of(rows: Sequence[Mapping[str, Any]], *, by_model: bool) -> dict[str, int]:
    """Return how many rows of `moved` there are of each kind."""
    counts = Counter(row["kind"] for row in rows)
    return {kind: counts[kind] for kind in _KINDS[by_model]}


def changes(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], *, by_model: bool, seed: int
) -> dict[str, Any]:
    """Return how the answers to the same problems changed: counts of each kind, and rows to show.

    Args:
        before: outcomes of the policy that PPO started from.
        after: outcomes of PPO's policy.
        by_model: a reward model scored the answers, so that none is simply right.
        seed: of the random rows.
    """
    rows = moved(before, after, by_model=by_model)
    up, down = _KINDS[by_model][:2]
    shown = [row for kind in (up, down) for row in [row for row in rows if row["kind"] == kind][:SHOWN_CHANGES]]
    rest = [row for row in rows if not any(row is each for each in shown)]
    drawn = Random(seed).sample(rest, min(SHOWN_CHANGES, len(rest)))
    shown += [{**row, "kind": f"random: {row['kind']}"} for row in drawn]
    rows_shown = [_as_shown(row, by_model=by_model) for row in shown]
    return {"counts": counts_of(rows, by_model=by_model), "shown": rows_shown}


def samples_document(
    chosen: Sequence[Mapping[str, Any]] | None, changed: Mapping[str, Any] | None, *, policy: str
) -> str:
    """Return the page of samples.

    Args:
        chosen: what `chosen_samples` returned; None if that failed.
        changed: what `changes` returned; None before evaluation.
        policy: reference of the policy that they are of.
    """
    parts = [f"# Answers of {policy}"]
    if changed is not None:
        parts += ["## Held-out problems, greedy answers, before and after PPO", change_counts(changed)]
        parts.append(_change_list(changed["shown"]))
    why_none = "No samples were kept." if chosen is not None else "They could not be chosen."
    parts += ["## PPO's last episode, sampled", _sample_list(chosen) if chosen else why_none]
    parts.append(f"Of texts longer than {SHOWN_LENGTH} characters, beginning and end are shown; ⏎ is a new line.")
    parts.append(f"All of them: samples.jsonl of `{policy}`, and outcomes.jsonl of each evaluation.")
    return "\n\n".join(parts) + "\n"


def change_counts(changed: Mapping[str, Any]) -> str:
    """Return the counts of `changes` as one line."""
    return ", ".join(f"**{count}** {kind}" for kind, count in changed["counts"].items()) + "."


def change_list(changed: Mapping[str, Any]) -> str:
    """Return the first rows of `changes`."""
    return _change_list(changed["shown"][:SHOWN_IN_REPORT])


def _kind(before: Mapping[str, Any], after: Mapping[str, Any], *, by_model: bool) -> str:
    if by_model:
        gain = after["score"] - before["score"]
        return ROSE if gain > 0 else FELL if gain < 0 else SAME
    if before["correct"] != after["correct"]:
        return GAINED if after["correct"] else LOST
    return BOTH_RIGHT if after["correct"] else BOTH_WRONG


def _as_shown(row: Mapping[str, Any], *, by_model: bool) -> dict[str, str]:
    before, after = row["before"], row["after"]
    scores = f", {before['score']:.2f} to {after['score']:.2f}" if by_model else ""
    return {
        "kind": row["kind"] + scores,
        "prompt": before["prompt"].strip(),
        "answer": before.get("answer") or "",
        "before": before["response"],
        "after": after["response"],
    }


def _change_list(shown: Sequence[Mapping[str, str]]) -> str:
    """Return rows of `changes` as lists: a table would cut long answers off, on a page and in the terminal."""
    return "\n\n".join(
        _told(
            f"{row['kind']}: {code(row['prompt'])}"
            + (f", to be answered {code(row['answer'])}" if row["answer"] else ""),
            {"before": code(row["before"]), "after": code(row["after"])},
        )
        for row in shown
    )


def _sample_list(chosen: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(
        _told(
            f"{sample['why']}: {_score(sample)}, KL {sample['kl']:z.3f} nats, {counted(sample['length'], 'token')}",
            {
                "problem": code(sample["prompt"].strip()),
                "right answer": code(sample["answer"]) if sample.get("answer") else "",
                "response": code(sample["response"]),
                "not judged": _failures(sample),
            },
        )
        for sample in chosen
    )


def _score(sample: Mapping[str, Any]) -> str:
    return "abstains" if sample.get("abstains") else f"score {sample['score']:.3f}"


def _failures(sample: Mapping[str, Any]) -> str:
    """Return who failed at a sample, and why; those of earlier releases do not tell."""
    failed = sample.get("failures") or {}
    return code("; ".join(f"{who}: {told_of(why)}" for who, why in failed.items())) if failed else ""


def _told(what: str, texts: Mapping[str, str]) -> str:
    return "\n".join([what, "", *(f"* {name}: {text}" for name, text in texts.items() if text)])
