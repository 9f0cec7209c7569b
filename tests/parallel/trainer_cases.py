"""`PPOTrainer` on this rank's share of the prompts; alone, on all of them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlhf_core.errors import RlhfError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.evaluators import PerformanceEvaluator
from rlhf_core.trainer.ppo import checkpoint as ppo_checkpoint
from rlhf_core.trainer.ppo import state as ppo_state
from rlhf_core.trainer.ppo.trainer import PPOTrainer
from tests.parallel.ranks import Found
from tests.unit.trainer.ppo_trainers import encoded, padded, record_stats, trainer, weights
from tests.unit.trainer.test_ppo_trainer_refusals import Spoilt

# One prompt stands in both halves, whose samples must differ all the same.
TEXTS = ["1 plus 1", "2 plus 2", "1 plus 1", "3 plus 3"]


def batches(ranks: Ranks, *, texts: list[str] | None = None) -> list[dict[str, Any]]:
    share = len(TEXTS) // ranks.world_size
    own = TEXTS[share * ranks.rank : share * (ranks.rank + 1)] if texts is None else texts
    return [padded(encoded(own))]


def built(ranks: Ranks, **changes: Any) -> PPOTrainer:
    parameters: dict[str, Any] = {"train_batch_size": 4 // ranks.world_size, "seed": 3}
    return trainer(**(parameters | changes))


def directory(ranks: Ranks) -> Path:
    """Return an empty directory of all ranks."""
    return Path(ranks.broadcast_object(tempfile.mkdtemp() if ranks.is_first else ""))


def episode(ranks: Ranks) -> Found:
    ours = built(ranks)
    stats = record_stats(ours)
    kept: list[torch.Tensor] = []
    step = ours.learner.training_step

    def spy(experience: Any, ptx: Any) -> Any:
        kept.append(torch.cat([experience.sequences, experience.policy_version[:, None]], dim=1))
        return step(experience, ptx)

    ours.learner.training_step = spy  # type: ignore[method-assign]
    ours.fit(2, 1, 1, batches(ranks))
    return Found(stats[0]._asdict(), {"rows": kept[0]} | weights(ours))


def unequal(ranks: Ranks) -> Found:
    built(ranks).fit(1, 1, 1, batches(ranks, texts=TEXTS[: 1 + ranks.rank]))
    return Found()


def padding_on_one(ranks: Ranks) -> Found:
    (batch,) = batches(ranks)
    batch["attention_mask"][:] *= 1 - ranks.rank
    # Told of the end on both ranks, at different times: what it measures must not wait for the other.
    built(ranks, callbacks=(PerformanceEvaluator(1, 1, 1, 1),)).fit(1, 1, 1, [batch])
    return Found()


def spoilt_on_one(ranks: Ranks) -> Found:
    value = float("nan") if ranks.rank == 1 else 0.0
    save_dir = directory(ranks)
    try:
        built(ranks, reward_model=Spoilt(value), save_dir=save_dir).fit(1, 1, 1, batches(ranks))
    except RlhfError as error:
        ranks.barrier()
        return Found({"kept": float(len(list(save_dir.rglob("batch.json"))))}, sentence=str(error))
    return Found()


def resumed(ranks: Ranks) -> Found:
    save_dir = directory(ranks)
    straight = built(ranks)
    straight.fit(2, 1, 2, batches(ranks))
    first = built(ranks, save_dir=save_dir, save_interval=3)
    first.fit(2, 1, 2, batches(ranks))
    second = built(ranks)
    second.load_checkpoint(save_dir / "trainer" / "epoch-1_step-3")
    second.fit(2, 1, 2, batches(ranks))
    expected, found = weights(straight), weights(second)
    equal = all(torch.equal(found[name], weight) for name, weight in expected.items())
    ranks.barrier()
    if ranks.is_first:
        shutil.rmtree(save_dir)
    return Found({"equal": float(equal), "step": float(second.position.step)})


def _full_disk_on(failing: int, ranks: Ranks) -> Found:
    save_dir = directory(ranks)
    ours = built(ranks, save_dir=save_dir, save_interval=1)
    write = ppo_state.write_state

    def full(*arguments: Any) -> None:
        if ranks.rank == failing and ours.position.step == 2:
            raise OSError(28, "No space left on device")
        write(*arguments)

    ppo_checkpoint.write_state = full  # type: ignore[attr-defined]
    sentence = ""
    try:
        ours.fit(1, 1, 2, batches(ranks))
    except RlhfError as error:
        sentence = str(error)
    finally:
        ppo_checkpoint.write_state = write  # type: ignore[attr-defined]
    again = built(ranks)
    again.load_checkpoint(save_dir)
    return Found({"step": float(again.position.step)}, sentence=sentence)


def full_disk_on_first(ranks: Ranks) -> Found:
    return _full_disk_on(0, ranks)


def full_disk_on_second(ranks: Ranks) -> Found:
    return _full_disk_on(1, ranks)
