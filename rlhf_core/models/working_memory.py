"""Does a stage fit on this machine with all that it does? An estimate, once the data's lengths are known.

To what must be there (`models/memory.py`) come the activations and logits of a micro-batch of the longest rows, what
sampling and scoring a chunk of them needs (`models/shape.py`), and, in host memory, the programs themselves:

    PPO                  in lockstep, and in one memory, the larger of what learning and sampling need: trainers and
                         makers work in turn; and a copy of what is trained and its moments, which is stored beside
                         the next episode
    SFT, reward model    what learning needs; a pair is two rows

On GPUs each process has what CUDA takes, besides. Autocast keeps a second copy of float32 weights. A stage is refused
where the estimate, if it were `TOLERANCE` too high, would still be more than there is; where it is above what there is,
a warning says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.memory import (
    MachineMemory,
    ModelSize,
    gigabytes,
    machine_memory,
    required_memory,
    stage_memory,
)
from rlhf_core.models.shape import MOST_TOKENS, PassRows, Shape

Stage = Literal["sft", "reward_model", "ppo"]
TOLERANCE = 0.2
_SHORT_PASSES = frozenset({"plain", "ddp", "3d"})
"""Strategies under which a rank makes as many passes as it likes (`training/micro_batches.py`)."""
_SNAPSHOT = 12
"""Bytes of a trained weight and its two moments."""
_PROGRAM = 400 * 10**6
"""Bytes of a process that learns or makes experience, before it has a model."""
_CUDA = 750 * 10**6
"""Bytes of a GPU for each process that uses it, without its tensors (640 to 800 MB on an H100)."""
_SERVICES = 1300 * 10**6
"""Bytes of what runs besides: server, worker, store, Ray and the flow."""


class LongestRow(NamedTuple):
    """The longest row of a stage's data, in tokens."""

    prompt: int
    response: int = 0
    """0 where the stage draws it."""


class WorkingMemory(NamedTuple):
    """Estimated bytes of a stage, on all processes of a machine."""

    held: int
    """Weights, gradients, optimizer state."""
    passes: int
    """What goes through the models."""
    programs: int
    """In host memory, with the snapshot of a training state."""
    largest: int
    """Of one process: held, and its passes."""


def working_memory(
    config: PipelineConfig, stage: Stage, size: ModelSize, shape: Shape, row: LongestRow, *, gpus: int
) -> WorkingMemory:
    """Return what a stage needs.

    Args:
        config: the resolved preset.
        stage: one that trains.
        size: of the model.
        shape: of the model.
        row: the longest of the stage's data.
        gpus: of the machine.
    """
    if stage == "ppo":
        return _of_ppo(config, size, shape, row, gpus=gpus)
    settings = config.sft if stage == "sft" else config.reward_model
    response = row.response or config.reward_model.max_new_tokens
    alone = 1 if stage == "sft" else 2
    number = min(settings.micro_batch_size, settings.batch_size) * alone
    rows = PassRows(number, row.prompt, response)
    if stage == "sft" and config.sft.packing:  # a batch's demonstrations, put together
        length = config.sft.max_length
        number = min(config.sft.micro_batch_size, -(-config.sft.batch_size * (row.prompt + response) // length))
        rows = PassRows(number, 0, length)
    learning = _learning(settings, size, shape, rows, has_head=stage == "sft", gpus=gpus, alone=alone)
    need, count, cuda = stage_memory(settings, size, on_gpus=gpus > 0), settings.num_trainers, _CUDA if gpus else 0
    return WorkingMemory(
        held=need.shared + count * (need.trainer + cuda),
        passes=count * learning,
        programs=count * _PROGRAM + _SERVICES + count * need.offloaded,
        largest=need.shared + need.trainer + learning + cuda,
    )


def _of_ppo(config: PipelineConfig, size: ModelSize, shape: Shape, row: LongestRow, *, gpus: int) -> WorkingMemory:
    ppo, adapted = config.ppo, config.reward_model.shares_base
    need = required_memory(
        ppo, size.num_parameters, published_bytes=size.published_bytes, reward_adapters=adapted, shape=shape
    )
    need = need.on_gpus(gpus) if gpus else need
    prompt, batch = min(row.prompt, ppo.max_prompt_tokens), min(ppo.micro_batch_size, ppo.train_batch_size)
    learnt, drawn = (PassRows(number, prompt, ppo.max_new_tokens) for number in (batch, ppo.chunk_size))
    learning = _learning(ppo, size, shape, learnt, has_head=True, gpus=gpus)
    sets = (ppo.lora if ppo.sends_adapters else None, config.sft.lora if ppo.shares_base else None)
    rank = sum(lora.r for lora in sets if lora is not None)
    sampling = shape.sampling_bytes(drawn, ppo.rollout_dtype, rank=rank, keeps_cache=ppo.engine == "vllm")
    trainers, makers = ppo.num_trainers, ppo.cluster.num_makers
    trained = size.num_parameters if ppo.lora is None else shape.adapter_parameters(ppo.lora.r)
    snapshot = _SNAPSHOT * trained * (2 if ppo.advantage_estimator == "gae" else 1)
    both = (trainers * learning, makers * sampling)
    offloaded, all_offloaded, cuda = (need.offloaded, need.total_offloaded, _CUDA) if gpus else (0, 0, 0)
    return WorkingMemory(
        held=need.total - all_offloaded + (trainers + makers) * cuda,
        passes=sum(both) if gpus > 1 or ppo.max_staleness else max(both),
        programs=(trainers + makers) * _PROGRAM + _SERVICES + snapshot + all_offloaded,
        largest=need.shared + cuda + max(need.trainer - offloaded + learning, need.maker + sampling),
    )


def _learning(
    settings: Any, size: ModelSize, shape: Shape, rows: PassRows, *, has_head: bool, gpus: int, alone: int = 1
) -> int:
    if not gpus and settings.strategy in _SHORT_PASSES:
        rows = rows._replace(most=max(MOST_TOKENS, alone * (rows.prompt + rows.response)))
    cast = 0 if settings.dtype == "float32" or settings.shares_base else 2 * size.num_parameters
    return cast + shape.learning_bytes(
        rows, settings.dtype, adapters=settings.lora is not None, checkpointing=settings.gradient_checkpointing,
        head=has_head,
    )  # fmt: skip


def check_working_memory(
    config: PipelineConfig, stage: Stage, size: ModelSize, row: LongestRow, *, machine: MachineMemory | None = None
) -> str:
    """Check that a stage fits on this machine; nothing, if the model's shape is not known.

    Args:
        config: the resolved preset.
        stage: one that trains.
        size: of the model.
        row: the longest of the stage's data.
        machine: None measures this one.

    Returns:
        A warning, if it is not sure to fit.

    Raises:
        ModelError: if it does not; with overrides that make it fit, if any do.
    """
    if size.shape is None:
        return ""
    machine, shape = machine or machine_memory(), size.shape
    found = working_memory(config, stage, size, shape, row, gpus=len(machine.gpus))
    excess = _excess(found, machine)
    if excess <= 1.0:
        return ""
    place = f"{gigabytes(found.largest)} of it in one process, " if machine.gpus else ""
    told = (
        f"the stage {stage.replace('_', '-')} on {config.model.path} needs about "
        f"{gigabytes(found.held + found.passes + (0 if machine.gpus else found.programs))} ({place}"
        f"{gigabytes(found.held)} for weights, gradients and optimizer state, {gigabytes(found.passes)} for what goes "
        f"through the models at once, {gigabytes(found.programs)}{' of host memory' if machine.gpus else ''} for the "
        f"programs), and this machine has {machine}"
    )
    advice = "take a smaller model (`-p model=PATH`) or a bigger machine"
    for changes in _smaller(config, stage):
        changed = _with(config, stage, changes)
        if changed is None:
            continue
        if _excess(working_memory(changed, stage, size, shape, row, gpus=len(machine.gpus)), machine) <= 1.0:
            overrides = json.dumps({f"{stage}.{key}": value for key, value in changes.items()})
            advice = f"with these overrides it should fit: {overrides}"
            break
    if excess > 1.0 + TOLERANCE:
        raise ModelError(f"{told}; {advice}")
    return f"{told}, which may not be enough; {advice}"


def _excess(found: WorkingMemory, machine: MachineMemory) -> float:
    """Return the largest ratio of what is needed to what there is."""
    if not machine.gpus:
        return (found.held + found.passes + found.programs) / machine.ram
    on_gpus = max((found.held + found.passes) / sum(machine.gpus), found.largest / max(machine.gpus))
    return max(on_gpus, found.programs / machine.ram)


def _smaller(config: PipelineConfig, stage: Stage) -> Iterator[Mapping[str, Any]]:
    """Yield settings that need less memory and learn the same, but for rounding: the nearest first."""
    settings = getattr(config, stage)
    chunks = _divisors(settings.chunk_size) if stage == "ppo" else [0]
    again = (False, True) if not settings.gradient_checkpointing else (True,)
    for checkpointing, micro, chunk in product(again, _divisors(settings.micro_batch_size), chunks):
        wanted = {"micro_batch_size": micro, "gradient_checkpointing": checkpointing}
        wanted |= {"chunk_size": chunk} if chunk else {}
        yield {key: value for key, value in wanted.items() if getattr(settings, key) != value}


def _with(config: PipelineConfig, stage: Stage, changes: Mapping[str, Any]) -> PipelineConfig | None:
    """Return the configuration with other settings; None if they exclude each other."""
    settings = getattr(config, stage)
    try:
        changed = type(settings).model_validate(settings.model_dump() | changes)
    except ValidationError:
        return None
    return config.model_copy(update={stage: changed})


def _divisors(number: int) -> list[int]:
    return [each for each in range(number, 0, -1) if number % each == 0]
