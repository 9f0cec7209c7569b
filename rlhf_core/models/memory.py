"""Does this machine hold the model? Twice: from the configuration alone, and once the data's lengths are known.

First, before anything is fetched, what must be there: weights, gradients and optimizer state. A machine that is refused
could never have done it. Not counted: buffers in which gradients or weights travel, of a bounded size; what fills a
tensor or chunk up to a multiple of W; one number per weight, Adam's count of steps.

Then, before anything is trained, all of it (`models/working_memory.py`).

A learner is what one rank holds to train one model (`bytes_per_rank`), by strategy:

    strategy      weights   gradients   master     moments      P parameters, T of them trained, W ranks
    plain, ddp    4 P       4 T         -          8 T
    zero2         w P       w T / W     4 T / W    8 T / W      w: 4 in fp32, 2 in bf16 and fp16
    zero2_cpu     w P       w T / W     4 T / W    8 T / W      master and moments in host memory
    gemini        w P / W   w T / W     4 T / W    8 T / W      no master in fp32, where the weights are exact
    3d            4 P / t   4 T / t     -          8 T / t      t = tp pp; adapters: tp cuts one of two factors

With adapters the frozen base lies in a file that all processes of a machine map: it counts once, in the dtype that it
is computed in, or was published in if that is smaller. With one GPU makers borrow the trainer's; with several it counts
for each process. Where it cannot be shared (`PPOConfig.shares_base`), each process holds weights of its own, in
fp32 where they are trained: updates smaller than bfloat16's steps would be lost when the adapters are merged (zero2
keeps 2 bytes in half precision).

Where a model's shape is not known, it has at most 2 r N^(2/3) parameters of adapters: a matrix of d x d has r (d + d)
of them, a share 2 r / d, and d exceeds N^(1/3) in every decoder in use (SmolLM2-135M: 576 > 513; Llama-2 7B: 4096 >
1889).

A stage needs:

    PPO, each trainer:   two learners (actor and critic); or, while they are made, both models whole in fp32, and beside
                         them the reward model, if the critic is made from it
    PPO, first trainer:  also the weights of both in the rollout dtype, on their way to the makers
    PPO, each maker:     actor, critic, initial model and, where it has weight, reward model, in the rollout dtype
                         (advantages that compare samples with each other need no critic, here and there)
    with vLLM:           each maker the actor once more, in the rollout dtype; over a shared base, too
    SFT, reward model:   one learner for each trainer; or, while it is made, the model whole in fp32

Over a shared base, A parameters of adapters for each of actor and critic:

    PPO, each trainer:   16 A (weights, gradients, moments); the first one also 4 A, on their way to the makers
    PPO, each maker:     4 A; and 4 A of the reward model's, or the whole of one without adapters
    SFT, reward model:   16 A for each trainer
    all together:        the base; and that of the reward model's adapters, where it is another
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pow as power
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import psutil

from rlhf_core.config.strategy import GEMINI, SAME_STRATEGY, StrategyName
from rlhf_core.counting import counted
from rlhf_core.errors import ModelError
from rlhf_core.models.shape import Shape, shape_of
from rlhf_core.strategy.parts import WHOLE, Parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import LoRAConfig, PipelineConfig, PPOConfig, RewardModelConfig, SFTConfig
    from rlhf_core.strategy.booster import Precision

    _Trains = PPOConfig | SFTConfig | RewardModelConfig

GB = 10**9
BYTES = {"float32": 4, "bfloat16": 2}
_EXACT = 4  # bytes of a float32
_MOMENTS = 8  # Adam's two, in float32
_MADE_IN = 4  # bytes per parameter of a model that is being made
_TOO_LITTLE = "Refused: too little memory"
_DISAGREE = 2  # a head that is stored twice makes a file of a small model half as large again, not twice as large
_PRECISIONS: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# where a container's limit stands: version 2, then version 1 of Linux's control groups
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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
    strategy: StrategyName,
    *,
    parameters: int,
    trained: int,
    world_size: int = 1,
    precision: Precision = "fp32",
    parts: Parts = WHOLE,
) -> RankMemory:
    """Return what one rank holds of one model.

    Args:
        strategy: by name.
        parameters: of the model, adapters and heads among them; tied ones once.
        trained: of these.
        world_size: ranks that train together.
        precision: of forward passes; under ZeRO and Gemini of the working weights and gradients too.
        parts: under `3d`. Left out are vectors, which each rank of a stage has whole, and the layer that some stages
            have more; and that words are cut by sp, too.

    Example:
        >>> bytes_per_rank("zero2", parameters=1000, trained=1000, world_size=4, precision="bf16")
        RankMemory(weights=2000, gradients=500, master=1000, moments=2000, offloaded=False)
    """
    name = SAME_STRATEGY.get(strategy, strategy)
    if name in {"plain", "ddp", "3d"}:
        # of an adapter's two factors, the one that no heads or units are in is whole on each
        own = -(-trained // parts.tp) if trained == parameters else (trained + -(-trained // parts.tp)) // 2
        own = -(-own // parts.pp)
        parameters, trained = -(-(parameters - trained) // (parts.tp * parts.pp)) + own, own
        return RankMemory(_EXACT * parameters, _EXACT * trained, 0, _MOMENTS * trained)
    working = _EXACT if precision == "fp32" else 2
    shard = -(-trained // world_size)
    master = 0 if strategy in GEMINI and precision == "fp32" else _EXACT * shard
    weights = -(-parameters // world_size) if strategy in GEMINI else parameters
    return RankMemory(
        working * weights, working * shard, master, _MOMENTS * shard, offloaded=name == "colossalai_zero2_cpu"
    )


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that PPO needs at least."""

    trainer: int
    """Of the first one, which gathers what is published."""
    maker: int
    """Of each."""
    num_makers: int
    other_trainer: int = 0
    """Of each."""
    num_other_trainers: int = 0
    offloaded: int = 0
    """Of each trainer's, what is in host memory wherever the rest is."""
    shared: int = 0
    """What all of them map, besides."""

    @property
    def total(self) -> int:
        """Of trainers and makers together, on a machine without GPUs."""
        own = self.trainer + self.num_other_trainers * self.other_trainer + self.num_makers * self.maker
        return own + self.shared

    def on_gpus(self, number: int) -> MemoryNeed:
        """Return the need where each process has what is shared to itself, but makers on the only GPU borrow it."""
        other = self.other_trainer + self.shared if self.num_other_trainers else 0
        maker = self.maker + (self.shared if number > 1 else 0)
        return replace(self, trainer=self.trainer + self.shared, maker=maker, other_trainer=other, shared=0)

    @property
    def total_offloaded(self) -> int:
        """Of all trainers."""
        return (1 + self.num_other_trainers) * self.offloaded


@dataclass(frozen=True)
class MachineMemory:
    """What this machine has."""

    ram: int
    """Bytes; a container's limit where there is one."""
    gpus: tuple[int, ...] = ()
    """Bytes of each CUDA device."""

    def __str__(self) -> str:
        gpus = f"{counted(len(self.gpus), 'GPU')} with {gigabytes(sum(self.gpus))} together" if self.gpus else "no GPU"
        return f"{gigabytes(self.ram)} and {gpus}"


def required_memory(
    config: PPOConfig,
    num_parameters: int,
    *,
    published_bytes: int = _EXACT,
    reward_adapters: bool = False,
    bases: int = 1,
    shape: Shape | None = None,
) -> MemoryNeed:
    """Return what one PPO run needs, all of it on one machine; the formula is this module's docstring.

    Args:
        config: of the run.
        num_parameters: of the model.
        published_bytes: of a weight in the model's files.
        reward_adapters: whether the reward model is adapters and a head.
        bases: how many are shared, all as large as the model.
        shape: of the model, if it is known.

    Example:
        >>> from rlhf_core.config import PPOConfig
        >>> need = required_memory(PPOConfig(lora=None), 1000)
        >>> (need.trainer, need.maker, need.num_makers)
        (36000, 6000, 2)
    """
    engine = _of_engine(config, num_parameters, shape)
    if config.shares_base:
        adapters = adapter_parameters(num_parameters, config.lora.r, shape) if config.lora else 0
        need = _need_over_base(config, num_parameters, adapters, published_bytes, reward_adapters=reward_adapters)
        return replace(need, shared=bases * need.shared, maker=need.maker + engine)
    rollout = BYTES[config.rollout_dtype] * num_parameters
    has_critic = config.advantage_estimator == "gae"
    models_of_a_learner = 2 if has_critic else 1
    models_of_a_maker = models_of_a_learner + (2 if config.reward.reward_model > 0 else 1)
    per_rank = _per_rank(config, num_parameters, config.lora, shape)
    copied = 1 if has_critic and config.critic_init == "reward_model" else 0
    made = (models_of_a_learner + copied) * _MADE_IN * num_parameters
    held = models_of_a_learner * (per_rank.device + per_rank.host)
    return MemoryNeed(
        trainer=max(made, held + models_of_a_learner * rollout),
        maker=models_of_a_maker * rollout + engine,
        num_makers=config.cluster.num_makers,
        other_trainer=max(made, held) if config.num_trainers > 1 else 0,
        num_other_trainers=config.num_trainers - 1,
        offloaded=models_of_a_learner * per_rank.host,
    )


def _need_over_base(
    config: PPOConfig, num_parameters: int, adapters: int, published_bytes: int, *, reward_adapters: bool
) -> MemoryNeed:
    rollout, has_critic = BYTES[config.rollout_dtype] * num_parameters, config.advantage_estimator == "gae"
    models = 2 if has_critic else 1
    # a critic that starts from a whole reward model has a transformer of its own
    own_critic = has_critic and config.critic_init == "reward_model" and not reward_adapters
    scorer = (_EXACT * adapters if reward_adapters else rollout) if config.reward.reward_model > 0 else 0
    learner = models * (2 * _EXACT + _MOMENTS) * adapters + (_EXACT * num_parameters if own_critic else 0)
    return MemoryNeed(
        trainer=learner + models * _EXACT * adapters,
        maker=models * _EXACT * adapters + scorer + (rollout if own_critic else 0),
        num_makers=config.cluster.num_makers,
        other_trainer=learner if config.num_trainers > 1 else 0,
        num_other_trainers=config.num_trainers - 1,
        shared=base_bytes(config.rollout_dtype, published_bytes) * num_parameters,
    )


def _of_engine(config: PPOConfig, num_parameters: int, shape: Shape | None) -> int:
    """Return the bytes of a maker's engine: vLLM holds the actor itself, and a second head, as one that is tied has."""
    if config.engine != "vllm":
        return 0
    return BYTES[config.rollout_dtype] * (num_parameters + (shape.vocabulary * shape.hidden if shape else 0))


def base_bytes(arithmetic: str, published_bytes: int) -> int:
    """Return the bytes of a weight of the base that is shared, as `models/base.py` copies it."""
    return BYTES["bfloat16"] if arithmetic == "bfloat16" else published_bytes


def adapter_parameters(num_parameters: int, rank: int, shape: Shape | None = None) -> int:
    """Return how many parameters adapters on all linear layers of a model have, at most where its shape is unknown."""
    if shape is not None:
        return shape.adapter_parameters(rank)
    return min(num_parameters, round(2 * rank * power(num_parameters, 2 / 3)))


def _per_rank(config: _Trains, num_parameters: int, lora: LoRAConfig | None, shape: Shape | None) -> RankMemory:
    adapters = 0 if lora is None else adapter_parameters(num_parameters, lora.r, shape)
    return bytes_per_rank(
        config.strategy,
        parameters=num_parameters + adapters,
        trained=num_parameters if lora is None else adapters,
        world_size=config.num_trainers,
        precision=_PRECISIONS[config.dtype],
        parts=config.parts,
    )


def machine_memory() -> MachineMemory:
    """Return the memory of this machine, or of the container that this process is in, and of its GPUs."""
    limits = [psutil.virtual_memory().total]
    for name in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return MachineMemory(min(limits), _gpu_memory())


def _gpu_memory() -> tuple[int, ...]:
    import torch  # noqa: PLC0415 (two seconds, which reading a formula should not cost)

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def check_memory(
    config: PPOConfig,
    num_parameters: int,
    *,
    model: str,
    machine: MachineMemory | None = None,
    doubt: str = "",
    published_bytes: int = _EXACT,
    reward_adapters: bool = False,
    bases: int = 1,
    shape: Shape | None = None,
) -> None:
    """Check that a PPO run fits on this machine.

    Args:
        config: of the run.
        num_parameters: of the model.
        model: its name, for the error.
        machine: None measures this one.
        doubt: what the error says of the number, such as that two ways to count do not agree.
        published_bytes: as for `required_memory`, as are the next.
        reward_adapters: see there.
        bases: see there.
        shape: see there.

    Raises:
        ModelError: if there are too few GPUs or too little memory.
    """
    machine = machine or machine_memory()
    cluster = config.cluster
    gpus = config.num_trainers * (cluster.trainer_gpus or 0) + cluster.num_makers * (cluster.maker_gpus or 0)
    if gpus > len(machine.gpus):
        raise ModelError(
            f"{counted(config.num_trainers, 'trainer')} and {counted(cluster.num_makers, 'maker')} are to have "
            f"{counted(gpus, 'GPU')}, but this machine has {len(machine.gpus)}; lower ppo.num_trainers, "
            "ppo.cluster.trainer_gpus, maker_gpus or num_makers, or take a bigger machine",
            ends_as="Refused: too few GPUs",
        )
    need = required_memory(
        config, num_parameters, published_bytes=published_bytes, reward_adapters=reward_adapters, bases=bases,
        shape=shape,
    )  # fmt: skip
    need = need.on_gpus(len(machine.gpus)) if machine.gpus else need
    place = sum(machine.gpus) or machine.ram
    largest = max(machine.gpus, default=machine.ram)
    # Without GPUs, what is offloaded is in the same memory as the rest.
    beside, beside_all = (need.offloaded, need.total_offloaded) if machine.gpus else (0, 0)
    fits = need.total - beside_all <= place and beside_all <= machine.ram
    if fits and need.shared + max(need.trainer - beside, need.maker) <= largest:
        return
    base = f"{gigabytes(need.shared)} for the base that all share, " if need.shared else ""
    others = f", {gigabytes(need.other_trainer)} for each other trainer" if need.num_other_trainers else ""
    advice = "set ppo.rollout_dtype to bfloat16, " if config.rollout_dtype == "float32" else ""
    advice += "" if config.lora else "set ppo.lora, "
    raise ModelError(
        f"PPO on {model} ({many(num_parameters)} parameters{doubt}) needs at least {gigabytes(need.total)} "
        f"({base}{gigabytes(need.trainer)} for the {'first ' if others else ''}trainer{others}, "
        f"{gigabytes(need.maker)} for each of {counted(need.num_makers, 'maker')}), but this machine has {machine}; "
        f"{advice}take a smaller model (`-p model=PATH`) or a bigger machine",
        ends_as=_TOO_LITTLE,
    )


def check_memory_for(
    config: PipelineConfig,
    models_dir: Path,
    *,
    stages: Sequence[Literal["sft", "reward_model", "ppo"]] = ("ppo",),
    reward_adapters: bool | None = None,
    bases: int = 1,
) -> None:
    """Check that this machine can run stages of a preset, before any model or reference is fetched.

    If the model is on this machine, its size is the larger of what its configuration builds and what its files hold:
    the one fills memory first, the other is what is loaded. Else it is the preset's `model.num_parameters`. Where
    neither is known (a hub model of unstated size that was never fetched), nothing is refused.

    Args:
        config: the resolved preset.
        models_dir: where packaged models are kept.
        stages: those that train; none only looks whether the model's path leads anywhere.
        reward_adapters: whether PPO's reward model is adapters; None: as the configuration makes them.
        bases: of PPO's models.

    Raises:
        ModelError: if the model's path leads nowhere, or the machine cannot hold it.
    """
    size = size_of(config, models_dir)
    if size is None:
        return
    for stage in stages:
        if stage != "ppo":
            _check_stage(config, stage, size)
            continue
        check_memory(
            config.ppo, size.num_parameters, model=config.model.path, doubt=size.doubt,
            published_bytes=size.published_bytes, bases=bases, shape=size.shape,
            reward_adapters=config.reward_model.shares_base if reward_adapters is None else reward_adapters,
        )  # fmt: skip


def stage_memory(settings: SFTConfig | RewardModelConfig, size: ModelSize, *, on_gpus: bool) -> StageMemory:
    """Return what a stage needs that trains one model."""
    if settings.lora is not None and settings.shares_base:
        shared = base_bytes(settings.dtype, size.published_bytes) * size.num_parameters
        one = (2 * _EXACT + _MOMENTS) * adapter_parameters(size.num_parameters, settings.lora.r, size.shape)
        return StageMemory(one + shared, 0) if on_gpus else StageMemory(one, 0, shared)
    per_rank = _per_rank(settings, size.num_parameters, settings.lora, size.shape)
    offloaded = per_rank.host if on_gpus else 0
    return StageMemory(max(_MADE_IN * size.num_parameters, per_rank.device + per_rank.host - offloaded), offloaded)


def _check_stage(config: PipelineConfig, stage: Literal["sft", "reward_model"], size: ModelSize) -> None:
    settings = config.sft if stage == "sft" else config.reward_model
    machine = machine_memory()
    need, count = stage_memory(settings, size, on_gpus=bool(machine.gpus)), settings.num_trainers
    place = sum(machine.gpus) or machine.ram
    fits = need.shared + count * need.trainer <= place and count * need.offloaded <= machine.ram
    if not fits or need.trainer > max(machine.gpus, default=machine.ram):
        advice = "" if settings.lora else f"set {stage}.lora, "
        raise ModelError(
            f"training the stage {stage.replace('_', '-')} on {config.model.path} ({many(size.num_parameters)} "
            f"parameters{size.doubt}) needs at least {gigabytes(need.shared + count * (need.trainer + need.offloaded))}"
            f", but this machine has {machine}; {advice}take a smaller model (`-p model=PATH`) or a bigger machine",
            ends_as=_TOO_LITTLE,
        )


class StageMemory(NamedTuple):
    """Bytes that SFT or the reward model needs at least."""

    trainer: int
    """Of each."""
    offloaded: int
    """Of each, in host memory."""
    shared: int = 0
    """What all of them map, besides."""


class ModelSize(NamedTuple):
    """How large a model is."""

    num_parameters: int
    doubt: str = ""
    """What an error says of the number beside it."""
    published_bytes: int = _EXACT
    """Of a weight in the files."""
    shape: Shape | None = None


def size_of(config: PipelineConfig, models_dir: Path) -> ModelSize | None:
    """Return how large a preset's model is; None where that is not known."""
    # imports torch and transformers, which `required_memory` does without
    from rlhf_core.models import locating, smollm2  # noqa: PLC0415

    path = config.model.path
    directory = locating.find_local(path, models_dir=models_dir)
    if directory is None and path == smollm2.NAME:
        return ModelSize(smollm2.NUM_PARAMETERS)
    directory = directory or locating.find_fetched(path)
    if directory is not None:
        return _size_on_disk(directory)
    return None if config.model.num_parameters is None else ModelSize(config.model.num_parameters)


def _size_on_disk(directory: Path) -> ModelSize:
    from rlhf_core.models.loading import count_built, count_parameters, published_bytes  # noqa: PLC0415

    stored = count_parameters(directory)
    built = count_built(directory) or stored
    doubt = ""
    if max(stored, built) > _DISAGREE * min(stored, built):
        more, less = ("its config.json builds", "its files hold")[:: 1 if built > stored else -1]
        doubt = f", which {more}; {less} {many(min(stored, built))}"
    shape = None if doubt else shape_of(directory)
    return ModelSize(max(stored, built), doubt, published_bytes(directory), shape)


def many(count: int) -> str:
    """Return a count as a person reads it."""
    for unit, word in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.3g} {word}"
    return f"{count:,}"


def gigabytes(size: int) -> str:
    """Return bytes as a person reads them."""
    return f"{size / GB:.3g} GB"
