"""Does a stage fit on this machine with all that it does? An estimate, once the data's lengths are known.

To what must be there (`models/memory.py`) come the activations and logits of a micro-batch of the longest rows, what
sampling and scoring a chunk of them needs (`models/shape.py`), and, in host memory, the programs themselves:

    PPO                  in lockstep the larger of what learning and sampling need: trainers and makers work in turn;
                         and a copy of what is trained and its moments, which is stored beside the next episode
    SFT, reward model    what learning needs; pairs are two rows

A stage is refused where even an estimate that is `TOLERANCE` too high would be more than there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from rlhf_core.config import PipelineConfig, PPOConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.memory import MachineMemory, ModelSize, gigabytes, machine_memory, required_memory, stage_memory
from rlhf_core.models.shape import Rows, Shape

Stage = Literal["sft", "reward_model", "ppo"]
TOLERANCE = 0.2
"""By which estimates were at most too high or too low where they were measured (docs/presets.md)."""
_SNAPSHOT = 12
"""Bytes of a trained weight and its two moments."""
_PROGRAM = 400 * 10**6
"""Bytes of a process that learns or makes experience, before it has a model."""
_SERVICES = 1300 * 10**6
"""Bytes of what runs besides: server, worker, store, Ray and the flow."""


class Lengths(NamedTuple):
    """Longest texts of a stage's data, in tokens."""

    prompt: int
    response: int
    """0 where the policy answers: then it is what the stage draws."""


class WorkingMemory(NamedTuple):
    """Estimated bytes of a stage, on all processes of a machine."""

    held: int
    """Weights, gradients, optimizer state."""
    passes: int
    """What goes through the models."""
    programs: int
    """In host memory, with the snapshot of a training state."""
    largest: int
    """Of one process."""


def working_memory(
    config: PipelineConfig, stage: Stage, size: ModelSize, shape: Shape, lengths: Lengths, *, on_gpus: bool
) -> WorkingMemory:
    """Return what a stage needs.

    Args:
        config: the resolved preset.
        stage: one that trains.
        size: of the model.
        shape: of the model.
        lengths: of the stage's data.
        on_gpus: whether each process has what is shared to itself.
    """
    if stage == "ppo":
        return _of_ppo(config.ppo, size, shape, lengths, on_gpus=on_gpus, adapted=config.reward_model.shares_base)
    settings = config.sft if stage == "sft" else config.reward_model
    prompt, response = lengths.prompt, lengths.response or config.reward_model.max_new_tokens
    if stage == "sft" and config.sft.packing:
        prompt, response = 0, settings.max_length
    learnt = min(response, settings.max_length)
    rows = Rows(
        settings.micro_batch_size * (1 if stage == "sft" else 2), min(prompt, settings.max_length - learnt), learnt
    )
    learning = shape.learning_bytes(
        rows, settings.dtype, adapters=settings.lora is not None, checkpointing=settings.gradient_checkpointing,
        head=stage == "sft",
    )  # fmt: skip
    need, count = stage_memory(settings, size, on_gpus=on_gpus), settings.num_trainers
    held = need.shared + count * need.trainer
    return WorkingMemory(held, count * learning, count * _PROGRAM + _SERVICES, need.shared + need.trainer + learning)


def _of_ppo(
    config: PPOConfig, size: ModelSize, shape: Shape, lengths: Lengths, *, on_gpus: bool, adapted: bool
) -> WorkingMemory:
    need = required_memory(
        config, size.num_parameters, published_bytes=size.published_bytes, reward_adapters=adapted, shape=shape
    )
    need = need.on_gpus() if on_gpus else need
    prompt = min(lengths.prompt, config.max_prompt_tokens)
    learnt, drawn = (
        Rows(count, prompt, config.max_new_tokens) for count in (config.micro_batch_size, config.chunk_size)
    )
    learning = shape.learning_bytes(
        learnt, config.dtype, adapters=config.lora is not None, checkpointing=config.gradient_checkpointing, head=True
    )
    sampling = shape.sampling_bytes(drawn, config.rollout_dtype)
    trainers, makers = config.num_trainers, config.cluster.num_makers
    adapted_to = None if config.lora is None else shape.adapter_parameters(config.lora.r)
    trained = (2 if config.advantage_estimator == "gae" else 1) * (adapted_to or size.num_parameters)
    snapshot = _SNAPSHOT * trained
    both = (trainers * learning, makers * sampling)
    return WorkingMemory(
        held=need.total - (need.total_offloaded if on_gpus else 0),
        passes=sum(both) if on_gpus or config.max_staleness else max(both),
        programs=(trainers + makers) * _PROGRAM + _SERVICES + snapshot,
        largest=need.shared + max(need.trainer - (need.offloaded if on_gpus else 0) + learning, need.maker + sampling),
    )


def check_working_memory(
    config: PipelineConfig,
    stage: Stage,
    size: ModelSize,
    lengths: Lengths,
    *,
    machine: MachineMemory | None = None,
) -> str:
    """Check that a stage fits on this machine; nothing, if the model's shape is not known.

    Args:
        config: the resolved preset.
        stage: one that trains.
        size: of the model.
        lengths: of the stage's data.
        machine: None measures this one.

    Returns:
        A warning, if it is not sure to fit.

    Raises:
        ModelError: if it does not; with what would make it fit.
    """
    if size.shape is None:
        return ""
    machine, shape = machine or machine_memory(), size.shape
    found = working_memory(config, stage, size, shape, lengths, on_gpus=bool(machine.gpus))
    excess = _excess(found, machine)
    if excess <= 1.0:
        return ""
    settings = _settings(config, stage)
    programs = "" if machine.gpus else f", {gigabytes(found.programs)} for the programs"
    total = found.held + found.passes + (0 if machine.gpus else found.programs)
    told = (
        f"the stage {stage.replace('_', '-')} on {config.model.path} needs about {gigabytes(total)} "
        f"({gigabytes(found.held)} for weights, gradients and optimizer state, {gigabytes(found.passes)} for what goes "
        f"through the model at once{programs}), and this machine has {machine}"
    )
    advice = "take a smaller model (`-p model=PATH`) or a bigger machine"
    for changes in _smaller(settings):
        changed = config.model_copy(update={stage: settings.model_copy(update=changes)})
        if _excess(working_memory(changed, stage, size, shape, lengths, on_gpus=bool(machine.gpus)), machine) <= 1.0:
            named = ", ".join(f'"{stage}.{key}": {str(value).lower()}' for key, value in changes.items())
            advice = f"with these overrides it should fit: {{{named}}}"
            break
    if excess > 1.0 + TOLERANCE:
        raise ModelError(f"{told}; {advice}")
    return f"{told}, which may not be enough; {advice}"


def _excess(found: WorkingMemory, machine: MachineMemory) -> float:
    """Return the largest ratio of what is needed to what there is."""
    if not machine.gpus:
        return (found.held + found.passes + found.programs) / machine.ram
    return max((found.held + found.passes) / sum(machine.gpus), found.largest / max(machine.gpus))


def _settings(config: PipelineConfig, stage: Stage) -> Any:
    return {"sft": config.sft, "reward_model": config.reward_model, "ppo": config.ppo}[stage]


def _smaller(settings: Any) -> Iterator[Mapping[str, Any]]:
    """Yield settings that need less memory and give the same numbers: the nearest first."""
    chunk = getattr(settings, "chunk_size", None)
    chunks: Sequence[int | None] = [None] if chunk is None else _divisors(chunk)
    for checkpointing, micro, drawn in product((False, True), _divisors(settings.micro_batch_size), chunks):
        wanted = {"micro_batch_size": micro, "chunk_size": drawn, "gradient_checkpointing": checkpointing}
        known = {key: value for key, value in wanted.items() if value is not None}
        yield {key: value for key, value in known.items() if getattr(settings, key) != value}


def _divisors(number: int) -> list[int]:
    return [each for each in range(number, 0, -1) if number % each == 0]
