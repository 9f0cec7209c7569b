"""The files of a checkpoint of one model, its optimizer and its schedule: safetensors and JSON, never pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.counting import counted
from rlhf_core.errors import ModelError
from rlhf_core.models.loading import check_harmless
from rlhf_core.models.lora import save_merged
from rlhf_core.models.saving import quiet

EXACT_FILE = "exact.safetensors"
"""All weights by the model's own names, adapters apart: beside merged shards, from which they cannot be recovered."""
OPTIMIZER_FILE = "optimizer.safetensors"
SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""What every strategy's Adam knows of a group, whichever class it is."""
_FACTS = "facts"


class OptimizerState(NamedTuple):
    """An optimizer's state as a checkpoint holds it, the same whatever the strategy and the number of ranks."""

    moments: Mapping[int, Mapping[str, Any]]
    """By the weight's number, in the order of the groups; whole tensors, or plain numbers."""
    facts: dict[str, Any]
    """Its groups, and what else JSON holds."""


def write_model_file(model: nn.Module, path: str | Path) -> None:
    """Write all weights and lasting buffers by the model's own names, tied weights once."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in _own(model).items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def write_model_directory(model: nn.Module, directory: str | Path, *, shard_mb: int) -> None:
    """Write a directory that the model's class loads with `from_pretrained`, adapters merged; and, if any, apart."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    size = f"{shard_mb}MB"
    if isinstance(model, PreTrainedModel):
        save_merged(model, directory, max_shard_size=size)
    elif callable(save := getattr(model, "save_pretrained", None)):
        save(directory, max_shard_size=size)
    has_adapters = any(isinstance(module, LoraLayer) for module in model.modules())
    if has_adapters or not hasattr(model, "save_pretrained"):
        write_model_file(model, directory / EXACT_FILE)


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of what a checkpoint holds: weights, tied ones once, and buffers that last."""
    return {name: tensor.shape for name, tensor in _own(model).items()}


def read_weights(model: nn.Module, path: str | Path, expected: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return, in host memory, what `write_model_file` or `write_model_directory` wrote; changes nothing.

    Args:
        model: its class and configuration tell how a directory is read.
        path: the file or directory.
        expected: as `shapes` returned it for the model.

    Raises:
        ModelError: if it is damaged or has other names or shapes.
    """
    path = Path(path)
    exact = path / EXACT_FILE if path.is_dir() else path
    try:
        if exact.is_file():
            tensors: dict[str, Tensor] = load_file(exact)
        elif path.is_dir():
            tensors = _from_pretrained(model, path)
        else:
            raise ModelError(f"{path} holds no checkpoint: there is no such file or directory")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _damaged(path, error) from error
    unlike = {name for name in expected.keys() & tensors.keys() if expected[name] != tensors[name].shape}
    if wrong := sorted((expected.keys() ^ tensors.keys()) | unlike):
        raise ModelError(
            f"the checkpoint {path} does not fit the model: they disagree on {counted(len(wrong), 'tensor')} (missing, "
            f"unknown or of another shape), first {wrong[0]!r}; build the model with the checkpoint's configuration"
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}  # of a directory they are trainable weights


def write_optimizer(state: OptimizerState, path: str | Path, *, directory: bool) -> None:
    """Write an optimizer's state; its tensors are named `<number of the parameter>.<moment>`."""
    tensors, plain = {}, {}
    for number, moments in state.moments.items():
        for moment, value in moments.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{moment}"] = value.detach().cpu().contiguous().clone()
            else:
                plain[f"{number}.{moment}"] = value
    path = Path(path) / OPTIMIZER_FILE if directory else Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={_FACTS: json.dumps(state.facts | {"plain": plain})})


def read_optimizer(path: str | Path, expected: Sequence[Sequence[torch.Size]]) -> OptimizerState:
    """Return what `write_optimizer` wrote; changes nothing.

    Args:
        path: the file, or the directory that it is in.
        expected: shapes of the optimizer's members, by group.

    Raises:
        ModelError: if it is damaged or belongs to other weights.
    """
    path = Path(path) / OPTIMIZER_FILE if Path(path).is_dir() else Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()[_FACTS])
            entries: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        entries |= facts.pop("plain")
        groups = [_settings(group) for group in facts["param_groups"]]
        sizes = [len(group["params"]) for group in facts["param_groups"]]
        moments: dict[int, dict[str, Any]] = {}
        for key, value in entries.items():
            number, _, moment = key.partition(".")
            moments.setdefault(int(number), {})[moment] = value
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise _damaged(path, error) from error
    _check_optimizer(moments, sizes, expected, path)
    return OptimizerState(moments, facts | {"param_groups": groups})


def write_scheduler(scheduler: Any, path: str | Path) -> None:
    """Write a schedule's state, without the functions in it, which the configuration makes again."""
    state = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(state))


def read_scheduler(scheduler: Any, path: str | Path) -> None:
    """Put back what `write_scheduler` wrote, the rates of the optimizer's groups with it.

    Raises:
        ModelError: if it is damaged.
    """
    try:
        state = json.loads(Path(path).read_text())
        rates = state["_last_lr"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _damaged(Path(path), error) from error
    groups = scheduler.optimizer.param_groups
    if len(rates) != len(groups):
        raise ModelError(
            f"the schedule {path} is for {counted(len(rates), 'group')} of weights, but the optimizer has "
            f"{len(groups)}; build it with the checkpoint's configuration"
        )
    if "lr_lambdas" in scheduler.state_dict():
        state["lr_lambdas"] = [None] * len(rates)
    scheduler.load_state_dict(state)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate  # the schedule keeps it, but does not hand it on before its next step


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, tied ones once, and the buffers that last."""
    lasting = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters())
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in lasting}


def _from_pretrained(model: nn.Module, directory: Path) -> dict[str, Tensor]:
    """Return the weights by the model's own names; through its own class, which may rename them on disk."""
    kind: Any = type(model)
    if isinstance(model, PreTrainedModel):
        check_harmless(directory)
        with quiet():
            fresh, report = kind.from_pretrained(
                directory, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        if lost := sorted(report["missing_keys"]):
            raise ModelError(f"the checkpoint {directory} is incomplete: it lacks {lost[0]!r}")
        return _own(fresh)
    return _own(kind.from_pretrained(directory, torch.float32))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the configuration says of a group, without how an optimizer of one strategy does it."""
    return {  # JSON has no tuples
        name: tuple(group[name]) if name == "betas" else group[name] for name in SETTINGS if name in group
    }


def _check_optimizer(
    moments: Mapping[int, Mapping[str, Any]], sizes: list[int], expected: Sequence[Sequence[torch.Size]], path: Path
) -> None:
    members = [shape for group in expected for shape in group]
    fits = sizes == [len(group) for group in expected] and all(
        number < len(members) and (not isinstance(value, Tensor) or value.ndim == 0 or value.shape == members[number])
        for number, held in moments.items()
        for value in held.values()
    )
    if not fits:
        raise ModelError(
            f"the optimizer's state {path} belongs to other weights; build model and optimizer with the checkpoint's "
            "configuration"
        )


def _damaged(path: Path, error: Exception) -> ModelError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelError(f"the checkpoint {path} cannot be read ({reason}); give one that was written whole")
