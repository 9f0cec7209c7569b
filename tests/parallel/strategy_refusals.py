"""What no strategy can do, asked of it on every rank."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.ranks import ALONE, Ranks
from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found
from tests.parallel.strategy_cases import llama, trained_by


def made(ranks: Ranks, strategy: str, precision: str) -> Found:
    make_booster(strategy, precision=precision, ranks=ranks)  # type: ignore[arg-type]
    return Found()


def fewer_ranks(ranks: Ranks) -> Found:  # noqa: ARG001 - a case's
    make_booster("zero2", ranks=ALONE)
    return Found()


def adapters(ranks: Ranks, strategy: str) -> Found:
    model = small()
    attach_lora(model, stages.LORA, seed=0)
    trained_by(model, strategy, "fp32", ranks)
    return Found()


def frozen(ranks: Ranks) -> Found:
    model = small()
    next(iter(model.parameters())).requires_grad_(requires_grad=False)
    trained_by(model, "gemini", "fp32", ranks)
    return Found()


def optimizer(ranks: Ranks, strategy: str) -> Found:
    model = small()
    booster = make_booster(strategy, ranks=ranks)  # type: ignore[arg-type]
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return Found()


def strangers(ranks: Ranks) -> Found:
    booster = make_booster("zero2", ranks=ranks)
    booster.boost(small(), torch.optim.AdamW(nn.Linear(2, 1, bias=False).parameters()))
    return Found()


def twice(ranks: Ranks) -> Found:
    trained = trained_by(small(), "zero2", "fp32", ranks)
    trained.booster.boost(small())
    return Found()


def other_model(ranks: Ranks, form: str) -> Found:
    """A checkpoint of a smaller model; that of another strategy would have been read."""
    with TemporaryDirectory() as own:
        place = f"{ranks.broadcast_object(own)}/model"
        written = trained_by(small(), "gemini", "fp32", ranks)
        written.booster.save_model(written.model, place, shard=form == "directory")
        larger = trained_by(llama(hidden=64, layers=2), "zero2", "fp32", ranks)
        return _refused(ranks, lambda: larger.booster.load_model(larger.model, place))


def other_optimizer(ranks: Ranks) -> Found:
    with TemporaryDirectory() as own:
        place = f"{ranks.broadcast_object(own)}/optimizer"
        written = trained_by(small(), "zero2", "fp32", ranks)
        written.booster.save_optimizer(written.optimizer, place)
        larger = trained_by(llama(hidden=64, layers=2), "gemini", "fp32", ranks)
        return _refused(ranks, lambda: larger.booster.load_optimizer(larger.optimizer, place))


def damaged(ranks: Ranks) -> Found:
    with TemporaryDirectory() as own:
        place = Path(ranks.broadcast_object(own)) / "model"
        trained = trained_by(small(), "gemini", "fp32", ranks)
        trained.booster.save_model(trained.model, str(place))
        if ranks.is_first:
            place.write_bytes(place.read_bytes()[:-100])
        ranks.barrier()
        return _refused(ranks, lambda: trained.booster.load_model(trained.model, str(place)))


def small() -> nn.Module:
    return llama(hidden=64, layers=1)


def _refused(ranks: Ranks, load: Any) -> Found:
    """Load what cannot be; every rank has done so before the first takes its files away."""
    try:
        load()
    except Exception:
        ranks.barrier()
        raise
    return Found()
