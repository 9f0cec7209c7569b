"""`PPOTrainer` on this rank's share of the prompts; alone, on all of them.

A case's further argument is the strategy; `strict` is the booster of tests that forgives nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhf_core.coati import ppo_checkpoint
from rlhf_core.coati.callbacks import PerformanceEvaluator
from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.config import LoRAConfig
from rlhf_core.errors import RlhfError
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.ranks import Ranks
from tests.parallel.directories import directory_of_all
from tests.parallel.ranks import Found
from tests.parallel.strategy_cases import laid_out
from tests.unit.coati.ppo_trainers import OPTIONS, encoded, padded, record_stats, trainer, weights
from tests.unit.coati.test_ppo_trainer_refusals import Spoilt
from tests.unit.training.strict_booster import StrictBooster

# One prompt stands in both halves, whose samples must differ all the same.
TEXTS = ["1 plus 1", "2 plus 2", "1 plus 1", "3 plus 3"]
OTHERS = ["4 plus 4", "5 plus 5", "6 plus 6", "7 plus 7"]


def batches(ranks: Ranks, *, texts: list[str] | None = None) -> list[dict[str, Any]]:
    share = len(TEXTS) // ranks.world_size
    own = TEXTS[share * ranks.rank : share * (ranks.rank + 1)] if texts is None else texts
    return [padded(encoded(own))]


def two_batches(ranks: Ranks) -> list[dict[str, Any]]:
    """What the loaders of all ranks give in a pass: a batch for an episode, and another for the next."""
    share = len(TEXTS) // ranks.world_size
    mine = slice(share * ranks.rank, share * (ranks.rank + 1))
    return [padded(encoded(texts[mine])) for texts in (TEXTS, OTHERS)]


def built(ranks: Ranks, strategy: str = "plain", **changes: Any) -> PPOTrainer:
    def make() -> Any:
        return StrictBooster() if strategy == "strict" else make_booster(strategy, ranks=ranks)  # type: ignore[arg-type]

    parameters: dict[str, Any] = {
        "train_batch_size": 4 // ranks.world_size,
        "seed": 3,
        "lr": 1e-4,
        "make_booster": make,
    }
    return trainer(**(parameters | changes))


def fitted(ours: PPOTrainer, *arguments: Any) -> Found:
    """Return what a fit does: the numbers of its steps, which rows they learnt from, and the weights after it."""
    stats = record_stats(ours)
    kept: list[torch.Tensor] = []
    step = ours.learner.training_step

    def spy(experience: Any, ptx: Any) -> Any:
        kept.append(torch.cat([experience.sequences, experience.policy_version[:, None]], dim=1))
        return step(experience, ptx)

    ours.learner.training_step = spy  # type: ignore[method-assign]
    ours.fit(*arguments)
    numbers = {f"{number}.{name}": value for number, each in enumerate(stats) for name, value in each._asdict().items()}
    rows = {f"rows.{number}": each for number, each in enumerate(kept)}
    return Found(numbers, rows | weights(ours))


def episode(ranks: Ranks, strategy: str = "plain") -> Found:
    strategy, ranks = laid_out(ranks, strategy)
    return fitted(built(ranks, strategy), 2, 1, 1, batches(ranks))


def adapters(ranks: Ranks, strategy: str = "plain") -> Found:
    """The reference is the actor without its adapters; activations are computed again."""
    strategy, ranks = laid_out(ranks, strategy)
    options = OPTIONS.model_copy(update={"gradient_checkpointing": True})
    return fitted(built(ranks, strategy, lora=LoRAConfig(r=2), options=options), 2, 1, 1, batches(ranks))


def saved(ranks: Ranks, strategy: str, save_dir: str) -> Found:
    """Three episodes of two steps, a pass each, and a checkpoint after every step."""
    ours = built(ranks, strategy, save_dir=Path(save_dir), save_interval=1)
    return fitted(ours, 3, 1, 2, two_batches(ranks))


def gone_on(ranks: Ranks, strategy: str, save_dir: str, name: str) -> Found:
    """What is left of the three episodes, by as many ranks as there are now."""
    ours = built(ranks, strategy)
    ours.load_checkpoint(Path(save_dir) / "trainer" / name)
    place = {"episode": float(ours.position.episode), "step": float(ours.position.step)}
    found = fitted(ours, 3, 1, 2, two_batches(ranks))
    return found._replace(numbers=found.numbers | place)


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
    with directory_of_all(ranks) as save_dir:
        try:
            built(ranks, reward_model=Spoilt(value), save_dir=save_dir).fit(1, 1, 1, batches(ranks))
        except RlhfError as error:
            ranks.barrier()
            return Found({"kept": float(len(list(save_dir.rglob("batch.json"))))}, sentence=str(error))
        finally:
            ranks.barrier()
    return Found()


def resumed(ranks: Ranks, strategy: str = "plain") -> Found:
    strategy, ranks = laid_out(ranks, strategy)
    straight = built(ranks, strategy)
    straight.fit(2, 1, 2, batches(ranks))
    with directory_of_all(ranks) as save_dir:
        first = built(ranks, strategy, save_dir=save_dir, save_interval=3)
        first.fit(2, 1, 2, batches(ranks))
        second = built(ranks, strategy)
        second.load_checkpoint(save_dir / "trainer" / "epoch-1_step-3")
    second.fit(2, 1, 2, batches(ranks))
    expected, found = weights(straight), weights(second)
    equal = all(torch.equal(found[name], weight) for name, weight in expected.items())
    return Found({"equal": float(equal), "step": float(second.position.step)})


def _full_disk_on(failing: int, ranks: Ranks) -> Found:
    write = ppo_checkpoint.write_state
    with directory_of_all(ranks) as save_dir:
        ours = built(ranks, save_dir=save_dir, save_interval=1)

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
