"""An experience maker as an actor: a shell around `ExperienceMaker`, no arithmetic of its own."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from torch import nn

from rlhf_core.errors import RlhfError
from rlhf_core.freed_memory import give_back
from rlhf_core.models.base import check_bases
from rlhf_core.models.base_on_gpu import Loan, borrowing
from rlhf_core.phases import reached
from rlhf_core.rollout.experience import ExperienceMaker, to_prompts
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.types import EpisodeControls, Experience, Prompt
from rlhf_core.weights import Publication, Subscriber

logger = logging.getLogger(__name__)
GROUPS = {"status": 1, "compute": 1}
"""Ray's threads for a maker's methods: it answers while it works, and never takes weights in mid-chunk."""


class StaleWeightsError(RlhfError):
    """A maker was asked for experience of a policy version that it does not hold."""


class MakerActor:
    """Holds actor, critic, reward model and initial model of one version, and makes experience with them.

    A process that was started again is built anew, and holds no weights until it is given some.

    Args:
        name: this actor's name, for messages.
        maker_fn: builds the maker inside this process.
    """

    def __init__(self, name: str, maker_fn: Callable[[], ExperienceMaker]) -> None:
        self._name = name
        self._maker_fn = maker_fn
        self._built: ExperienceMaker | None = None
        self._version: int | None = None
        self._subscriber = Subscriber(self._models)
        logger.info("process %d begins", os.getpid())

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return this process's id: the actor lives and answers."""
        return os.getpid()

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def node(self) -> tuple[str, str]:
        """Return the id and the address of the machine that this process is on."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def build(self, loans: Sequence[Loan] = ()) -> None:
        """Build the maker, unless it is built; apart from `__init__`, whose errors Ray garbles.

        Args:
            loans: of bases that the trainer has on this GPU.
        """
        if self._built is None:
            with borrowing(loans):
                self._built = self._maker_fn()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def load_weights(self, publication: Publication, timeout_s: float) -> int:
        """Take a published version, all of it or (on damage) nothing; return the version held.

        Args:
            publication: what to take.
            timeout_s: longest wait for its buckets.
        """
        try:
            return self._subscriber.take(publication, timeout_s)
        finally:
            self._version = self._subscriber.version  # none, if it failed in the midst of replacing them

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def make_chunk(self, unit: Any, version: int, controls: EpisodeControls | None) -> MadeChunk:
        """Generate and score one chunk with the weights of `version`.

        Args:
            unit: what is to be made: a `Chunk`, or what `_prompts` of a subclass reads.
            version: of the policy.
            controls: the episode's KL coefficient and scale of scores, which the trainer keeps; None takes the maker's.

        Raises:
            StaleWeightsError: another version is held, or none.
        """
        maker = self._maker
        if version != self._version:
            held = "no weights" if self._version is None else f"policy version {self._version}"
            raise StaleWeightsError(f"{self._name} holds {held}, but version {version} was asked for")
        check_bases(maker.actor, maker.critic)
        self._before_making()
        started = time.perf_counter()
        prompts, samples = self._prompts(unit)
        experience, made = maker.make_experience(
            prompts, samples, episode=unit.episode, policy_version=version, controls=controls
        )
        seconds = {"generate": maker.generate_seconds}
        seconds["score"] = time.perf_counter() - started - seconds["generate"]
        give_back()
        self._after_making(experience)
        self._before_sending()
        reached("send")
        chunk = MadeChunk(unit.index, self._name, experience.to_numpy(), made, seconds, unit.episode, version)
        self._after_sending()
        return chunk

    def _models(self) -> dict[str, nn.Module]:
        """Return the models that weights are published for."""
        maker = self._maker
        return {"actor": maker.actor} | ({} if maker.critic is None else {"critic": maker.critic})

    def _prompts(self, unit: Any) -> tuple[Sequence[Prompt], Sequence[int]]:
        """Return the prompts of a unit, and the number of each sample among those of its prompt."""
        return to_prompts(unit.problems, self._maker.template), unit.samples

    def _before_making(self) -> None: ...

    def _after_making(self, experience: Experience) -> None: ...

    def _before_sending(self) -> None: ...

    def _after_sending(self) -> None: ...

    @property
    def _maker(self) -> ExperienceMaker:
        if self._built is None:
            raise StaleWeightsError(f"{self._name} was started again, and has built no models; build it")
        return self._built
