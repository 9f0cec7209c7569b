"""PPOTrainer on a CUDA device: who is where while the others learn, and the same bits after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.coati.callbacks import Callback
from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.models.critic import Critic
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.training.optim import make_trained, warmup_then_constant
from tests.unit.coati.ppo_trainers import prompts, restless_llama, trainer, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_cuda(**changes: Any) -> PPOTrainer:
    actor = restless_llama().to("cuda")
    parts: dict[str, Any] = {}
    for role, model in (("actor", actor), ("critic", Critic.from_causal_lm(actor))):
        booster, schedule = PlainBooster("bf16"), warmup_then_constant(0)
        trained = make_trained(model, lr=1e-4, weight_decay=0.0, schedule=schedule, booster=booster)
        parts |= {role: trained.model, f"{role}_optim": trained.optimizer, f"{role}_lr_scheduler": trained.scheduler}
        parts[f"{role}_booster"] = booster
    return trainer(**(parts | changes))


@pytest.mark.parametrize("offload", [False, True])
def test_models_that_only_judge_are_on_the_device_when_they_are_needed(offload: bool) -> None:
    seen: dict[str, set[str]] = {"learning": set(), "buffer": set()}
    ours = on_cuda(offload_inference_models=offload, buffer_cpu_offload=offload)
    judge: Any = ours.experience_maker.initial_model

    class Looks(Callback):
        def on_learn_batch_start(self) -> None:
            seen["learning"].add(judge.device.type)
            seen["buffer"].add(ours.buffer[0].sequences.device.type)

    ours.callbacks = (Looks(),)
    ours.fit(2, 1, 1, prompts())
    assert seen == ({"learning": {"cpu"}, "buffer": {"cpu"}} if offload else {"learning": {"cuda"}, "buffer": {"cuda"}})
    assert ours.position.step == 2


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    straight = on_cuda()
    straight.fit(2, 1, 2, prompts())
    torch.manual_seed(0)
    on_cuda(save_dir=tmp_path, save_interval=3).fit(2, 1, 2, prompts())
    resumed = on_cuda()
    torch.manual_seed(99)
    resumed.load_checkpoint(tmp_path / "trainer" / "epoch-1_step-3")
    resumed.fit(2, 1, 2, prompts())
    expected, found = weights(straight), weights(resumed)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
