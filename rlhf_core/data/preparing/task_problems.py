"""As many of a task's problems as the splits take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.preparing.pools import TASK, Pool

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rlhf_core.config import PipelineConfig
    from rlhf_core.data.preparing.fitting import Fitting

MOST_DRAWN = 8
"""Times as many problems as are needed that are drawn, at most, to make up for those that cannot be taken."""


def draw_task(config: PipelineConfig, fitting: Fitting, *, wanted: Mapping[str, int], given: Collection[str]) -> Pool:
    """Return problems of the configuration's task, more than are wanted where some are too long.

    A problem that a given set has is drawn around. The problems come in the order in which they are drawn, so that
    the beginning stays the same where more are wanted.

    Args:
        config: the task, its parameters, and the seed.
        fitting: says which problems are too long; what it notes is not looked at.
        wanted: problems by split.
        given: keys of the prompts that the sets have.

    Raises:
        DataError: if the task or a parameter is unknown or refused.
    """
    from rlhf_core.data.tasks import draw_problems  # noqa: PLC0415  # reasoning-gym takes two seconds to import

    data, total = config.data, sum(wanted.values())
    count = total
    while True:
        drawn = draw_problems(str(data.task), data.task_parameters, seed=config.seed, count=count)
        rows = [problem for problem in drawn if problem.key not in given]
        usable = fitting.problems(rows, wanted)
        if len(usable) >= total or len(drawn) < count or count >= MOST_DRAWN * total:
            parameters = f" with parameters {data.task_parameters}" if data.task_parameters else ""
            around = len(drawn) - len(rows)
            less = f", less {around} that a given set has" if around else ""
            return Pool(TASK, rows, f"{data.task!r}{parameters}{less}")
        count *= 2
