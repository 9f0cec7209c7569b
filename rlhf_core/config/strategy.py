"""How several processes train one model together."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from rlhf_core.config.base import Config, Positive
from rlhf_core.config.model import LoRAConfig

StrategyName = Literal[
    "plain",
    "ddp",
    "colossalai_zero2",
    "colossalai_zero2_cpu",
    "zero2",
    "zero2_cpu",
    "colossalai_gemini",
    "gemini",
    "gemini_auto",
    "3d",
]
"""coati's names: of its Strategy classes and of the flag --plugin."""

SAME_STRATEGY = {"zero2": "colossalai_zero2", "zero2_cpu": "colossalai_zero2_cpu", "gemini": "colossalai_gemini"}
"""Two names of one thing: the flag's, and that of the class."""
GEMINI = frozenset({"colossalai_gemini", "gemini", "gemini_auto"})


class TrainersConfig(Config):
    """The processes that train one model together."""

    strategy: StrategyName = "plain"
    """How the trainers share the model: plain and ddp hold all of it on each; zero2 shards gradients and optimizer
    state (zero2_cpu keeps them in host memory); gemini shards the weights too; 3d cuts each matrix into tp parts."""
    num_trainers: Positive = 1
    """Trainer processes. Each has rows of its own, under 3d every tp of them together: a step learns from num_trainers
    / tp batches."""
    tp: Positive = 1
    """Trainers that hold one model together, of strategy 3d."""

    @model_validator(mode="after")
    def _cut_by_3d(self) -> Self:
        if self.tp > 1 and self.strategy != "3d":
            raise ValueError(
                f"tp is {self.tp}, which cuts one model into parts, but the strategy is {self.strategy}; set strategy "
                "to 3d, or tp to 1"
            )
        if self.num_trainers % self.tp:
            raise ValueError(
                f"tp is {self.tp}, but num_trainers {self.num_trainers} cannot be cut into groups of {self.tp} that "
                f"hold a model each; choose a multiple of {self.tp}"
            )
        return self

    @property
    def dp(self) -> int:
        """Models that are trained side by side, each from rows of its own."""
        return self.num_trainers // self.tp

    @property
    def is_alone(self) -> bool:
        """Whether one process trains on its own, which needs no group: it stays in the stage's."""
        return self.num_trainers == 1 and self.strategy == "plain"

    @property
    def figures(self) -> dict[str, int | str]:
        """By how many processes and how a model is trained, for a stage's figures; nothing for one on its own."""
        parts = {"tp": self.tp} if self.tp > 1 else {}
        return {} if self.is_alone else {"trainers": self.num_trainers, "strategy": self.strategy, **parts}


class AdapterTrainersConfig(TrainersConfig):
    """Trainers of a model that is trained whole, or through adapters."""

    lora: LoRAConfig | None = None
    """None trains all weights."""

    @property
    def shares_base(self) -> bool:
        """Whether what is trained are adapters over a frozen base that no process changes, and that others map too."""
        return self.not_shared is None

    @property
    def not_shared(self) -> str | None:
        """What keeps processes from sharing a base, in words; None if nothing does."""
        if self.lora is None:
            return "all weights are trained"
        if not self.lora.keeps_base:
            return f"lora.init {self.lora.init} with lora.bias {self.lora.bias} changes what is below the adapters"
        return None if self.strategy in {"plain", "ddp", "3d"} else f"strategy {self.strategy} lays out weights itself"


def refuse_sharded_adapters(stage: str, strategy: str, adapters: object) -> None:
    """Check that adapters are not asked of a strategy that shards the weights they adapt.

    Raises:
        ValueError: if they are.
    """
    if strategy in GEMINI and adapters is not None:
        raise ValueError(
            f"{stage}.strategy {strategy} shards all weights and trains no adapters; set {stage}.lora to null, or "
            f"{stage}.strategy to zero2, ddp or plain"
        )
