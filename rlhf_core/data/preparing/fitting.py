"""Rows that are too long for their stage, left out and remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.preparing.limits import PAIRS, TooLong, fits, too_long

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.preparing.metering import TokenMeter
    from rlhf_core.data.problems import Problem


class Fitting:
    """Leaves out what is too long, where the configuration says so and lengths can be measured."""

    def __init__(self, config: PipelineConfig, meter: TokenMeter | None) -> None:
        self._config = config
        self._meter = meter if config.data.too_long == "drop" else None
        self.left_out: list[TooLong] = []

    def problems(self, problems: Sequence[Problem], splits: Iterable[str]) -> list[Problem]:
        """Return the problems that keep to the limits of all splits that they may go to: so these stay alike."""
        if self._meter is None:
            return list(problems)
        kept = list(zip(problems, self._meter.problems(problems), strict=True))
        for split in splits:
            self._note(too_long(split, [lengths for _, lengths in kept], self._config, dropped=True))
            kept = [(problem, lengths) for problem, lengths in kept if fits(split, lengths, self._config)]
        return [problem for problem, _ in kept]

    def pairs(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """Return the pairs that the reward model takes."""
        if self._meter is None:
            return list(pairs)
        lengths = self._meter.pairs(pairs)
        self._note(too_long(PAIRS, lengths, self._config, dropped=True))
        return [pair for pair, each in zip(pairs, lengths, strict=True) if fits(PAIRS, each, self._config)]

    def _note(self, found: TooLong | None) -> None:
        if found is not None:
            self.left_out.append(found)
