"""The parser of our command lines, and how a command line that fails says why: in one sentence, from one rank."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from typing import NoReturn

from rlhf_core.errors import ConfigError
from rlhf_core.strategy.launch import launched_rank, tell_launcher

# The ranks usually make the same mistake at once: torchrun ends the others before they repeat what rank 0 said. It
# sees that rank 0 has ended some seconds after that spoke, once torch is loaded.
_RANK_0_SPEAKS_FIRST_S = 10.0


class Parser(argparse.ArgumentParser):
    """Raises its complaint, so that who called it says it: under torchrun one rank alone."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message)


def end_with(sentence: str, *, program: str, status: int) -> int:
    """Say why a command line failed, and return its exit status; torchrun is told too, and repeats it last.

    Args:
        sentence: for the person who can mend it.
        program: the command's name.
        status: above 0.
    """
    rank = launched_rank()
    if rank:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C ends the wait, not the sentence
            time.sleep(_RANK_0_SPEAKS_FIRST_S)
        sentence = f"rank {rank}: {sentence}"
    told = f"{program}: {sentence}"
    sys.stderr.write(f"{told}\n")
    tell_launcher(told)
    return status
