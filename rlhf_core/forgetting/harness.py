"""Tasks of lm-evaluation-harness, where it is installed (`pip install lm-eval`): from YAML of one's own, or its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.forgetting.measures import Measure
from rlhf_core.models.trunk import autocast, device_of, evaluating

if TYPE_CHECKING:
    from rlhf_core.config import ForgettingConfig

PREFIX = "lm_eval:"
PACKAGE = "lm_eval"
_PREFERRED = ("acc", "exact_match", "acc_norm")
"""Measures of a sample, the first that a task has; else its first number."""


def check_task(suite: str, config: ForgettingConfig) -> None:
    """Refuse a task that cannot be run here.

    Raises:
        ConfigError: the package is not installed, or the directory of tasks is not there.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"evaluation.forgetting.suites names {suite!r}, but lm-evaluation-harness is not installed; install "
            "lm-eval, or leave the suite out"
        )
    if config.task_directory is not None and not Path(config.task_directory).is_dir():
        raise ConfigError(
            f"evaluation.forgetting.task_directory is {config.task_directory!r}, but there is no such directory"
        )


def measure_task(suite: str, model: Any, tokenizer: Any, config: ForgettingConfig, *, dtype: torch.dtype) -> Measure:
    """Return what a task says of each of its samples.

    Args:
        suite: `lm_eval:<task>`.
        model: a causal language model; its mode comes out as it was.
        tokenizer: the model's.
        config: where tasks lie, and how many samples are asked.
        dtype: arithmetic of the passes.

    Raises:
        ConfigError: there is no such task.
        RlhfError: the task fails, or its samples have no number.
    """
    from lm_eval import simple_evaluate  # noqa: PLC0415  # optional, and seconds
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    task = suite.removeprefix(PREFIX)
    manager = TaskManager(include_path=config.task_directory)
    if task not in manager.all_tasks:
        raise ConfigError(
            f"lm-evaluation-harness has no task {task!r}; give evaluation.forgetting.task_directory the directory of "
            "its YAML, or choose another task"
        )
    with evaluating(model), torch.no_grad(), autocast(device_of(model), dtype):
        try:
            asked = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
            found = simple_evaluate(
                asked, tasks=[task], task_manager=manager, limit=config.limit, log_samples=True, bootstrap_iters=0
            )
        except Exception as error:
            raise RlhfError(f"the suite {suite} failed: {type(error).__name__}: {error}") from error
    samples = (found or {}).get("samples", {})
    values = {f"{name} {row['doc_id']}": _number(row, suite) for name, rows in samples.items() for row in rows}
    if not values:
        raise RlhfError(f"the suite {suite} has no samples")
    return Measure(suite, values)


def _number(row: dict[str, Any], suite: str) -> float:
    names = [name for name in (*_PREFERRED, *row.get("metrics", ())) if isinstance(row.get(name), int | float)]
    if not names:
        raise RlhfError(f"the suite {suite} says no number of a sample; it has {', '.join(row)}")
    return float(row[names[0]])
