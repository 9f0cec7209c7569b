"""The models of the four roles, out of what the flags name, read by the process that holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf_core.errors import ModelError
from rlhf_core.models.compatibility import check_same_tokenizer
from rlhf_core.models.heads import HEAD_FILE
from rlhf_core.models.loading import load_causal_lm, load_tokenizer, locate_model
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import disable_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf_core.coati.roles.settings import RoleSettings

MODELS_DIR = Path("~/.cache/rlhf/models")
"""Where packaged models are kept once they are converted."""
ANY_KIND = "auto"


def load_policy(settings: RoleSettings, device: torch.device, *, trained: bool) -> PreTrainedModel:
    """Return the model of `--pretrain`, without dropout.

    Args:
        settings: name it, and the kind that it must be of.
        device: where it goes.
        trained: in float32; else as small as the run's arithmetic allows on a GPU.

    Raises:
        ModelError: if there is none, or it is of another kind.
    """
    directory = _located(settings.pretrain)
    check_kind(directory, settings.pretrain, settings.model)
    model = load_causal_lm(directory, torch.float32 if trained else _frozen_dtype(settings, device), device)
    disable_dropout(model)
    return model


def load_policy_tokenizer(settings: RoleSettings) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the policy."""
    return load_tokenizer(_located(settings.pretrain))


def load_reward_model(settings: RoleSettings, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    """Return the reward model: a trained one, or the policy's transformer under a head that nobody trained.

    Raises:
        ModelError: if `--rm_pretrain` holds none, or it reads other tokens than the policy.
    """
    if settings.rm_pretrain is None:
        policy = load_policy(settings, device, trained=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return RewardModel.from_causal_lm(policy.cpu()).to(device).eval()
    directory = _located(settings.rm_pretrain)
    held = next((place for place in (directory, directory / "modeling") if (place / HEAD_FILE).is_file()), None)
    if held is None:
        raise ModelError(
            f"--rm_pretrain {settings.rm_pretrain} holds no reward model, as it has no {HEAD_FILE}; give what "
            "RewardModel.save_pretrained or RewardModelTrainer wrote, or leave the flag out"
        )
    model = RewardModel.from_pretrained(held, _frozen_dtype(settings, device)).to(device).eval()
    check_same_tokenizer(model, tokenizer, what=f"the reward model {settings.rm_pretrain} and the policy's tokenizer")
    return model


def check_kind(directory: Path, name: str, kind: str) -> None:
    """See that a model's directory holds the architecture that `--model` says.

    Raises:
        ModelError: if it does not say which it holds, or it is another.
    """
    file = directory / "config.json"
    try:
        held = str(json.loads(file.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{file} does not say which kind of model it is; give a model that transformers saved"
        ) from error
    if kind not in (ANY_KIND, held):
        raise ModelError(
            f"--pretrain {name} holds a model of the kind {held}, but --model says {kind}; give --model {held}, or "
            f"--model {ANY_KIND} for any kind that transformers loads"
        )


def _located(name: str) -> Path:
    return locate_model(name, models_dir=MODELS_DIR.expanduser())


def _frozen_dtype(settings: RoleSettings, device: torch.device) -> torch.dtype:
    """Return the kind of weights that are not trained: on a GPU they are kept in the arithmetic of the run."""
    if device.type == "cpu" or settings.precision == "fp32":
        return torch.float32
    return torch.float16 if settings.precision == "fp16" else torch.bfloat16
