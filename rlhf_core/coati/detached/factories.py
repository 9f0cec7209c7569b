"""coati's helpers that make models, tokenizers and strategies from a few words, as its Ray scripts call them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rlhf_core.coati.script.models import MODELS_DIR
from rlhf_core.coati.strategy import Strategy, make_strategy
from rlhf_core.config import LoRAConfig
from rlhf_core.config.strategy import StrategyName
from rlhf_core.errors import ConfigError
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, load_tokenizer, locate_model
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.strategy.ranks import current_ranks

FAMILIES = ("gpt2", "bloom", "opt", "llama")
TOKENIZERS = {
    "gpt2": "gpt2",
    "bloom": "bigscience/bloom-560m",
    "opt": "facebook/opt-350m",
    "llama": "hf-internal-testing/llama-tokenizer",
}
STRATEGIES: Mapping[str, StrategyName] = {
    "ddp": "ddp",
    "colossalai_gemini": "colossalai_gemini",
    # coati keeps weights and optimizer in host memory under this name, as static placement on a CPU does anyway.
    "colossalai_gemini_cpu": "colossalai_gemini",
    "colossalai_zero2": "colossalai_zero2",
    "colossalai_zero2_cpu": "colossalai_zero2_cpu",
}
ENVIRONMENT = ("rank", "local_rank", "world_size", "master_port", "master_addr")
"""What `env_info` must name; all five, as texts."""
_ALPHA_PER_RANK = 1.0  # coati's LoraLinear adds B A as it is
_SEED = 42  # of adapters' first factors


def get_actor_from_args(
    model: str, pretrained: str | None = None, config: PretrainedConfig | None = None, lora_rank: int = 0
) -> PreTrainedModel:
    """Return a causal language model.

    Args:
        model: its family: gpt2, bloom, opt or llama.
        pretrained: directory of its weights, or a name that is known here; None draws new ones.
        config: of new weights; None takes the family's own defaults, which are large.
        lora_rank: of adapters on its linear layers; 0 attaches none.

    Raises:
        ConfigError: if the family is unknown, or another than that of weights or configuration.
        ModelError: if the weights cannot be read.
    """
    loaded = _language_model(model, pretrained, config)
    if lora_rank > 0:
        attach_lora(loaded, LoRAConfig(r=lora_rank, alpha=_ALPHA_PER_RANK * lora_rank), seed=_SEED)
    return loaded


def get_critic_from_args(
    model: str, pretrained: str | None = None, config: PretrainedConfig | None = None, lora_rank: int = 0
) -> Critic:
    """Return a critic on the transformer of such a language model, with a head of zeros; as `get_actor_from_args`."""
    critic = Critic.from_causal_lm(_language_model(model, pretrained, config))
    if lora_rank > 0:
        attach_lora(critic.trunk, LoRAConfig(r=lora_rank, alpha=_ALPHA_PER_RANK * lora_rank), seed=_SEED)
    return critic


def get_reward_model_from_args(
    model: str, pretrained: str | None = None, config: PretrainedConfig | None = None
) -> RewardModel:
    """Return a reward model: the one that a directory holds, or an untrained one on such a language model.

    Args:
        model: the family.
        pretrained: directory that `RewardModel.save_pretrained` wrote, or a language model's; None draws new weights.
        config: of new weights.
    """
    directory = None if pretrained is None else _directory(pretrained)
    if directory is not None and (directory / "head.safetensors").is_file():
        return RewardModel.from_pretrained(directory, torch.float32)
    return RewardModel.from_causal_lm(_language_model(model, pretrained, config))


def get_strategy_from_args(strategy: str) -> Strategy:
    """Return one of coati's strategies: ddp, colossalai_gemini, colossalai_zero2, or the last two with `_cpu`.

    Raises:
        ConfigError: if the name is another, or the strategy cannot be had here.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"unsupported strategy {strategy!r}; take one of {', '.join(STRATEGIES)}")
    return make_strategy(STRATEGIES[strategy])


def get_tokenizer_from_args(model: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Return a tokenizer that pads with its end token where it has none of its own for padding.

    Args:
        model: the family, whose smallest public model's tokenizer is taken.
        **kwargs: `pretrained`, a directory or known name, takes that one instead.

    Raises:
        ConfigError: if the family is unknown, or there is another argument.
        ModelError: if there is no such tokenizer on this machine.
    """
    _check_family(model)
    pretrained = kwargs.pop("pretrained", None) or TOKENIZERS[model]
    if kwargs:
        raise ConfigError(f"get_tokenizer_from_args takes pretrained, but not {next(iter(kwargs))!r}")
    tokenizer = load_tokenizer(_directory(pretrained))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def set_dist_env(env_info: Mapping[str, str]) -> None:
    """Tell this process its place among those that train together, as torchrun would, before it joins them.

    Args:
        env_info: rank, local_rank, world_size, master_port and master_addr, all of them as texts.

    Raises:
        ConfigError: if one is missing, or is no text.
    """
    missing = [name for name in ENVIRONMENT if name not in env_info]
    if missing:
        raise ConfigError(f"env_info lacks {', '.join(missing)}; it must name {', '.join(ENVIRONMENT)}")
    wrong = [name for name in ENVIRONMENT if not isinstance(env_info[name], str)]
    if wrong:
        raise ConfigError(f"env_info has {wrong[0]} {env_info[wrong[0]]!r}, but all five must be texts; give str(...)")
    for name in ENVIRONMENT:
        os.environ[name.upper()] = env_info[name]


def get_rank() -> int:
    """Return this process's place among those that train together; 0 for one alone."""
    return current_ranks().rank


def get_world_size() -> int:
    """Return how many processes train together; 1 for one alone."""
    return current_ranks().world_size


def is_rank_0() -> bool:
    """Return whether this process is the first of those that train together."""
    return current_ranks().is_first


def get_model_numel(model: nn.Module) -> int:
    """Return the number of a model's parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _language_model(model: str, pretrained: str | None, config: PretrainedConfig | None) -> PreTrainedModel:
    _check_family(model)
    if pretrained is not None:
        loaded = load_causal_lm(_directory(pretrained), "float32")
    else:
        wanted = config if config is not None else AutoConfig.for_model(model)
        loaded = AutoModelForCausalLM.from_config(wanted, torch_dtype=torch.float32).eval()
    if loaded.config.model_type != model:
        where = "the configuration" if pretrained is None else pretrained
        raise ConfigError(f"{where} is of a {loaded.config.model_type}, but a {model} was asked for; name its family")
    return loaded


def _check_family(model: str) -> None:
    if model not in FAMILIES:
        raise ConfigError(f"unsupported model {model!r}; take one of {', '.join(FAMILIES)}")


def _directory(pretrained: str) -> Path:
    return locate_model(pretrained, models_dir=MODELS_DIR.expanduser())


def get_receivers_per_sender(
    sender_idx: int, num_senders: int, num_receivers: int, allow_idle_sender: bool
) -> list[int]:
    """Return the numbers of the receivers that one sender has.

        senders <= receivers, or idle ones allowed: receiver i has one sender, i mod senders
        else:                                       sender i has one receiver, i mod receivers

    Makers may be wired to all trainers here, and need none of this; it is for scripts of coati's that do.

    Args:
        sender_idx: of the sender, from 0.
        num_senders: how many there are.
        num_receivers: how many there are.
        allow_idle_sender: whether a sender may have no receiver at all.

    Raises:
        ConfigError: if there is no sender or receiver, or no such sender.

    Example:
        >>> [get_receivers_per_sender(sender, 2, 3, allow_idle_sender=False) for sender in range(2)]
        [[0, 2], [1]]
        >>> [get_receivers_per_sender(sender, 3, 2, allow_idle_sender=False) for sender in range(3)]
        [[0], [1], [0]]
        >>> [get_receivers_per_sender(sender, 3, 2, allow_idle_sender=True) for sender in range(3)]
        [[0], [1], []]
    """
    if num_senders < 1 or num_receivers < 1 or not 0 <= sender_idx < num_senders:
        raise ConfigError(
            f"expected a sender below the number of senders, and at least one receiver, got sender {sender_idx} of "
            f"{num_senders} and {num_receivers} receivers"
        )
    if num_senders <= num_receivers or allow_idle_sender:
        return list(range(sender_idx, num_receivers, num_senders))
    return [sender_idx % num_receivers]
