"""Bytes that one rank holds to train one model, by strategy: arithmetic alone, no torch.

    strategy      weights   gradients   master     moments      P parameters, T of them trained, W ranks
    plain, ddp    4 P       4 T         -          8 T
    zero2         w P       w T / W     4 T / W    8 T / W      w: 4 in fp32, 2 in bf16 and fp16
    zero2_cpu     w P       w T / W     4 T / W    8 T / W      master and moments in host memory
    gemini        w P / W   w T / W     4 T / W    8 T / W      no master in fp32, where the weights are exact

Not counted: activations; buffers in which gradients or weights travel, of a bounded size; what fills a tensor or chunk
up to a multiple of W; one number per weight, Adam's count of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.config.strategy import GEMINI, SAME_STRATEGY, StrategyName

if TYPE_CHECKING:
    from rlhf_core.strategy.booster import Precision

_EXACT = 4  # bytes of a float32
_MOMENTS = 8  # Adam's two, in float32


class RankMemory(NamedTuple):
    """Bytes of one rank; what is held throughout a step."""

    weights: int
    gradients: int
    master: int
    """Exact copies of weights that are kept in another precision, or of this rank's part of them."""
    moments: int
    offloaded: bool = False
    """Whether master and moments are in host memory, wherever the rest is."""

    @property
    def device(self) -> int:
        """Return the bytes where the model is trained."""
        return self.weights + self.gradients + (0 if self.offloaded else self.master + self.moments)

    @property
    def host(self) -> int:
        """Return the bytes in host memory besides."""
        return self.master + self.moments if self.offloaded else 0


def bytes_per_rank(
    strategy: StrategyName, *, parameters: int, trained: int, world_size: int = 1, precision: Precision = "fp32"
) -> RankMemory:
    """Return what one rank holds of one model.

    Args:
        strategy: by name; `3d` has no formula yet.
        parameters: of the model, adapters and heads among them; tied ones once.
        trained: of these.
        world_size: ranks that train together.
        precision: of forward passes; under ZeRO and Gemini of the working weights and gradients too.

    Raises:
        ValueError: for `3d`.

    Example:
        >>> bytes_per_rank("zero2", parameters=1000, trained=1000, world_size=4, precision="bf16")
        RankMemory(weights=2000, gradients=500, master=1000, moments=2000, offloaded=False)
    """
    if strategy == "3d":
        raise ValueError("strategy 3d comes in a later release; what its ranks hold is not known yet")
    name = SAME_STRATEGY.get(strategy, strategy)
    if name in {"plain", "ddp"}:
        return RankMemory(_EXACT * parameters, _EXACT * trained, 0, _MOMENTS * trained)
    working = _EXACT if precision == "fp32" else 2
    shard = -(-trained // world_size)
    master = 0 if strategy in GEMINI and precision == "fp32" else _EXACT * shard
    weights = -(-parameters // world_size) if strategy in GEMINI else parameters
    return RankMemory(
        working * weights, working * shard, master, _MOMENTS * shard, offloaded=name == "colossalai_zero2_cpu"
    )
