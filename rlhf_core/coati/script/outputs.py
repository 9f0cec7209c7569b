"""What `train_ppo` leaves behind: two directories that `from_pretrained` loads, each whole or as it was before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlhf_core.coati.script.models import MODELS_DIR, load_policy
from rlhf_core.models.adapters import is_adapter_directory, save_adapters
from rlhf_core.models.loading import locate_model
from rlhf_core.models.lora import save_merged
from rlhf_core.models.saving import save_model
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.optim import Trained

if TYPE_CHECKING:
    from argparse import Namespace

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    with exact(trainees.actor) as actor:
        together(ranks, lambda: None if actor is None else _save_actor(args, actor, tokenizer), what="store the actor")
    with exact(trainees.critic) as critic:

        def write(directory: Path) -> None:
            critic.save_pretrained(directory)
            tokenizer.save_pretrained(directory)

        place = Path(args.save_path) / "critic" / "modeling"
        together(ranks, lambda: None if critic is None else replace(place, write), what="store the critic")


def exact(trained: Trained) -> AbstractContextManager[Any]:
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
        replace(base, write_base)
    replace(base.parent / "modeling", write_actor)
    inputs = {Path(given).resolve() for given in (args.pretrain, args.rm_pretrain) if given}
    if not merged and base.resolve() not in inputs:
        shutil.rmtree(base, ignore_errors=True)  # of an earlier run, whose adapters are gone now


def replace(directory: Path, write: Callable[[Path], None]) -> None:
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
