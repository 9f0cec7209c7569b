"""The tasks that store a run's report, as markdown with pictures and as one page, and put what was made on its page.

Matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from infra.artifacts import ArtifactRef
from rlhf_core.config import PipelineConfig
from rlhf_core.escaping import prose
from tasks.arrivals import day_of_night
from tasks.budget import spent, worked_s
from tasks.context import Context, open_context
from tasks.report.facts import METRICS, SAMPLES, Facts, Row, changes_between, gather, levels, rows_of
from tasks.report.html import page_of_facts
from tasks.report.page import inline, show_markdown, with_pictures
from tasks.report.samples import change_counts, change_list, chosen_samples, samples_document
from tasks.report.tables import constant_sentence, episode_tables, evaluation_table, stage_figures, stage_list
from tasks.report.text import CAPTIONS, EPISODES, EVALUATION, LINEAGE, LONGEST_REASON, TRAINING, report_text
from tasks.results import PLANNED, Decision, StageResult
from tasks.showing import DEADLINE_S, only_shows
from tasks.source import source_digest
from tasks.taken_over import leave_if_taken_over
from tasks.task_errors import stage_task

_WHAT = "a picture"


def report_pictures(facts: Facts) -> dict[str, bytes]:
    """Return the PNGs of a report by file name; one that cannot be drawn is left out."""
    pictures = {EVALUATION: evaluations_picture(facts.evaluations)}
    pictures[EPISODES] = episodes_picture(facts.episodes, compared=levels(facts.evaluations))
    pictures[LINEAGE] = ancestry_picture(facts.ancestry)
    for stage in facts.stages:
        if stage.stage in TRAINING:
            pictures[TRAINING[stage.stage]] = training_picture(stage, facts.training.get(stage.stage, []))
    return {name: png for name, png in pictures.items() if png is not None}


@only_shows(_WHAT)
def evaluations_picture(evaluations: Mapping[str, StageResult]) -> bytes:
    """Return the held-out scores of the policies that were compared, by role."""
    from tasks.pictures.figures import draw_evaluations
    from tasks.pictures.style import png

    return png(draw_evaluations({role: result.metrics for role, result in evaluations.items()}))


@only_shows(_WHAT)
def episodes_picture(rows: Sequence[Row], *, compared: dict[str, Row]) -> bytes:
    """Return the curves of a PPO run."""
    from tasks.pictures.figures import draw_episodes
    from tasks.pictures.style import png

    return png(draw_episodes(rows, evaluations=compared))


@only_shows(_WHAT)
def ancestry_picture(found: Row | None) -> bytes | None:
    """Return what a policy came from, as boxes and arrows; None where that is not known."""
    if found is None:
        return None
    from tasks.pictures.figures import draw_ancestry
    from tasks.pictures.style import png

    return png(draw_ancestry(found))


@only_shows(_WHAT)
def training_picture(stage: StageResult, rows: Sequence[Row]) -> bytes | None:
    """Return the curves of a supervised stage; None for any other, and where nothing was kept to draw."""
    if stage.stage not in TRAINING:
        return None
    from tasks.pictures.figures import draw_reward_model, draw_sft
    from tasks.pictures.style import png

    figure = draw_sft(rows) if stage.stage == "sft" else draw_reward_model(rows, stage.metrics)
    return None if figure is None else png(figure)


REPORT, FACTS, SAMPLES_PAGE, WHOLE_PAGE = "report.md", "report.json", "samples.md", "report.html"
PAGE = "a page in Prefect"
"""What is shown there, as warnings call it."""
MODULES = (
    *("facts", "findings", "costs", "ancestry", "samples"),
    *("cells", "tables", "text", "html", "page", "write"),
)


@stage_task(name="show-episodes")
@only_shows(PAGE, deadline_s=DEADLINE_S)
def show_episodes(policy: StageResult, seed: int) -> None:
    """Put a PPO run on its page: curves and a table of its episodes, and samples of the last one.

    Args:
        policy: what the run made.
        seed: of the random samples.
    """
    context = open_context()
    rows, samples = rows_of(context, policy, METRICS), rows_of(context, policy, SAMPLES)
    _show_curves("ppo-episodes", policy, rows, episodes_picture(rows, compared={}))
    page = samples_document(chosen_samples(samples, seed), None, policy=policy.uri)
    show_markdown("ppo-samples", policy.uri, page, seen_at_once="Best, worst, longest, random")


@stage_task(name="show-training")
@only_shows(PAGE, deadline_s=DEADLINE_S)
def show_training(result: StageResult) -> None:
    """Put the curves of a supervised stage on the page of its run; nothing where an older artifact kept none.

    Args:
        result: of SFT or of the reward model.
    """
    drawn = training_picture(result, rows_of(open_context(), result, METRICS))
    if drawn is not None:
        curves = inline(CAPTIONS[TRAINING[result.stage]], drawn)
        text = f"`{result.uri}`: {stage_figures(result)}."
        show_markdown(f"{result.stage}-training", result.uri, text, seen_at_once=f"Training of {result.uri} {curves}")


@stage_task(name="show-evaluations")
@only_shows(PAGE, deadline_s=DEADLINE_S)
def show_evaluations(evaluations: dict[str, StageResult], seed: int) -> None:
    """Put an evaluation on its page: the policies' scores, and what became of answers from PPO's start to its end.

    Args:
        evaluations: by role.
        seed: of the random answers.
    """
    scores = inline(CAPTIONS[EVALUATION], evaluations_picture(evaluations))
    parts = ["# Held-out problems, greedy answers", evaluation_table(evaluations), constant_sentence(evaluations)]
    changed = changes_between(open_context(), evaluations, seed)
    if changed is not None:
        parts += ["## Answers before and after PPO", change_counts(changed), change_list(changed)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    policy = evaluations["ppo"].metrics["policy"]
    show_markdown("evaluation", evaluations["ppo"].uri, text, seen_at_once=f"Held-out answers of {policy} {scores}")


@stage_task(name="report")
def write_report(
    config: PipelineConfig,
    stages: list[StageResult],
    evaluations: dict[str, StageResult],
    decision: Decision,
    champion: str | None,
    *,
    wall_s: float,
) -> str:
    """Store the run's report and put it on its page; return the reference of the `run` artifact.

    Its figures are stored in any case, as report.json; what is only for reading may be missing, with a warning.

    Args:
        config: the resolved preset.
        stages: in order; the last one is PPO.
        evaluations: by role.
        decision: the gate's.
        champion: after the decision.
        wall_s: seconds of this start of the run; those that all starts have worked count where they are more.
    """
    context = open_context()
    facts = gather(
        context,
        name=config.name,
        seed=config.seed,
        config=config,
        stages=[_of_all_starts(context, each) for each in stages],
        evaluations={role: _of_all_starts(context, each) for role, each in evaluations.items()},
        decision=decision,
        champion=champion,
        wall_s=max(wall_s, worked_s()),
    )
    pictures = report_pictures(facts)
    text = _text(facts, pictures) or f"The text of this report could not be made; its figures are in {FACTS}.\n"
    samples = _samples(facts) or f"The samples could not be written down; what there is of them is in {FACTS}.\n"
    files = {REPORT: text.encode(), SAMPLES_PAGE: samples.encode(), **pictures}
    if (whole := _whole_page(facts)) is not None:
        files[WHOLE_PAGE] = whole.encode()
    reference = _commit(context, config, facts, files)
    _show(reference, facts, pictures, text=text, samples=samples)
    return reference


@stage_task(name="report")
def write_budget_spent(config: PipelineConfig, stages: list[StageResult], told: str, *, wall_s: float) -> str:
    """Store that a budget was spent before PPO, and put that on the page; return the `run` artifact's reference.

    Args:
        config: the resolved preset.
        stages: that there were, in order.
        told: a sentence of it.
        wall_s: seconds of this start of the run; those that all starts have worked count where they are more.
    """
    context = open_context()
    stages = [_of_all_starts(context, each) for each in stages]
    text = f"# {config.name}: no policy\n\n{prose(told, LONGEST_REASON)}\n\n## Stages\n\n{stage_list(stages)}\n"
    leave_if_taken_over()
    reference = context.store.commit(
        "run",
        config.name,
        {
            REPORT: text.encode(),
            FACTS: json.dumps({"told": told, "stages": [stage.model_dump() for stage in stages]}).encode(),
            "config.json": config.model_dump_json(indent=1).encode(),
        },
        key=context.flow_run,
        parents=[ArtifactRef(each.uri, each.digest) for each in stages],
        config=config.model_dump(mode="json"),
        metrics={
            "promoted": False,
            "budget_spent": True,
            "unfinished": True,
            "reason": told,
            "champion": context.store.alias("policy", config.name, "champion"),
            **_spent_and_when(context, config, stages, max(wall_s, worked_s())),
        },
        source_digest=source_digest(*(f"report/{name}" for name in MODULES)),
        flow_run=context.flow_run,
    )
    only_shows(PAGE, deadline_s=DEADLINE_S)(show_markdown)(
        "report", reference.uri, text, seen_at_once=f"No policy: the budget was spent; stored as {reference.uri}"
    )
    return reference.uri


def _of_all_starts(context: Context, result: StageResult) -> StageResult:
    """Return a stage as this run's own work if an earlier start of the run made it, and this one found it."""
    if not result.reused or context.flow_run is None:
        return result
    manifest = context.store.resolve(result.uri)
    if manifest.flow_run != context.flow_run:
        return result
    # the key leads to what was first made under it: what another project made has a copy here, stored by this run
    first = manifest if manifest.key is None else context.store.find(manifest.kind, manifest.key)
    return result.model_copy(update={"reused": first is not None and first.ref != manifest.ref})


def _spent_and_when(
    context: Context, config: PipelineConfig, stages: Sequence[StageResult], wall_s: float
) -> dict[str, Any]:
    """Return the figures that each night's report has: what it spent, by stage too, and the day that it stands for."""
    return {
        **spent(context, config)._asdict(),
        "night": day_of_night(context, config),
        "wall_s": wall_s,
        "seconds": {each.stage: each.seconds for each in stages if not each.reused},
    }


@only_shows("the report's text")
def _text(facts: Facts, pictures: dict[str, bytes]) -> str:
    return report_text(facts, pictures)


@only_shows("the report as one page")
def _whole_page(facts: Facts) -> str:
    return page_of_facts(facts)


@only_shows("the report's samples")
def _samples(facts: Facts) -> str:
    return samples_document(facts.samples, facts.changes, policy=facts.policy.uri)


def _commit(context: Context, config: PipelineConfig, facts: Facts, files: dict[str, bytes]) -> str:
    leave_if_taken_over()
    reference = context.store.commit(
        "run",
        config.name,
        {
            **files,
            FACTS: facts.as_json(),
            METRICS: context.store.read_bytes(context.store.resolve(facts.policy.uri), METRICS),
            "config.json": config.model_dump_json(indent=1).encode(),
        },
        key=context.flow_run,
        parents=[ArtifactRef(each.uri, each.digest) for each in (*facts.stages, *facts.evaluations.values())],
        config=config.model_dump(mode="json"),
        metrics={
            "promoted": facts.decision.promote,
            "difference": facts.decision.difference,
            "unfinished": PLANNED in facts.policy.metrics,
            "reason": facts.decision.reason,
            "champion": facts.champion,
            **_spent_and_when(context, config, facts.stages, facts.wall_s),
        },
        source_digest=source_digest(*(f"report/{name}" for name in MODULES)),
        flow_run=context.flow_run,
    )
    return reference.uri


@only_shows(PAGE, deadline_s=DEADLINE_S)
def _show(reference: str, facts: Facts, pictures: dict[str, bytes], *, text: str, samples: str) -> None:
    """Put the report on the run's page; a picture that is seen at once is not repeated in the body."""
    body = {name: png for name, png in pictures.items() if name not in {EVALUATION, EPISODES}}
    scores = inline(CAPTIONS[EVALUATION], pictures.get(EVALUATION))
    whole = f"All of it on one page, with both answers to each problem: `rlhf page {reference}`\n\n"
    seen = f"Report, stored as {reference} {scores}"
    show_markdown("report", reference, whole + with_pictures(text, body), seen_at_once=seen)
    _show_curves("ppo-curves", facts.policy, facts.episodes, pictures.get(EPISODES))
    show_markdown("samples", reference, samples, seen_at_once="Before and after; best, worst, longest")


def _show_curves(what: str, policy: StageResult, episodes: Sequence[Row], curves: bytes | None) -> None:
    text = f"# PPO by episode\n\n{episode_tables(episodes)}\n\nAll figures: {METRICS} of `{policy.uri}`.\n"
    picture = inline(CAPTIONS[EPISODES], curves)
    show_markdown(what, policy.uri, text, seen_at_once=f"Episodes of {policy.uri} {picture}")
