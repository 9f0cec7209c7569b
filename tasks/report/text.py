"""The report as markdown: for a run's page in Prefect, and for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.escaping import block, picture, prose
from tasks.report.cells import moved_counts, paid_cells
from tasks.report.facts import Facts
from tasks.report.samples import change_counts, change_list
from tasks.report.tables import (
    cells_table,
    conditions_table,
    constant_sentence,
    cost_table,
    difference_list,
    episode_tables,
    evaluation_table,
    finding_list,
    stage_list,
    time_table,
)

EVALUATION, EPISODES, LINEAGE = "evaluation.png", "ppo.png", "lineage.png"
TRAINING = {"sft": "sft.png", "reward-model": "reward-model.png"}
CAPTIONS = {
    EVALUATION: "Held-out scores of the policies, with intervals",
    EPISODES: "PPO by episode",
    LINEAGE: "What the policy came from",
    TRAINING["sft"]: "Supervised fine-tuning by step",
    TRAINING["reward-model"]: "The reward model: training, calibration, scores",
}
LONGEST_REASON = 1500


def report_text(facts: Facts, pictures: Mapping[str, bytes]) -> str:
    """Return the report.

    Args:
        facts: of the run.
        pictures: by file name; those of CAPTIONS that are there get their place.
    """

    def shown(*names: str) -> list[str]:
        return [picture(CAPTIONS[name], name) for name in names if name in pictures]

    differs, moved = facts.differs, facts.moved
    sections = [
        ("Why, and what to do", [finding_list(facts.reasons)]),
        (moved and f"What moved against {moved['against']} ({moved['role']})", [_moved(facts)]),
        ("Conditions of the gate", [conditions_table(facts.decision)]),
        ("Held-out problems, greedy answers", [*shown(EVALUATION), evaluation_table(facts.evaluations)]),
        ("", [constant_sentence(facts.evaluations)]),
        ("Answers before and after PPO", _changes(facts)),
        ("PPO by episode", [*shown(EPISODES), episode_tables(facts.episodes)]),
        ("Rewards by source", [cells_table(paid_cells(facts.paid))]),
        (differs and f"What differs from {differs['against']}", [difference_list(differs) if differs else ""]),
        ("Stages", [stage_list(facts.stages, facts), *shown(*TRAINING.values())]),
        ("What the policy came from", [*shown(LINEAGE), block(facts.lineage)] if facts.lineage else []),
        ("What it cost", [cost_table(facts.costs)]),
        ("Where the time went", [] if facts.compares else [time_table(facts)]),
    ]
    parts = [f"# {facts.name}: {facts.decision.policy} {_outcome(facts)}", *_verdict(facts)]
    for title, body in sections:
        if any(body):
            parts += [f"## {title}" if title else "", *body]
    if facts.page:
        parts.append(f"The run in Prefect: {facts.page}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _outcome(facts: Facts) -> str:
    if facts.compares:
        return f"against {facts.decision.incumbent}"
    if facts.decision.promote:
        return "promoted"
    return "is the champion already" if facts.champion == facts.decision.policy else "not promoted"


def _verdict(facts: Facts) -> list[str]:
    told = [f"{prose(facts.verdict, LONGEST_REASON)}."]
    if facts.compares:
        return told
    reason = prose(facts.decision.reason, LONGEST_REASON)  # a person may have said why something is the champion
    return [*told, f"**{_outcome(facts).capitalize()}.** {reason}. Champion now: {facts.champion or 'none'}."]


def _moved(facts: Facts) -> str:
    if facts.moved is None:
        return ""
    return ", ".join(f"**{count}** {kind}" for kind, count in moved_counts(facts.moved).items()) + "."


def _changes(facts: Facts) -> list[str]:
    if facts.changes is None:
        return []
    more = "More of them, and samples of the last episode: samples.md."
    return [change_counts(facts.changes), change_list(facts.changes), more]
