"""Every knob, as frozen pydantic models. Imports no torch: flows and the command line read it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]


class Config(BaseModel):
    """A frozen configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Config):
    """The pretrained model that a chain starts from."""

    path: str = "smollm2-135m-instruct"
    """Name of a packaged model, a local directory, or a hub name."""
    num_parameters: int | None = Field(None, ge=1)
    """Size for the memory check while the model is not on this machine; read from the files when it is."""


class TemplateConfig(Config):
    """How a prompt is put to the model, and how a response ends."""

    prompt: str | None = None
    """Text around `{prompt}`; None takes the tokenizer's own chat template."""
    stop: tuple[str, ...] = ()
    """Tokens that end a response besides the tokenizer's end-of-sequence token."""
    answer_tag: str = "answer"
    """The verifier reads what stands between `<answer>` and `</answer>`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.prompt is not None and self.prompt.count("{prompt}") != 1:
            raise ValueError(f"template.prompt must hold {{prompt}} once, but it is {self.prompt!r}")
        return self


class SplitsConfig(Config):
    """How many problems each stage gets; the splits share no prompt."""

    sft: Positive = 384
    preferences: Positive = 96
    ppo: Positive = 256
    evaluation: int = Field(100, ge=2)
    """At least two, so that there is an interval."""


class DataConfig(Config):
    """Where prompts, answers and preferences come from."""

    task: str | None = "number_sorting"
    """A reasoning-gym task by name; None when `problems` names a file."""
    task_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    problems: str | None = None
    """JSON lines (also .gz) of {"question", "answer"}, as GSM8K's."""
    preferences: str | None = None
    """JSON lines (also .gz) of {"chosen", "rejected"}, as HH-RLHF's; None samples pairs from the SFT model."""
    splits: SplitsConfig = SplitsConfig()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.task is None) == (self.problems is None):
            raise ValueError("set exactly one of data.task and data.problems (set the other to null)")
        return self


class LoRAConfig(Config):
    """Low-rank adapters on the linear layers."""

    r: Positive = 16
    """Rank."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter."""


class SFTConfig(Config):
    """Supervised fine-tuning on demonstrations."""

    epochs: Positive = 1
    batch_size: Positive = 16
    """Sequences per optimizer step."""
    micro_batch_size: Positive = 16
    """Sequences that go through the model at once."""
    lr: float = Field(5e-5, gt=0)
    warmup_steps: int = Field(2, ge=0)
    """Linear warm-up, then linear decay to zero."""
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    max_length: Positive = 256
    """Tokens of prompt and response together; a longer demonstration is an error."""
    lora: LoRAConfig | None = None
    """None trains all weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the forward pass (bfloat16: autocast over float32 weights)."""


class RewardModelConfig(Config):
    """Bradley-Terry training on preference pairs."""

    samples_per_prompt: int = Field(4, ge=2)
    """Responses sampled per prompt when pairs come from the SFT model's own samples."""
    max_new_tokens: Positive = 20
    """Length of those samples."""
    pairs: Positive = 192
    """Most pairs used, held-out ones included."""
    heldout_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of prompts whose pairs are kept for measuring accuracy."""
    epochs: Positive = 1
    batch_size: Positive = 16
    """Pairs per optimizer step."""
    micro_batch_size: Positive = 8
    lr: float = Field(3e-5, gt=0)
    head_lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(2, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the forward pass (bfloat16: autocast over float32 weights)."""
    max_length: Positive = 512
    """Tokens of prompt and response together; a longer pair is dropped and counted."""


class RewardConfig(Config):
    """Weights of the sources of reward; the reward model's score is standardised before it is weighted."""

    verifier: float = Field(1.0, ge=0)
    """Weight of the verifier's 0 or 1."""
    reward_model: float = Field(0.0, ge=0)
    """Weight of the reward model's score, in its standard deviations on held-out samples."""

    @model_validator(mode="after")
    def _some_source(self) -> Self:
        if self.verifier == 0 and self.reward_model == 0:
            raise ValueError("at least one of ppo.reward.verifier and ppo.reward.reward_model must be above 0")
        return self


class ClusterConfig(Config):
    """The Ray cluster of one PPO run."""

    num_makers: Positive = 2
    """Experience makers."""
    trainer_threads: Positive = 2
    """Threads of the trainer on a CPU; part of what makes a run repeatable."""
    maker_threads: Positive = 1
    """Threads of each maker on a CPU."""
    trainer_gpus: float | None = Field(None, ge=0)
    """GPUs of the trainer; None shares what the machine has."""
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


class PPOConfig(Config):
    """One PPO run."""

    episodes: Positive = 6
    """Rounds of collecting and learning; each commits a training state."""
    prompts_per_episode: Positive = 64
    samples_per_prompt: Positive = 1
    chunk_size: Positive = 32
    """Samples that one maker generates and scores together; never depends on the number of makers."""
    train_batch_size: Positive = 32
    """Samples per optimizer step of one trainer process."""
    micro_batch_size: Positive = 32
    """Samples that go through the model at once."""
    max_epochs: Positive = 1
    """Passes over an episode's experience."""
    lr: float = Field(1e-5, gt=0)
    critic_lr: float = Field(1e-4, gt=0)
    warmup_steps: int = Field(2, ge=0)
    """Optimizer steps of linear warm-up; constant afterwards."""
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    eps_clip: float = Field(0.2, gt=0, lt=1)
    """Half-width of the trust region on the probability ratio."""
    value_clip: float = Field(0.2, gt=0)
    """Half-width of the trust region on values."""
    kl_coef: float = Field(0.02, ge=0)
    """Weight of the per-token KL penalty, per nat."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    temperature: float = Field(1.0, gt=0)
    max_prompt_tokens: Positive = 256
    max_new_tokens: Positive = 20
    reward: RewardConfig = RewardConfig()
    lora: LoRAConfig | None = LoRAConfig()
    """Adapters on actor and critic; None trains all weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the trainer's forward pass (bfloat16: autocast over float32 trainable weights)."""
    rollout_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and arithmetic of the makers."""
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _whole_batches(self) -> Self:
        samples = self.prompts_per_episode * self.samples_per_prompt
        for name in ("chunk_size", "train_batch_size"):
            if samples % getattr(self, name):
                raise ValueError(
                    f"ppo.{name} is {getattr(self, name)}, but an episode has {samples} samples "
                    f"(prompts_per_episode x samples_per_prompt); choose a divisor of {samples}"
                )
        if self.chunk_size % self.samples_per_prompt:
            raise ValueError("ppo.chunk_size must be a multiple of ppo.samples_per_prompt")
        if self.train_batch_size % self.micro_batch_size:
            raise ValueError("ppo.train_batch_size must be a multiple of ppo.micro_batch_size")
        return self


class EvaluationConfig(Config):
    """Greedy answers on held-out problems."""

    max_new_tokens: Positive = 24
    """At least two more than the longest reference answer."""
    batch_size: Positive = 50


class GateConfig(Config):
    """When a policy replaces the champion."""

    confidence: float = Field(0.95, gt=0.5, lt=1)
    min_gain: float = Field(0.0, ge=-1, le=1)
    """The paired interval's lower end over the champion (or, without one, over the SFT model) must exceed this."""


class PipelineConfig(Config):
    """A preset: one whole chain."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Artifacts are named after it: `policy/<name>`."""
    bootstrap: bool = False
    """Take the base model where a stage's parent does not exist yet."""
    seed: int = Field(0, ge=0, lt=2**32)
    model: ModelConfig = ModelConfig()
    template: TemplateConfig = TemplateConfig()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    ppo: PPOConfig = PPOConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()

    @model_validator(mode="after")
    def _an_episode_has_enough_prompts(self) -> Self:
        if self.ppo.prompts_per_episode > self.data.splits.ppo:
            raise ValueError(
                f"ppo.prompts_per_episode is {self.ppo.prompts_per_episode}, but data.splits.ppo has only "
                f"{self.data.splits.ppo} problems; lower the first or raise the second"
            )
        return self
