"""The parser of our command lines: one whose complaints are errors of ours, told as all others are."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rlhf_core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises its complaint, so that who called it says it: under torchrun one rank alone."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message)
