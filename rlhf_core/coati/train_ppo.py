"""`python -m rlhf_core.train_ppo`, also under torchrun: PPO from the command line, with coati's flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlhf_core.coati.script.checks import check_arguments
from rlhf_core.coati.script.flags import build_parser, end_with
from rlhf_core.errors import ConfigError, RlhfError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

_USAGE = 2  # as argparse reports a command line that cannot be run
_INTERRUPTED = 130


def train(args: Namespace) -> None:
    """Run PPO as the flags say, and write the models to `args.save_path`.

    Args:
        args: what `rlhf_core.coati.script.flags.build_parser` parses.

    Raises:
        RlhfError: a flag, file or model is not what it should be, or training cannot go on.
    """
    check_arguments(args)
    from rlhf_core.coati.script.run import run  # noqa: PLC0415  # torch is loaded once the flags are known to be good

    run(args)


def main(arguments: Sequence[str] | None = None, *, allowed_reward_modules: Sequence[str] = ()) -> int:
    """Run one command line and return its exit status: 2 for flags that cannot be run, 1 for a run that failed.

    Args:
        arguments: the command line's words; None takes this process's.
        allowed_reward_modules: what the flag of this name has where it is not given.
    """
    try:
        parser = build_parser()
        parser.set_defaults(allowed_reward_modules=list(allowed_reward_modules))
        args = parser.parse_args(arguments)
        check_arguments(args)
    except ConfigError as error:
        return _fail(f"error: {error}; --help lists the flags", status=_USAGE)
    try:
        train(args)
    except RlhfError as error:
        return _fail(str(error), status=1)
    except KeyboardInterrupt:
        return _fail("interrupted", status=_INTERRUPTED)
    return 0


def _fail(sentence: str, *, status: int) -> int:
    return end_with(sentence, program="train_ppo", status=status)


if __name__ == "__main__":
    sys.exit(main())
