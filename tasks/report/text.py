"""The whole report as markdown; pictures are files that lie beside it."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.report.facts import Facts
from tasks.report.markdown import block, picture
from tasks.report.samples import change_counts, change_list
from tasks.report.tables import constant_sentence, episode_tables, evaluation_table, stage_list, time_table
from tasks.results import Decision

EVALUATION, EPISODES = "evaluation.png", "ppo.png"
TRAINING = {"sft": "sft.png", "reward-model": "reward-model.png"}
CAPTIONS = {
    EVALUATION: "Held-out scores of the policies, with intervals",
    EPISODES: "PPO by episode",
    TRAINING["sft"]: "Supervised fine-tuning by step",
    TRAINING["reward-model"]: "The reward model: training, calibration, scores",
}


def report_text(facts: Facts, pictures: Mapping[str, bytes]) -> str:
    """Return the report.

    Args:
        facts: of the run.
        pictures: by file name; those of CAPTIONS that are there get their place.
    """

    def shown(*names: str) -> list[str]:
        return [picture(CAPTIONS[name], name) for name in names if name in pictures]

    parts = [f"# {facts.name}: {_verdict(facts.decision)}", _gate(facts)]
    parts += ["## Held-out problems, greedy answers", *shown(EVALUATION), evaluation_table(facts.evaluations)]
    parts.append(constant_sentence(facts.evaluations))
    if facts.changes is not None:
        parts += ["## Answers before and after PPO", change_counts(facts.changes), change_list(facts.changes)]
        parts.append("More of them, and samples of the last episode: samples.md.")
    parts += ["## PPO by episode", *shown(EPISODES), episode_tables(facts.episodes)]
    parts += ["## Stages", stage_list(facts), *shown(*TRAINING.values())]
    if facts.lineage:
        parts += ["## What the policy came from", block(facts.lineage)]
    parts += ["## Where the time went", time_table(facts)]
    if facts.page:
        parts.append(f"The run in Prefect: {facts.page}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(decision: Decision) -> str:
    return f"{decision.policy} promoted" if decision.promote else f"{decision.policy} not promoted"


def _gate(facts: Facts) -> str:
    word = "**Promoted.**" if facts.decision.promote else "**Not promoted.**"
    return f"{word} {facts.decision.reason}. Champion now: {facts.champion or 'none'}."
