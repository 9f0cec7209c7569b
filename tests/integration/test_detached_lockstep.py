"""A detached trainer in lockstep takes the steps of `PPOTrainer` in this process, to the last bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from rlhf_core.coati.detached.building import LearningOptions
from rlhf_core.coati.detached.ppo_trainer import DetachedPPOTrainer
from rlhf_core.coati.detached.scheduled_fit import DealingOptions
from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, RlhfError
from tests.integration import equality
from tests.integration.detached_models import (
    LIMIT_S,
    OPTIONS,
    Dies,
    MakerNotes,
    Notes,
    all_four,
    batches,
    cluster,
    end,
    maker,
    notes,
    plain,
    run,
    trained,
    wait_until_free,
    weights_in,
)
from tests.unit.coati.ppo_trainers import demonstrations, record_stats, trainer

pytestmark = pytest.mark.integration

LR = 1e-3
FIT = (20, 4, 3)
"""Five episodes of four batches of two, three times each: of four units, as the makers' batches are of two, too."""
GROUPS = OPTIONS.model_copy(
    update={"advantage_estimator": "grpo", "samples_per_prompt": 2, "entropy_coef": 0.01, "kl_target": 0.5}
)
COMBINED = {"options": GROUPS, "ptx_coef": 0.3, "accumulation_steps": 3}


@pytest.fixture(scope="module", autouse=True)
def on_a_cluster(tmp_path_factory: pytest.TempPathFactory, forked: dict[str, str]) -> Iterator[None]:
    with patch.dict(os.environ, forked), cluster(tmp_path_factory.mktemp("clusters")):
        yield


def schedule(step: int) -> float:
    return 1 / (1 + 0.1 * step)  # as the trainers of `ppo_trainers` have it


def texts() -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the loader shuffles
        return list(demonstrations())


def detached(
    name: str, makers: list[str], path: Path, *, options: Any = OPTIONS, lora: bool = False, **changes: Any
) -> Any:
    known = {"ptx_coef", "accumulation_steps"}
    learning = LearningOptions(
        lr=LR, lr_schedule=schedule, max_new_tokens=4, **{key: changes.pop(key) for key in known & changes.keys()}
    )
    parameters: dict[str, Any] = {
        "train_batch_size": 2, "callbacks": [Notes(path)], "learning": learning, "options": options,
        "value_clip": 0.2,  # PPOTrainer's default
        "update_lora_weights": lora, "pretrain_dataloader_fn": texts,
        "dealing": DealingOptions(seed=3, start_timeout_s=300.0),
    }  # fmt: skip
    return DetachedPPOTrainer.options(name=name, num_gpus=1, num_cpus=0).remote(
        makers, plain, lambda: trained(lora), **(parameters | changes)
    )


def in_process(*, options: Any = OPTIONS, lora: bool = False, **changes: Any) -> tuple[PPOTrainer, list[Any]]:
    ours = trainer(options=options, seed=3, lr=LR, lora=LoRAConfig(r=2) if lora else None, **changes)
    stats = record_stats(ours)
    rows = options.samples_per_prompt * 2
    ours.fit(FIT[0] // FIT[1], 2 * FIT[1] // rows, FIT[2], batches(), texts() if changes.get("ptx_coef") else None)
    return ours, stats


@pytest.mark.parametrize(
    ("makers", "dies_after", "changes"),
    [
        pytest.param(1, 0, {}, marks=pytest.mark.parallel),
        pytest.param(2, 0, {}, marks=pytest.mark.parallel),
        (2, 3, COMBINED),
        pytest.param(1, 3, {"lora": True}, marks=pytest.mark.parallel),
    ],
    ids=["one", "two", "all, and a maker that dies", "adapters, and a maker that comes up again"],
)
def test_losses_and_weights_are_those_of_one_process(
    makers: int, dies_after: int, changes: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = [f"maker_{number}" for number in range(makers)]
    options, lora = changes.get("options", OPTIONS), bool(changes.get("lora"))
    ours, stats = in_process(**changes)
    handles = [
        maker(
            name, ["trainer_0"], options=options, model_fn=lambda: all_four(lora), update_lora_weights=lora,
            callbacks=[MakerNotes(tmp_path / name, dies_after * (name == names[-1]))],
            sync_models_from_trainers=True, max_restarts=int(makers == 1),
        )
        for name in names
    ]  # fmt: skip
    other = detached("trainer_0", names, tmp_path / "steps", **changes)
    ray.get(other.sync_models_to_remote_makers.remote(), timeout=LIMIT_S)
    units = FIT[0] * 2 // (2 * options.samples_per_prompt)
    steps = [units - units // 2, units // 2] if makers == 2 else [units]
    run([other], handles, batches, steps, *FIT)
    ray.get(other.strategy_save_actor.remote(str(tmp_path / "actor")), timeout=LIMIT_S)
    found = notes(tmp_path / "steps")
    mine = [(each["actor_loss"], each["critic_loss"]) for each in found]
    theirs = [(each.actor_loss, each.critic_loss) for each in stats]
    assert mine == theirs  # to the bit
    equality.keep(f"coati's, 1 trainer x {makers} makers ({request.node.callspec.id})", mine, theirs)
    made = [len((tmp_path / name).read_text()) for name in names]
    assert sum(made) == units + bool(dies_after)  # what the dead one sent last did not come
    assert all(made)
    expected = dict(ours.learner.actor.named_parameters())
    saved = weights_in(tmp_path / "actor")
    assert len(saved.keys() & expected.keys()) >= len(expected) - 1  # tied weights have one of two names
    for name in saved.keys() & expected.keys():
        assert torch.equal(saved[name], expected[name].detach()), name
    assert ray.get(other.figures.remote(), timeout=LIMIT_S)["staleness"] == 0.0
    end(other, *handles)
    for name in ("trainer_0", *names):
        wait_until_free(name)


def test_a_trainer_that_died_goes_on_to_the_same_bits_from_its_state(tmp_path: Path) -> None:
    _, stats = in_process(**COMBINED)
    first = detached(
        "trainer_0", ["maker_0"], tmp_path / "steps", callbacks=[Notes(tmp_path / "steps"), Dies(2)],
        save_dir=tmp_path / "state", **COMBINED,
    )  # fmt: skip
    handle = maker("maker_0", ["trainer_0"], options=GROUPS, model_fn=all_four)
    loop = handle.workingloop.remote(batches, num_steps=10)
    with pytest.raises(RayActorError):
        ray.get(first.fit.remote(*FIT), timeout=LIMIT_S)
    with pytest.raises(RlhfError, match=r"trainer_0, which maker_0 works for, has ended"):
        ray.get(loop, timeout=LIMIT_S)
    ray.kill(first)  # or Ray would keep its name taken for this process
    wait_until_free("trainer_0")
    again = detached("trainer_0", ["maker_0"], tmp_path / "steps", **COMBINED)
    ray.get(again.load_state.remote(tmp_path / "state"), timeout=LIMIT_S)
    with pytest.raises(ConfigError, match=r"stands at version 3 .* call sync_models_to_remote_makers first"):
        run([again], [handle], batches, [10], *FIT)
    ray.get(again.sync_models_to_remote_makers.remote(), timeout=LIMIT_S)
    run([again], [handle], batches, [10], *FIT)
    assert [each["actor_loss"] for each in notes(tmp_path / "steps")] == [each.actor_loss for each in stats]
    end(again, handle)
