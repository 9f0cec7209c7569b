"""Checkpoints that one strategy writes and every other reads, on any number of ranks; adapters, merged and not."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.booster import TrainedState
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.supervised.batches import as_masked, token_batch
from rlhf_core.supervised.step import token_loss
from rlhf_core.training.optim import Trained, make_trained
from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found
from tests.parallel.strategy_cases import laid_out, llama

FORMS = {"file": False, "directory": True}
"""Unsharded and sharded, as `save_model(shard=)` has it."""
BEFORE = 2
"""Steps before the checkpoint."""


def write(ranks: Ranks, strategy: str, precision: str, directory: str) -> Found:
    """Two steps, a checkpoint in both forms, and the next step; the state is what the checkpoint must hold."""
    strategy, ranks = laid_out(ranks, strategy)
    trained = _trained(ranks, strategy, precision)
    for _ in range(BEFORE):
        _step(trained, ranks)
    _save(trained, Path(directory))
    state = trained.booster.state(trained.model, trained.optimizer)
    return Found(_step(trained, ranks), _flat(state))


def read(ranks: Ranks, strategy: str, precision: str, directory: str) -> Found:
    """Of every checkpoint in the directory, in both forms: how many tensors came back otherwise, and the next step."""
    strategy, ranks = laid_out(ranks, strategy)
    numbers = {}
    for written in sorted(each for each in Path(directory).iterdir() if each.is_dir()):
        for form in FORMS:
            trained = _trained(ranks, strategy, precision)
            _load(trained, written / form)
            state = trained.booster.state(trained.model, trained.optimizer)
            unlike = _unlike(state, written / "file") if ranks.is_first else 0
            taken = _step(trained, ranks)
            numbers |= {f"{written.name}.{form}.{name}": value for name, value in taken.items()}
            numbers[f"{written.name}.{form}.unlike"] = float(unlike)
    return Found(numbers)


def write_adapters(ranks: Ranks, strategy: str, precision: str, directory: str) -> Found:
    """Two steps of adapters, and their checkpoint; what the optimizer holds, and what the base holds still."""
    strategy, ranks = laid_out(ranks, strategy)
    trained = _trained(ranks, strategy, precision, adapters=True)
    base = _frozen(trained)
    for _ in range(BEFORE):
        _step(trained, ranks)
    _save(trained, Path(directory))
    moved = sum(not torch.equal(tensor, base[name]) for name, tensor in _frozen(trained).items())
    members = [member for group in trained.optimizer.param_groups for member in group["params"]]
    held = ranks.everyone.sum(torch.tensor(sum(member.numel() for member in members))).item()
    state = trained.booster.state(trained.model, trained.optimizer)
    numbers = {
        "members": float(held),
        "tensors": float(len(members)),
        "moved": float(moved),
        "frozen": float(len(base)),
    }
    return Found(numbers | _step(trained, ranks), _flat(state) | {f"base.{name}": each for name, each in base.items()})


def read_adapters(ranks: Ranks, strategy: str, precision: str, directory: str) -> Found:
    """The unmerged checkpoint of adapters, from both forms: which tensors came back otherwise, and the next step."""
    strategy, ranks = laid_out(ranks, strategy)
    numbers = {}
    for form in FORMS:
        trained = _trained(ranks, strategy, precision, adapters=True)
        _load(trained, Path(directory) / form)
        state = trained.booster.state(trained.model, trained.optimizer)
        unlike = _unlike(state, Path(directory) / "file") if ranks.is_first else 0
        numbers |= {f"{form}.{name}": value for name, value in _step(trained, ranks).items()}
        numbers[f"{form}.unlike"] = float(unlike)
    return Found(numbers)


def _trained(ranks: Ranks, strategy: str, precision: str, *, adapters: bool = False) -> Trained:
    """A model like no other: what it is after reading must come from the checkpoint."""
    # The base of adapters, which training leaves alone, is the checkpoint's own.
    model = llama(hidden=128, layers=2, seed=0 if adapters else 100 * ranks.world_size + len(strategy))
    if adapters:
        attach_lora(model, stages.LORA, seed=ranks.world_size)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(ranks.world_size))
    return make_trained(
        model,
        lr=stages.OTHER_LR,
        weight_decay=stages.DECAY,
        schedule=lambda step: 1 / (1 + step),
        booster=make_booster(strategy, precision=precision, max_norm=stages.CLIP, ranks=ranks, device=stages.DEVICE),  # type: ignore[arg-type]
    )


def _step(trained: Trained, ranks: Ranks) -> dict[str, float]:
    """One step from rows that are the same however many ranks share them; how far it led, the first rank knows."""
    before = trained.booster.weights(trained.model)
    rows = [as_masked(row) for row in stages.demonstrations()[: stages.ROWS]]
    mine = token_batch(rows[ranks.rank :: ranks.world_size])
    tokens = int(ranks.sum(torch.tensor(mine.tokens)).item())
    loss = token_loss(
        trained.model,
        mine,
        denominator=tokens / ranks.world_size,
        device=torch.device(stages.DEVICE),
        autocast_dtype=trained.booster.autocast_dtype,
    )
    trained.booster.backward(loss, trained.optimizer)
    rate = trained.scheduler.get_last_lr()[0]
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    trained.scheduler.step()
    mean = ranks.sum(loss.detach()).item() / ranks.world_size
    after = trained.booster.weights(trained.model)
    length = sum(((tensor - before[name]) ** 2).sum().item() for name, tensor in after.items()) ** 0.5
    return {"loss": mean, "grad_norm": trained.optimizer.get_grad_norm(), "lr": rate, "length": length}


def _save(trained: Trained, directory: Path) -> None:
    model, optimizer, scheduler, booster = trained
    for form, shard in FORMS.items():
        where = directory / form
        booster.save_model(model, str(where / "model"), shard=shard, size_per_shard=1)
        booster.save_optimizer(optimizer, str(where / "optimizer"), shard=shard)
        booster.save_lr_scheduler(scheduler, str(where / "schedule.json"))


def _load(trained: Trained, where: Path) -> None:
    model, optimizer, scheduler, booster = trained
    booster.load_model(model, str(where / "model"))
    booster.load_optimizer(optimizer, str(where / "optimizer"))
    booster.load_lr_scheduler(scheduler, str(where / "schedule.json"))


def _flat(state: TrainedState) -> dict[str, Tensor]:
    weights = {f"weights.{name}": tensor for name, tensor in state.weights.items()}
    moments = {f"{moment}.{name}": each for moment, held in state.moments.items() for name, each in held.items()}
    return weights | moments


def _frozen(trained: Trained) -> dict[str, Tensor]:
    plain = trained.booster.plain(trained.model)
    with trained.booster.awake(trained.model):
        return {name: each.detach().clone() for name, each in plain.named_parameters() if not each.requires_grad}


def _unlike(state: TrainedState, written: Path) -> int:
    """Return how many of a state's tensors are not, to the bit, what two safetensors files say; nothing of ours reads.

    Moments are in the file by number: matrices first, as they decay, then all others, each in the model's order.
    """
    weights, optimizer = load_file(written / "model"), load_file(written / "optimizer")
    names = [name for matrices in (True, False) for name, each in state.weights.items() if (each.ndim > 1) == matrices]
    expected = {f"weights.{name}": weights[name] for name in state.weights}
    for key, tensor in optimizer.items():
        number, _, moment = key.partition(".")
        expected[f"{moment}.{names[int(number)]}"] = tensor
    found = _flat(state)
    assert len(optimizer) == 3 * len(names)
    return sum(name not in found or not torch.equal(found[name], each) for name, each in expected.items()) + len(
        found.keys() - expected.keys()
    )
