"""The experience maker as a detached Ray actor: a shell around `ExperienceMaker`, no arithmetic of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from numpy.typing import NDArray
from torch import nn

from rlhf_core.detached.chunks import Chunk
from rlhf_core.detached.weights import WeightsManifest, replace_weights, unpack
from rlhf_core.errors import RlhfError
from rlhf_core.experience_maker.maker import ExperienceMaker, to_prompts
from rlhf_core.types import EpisodeControls, Sample


class StaleWeightsError(RlhfError):
    """A maker was asked for experience of a policy version that it does not hold."""


@dataclass(frozen=True, slots=True)
class MadeChunk:
    """What comes back for one chunk."""

    index: int
    maker: str
    experience: dict[str, NDArray[Any]]
    """`Experience.to_numpy`: plain arrays cross processes without pickling tensors."""
    samples: list[Sample]
    seconds: dict[str, float]
    """Time by phase: generate, score."""


@ray.remote(concurrency_groups={"status": 1, "compute": 1})
class ExperienceMakerHolder:
    """Holds actor, critic, reward model and initial model of one version, and makes experience with them.

    Args:
        name: this actor's name, for messages.
        maker_fn: builds the maker inside this process, with the weights of version 0.
    """

    def __init__(self, name: str, maker_fn: Callable[[], ExperienceMaker]) -> None:
        self._name = name
        self._maker_fn = maker_fn
        self._maker: ExperienceMaker
        self._version = 0

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def build(self) -> None:
        """Build the maker, with the weights of version 0; apart from `__init__`, whose errors Ray garbles."""
        self._maker = self._maker_fn()

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return this process's id: the actor lives and answers."""
        return os.getpid()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def load_weights(self, manifest: WeightsManifest, buckets: Sequence[Any], timeout_s: float) -> int:
        """Take a published version, all of it or (on damage) nothing; return the version held.

        Runs in the same group as `make_chunk`, so weights are never swapped in the middle of a chunk.

        Args:
            manifest: names, shapes and checksums.
            buckets: references of the buckets, inside a list so that Ray leaves fetching to us.
            timeout_s: longest wait for the buckets.
        """
        tensors = unpack(manifest, ray.get(list(buckets), timeout=timeout_s))
        models: dict[str, nn.Module] = {"actor": self._maker.actor}
        if self._maker.critic is not None:
            models["critic"] = self._maker.critic
        replace_weights(models, tensors)
        self._version = manifest.version
        return self._version

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def make_chunk(self, chunk: Chunk, version: int, controls: EpisodeControls) -> MadeChunk:
        """Generate and score one chunk with the weights of `version`.

        Args:
            chunk: what is to be made.
            version: of the policy.
            controls: the episode's KL coefficient and scale of scores, which the trainer keeps.

        Raises:
            StaleWeightsError: another version is held.
        """
        if version != self._version:
            raise StaleWeightsError(
                f"{self._name} holds policy version {self._version}, but version {version} was asked for"
            )
        started = time.perf_counter()
        experience, samples = self._maker.make_experience(
            to_prompts(chunk.problems, self._maker.template),
            chunk.samples,
            episode=chunk.episode,
            policy_version=version,
            controls=controls,
        )
        seconds = {"generate": self._maker.generate_seconds}
        seconds["score"] = time.perf_counter() - started - seconds["generate"]
        return MadeChunk(chunk.index, self._name, experience.to_numpy(), samples, seconds)
