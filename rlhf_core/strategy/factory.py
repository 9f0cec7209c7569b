"""Makes a booster by the name of its strategy; refuses in one sentence what a strategy cannot do. Imports no torch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, get_args

from rlhf_core.config.strategy import GEMINI, SAME_STRATEGY, StrategyName
from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError
from rlhf_core.strategy.launch import launched_ranks
from rlhf_core.strategy.parts import WHOLE, Parts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlhf_core.strategy.booster import OwnBooster, Precision
    from rlhf_core.strategy.ranks import Ranks

INSTALL = "pip install --no-deps --no-build-isolation colossalai==0.5.0"
"""It asks for releases of torch and transformers that are years old: nothing that it names may be installed."""
_COLOSSALAI = frozenset(get_args(StrategyName)) - {"plain", "3d"}
_ZERO = frozenset({"colossalai_zero2", "colossalai_zero2_cpu"})
_ADAMS = frozenset({"Adam", "AdamW", "HybridAdam", "CPUAdam", "FusedAdam"})


def check_strategy(
    strategy: StrategyName,
    *,
    precision: Precision,
    cuda: bool,
    num_trainers: int = 1,
    adapters: bool = False,
    accumulates: bool = False,
    parts: Parts = WHOLE,
) -> None:
    """Check, before anything is loaded, that a strategy can do what is asked of it. Imports no torch.

    Args:
        strategy: by name.
        precision: of forward passes.
        cuda: whether the trainers have GPUs.
        num_trainers: processes that train together.
        adapters: whether LoRA is trained.
        accumulates: whether an optimizer step has several backward passes.
        parts: into which one model is to be cut.

    Raises:
        ConfigError: if it cannot; one sentence.
    """
    if strategy not in get_args(StrategyName):
        raise ConfigError(f"strategy {strategy!r} is unknown; take one of {', '.join(get_args(StrategyName))}")
    if num_trainers < 1:
        raise ConfigError(f"expected at least 1 trainer process, got {num_trainers}")
    if parts.number > 1 and strategy != "3d":
        raise ConfigError(
            f"strategy {strategy} does not cut one model into parts, but is asked for {parts}; take 3d, or set "
            f"{' and '.join(parts.sizes)} to 1"
        )
    if precision == "fp16" and not cuda:
        raise ConfigError("precision fp16 needs a GPU; take bf16, or fp32, on a CPU")
    if strategy == "gemini_auto" and not cuda:
        raise ConfigError(
            "strategy gemini_auto places weights by the GPU memory that is free, but there is no GPU; take gemini"
        )
    if strategy in GEMINI and adapters:
        raise ConfigError(
            f"strategy {strategy} shards all weights and trains no adapters; take zero2, ddp or plain with LoRA"
        )
    if strategy == "gemini_auto" and accumulates:
        raise ConfigError(
            "strategy gemini_auto does not accumulate gradients over several backward passes; make one pass per step, "
            "or take gemini"
        )
    _check_installed(strategy)


def check_optimizer(strategy: StrategyName, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that a strategy takes an optimizer that the caller made for a model.

    Raises:
        ConfigError: if it does not; one sentence.
    """
    kind = type(optimizer)
    kinds = {base.__name__ for base in kind.__mro__}
    if strategy in GEMINI and "HybridAdam" not in kinds:
        raise ConfigError(
            f"strategy {strategy} takes ColossalAI's HybridAdam, not {kind.__name__}; let the strategy make it "
            "(new_optimizer)"
        )
    if SAME_STRATEGY.get(strategy, strategy) in _ZERO and not kinds & _ADAMS:
        raise ConfigError(
            f"strategy {strategy} gives its optimizer flat pieces of weights, and takes Adam, AdamW or HybridAdam, not "
            f"{kind.__name__}; let the strategy make it (new_optimizer)"
        )
    members = [member for group in optimizer.param_groups for member in group["params"]]
    if not set(model.parameters()).issuperset(members):
        raise ConfigError(
            f"the optimizer holds weights that are none of the {type(model).__name__}'s beside it; prepare each model "
            "with the optimizer that was made for it"
        )
    if frozen := sum(not member.requires_grad for member in members):
        raise ConfigError(
            f"frozen weights in the optimizer: {frozen} of {len(members)}; give it those with requires_grad alone, "
            "or let the strategy make it (new_optimizer)"
        )


def make_booster(
    strategy: StrategyName,
    *,
    precision: Precision = "fp32",
    max_norm: float | None = 1.0,
    ranks: Ranks | None = None,
    device: torch.device | str | None = None,
) -> OwnBooster:
    """Return a new booster, for one model.

    Args:
        strategy: by name.
        precision: of forward passes; under ZeRO and Gemini of the working weights too.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together, for 3d laid out; None takes torch.distributed's default group. ColossalAI's
            strategies need one: a process on its own enters a group of one.
        device: where the weights are; None takes the GPU where there is one.

    Raises:
        ConfigError: if the strategy cannot be had here; one sentence.
    """
    import torch  # noqa: PLC0415 - two seconds, which checking a name should not cost

    from rlhf_core.models.loading import default_device  # noqa: PLC0415
    from rlhf_core.strategy.plain import PlainBooster  # noqa: PLC0415

    where = default_device() if device is None else torch.device(device)
    check_strategy(strategy, precision=precision, cuda=where.type == "cuda")
    if strategy == "plain":
        return PlainBooster(precision, max_norm, ranks)
    if strategy == "3d":
        from rlhf_core.strategy.ranks import current_ranks  # noqa: PLC0415
        from rlhf_core.strategy.three_d import ThreeDBooster  # noqa: PLC0415

        everyone = (current_ranks() if ranks is None else ranks).everyone
        if everyone.world_size > 1:
            _check_device(strategy, where, everyone)
        booster: OwnBooster = ThreeDBooster(precision, max_norm, ranks)
        return booster
    joined = _joined(strategy, ranks)
    _check_device(strategy, where, joined)
    return _colossal(strategy, precision, max_norm, joined)


def _colossal(strategy: StrategyName, precision: Precision, max_norm: float | None, ranks: Ranks) -> OwnBooster:
    """Import ColossalAI, which takes seconds, and make the booster of a plugin."""
    made: Any
    match SAME_STRATEGY.get(strategy, strategy):
        case "ddp":
            from rlhf_core.strategy.colossal.ddp import DDPBooster  # noqa: PLC0415

            made = DDPBooster(precision, max_norm, ranks)
        case "colossalai_zero2" | "colossalai_zero2_cpu" as zero:
            from rlhf_core.strategy.colossal.zero import ZeroBooster  # noqa: PLC0415

            made = ZeroBooster(precision, max_norm, ranks, cpu_offload=zero == "colossalai_zero2_cpu")
        case _:
            from rlhf_core.strategy.colossal.gemini import GeminiBooster  # noqa: PLC0415

            auto = strategy == "gemini_auto"
            made = GeminiBooster(precision, max_norm, ranks, placement="auto" if auto else "static")
    booster: OwnBooster = made
    return booster


def _check_installed(strategy: str) -> None:
    if strategy in _COLOSSALAI and importlib.util.find_spec("colossalai") is None:
        raise ConfigError(
            f"strategy {strategy} needs ColossalAI, which is not installed; `make setup` installs it, as does "
            f"`{INSTALL}`; or take plain"
        )


def _joined(strategy: str, ranks: Ranks | None) -> Ranks:
    """Return the group of processes that a plugin will find, which must be the one that is asked for."""
    import torch.distributed as dist  # noqa: PLC0415

    from rlhf_core.strategy.ranks import current_ranks, join_alone  # noqa: PLC0415

    asked = current_ranks() if ranks is None else ranks
    if not dist.is_initialized():
        if asked.world_size > 1:
            raise ConfigError(
                f"strategy {strategy} is asked for {counted(asked.world_size, 'rank')}, but this process has joined no "
                "group; call rlhf_core.strategy.ranks.join() first, under torchrun"
            )
        if launched_ranks() > 1:
            raise ConfigError(
                f"strategy {strategy} would train alone in each of the {launched_ranks()} processes that were started, "
                "as this one has joined no group; call rlhf_core.strategy.ranks.join() first"
            )
        return join_alone()
    if asked.world_size != dist.get_world_size():
        raise ConfigError(
            f"strategy {strategy} shards over the whole group "
            f"({counted(dist.get_world_size(), 'process', 'processes')}), but is asked for "
            f"{counted(asked.world_size, 'rank')}; start as many processes as train together"
        )
    return asked


def _check_device(strategy: str, device: torch.device, ranks: Ranks) -> None:
    """Check that the model is where ColossalAI puts it without asking, and that the ranks can communicate there."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    taken = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else ""
    if taken and str(device) not in {taken, "cuda"}:
        raise ConfigError(
            f"strategy {strategy} trains on the process's current GPU, {taken}, but the model is to be on {device}; "
            "give that device, call torch.cuda.set_device before, or take plain"
        )
    if device.type == "cuda" and "nccl" not in dist.get_backend():
        raise ConfigError(
            f"strategy {strategy} trains on GPUs over NCCL, which needs one for each of "
            f"{counted(ranks.world_size, 'rank')}, but they share one or see none; start as many ranks as there are "
            "GPUs, or take plain"
        )
