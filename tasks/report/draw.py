"""Which pictures a report has, as far as they can be drawn; matplotlib is imported only when one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.report.facts import Facts, Row, levels
from tasks.report.text import EPISODES, EVALUATION, TRAINING
from tasks.results import StageResult
from tasks.showing import only_shows

_WHAT = "a picture"


def report_pictures(facts: Facts) -> dict[str, bytes]:
    """Return the PNGs of a report by file name; one that cannot be drawn is left out."""
    pictures = {EVALUATION: evaluations_picture(facts.evaluations)}
    pictures[EPISODES] = episodes_picture(facts.episodes, compared=levels(facts.evaluations))
    for stage in facts.stages:
        if stage.stage in TRAINING:
            pictures[TRAINING[stage.stage]] = training_picture(stage, facts.training.get(stage.stage, []))
    return {name: png for name, png in pictures.items() if png is not None}


@only_shows(_WHAT)
def evaluations_picture(evaluations: Mapping[str, StageResult]) -> bytes:
    """Return the held-out scores of the policies that were compared, by role."""
    from tasks.pictures.evaluation import draw_evaluations
    from tasks.pictures.style import png

    return png(draw_evaluations({role: result.metrics for role, result in evaluations.items()}))


@only_shows(_WHAT)
def episodes_picture(rows: Sequence[Row], *, compared: dict[str, Row]) -> bytes:
    """Return the curves of a PPO run."""
    from tasks.pictures.episodes import draw_episodes
    from tasks.pictures.style import png

    return png(draw_episodes(rows, evaluations=compared))


@only_shows(_WHAT)
def training_picture(stage: StageResult, rows: Sequence[Row]) -> bytes | None:
    """Return the curves of a supervised stage; None for any other, and where nothing was kept to draw."""
    if stage.stage not in TRAINING:
        return None
    from tasks.pictures.style import png
    from tasks.pictures.training import draw_reward_model, draw_sft

    figure = draw_sft(rows) if stage.stage == "sft" else draw_reward_model(rows, stage.metrics)
    return None if figure is None else png(figure)
