"""How several processes train one model together."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from rlhf_core.config.base import Config, Positive
from rlhf_core.config.model import LoRAConfig
from rlhf_core.config.passes import PassConfig
from rlhf_core.strategy.parts import Parts, SequenceMode

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
    state (zero2_cpu keeps them in host memory); gemini shards the weights too; 3d cuts each matrix into tp parts,
    the layers into pp stages and rows into sp parts."""
    num_trainers: Positive = 1
    """Trainer processes. Each has rows of its own, under 3d every tp x pp x sp of them together (tp x pp
    in split_gather): a step learns from as many batches as there are such groups."""
    tp: Positive = 1
    """Parts of each matrix, of strategy 3d."""
    pp: Positive = 1
    """Stages of layers, of strategy 3d."""
    sp: Positive = 1
    """Parts of each row's tokens between attention and attention, of strategy 3d."""
    sp_mode: SequenceMode = "all_to_all"
    """all_to_all: sp x as many trainers hold one model, each attends by its heads; split_gather: the tp trainers that
    have parts of matrices have parts of rows too, and sp is tp."""

    @model_validator(mode="after")
    def _cut_by_3d(self) -> Self:
        parts = self.parts
        if parts.fault:
            raise ValueError(parts.fault)
        if parts.sizes and self.strategy != "3d":
            raise ValueError(
                f"{parts} cuts one model into parts, but the strategy is {self.strategy}; set strategy to 3d, or "
                f"{' and '.join(parts.sizes)} to 1"
            )
        if self.num_trainers % parts.number:
            raise ValueError(
                f"a model in {parts} needs groups of {parts.number}, into which num_trainers {self.num_trainers} "
                f"cannot be cut; choose a multiple of {parts.number}"
            )
        return self

    @property
    def parts(self) -> Parts:
        """Into how many one model is cut."""
        return Parts(self.tp, self.pp, self.sp, self.sp_mode)

    @property
    def dp(self) -> int:
        """Models that are trained side by side, each from rows of its own."""
        return self.num_trainers // self.parts.number

    @property
    def is_alone(self) -> bool:
        """Whether one process trains on its own, which needs no group: it stays in the stage's."""
        return self.num_trainers == 1 and self.strategy == "plain"

    @property
    def figures(self) -> dict[str, int | str]:
        """By how many processes and how a model is trained, for a stage's figures; nothing for one on its own."""
        figures: dict[str, int | str] = {"trainers": self.num_trainers, "strategy": self.strategy}
        figures.update(self.parts.sizes)
        return {} if self.is_alone else figures


class AdapterTrainersConfig(TrainersConfig, PassConfig):
    """Trainers of a model that is trained whole, or through adapters."""

    lora: LoRAConfig | None = None
    """None trains all weights."""

    @model_validator(mode="after")
    def _suits_strategy(self) -> Self:
        stage, strategy = self.STAGE, self.strategy
        if strategy in GEMINI and self.lora is not None:
            raise ValueError(
                f"{stage}.strategy {strategy} shards all weights and trains no adapters; set {stage}.lora to null, or "
                f"{stage}.strategy to zero2, ddp or plain"
            )
        for name in ("compile_layers", "flash_attention"):
            if getattr(self, name) and strategy not in {"plain", "ddp"}:
                raise ValueError(
                    f"{stage}.{name} needs layers that no strategy changes, but {stage}.strategy is {strategy}; set it "
                    f"to plain or ddp, or {stage}.{name} to false"
                )
        return self

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
