"""PPO: how samples are drawn and judged, and how they are learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Positive
from rlhf_core.config.model import LoRAConfig
from rlhf_core.config.passes import PassConfig
from rlhf_core.config.strategy import AdapterTrainersConfig

PROMPTS, CHUNK = "ppo.prompts_per_episode", "ppo.chunk_size"
BATCH, MICRO = "ppo.train_batch_size", "ppo.micro_batch_size"
BATCHES = (PROMPTS, CHUNK, BATCH, MICRO)
"""Keys of the sizes that an episode's samples are cut into; `batch_complaints` says how they must fit."""


class RewardConfig(Config):
    """Weights of the sources of reward; each source is scaled to order one before it is weighted."""

    verifier: float = Field(1.0, ge=0)
    """Weight of the verifier's 0 or 1."""
    reward_model: float = Field(0.0, ge=0)
    """Weight of the reward model's score, in its standard deviations on held-out samples."""
    functions: dict[str, float] = Field(default_factory=dict)
    """Weights of reward functions, by name (`gsm8k_reward_fn`) or by path (`package.module:function`)."""
    timeout_s: float = Field(10.0, gt=0, le=86_400)
    """Longest time that a reward function may take over one response; then it has failed (`ppo.max_abstained`)."""

    @model_validator(mode="after")
    def _some_source(self) -> Self:
        if self.verifier == 0 and self.reward_model == 0 and not any(self.functions.values()):
            raise ValueError("at least one weight among ppo.reward's sources must be above 0")
        return self


class ClusterConfig(Config):
    """The Ray cluster of one PPO run; what it says of trainers holds for SFT and reward model with several, too."""

    address: str | None = None
    """A Ray cluster of your own, as host:port of its control server; None starts one for the run (docs/clusters.md)."""
    num_makers: Positive = 2
    """Experience makers."""
    trainer_threads: Positive = 2
    """Threads of each trainer process on a CPU; part of what makes a run repeatable."""
    maker_threads: Positive = 1
    """Threads of each maker on a CPU."""
    trainer_gpus: float | None = Field(None, ge=0)
    """GPUs of each trainer process; None shares what the machine has."""
    maker_gpus: float | None = Field(None, ge=0)
    """GPUs of each maker; None shares what the machine has."""
    object_store_mb: int | None = Field(None, ge=80)
    """Ray's shared memory for weights on their way to the makers; None takes what two versions of them need."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Longest wait for the cluster and its actors."""
    episode_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for one episode."""
    commit_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for one training state to be stored."""
    collective_timeout_s: float = Field(300.0, gt=0)
    """Longest wait of one trainer process for another in what they do together; then the group is lost."""
    weights_transport: Literal["auto", "shared_memory", "objects", "nccl"] = "auto"
    """How weights get to the makers: within a machine, through Ray's object store, or between GPUs; auto takes
    shared_memory where all makers are on the trainer's machine, else objects."""
    bucket_bytes: int = Field(64 << 20, ge=1 << 10)
    """Weights travel in pieces of about this size."""
    sparse_weights: bool = False
    """Send makers what changed since the version that they hold, where that is at most half the bytes; for makers on
    other machines. The trainer keeps a copy of the weights for it."""


class SamplingConfig(Config):
    """The distribution that responses are drawn from."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits, in sampling and in learning."""
    top_k: int = Field(0, ge=0)
    """Draw from the k likeliest tokens; 0 from all. What the ratio means then: ADR 12."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability."""


class PPOOptions(PassConfig):
    """Choices of the algorithm that coati's `PPOTrainer` has no parameter for."""

    STAGE: ClassVar[str] = "ppo"
    advantage_estimator: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp"] = "gae"
    """All but gae compare the samples of a prompt (reinforce_pp: of the batch) and need no critic."""
    samples_per_prompt: Positive = 1
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_target: float | None = Field(None, gt=0)
    """Nats per response that an adaptive KL coefficient steers to; None keeps the coefficient fixed."""
    kl_horizon: Positive = 10_000
    """Samples over which an adaptive coefficient reacts."""
    reward_clip: float | None = Field(None, gt=0)
    """Cut scores to plus or minus this; None keeps them, as a verifier's scores should be kept."""
    normalise_rewards: bool = False
    """Divide scores by the running standard deviation of all earlier episodes' scores."""
    max_abstained: float = Field(0.5, ge=0, le=1)
    """A sample whose reward function or judge fails abstains: nothing is learnt from it. Of an episode of which a
    larger share abstains nothing is learnt at all, and the run fails at its last commit; so do an evaluation, and the
    sampling of preferences. At one half, most of what is learnt from was judged."""
    eps_clip_high: float | None = Field(None, gt=0)
    """Upper half-width of the trust region; None takes eps_clip."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the ratio of tokens with a negative advantage; None sets none."""
    max_ratio: float | None = Field(20.0, gt=1)
    """Skip the actor's step, on all ranks, when a token's ratio of new to old probability exceeds this."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the policy's entropy, which is added to the objective."""
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """How tokens' losses become one: mean of all tokens, of sequences' means, or sums over the longest length."""
    correction: Literal["none", "truncated", "decoupled"] = "none"
    """For samples of an older policy: truncated importance weights, or PPO around the recomputed policy."""
    importance_cap: float = Field(2.0, gt=0)
    """Largest importance weight."""
    critic_init: Literal["policy", "reward_model"] = "policy"
    """The critic starts on the policy's transformer with a zero head, or as the reward model, its head rescaled."""
    engine: Literal["native", "native_graphs", "hf", "vllm"] = "native"
    """Our own decoding loop, the same with steps recorded as CUDA graphs (untried), transformers' `generate`, or vLLM
    where it is installed."""
    rollout_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and arithmetic of the makers."""
    legacy: bool = False
    """Give upstream's numbers instead of the right ones; ADR 8 lists what changes."""


def batch_complaints(
    values: Mapping[str, int], *, samples_per_prompt: int = 1, dp: int = 1, buffer_limit: int = 0
) -> list[str]:
    """Return what does not hold between an episode's prompts, its chunks and its batches, a sentence each.

    Args:
        values: by key; only relations between the given ones are looked at.
        samples_per_prompt: of `ppo`, as the others.
        dp: models that learn side by side, from a batch each.
        buffer_limit: batches for which makers may run ahead; 0 sets no limit.
    """
    told = []
    prompts, chunk, batch, micro = (values.get(key) for key in BATCHES)
    samples, each = (prompts or 0) * samples_per_prompt, samples_per_prompt
    if chunk and chunk % each:
        told.append(f"ppo.chunk_size is {chunk}, but must be a multiple of ppo.samples_per_prompt, {each}")
    if batch and micro and batch % micro:
        told.append(f"ppo.train_batch_size is {batch}, but must be a multiple of ppo.micro_batch_size, {micro}")
    told += [
        f"{key} is {size}, but an episode has {samples} samples (prompts_per_episode x samples_per_prompt); "
        f"choose a divisor of {samples}"
        for key, size in ((CHUNK, chunk), (BATCH, batch))
        if size and samples % size
    ]
    step = (batch or 0) * dp
    if step and samples % step and not samples % (batch or 1):
        told.append(
            f"ppo.train_batch_size is {batch} on each of {dp} (ppo.num_trainers over those that hold one "
            f"model), so a step learns from {step} samples, which do not divide an episode's {samples} "
            "(prompts_per_episode x samples_per_prompt); lower one of them"
        )
    room = buffer_limit * step
    if chunk and 0 < room < chunk:
        told.append(
            f"ppo.buffer_limit has room for {room} samples, less than a chunk ({chunk}): no maker could run ahead; "
            "raise it"
        )
    return told


class RolloutConfig(SamplingConfig, PPOOptions):
    """From prompts to experience."""

    chunk_size: Positive = 32
    """Samples that one maker generates and scores together; never depends on the number of makers."""
    max_prompt_tokens: Positive = 256
    max_new_tokens: Positive = 20
    max_length: int | None = Field(None, ge=2)
    """Tokens of prompt and response together; None sets no limit but the model's."""
    kl_coef: float = Field(0.02, ge=0)
    """Weight of the per-token KL penalty, per nat; where an adaptive coefficient starts."""
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        complaints = batch_complaints({CHUNK: self.chunk_size}, samples_per_prompt=self.samples_per_prompt)
        if complaints:
            raise ValueError(complaints[0])
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("ppo.kl_target steers ppo.kl_coef, which from 0 goes nowhere; start it above 0")
        if self.advantage_estimator in {"grpo", "dr_grpo", "rloo"} and self.samples_per_prompt == 1:
            raise ValueError(
                f"ppo.advantage_estimator {self.advantage_estimator} compares samples of one prompt; "
                "set ppo.samples_per_prompt to at least 2"
            )
        return self


class LearningConfig(SamplingConfig, PPOOptions):
    """From experience to steps of actor and critic."""

    train_batch_size: Positive = 32
    """Samples per optimizer step of one trainer process."""
    micro_batch_size: Positive = 32
    """Samples that go through the model at once, at most."""
    max_epochs: Positive = 1
    """Passes over an episode's experience."""
    eps_clip: float = Field(0.2, gt=0, lt=1)
    """Half-width of the trust region on the probability ratio."""
    value_clip: float = Field(0.2, gt=0)
    """Half-width of the trust region on values, in the unit of the returns."""
    vf_coef: float = Field(1.0, gt=0)
    """Weight of the critic's loss."""
    ptx_coef: float = Field(0.0, ge=0, lt=1)
    """Weight of the language-model loss on demonstrations; the policy's loss gets what is left of 1."""
    ptx_batch_size: Positive = 4
    """Demonstrations per optimizer step of one trainer process."""
    grad_clip: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        complaints = batch_complaints({BATCH: self.train_batch_size, MICRO: self.micro_batch_size})
        if complaints:
            raise ValueError(complaints[0])
        return self


class OverlapConfig(Config):
    """How far makers may run ahead of the trainer."""

    max_staleness: int = Field(0, ge=0)
    """Episodes that makers may be ahead. 0 is lockstep: every sample comes from the version that learns from it, and a
    run can be repeated to the bit. From 1 on makers work while the trainer learns; `correction` truncated or decoupled
    is recommended then."""
    stale_samples: Literal["wait", "drop"] = "wait"
    """wait: makers begin nothing that could become older than max_staleness; drop: they go on, and what became too old
    is thrown away and its prompts are sampled again."""
    buffer_limit: int = Field(0, ge=0)
    """Batches (train_batch_size x num_trainers samples; under 3d fewer) that may be ready or being made for later
    episodes; then the makers wait. 0 sets no limit but that of max_staleness."""
    update_lora_weights: bool | None = None
    """Send makers only adapters and heads, which they hold beside the frozen weights, instead of merged weights. None
    does so where trainers and makers of a run share one frozen base: with adapters, under plain and ddp."""


class StopConfig(Config):
    """When PPO ends before its last episode; its policy is finished then."""

    kl: float | None = Field(None, gt=0)
    """Mean KL from the start, in nats per response, above which `episodes` episodes in a row end it."""
    drift: float | None = Field(None, gt=0)
    """How far the development figure may fall below its best (share of right answers, or the reward model's standard
    deviations) for the last `episodes` measurements, while the reward model pays more than it paid then."""
    episodes: Positive = 2
    """In a row."""


class PPOConfig(RolloutConfig, LearningConfig, AdapterTrainersConfig, OverlapConfig):
    """One PPO run."""

    episodes: Positive = 6
    """Rounds of collecting and learning; each commits a training state."""
    prompts_per_episode: Positive = 64
    evaluate_every: int = Field(0, ge=0)
    """Episodes from one measurement on the development split to the next; the best measured episode's policy is kept.
    0 measures nothing, and keeps the last."""
    stop: StopConfig = StopConfig()
    lr: float = Field(1e-5, gt=0)
    critic_lr: float = Field(1e-4, gt=0)
    warmup_steps: int = Field(2, ge=0)
    """Optimizer steps of linear warm-up; constant afterwards."""
    weight_decay: float = Field(0.0, ge=0)
    lora: LoRAConfig | None = LoRAConfig()
    """Adapters on actor and critic; None trains all weights."""
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _whole_batches(self) -> Self:
        complaints = batch_complaints(
            {key: getattr(self, key.removeprefix("ppo.")) for key in BATCHES},
            samples_per_prompt=self.samples_per_prompt,
            dp=self.dp,
            buffer_limit=self.buffer_limit,
        )
        if complaints:
            raise ValueError("; ".join(complaints))
        return self

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.stale_samples == "drop" and not (self.buffer_limit and self.max_staleness):
            raise ValueError(
                "ppo.stale_samples drop lets makers run ahead until the buffer is full; set ppo.buffer_limit to at "
                "least 1, and ppo.max_staleness too, or everything made ahead would be thrown away"
            )
        if self.update_lora_weights and (self.lora is None or self.lora.init == "pissa"):
            raise ValueError(
                "ppo.update_lora_weights sends adapters to makers that hold the weights below them: it needs ppo.lora, "
                "and not ppo.lora.init pissa, which changes those"
            )
        return self

    @model_validator(mode="after")
    def _drift_is_seen(self) -> Self:
        if self.stop.drift is not None and not (self.evaluate_every and self.reward.reward_model):
            raise ValueError(
                "ppo.stop.drift compares the reward model with the development split: set ppo.evaluate_every, and "
                "ppo.reward.reward_model above 0, or leave it out"
            )
        return self

    @property
    def not_shared(self) -> str | None:
        """What keeps the processes of a run from sharing a base, in words; None if nothing does."""
        return super().not_shared or ("update_lora_weights is false" if self.update_lora_weights is False else None)

    @property
    def sends_adapters(self) -> bool:
        """Whether makers are sent adapters and heads alone."""
        return self.shares_base or bool(self.update_lora_weights)
