"""`rlhf train-ppo`: PPO without the stack, with coati's flags."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def train_ppo(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Run PPO from the command line with coati's flags; `rlhf train-ppo --help` lists them.

    Args:
        arguments: passed on as they are.
    """
    from infra.settings import settings
    from rlhf_core.coati.train_ppo import main

    return main(arguments, allowed_reward_modules=settings().reward_modules)
