"""The models of `train_ppo`: made from the directories that the flags name, and at the end stored.

What is stored are two directories, actor and critic, that `from_pretrained` loads, each whole or as it was before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from rlhf_core.coati.script.checks import parts_of, read_lora
from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.adapters import CONFIG_FILE, is_adapter_directory, load_adapters, save_adapters
from rlhf_core.models.attention import attend_by_flash, flash_attention_lacks
from rlhf_core.models.compatibility import check_same_tokenizer
from rlhf_core.models.critic import Critic
from rlhf_core.models.heads import HEAD_FILE
from rlhf_core.models.loading import load_causal_lm, load_tokenizer, locate_model
from rlhf_core.models.lora import attach_lora, merge_adapters, save_merged
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.saving import save_model
from rlhf_core.models.trunk import cast_weights, disable_dropout
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.strategy.tensor_parallel import check_parts_of
from rlhf_core.training.optim import Trained

if TYPE_CHECKING:
    from argparse import Namespace

    from transformers import PreTrainedTokenizerBase

MODELS_DIR = Path("~/.cache/rlhf/models")
"""Where packaged models are kept once they are converted."""
_COATIS = {
    "alpha": "lora_alpha",
    "dropout": "linear_lora_dropout",
    "bias": "lora_train_bias",
    "init": "lora_initialization_method",
}
"""Keys of the adapters' file, by ours."""
_TOKENIZER_FILE = "tokenizer_config.json"


class Models(NamedTuple):
    """What one run trains and asks, all on its device."""

    actor: PreTrainedModel
    critic: Critic
    reward_model: RewardModel | None
    """None if functions give the reward."""
    initial_model: PreTrainedModel | None
    """None if the reference is the actor with its adapters switched off."""
    tokenizer: PreTrainedTokenizerBase
    critic_init: str


def build_models(args: Namespace, device: torch.device, tell: Callable[[str], None]) -> Models:
    """Load what the flags name.

    Args:
        args: the flags, checked.
        device: where the models go.
        tell: is told in one line what is not as the flags say.

    Raises:
        ModelError: if a directory does not hold the model it should, or two of them read other tokens.
        ConfigError: if the adapters cannot be made as their file says.
    """
    lora = None if args.lora_config is None else lora_config(args.lora_config)
    frozen = _frozen_dtype(args, device)
    # biases that train are of the base, whose weights must then be of their kind
    dtype = frozen if lora is not None and lora.bias == "none" else torch.float32
    directory = locate_model(args.pretrain, models_dir=MODELS_DIR.expanduser())
    if args.plugin == "3d":
        check_parts_of(_base_of(directory) if is_adapter_directory(directory) else directory, parts_of(args))
    tokenizer = load_tokenizer(_tokenizer_directory(args, directory))
    actor = load_policy(directory, dtype, device)
    check_same_tokenizer(actor, tokenizer, what=f"--pretrain {args.pretrain} and the tokenizer")
    reward_model = None if args.no_neural_reward_model else _reward_model(args, actor, tokenizer, dtype, device)
    critic, critic_init = _critic(args, actor, reward_model, tokenizer, dtype, device)
    # switched off, adapters leave the policy as it was, unless they changed the base too
    own_reference = lora is None or lora.init == "pissa" or lora.bias != "none"
    initial_model = load_policy(directory, frozen, device).requires_grad_(False) if own_reference else None
    lacks = flash_attention_lacks(device)
    if args.use_flash_attn and lacks:
        tell(f"--use_flash_attn needs {lacks}, which is not here; attention runs as sdpa")
    for model in (actor, critic.trunk):
        disable_dropout(model)
        if args.use_flash_attn and not lacks:
            attend_by_flash(model)
        if lora is not None:
            attach_lora(model, lora, seed=args.seed)
    if reward_model is not None:
        reward_model.requires_grad_(False).trunk.to(frozen)  # only now: the critic began as a copy of it
    return Models(actor, critic, reward_model, initial_model, tokenizer, critic_init)


def lora_config(path: str) -> LoRAConfig:
    """Return the adapters that a file of coati's form describes.

    Raises:
        ConfigError: if it describes none that can be made.
    """
    try:
        return LoRAConfig(**read_lora(path))
    except ValueError as error:
        first = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
        where = ".".join(_COATIS.get(str(part), str(part)) for part in first["loc"]) or "value"
        raise ConfigError(f"--lora_config {path}: {where}: {first['msg']}") from error


def load_policy(directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the causal language model of a directory; of a peft adapter's, its base with the adapter merged.

    Merged first, a policy has no adapters but those that PPO adds: switched off, it is the stored policy again.

    Raises:
        ModelError: if there is none.
    """
    if not is_adapter_directory(directory):
        return load_causal_lm(directory, dtype, device)
    model = load_causal_lm(_base_of(directory), torch.float32, device)
    load_adapters(model, directory)
    merge_adapters(model)  # summed in float32, rounded once
    cast_weights(model, dtype)
    return model


def _base_of(adapter: Path) -> Path:
    try:
        base = str(json.loads((adapter / CONFIG_FILE).read_text())["base_model_name_or_path"] or "")
    except (ValueError, KeyError, TypeError):
        base = ""
    if not base:
        raise ModelError(f"{adapter / CONFIG_FILE} does not say which model it adapts; write base_model_name_or_path")
    return locate_model(base, models_dir=MODELS_DIR.expanduser())


def _tokenizer_directory(args: Namespace, policy: Path) -> Path:
    if args.tokenizer_dir:
        return Path(args.tokenizer_dir)
    adapters_only = is_adapter_directory(policy) and not (policy / _TOKENIZER_FILE).is_file()
    return _base_of(policy) if adapters_only else policy


def _reward_model(
    args: Namespace,
    actor: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: torch.device,
) -> RewardModel:
    flag = "--rm_checkpoint_path" if args.rm_checkpoint_path else "--rm_pretrain"
    given = args.rm_checkpoint_path or args.rm_pretrain
    local = args.rm_checkpoint_path is not None
    directory = Path(given) if local else locate_model(given, models_dir=MODELS_DIR.expanduser())
    held = next((place for place in (directory, directory / "modeling") if (place / HEAD_FILE).is_file()), None)
    if held is None:
        raise ModelError(
            f"{flag} {given} holds no reward model, as it has no {HEAD_FILE}; give what RewardModel.save_pretrained or "
            "RewardModelTrainer wrote as --rm_checkpoint_path"
        )
    model = RewardModel.from_pretrained(held, dtype).to(device).eval()
    _check_reads(model, (held, args.rm_pretrain), actor, tokenizer, what=f"the reward model {given} and the policy")
    return model


def _check_reads(
    model: RewardModel | Critic,
    places: tuple[Path | str | None, ...],
    actor: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    what: str,
) -> None:
    """Check that a model reads the policy's tokens: by its vocabulary, and by a tokenizer, if one stands beside it."""
    check_same_tokenizer(model, actor, what=what)
    for place in places:
        if place is not None and (Path(place).expanduser() / _TOKENIZER_FILE).is_file():
            check_same_tokenizer(load_tokenizer(Path(place).expanduser()), tokenizer, what=what)
            return


def _critic(
    args: Namespace,
    actor: PreTrainedModel,
    reward_model: RewardModel | None,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Critic, str]:
    if reward_model is not None and args.critic_init != "policy":
        return Critic.from_reward_model(reward_model, keep_head=True), "reward_model"
    if args.critic_init == "policy" or args.rm_pretrain is None:
        return Critic.from_causal_lm(actor), "policy"
    base = locate_model(args.rm_pretrain, models_dir=MODELS_DIR.expanduser())
    critic = Critic.from_causal_lm(load_policy(base, dtype, device))
    _check_reads(critic, (base,), actor, tokenizer, what=f"--rm_pretrain {args.rm_pretrain} and the policy")
    return critic, "policy"


def _frozen_dtype(args: Namespace, device: torch.device) -> torch.dtype:
    """Return the kind of frozen weights: on a GPU they are kept in the arithmetic of the run."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if args.mixed_precision == "fp16" else torch.bfloat16


class Trainees(NamedTuple):
    """What a run trains, each with what trains it."""

    actor: Trained
    critic: Trained


def save_outputs(args: Namespace, tokenizer: PreTrainedTokenizerBase, trainees: Trainees, ranks: Ranks) -> None:
    """Write actor and critic, each as its own `from_pretrained` loads it, with the tokenizer beside it.

    All ranks call it, since they may hold the weights together; the first one writes.

    Kept adapters name the model below them. Where that was made by merging an adapter of --pretrain, it is stored
    too, as actor/base: nothing else on disk is what PPO's adapters were trained on.
    """
    with _exact(trainees.actor) as actor:
        together(ranks, lambda: None if actor is None else _save_actor(args, actor, tokenizer), what="store the actor")
    with _exact(trainees.critic) as critic:

        def write(directory: Path) -> None:
            critic.save_pretrained(directory)
            tokenizer.save_pretrained(directory)

        place = Path(args.save_path) / "critic" / "modeling"
        together(ranks, lambda: None if critic is None else replace_directory(place, write), what="store the critic")


def _exact(trained: Trained) -> AbstractContextManager[Any]:
    """Return the context of a trained model with its exact weights on the first rank, of None on the others."""
    booster: Any = trained.booster
    held: AbstractContextManager[Any] = booster.exact(trained.model)
    return held


def _save_actor(args: Namespace, actor: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    base = Path(args.save_path) / "actor" / "base"
    pretrain = locate_model(args.pretrain, models_dir=MODELS_DIR.expanduser())
    merged = args.keep_lora and is_adapter_directory(pretrain)

    def write_base(directory: Path) -> None:
        save_model(load_policy(pretrain, actor.dtype, torch.device("cpu")), tokenizer, directory)

    def write_actor(directory: Path) -> None:
        if args.keep_lora:
            save_adapters(actor, directory, base=str(base.absolute()) if merged else str(pretrain))
        else:
            save_merged(actor, directory)
        tokenizer.save_pretrained(directory)

    if merged:
        replace_directory(base, write_base)
    replace_directory(base.parent / "modeling", write_actor)
    inputs = {Path(given).resolve() for given in (args.pretrain, args.rm_pretrain) if given}
    if not merged and base.resolve() not in inputs:
        shutil.rmtree(base, ignore_errors=True)  # of an earlier run, whose adapters are gone now


def replace_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Write a directory beside its place and put it there: nothing of an earlier one stays in it.

    Where a process ends between the two renames, the earlier one stands beside its place; the next call puts it back.

    Args:
        directory: the place.
        write: fills the directory that it is given; what it raises leaves the earlier one as it was.
    """
    fresh, old = directory.with_name(f"{directory.name}.new"), directory.with_name(f"{directory.name}.old")
    if old.exists() and not directory.exists():
        old.rename(directory)
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)
    write(fresh)
    if directory.exists():
        directory.rename(old)
    try:
        fresh.rename(directory)
    except OSError:
        if old.exists():
            old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)
