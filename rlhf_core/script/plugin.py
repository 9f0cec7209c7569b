"""Which plugin a run of `train_ppo` has, and in which arithmetic: decided once it is known whether there are GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlhf_core.errors import ConfigError
from rlhf_core.strategy.making import check_strategy

if TYPE_CHECKING:
    from argparse import Namespace

    from rlhf_core.config.strategy import StrategyName

Precision = Literal["fp16", "bf16"]


class Plugin(NamedTuple):
    """How the ranks of a run share their models."""

    strategy: StrategyName
    precision: Precision


def choose_plugin(args: Namespace, *, cuda: bool, num_ranks: int, tell: Callable[[str], None]) -> Plugin:
    """Return what the flags name; without --plugin the original's default, gemini, where it can be had and is of use.

    Args:
        args: the flags, checked.
        cuda: whether there are GPUs.
        num_ranks: processes that train together.
        tell: is told in one line what is not as the flags, or the original's defaults, say.

    Raises:
        ConfigError: if the plugin cannot be had here.
    """
    precision: Precision = "fp16" if args.mixed_precision == "fp16" else "bf16"
    if precision == "fp16" and not cuda:
        tell("--mixed_precision fp16 runs as bf16 on a CPU")
        precision = "bf16"
    strategy: StrategyName = args.plugin or "gemini"
    if args.plugin is None and not cuda:
        strategy = "plain"
        tell("--plugin plain: gemini, the default, is for GPUs; here every rank holds whole models")
    elif args.plugin is None and args.lora_config:
        strategy = "zero2"
        tell("--plugin zero2: gemini, the default, trains no adapters")
    try:
        check_strategy(
            strategy,
            precision=precision,
            cuda=cuda,
            num_trainers=num_ranks,
            adapters=args.lora_config is not None,
            accumulates=args.accumulation_steps > 1,
        )
    except ConfigError as error:
        raise ConfigError(f"--plugin {strategy} cannot be had: {error}") from error
    return Plugin(strategy, precision)
