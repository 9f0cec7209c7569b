"""What `train_ppo` says on rank 0 while it runs: a line per episode."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from rlhf_core.counting import counted, ordinal
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.callbacks import Callback
from rlhf_core.types import Experience

Tell = Callable[[str], None]


def teller(ranks: Ranks) -> Tell:
    """Return what writes a line on standard output on rank 0, and nothing on the others."""

    def tell(line: str) -> None:
        if ranks.is_first:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    return tell


class EpisodeLine(Callback):
    """Tells at each episode's end what it collected, over all ranks, and how long it took.

    Args:
        num_episodes: of the run.
        ranks: who collects together.
        tell: takes a line.
    """

    def __init__(self, num_episodes: int, ranks: Ranks, tell: Tell) -> None:
        self._num_episodes = num_episodes
        self._ranks = ranks
        self._tell = tell
        self._started = 0.0
        self._sums = torch.zeros(4)

    def on_episode_start(self, episode: int) -> None:  # noqa: ARG002
        """Begin to count."""
        self._started = time.perf_counter()
        self._sums = torch.zeros(4)

    def on_make_experience_end(self, experience: Experience) -> None:
        """Add one batch: rows, reward, KL and tokens."""
        per_rank = [float(len(experience)), *(float(x.sum()) for x in (experience.reward, experience.kl))]
        sums = torch.tensor([*per_rank, float(experience.action_mask.sum())])
        self._sums += self._ranks.sum(sums)  # here, not at the episode's end, which an error on one rank reaches too

    def on_episode_end(self, episode: int) -> None:
        """Tell the episode's means."""
        rows = self._sums[0].item()
        if not rows:  # an error came before the first batch
            return
        reward, divergence, length = (self._sums[1:] / rows).tolist()
        self._tell(
            f"episode {ordinal(episode)}/{self._num_episodes}: {counted(int(rows), 'sample')}, reward {reward:.4f} (KL "
            f"penalty included), KL {divergence:.4f}, {length:.1f} tokens, {time.perf_counter() - self._started:.1f} s"
        )
