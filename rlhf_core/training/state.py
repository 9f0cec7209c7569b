"""A learner's state as flat tensors and a few plain facts: what safetensors and JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.errors import ModelError
from rlhf_core.models.lora import check_trainable_state
from rlhf_core.strategy.booster import TrainedState
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.boosted import held_state, load_held_state, plain_model
from rlhf_core.training.optim import Trained

_WEIGHTS, _MOMENTS = "weights", "optimizer"
_COUNTERS = frozenset({"step"})  # moments that are one number, whatever the weight's shape
_CPU_RANDOM_STATE, _CUDA_RANDOM_STATE = "random.cpu", "random.cuda"


class LearnerState(NamedTuple):
    """In host memory."""

    tensors: dict[str, Tensor]
    """`actor.weights.<name>`, `actor.optimizer.<moment>.<name>`, `random.cpu`, of the second rank `random.cpu.1`."""
    facts: dict[str, Any]
    """Schedules and learning rates, as JSON holds them."""


def state_tensors(
    roles: Mapping[str, Trained], device: torch.device, ranks: Ranks, *, copied: bool = True
) -> LearnerState:
    """Return trainable weights, optimizer moments and steps, schedules, and torch's random state on every rank.

    Frozen weights are not in it: they are found where the model came from. Called by all ranks; only the first gets
    tensors.

    Args:
        roles: what is trained, by name.
        device: of the models, whose random state is kept besides the CPU's.
        ranks: who trains together.
        copied: as for `held_state`.
    """
    tensors = _random_tensors(device, ranks)
    facts: dict[str, Any] = {}
    for role, trained in roles.items():
        weights, moments = held_state(trained.booster, trained.model, trained.optimizer, ranks, copied=copied)
        tensors |= prefixed(f"{role}.{_WEIGHTS}", weights)
        for moment, held in moments.items():
            tensors |= prefixed(f"{role}.{_MOMENTS}.{moment}", held)
        facts[role] = {"schedule": _schedule(trained)}
        if (scale := getattr(trained.optimizer, "scale", None)) is not None:
            facts[role]["loss_scale"] = scale.facts()
    return LearnerState(tensors if ranks.is_first else {}, facts)


def load_state_tensors(
    roles: Mapping[str, Trained],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    device: torch.device,
    ranks: Ranks,
) -> None:
    """Put back what `state_tensors` returned, under this strategy or another; called by all ranks.

    A rank that the state knows no random state of keeps its own.

    Args:
        roles: freshly built from the same configuration.
        tensors: all of them, on every rank.
        facts: as they were, or read back from JSON.
        device: of the models.
        ranks: who trains together; maybe more or fewer than those of the state.

    Raises:
        ModelError: if names, shapes or schedules differ from the models', or something is missing; nothing was
            changed.
    """
    states = {role: TrainedState(under(f"{role}.{_WEIGHTS}", tensors), _moments(role, tensors)) for role in roles}
    if missing := sorted({*roles, _CPU_RANDOM_STATE} - {*facts, *tensors}):
        raise ModelError(f"the stored training state is incomplete: it lacks {', '.join(missing)}")
    for role, trained in roles.items():
        _check(role, trained, states[role])
        _check_facts(role, trained, facts[role])
    _check_random(tensors, device)
    for role, trained in roles.items():
        load_held_state(trained.booster, trained.model, trained.optimizer, states[role])
        if (scale := getattr(trained.optimizer, "scale", None)) is not None and "loss_scale" in facts[role]:
            scale.load(facts[role]["loss_scale"])
        trained.scheduler.load_state_dict({**facts[role]["schedule"], "lr_lambdas": [None]})
        rates = trained.scheduler.get_last_lr()
        for group, rate in zip(trained.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # the schedule keeps it, but does not hand it to the optimizer before its next step
    cpu, cuda = (_of_rank(name, ranks.rank) for name in (_CPU_RANDOM_STATE, _CUDA_RANDOM_STATE))
    if cpu in tensors:
        torch.set_rng_state(tensors[cpu])
    if device.type == "cuda" and cuda in tensors:
        torch.cuda.set_rng_state(tensors[cuda], device)


def _random_tensors(device: torch.device, ranks: Ranks) -> dict[str, Tensor]:
    """Return the random states of all ranks, by names that say whose they are."""
    own = {_CPU_RANDOM_STATE: torch.get_rng_state()}
    if device.type == "cuda":
        own[_CUDA_RANDOM_STATE] = torch.cuda.get_rng_state(device)
    return {
        _of_rank(name, rank): row.clone()
        for name, state in own.items()
        for rank, row in enumerate(ranks.gather(state[None]))
    }


def _of_rank(name: str, rank: int) -> str:
    """Return the name of a rank's random state; the first's is that of a learner that is alone."""
    return name if rank == 0 else f"{name}.{rank}"


def _check(role: str, trained: Trained, state: TrainedState) -> None:
    weights, moments = state
    check_trainable_state(plain_model(trained.booster, trained.model), weights)
    covered = {name for held in moments.values() for name in held}
    if unknown := sorted(covered - weights.keys()):
        raise ModelError(
            f"the stored training state is damaged: {role} has moments of {unknown[0]}, but not its weight"
        )
    for moment, held in moments.items():
        if lost := sorted(covered - held.keys()):  # a weight that was never used has none at all
            raise ModelError(f"the stored training state is incomplete: {role}'s {moment} lacks {lost[0]}")
        for name, tensor in held.items():
            shape = torch.Size() if moment in _COUNTERS else weights[name].shape
            if tensor.shape != shape:
                raise ModelError(
                    f"the stored training state does not fit the model: {role}'s {moment} of {name} has shape "
                    f"{list(tensor.shape)}, expected {list(shape)}"
                )


def _check_facts(role: str, trained: Trained, facts: Any) -> None:
    """Check that schedule and loss scale are there, and for as many groups of weights."""
    own = _schedule(trained)
    held = facts.get("schedule") if isinstance(facts, Mapping) else None
    if not isinstance(held, Mapping) or own.keys() - held.keys():
        raise ModelError(f"the stored training state is incomplete: it lacks {role}'s schedule")
    for name, value in own.items():
        if isinstance(value, list) and (not isinstance(held[name], list) or len(held[name]) != len(value)):
            raise ModelError(
                f"the stored training state does not fit the model: {role}'s schedule has {held[name]} as {name}, "
                f"expected {len(value)} numbers, one for each group of weights"
            )
    scale = facts.get("loss_scale", {"factor": 1.0, "good_steps": 0})
    if getattr(trained.optimizer, "scale", None) is not None and not (
        isinstance(scale, Mapping) and {"factor", "good_steps"} <= scale.keys()
    ):
        raise ModelError(f"the stored training state is incomplete: {role}'s loss scale is {scale}")


def _check_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    own = {_CPU_RANDOM_STATE: torch.get_rng_state()}
    if device.type == "cuda":
        own[_CUDA_RANDOM_STATE] = torch.cuda.get_rng_state(device)
    for kind, expected in own.items():  # a state of another device has none of this one's
        for name, held in tensors.items():
            is_such = name == kind or name.startswith(f"{kind}.")
            if is_such and (held.shape, held.dtype) != (expected.shape, expected.dtype):
                raise ModelError(f"the stored training state is damaged: {name} is no state of this torch's generator")


def _schedule(trained: Trained) -> dict[str, Any]:
    """Return the schedule's state without its functions, which the configuration makes again."""
    state: dict[str, Any] = trained.scheduler.state_dict()
    return {name: value for name, value in state.items() if name != "lr_lambdas"}


def _moments(role: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's tensors by moment and name; empty before the first step."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in under(f"{role}.{_MOMENTS}", tensors).items():
        moment, _, name = key.partition(".")
        found.setdefault(moment, {})[name] = tensor
    return found


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under names that begin with their owner's."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `prefixed` was given."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
