"""The report's tables and lists in markdown.

No table is wider than a run's page in Prefect, 700 pixels, which breaks no line in a cell. A figure that an artifact
does not have leaves its cell empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_core.counting import counted, ordinal
from rlhf_core.escaping import code, prose, table
from rlhf_core.functional.curves import Fall
from rlhf_core.ppo.best import DEVELOPMENT, best_episode
from rlhf_core.ppo.former_names import current_names
from tasks.progress import duration
from tasks.report.cells import (
    BROKEN,
    HACK,
    Cells,
    change_cells,
    condition_cells,
    cost_cells,
    episodes_told,
    evaluation_cells,
    number,
    with_interval,
)
from tasks.report.facts import Facts, judged_by_model
from tasks.report.findings import Finding
from tasks.results import Decision, StageResult

Metrics = Mapping[str, Any]
EPISODE_TABLES = (
    {DEVELOPMENT: "development split", f"{DEVELOPMENT}_well_formed": "well formed there"},
    {
        "score": "score",
        "verifier": "verifier's score",
        "accuracy_given_form": "right, given the form",
        "well_formed": "well formed",
        "abstained": "abstained",
    },
    {"kl": "KL, nats", "length": "tokens", "entropy": "entropy, nats per token", "clip_fraction": "clipped"},
    {
        "explained_variance": "explained variance",
        "reward_share_reward_model": "reward model's share of variance",
    },
    {
        "staleness": "versions old",
        "queue_depth": "samples ready",
        "idle_trainer": "trainer idle",
        "idle_makers": "makers idle",
    },
)
"""Headings by name in an episode's row, a table each."""
JUDGED = {"verifier", "accuracy_given_form", "well_formed"}
"""The columns that come from a verifier."""
OVERLAP = {"staleness", "queue_depth", "idle_trainer", "idle_makers"}
"""The columns that say little where trainer and makers work in turns."""
MOST_EPISODES = 30
"""Rows of a table that is still read."""
_LONGEST_CONSTANT = 40


def stage_list(stages: Sequence[StageResult], facts: Facts | None = None) -> str:
    """Return what each stage made, with its figures; a list, for some pages break no lines in a table.

    Args:
        stages: in order.
        facts: of the whole run; None of one that made no policy.
    """
    return "\n".join(
        f"* **{stage.stage}**: {stage_figures(stage, facts)} ({stage.uri}, {origin(stage)})" for stage in stages
    )


def stage_figures(stage: StageResult, facts: Facts | None = None) -> str:
    """Return a stage's figures in a few words.

    Args:
        stage: any.
        facts: of the whole run, which knows more of SFT and PPO than their own artifacts; None for a stage alone.
    """
    metrics = stage.metrics
    if stage.stage == "sft":
        sft = facts.evaluations.get("sft") if facts else None
        return _joined(_sft_figures(metrics, sft.metrics if sft else {}))
    if stage.stage == "reward-model":
        return _joined(_reward_model_figures(metrics))
    if stage.stage == "ppo":
        return _joined(_ppo_figures(metrics, facts.episodes if facts else ()))
    if stage.stage == "preferences" and "accuracy" in metrics:
        pairs, samples = counted(metrics["pairs"], "pair"), counted(metrics["samples"], "sample")
        return f"{pairs} of {samples}, {metrics['accuracy']:.2f} of them right"
    counts = {name.removeprefix("problems_"): value for name, value in metrics.items() if type(value) is int}
    return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items())


def cells_table(cells: Cells) -> str:
    """Return a table of plain cells; empty without rows."""
    if not cells.rows:
        return ""
    rows = [[f"**{each}**" if each in {BROKEN, HACK} else prose(each) for each in row] for row in cells.rows]
    return table(cells.header, rows)


def conditions_table(decision: Decision) -> str:
    """Return what came of each of the gate's conditions, and below them what the figures are; empty without any.

    A condition is often named for what was measured, such as a user's own suite.
    """
    figures = "\n".join(f"* {prose(each.name)}: {prose(each.told)}" for each in decision.conditions)
    return "\n\n".join(part for part in (cells_table(condition_cells(decision)), figures) if part)


def evaluation_table(evaluations: dict[str, StageResult]) -> str:
    """Return the held-out figures of each policy, by role, and below them which policy has the role."""
    cells = evaluation_cells(evaluations, by_model=judged_by_model(evaluations))
    policies = ", ".join(
        f"{role} is {prose(str(result.metrics['policy']))}"
        for role, result in evaluations.items()
        if "policy" in result.metrics
    )
    # intervals in brackets are no links here: nothing follows them
    return table(cells.header, cells.rows) + (f"\n\nOf these, {policies}." if policies else "")


def cost_table(costs: Sequence[Metrics]) -> str:
    """Return what each stage cost."""
    return cells_table(cost_cells(costs))


def finding_list(found: Sequence[Finding]) -> str:
    """Return why little was learnt and what to do, a line each."""
    return "\n".join(f"* **{prose(each.cause)}**: {prose(each.told)}. *To do*: {prose(each.advice)}." for each in found)


def difference_list(differs: Metrics) -> str:
    """Return what is different from another run, in lists, for values may be long."""
    parts = []
    for title in ("config", "data", "code", "seconds"):
        rows = change_cells(differs[title])
        lines = [f"* {code(name)}: {code(before)} → {code(after)}" for name, before, after in rows]
        parts.append("\n".join([f"**{title}**" + ("" if lines else ": the same"), *([""] if lines else []), *lines]))
    return "\n\n".join(parts)


def constant_sentence(evaluations: dict[str, StageResult]) -> str:
    """Return which answer the best constant one is; nothing where it is not known."""
    for result in evaluations.values():
        answer, score = result.metrics.get("constant_answer"), number(result.metrics, "constant_accuracy")
        if score and answer is not None:
            return f"Always answering {code(str(answer), _LONGEST_CONSTANT)} would be right {score} of the time."
    return ""


def episode_tables(episodes: Sequence[Metrics]) -> str:
    """Return the figures of each episode; of many, of the first, the last and evenly spaced ones between."""
    unknown = set() if any("raw/verifier" in row for row in episodes) else JUDGED  # 0 where no verifier judged
    if not any(row.get("staleness") for row in episodes):
        unknown = unknown | OVERLAP
    if not any(row.get("abstained") for row in episodes):
        unknown = unknown | {"abstained"}
    shown, parts = _evenly(episodes), []
    best = best_episode(episodes)
    kept = None if best is None else episodes[best]
    for columns in EPISODE_TABLES:
        known = {
            name: each
            for name, each in columns.items()
            if name not in unknown and any(number(row, name) for row in shown)
        }
        rows = [[_named(row, is_kept=row is kept), *(number(row, name) for name in known)] for row in shown]
        if known:
            parts.append(table(["episode", *known.values()], rows))
    if failed := _failed_calls(episodes):
        parts.append(f"Calls of judges that failed: {failed}.")
    if left_out := len(episodes) - len(shown):
        parts.append(f"Left out here: {counted(left_out, 'episode')}; metrics.jsonl has all of them.")
    return "\n\n".join(parts)


def _failed_calls(episodes: Sequence[Metrics]) -> str:
    """Return how often which source of reward failed, and how, in all episodes together."""
    found: Counter[str] = Counter()
    for row in episodes:
        found.update({name: round(value) for name, value in row.items() if name.startswith("failed/")})
    named = ((name.removeprefix("failed/").rpartition("/"), count) for name, count in found.most_common())
    return ", ".join(f"{prose(source)} {prose(kind.replace('_', ' '))} {count}" for (source, _, kind), count in named)


def _named(row: Metrics, *, is_kept: bool) -> str:
    return f"{ordinal(row['episode'])}{' (kept)' if is_kept else ''}"


def time_table(facts: Facts) -> str:
    """Return where the run's time went."""
    rows = [[stage.stage, duration(stage.seconds), origin(stage)] for stage in facts.stages]
    rows += [
        [f"evaluate {role}", duration(result.seconds), origin(result)] for role, result in facts.evaluations.items()
    ]
    prefix = "seconds_"
    rows += [
        [f"of ppo: {prose(name.removeprefix(prefix))}", duration(value), ""]
        for name, value in facts.policy.metrics.items()
        if name.startswith(prefix)
    ]
    worked = [each for each in (*facts.stages, *facts.evaluations.values()) if not each.reused]
    rest = max(0.0, facts.wall_s - sum(each.seconds for each in worked))
    rows += [["starting processes, storing, waiting", duration(rest), ""]]
    rows += [["**this run**", f"**{duration(facts.wall_s)}**", ""]]
    return table(["", "time", ""], rows)


def origin(result: StageResult) -> str:
    """Return whether this run made it."""
    return "from the store" if result.reused else "made now"


def _evenly(episodes: Sequence[Metrics]) -> Sequence[Metrics]:
    if len(episodes) <= MOST_EPISODES:
        return episodes
    return [episodes[round(at * (len(episodes) - 1) / (MOST_EPISODES - 1))] for at in range(MOST_EPISODES)]


def _sft_figures(metrics: Metrics, evaluation: Metrics) -> list[str]:
    falls = number(metrics, "first_loss", "loss {:.3f}") + number(metrics, "last_loss", " to {:.3f}")
    return [
        falls + (f" in {counted(metrics['steps'], 'step')}" if "steps" in metrics else ""),
        number(metrics, "heldout_loss", "{:.3f} held out"),
        _flatness(metrics),
        number(evaluation, "well_formed", "{:.3f} of held-out answers well formed") if "accuracy" in evaluation else "",
        _trainers(metrics),
    ]


def _flatness(metrics: Metrics) -> str:
    if "flatness" not in metrics:
        return ""
    fall = Fall(metrics["flatness"], metrics["flatness_error"])
    return f"{fall.word} ({-fall.relative:+.1%} over the last quarter of the steps, standard error {fall.error:.1%})"


def _reward_model_figures(metrics: Metrics) -> list[str]:
    asked = f" of {counted(metrics['heldout_pairs'], 'held-out pair')}" if "heldout_pairs" in metrics else ""
    figures = [f"{with_interval(metrics, 'accuracy')} right{asked}"]
    if "well_formed_accuracy" in metrics:
        share = with_interval(metrics, "well_formed_accuracy", prefix="well_formed_")
        figures.append(f"{share} of the {metrics.get('well_formed_pairs')} both well formed")
    return [*figures, number(metrics, "training_accuracy", "{:.3f} of its last training pairs"), _trainers(metrics)]


def _ppo_figures(metrics: Metrics, episodes: Sequence[Metrics]) -> list[str]:
    shares = [row["reward_share_reward_model"] for row in episodes if "reward_share_reward_model" in row]
    metrics = current_names(metrics)
    what = "verifier" if metrics.get("first_raw/verifier") is not None else "score"
    return [
        number(metrics, f"first_{what}", what + " {:.3f}") + number(metrics, f"last_{what}", " to {:.3f}"),
        number(metrics, "last_kl", "KL {:z.3f} nats"),
        prose(episodes_told(metrics)),
        f"{fmean(shares):.1%} of the reward's variance from the reward model" if shares else "",
        _trainers(metrics),
    ]


def _trainers(metrics: Metrics) -> str:
    """Return how many processes trained, and by which strategy; nothing for one on its own."""
    if "trainers" not in metrics:
        return ""
    return f"{counted(metrics['trainers'], 'trainer')} under {prose(str(metrics['strategy']))}"


def _joined(figures: Sequence[str]) -> str:
    return ", ".join(figure for figure in figures if figure)
