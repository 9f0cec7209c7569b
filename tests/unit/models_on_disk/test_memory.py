"""The memory check: its formula against arithmetic by hand, its refusals, and what it needs to know."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlhf_core.config import (
    ClusterConfig,
    DataConfig,
    LoRAConfig,
    ModelConfig,
    PipelineConfig,
    PPOConfig,
    RewardConfig,
    RewardModelConfig,
    SFTConfig,
)
from rlhf_core.errors import ModelError
from rlhf_core.models import memory
from rlhf_core.models.memory import (
    MachineMemory,
    check_memory,
    check_memory_for,
    machine_memory,
    required_memory,
)
from tests.tiny_llama import tiny_llama, write_tiny_llama

GB = 10**9


def test_full_training_of_a_billion_parameters_by_hand() -> None:
    config = PPOConfig(lora=None, rollout_dtype="bfloat16", cluster=ClusterConfig(num_makers=3))
    need = required_memory(config, GB)
    # actor and critic: weights 4 GB, gradients 4 GB, Adam 8 GB each; and 2 GB each of bfloat16 to publish
    assert need.trainer == 2 * (4 + 4 + 8) * GB + 2 * 2 * GB
    assert need.maker == 3 * 2 * GB  # actor, critic and initial model
    assert need.total == 36 * GB + 3 * 6 * GB


def test_group_baselines_need_no_memory_for_a_critic() -> None:
    config = PPOConfig(lora=None, rollout_dtype="bfloat16", advantage_estimator="rloo", samples_per_prompt=4)
    need = required_memory(config, GB)
    assert need.trainer == (4 + 4 + 8) * GB + 2 * GB
    assert need.maker == 2 * 2 * GB  # actor and initial model


def test_adapters_on_a_billion_parameters_by_hand() -> None:
    reward = RewardConfig(verifier=1, reward_model=0.5)
    config = PPOConfig(lora=LoRAConfig(r=8), dtype="bfloat16", rollout_dtype="float32", reward=reward)
    need = required_memory(config, GB)
    # N^(2/3) is a million: 2 x 8 x 10^6 adapter parameters of 16 bytes, on 4 GB of float32, for actor and critic;
    # and 4 GB each to publish
    assert need.trainer == pytest.approx(2 * (4 * GB + 16 * 16 * 10**6 + 4 * GB), rel=1e-6)
    assert need.maker == 4 * 4 * GB  # actor, critic, initial model and reward model


def test_four_trainers_share_what_their_strategy_divides_by_hand() -> None:
    makers = ClusterConfig(num_makers=1)
    config = PPOConfig(
        lora=None, cluster=makers, strategy="zero2", num_trainers=4, train_batch_size=8, micro_batch_size=8
    )
    need = required_memory(config, GB)
    # per model: 2 GB of bfloat16 weights, a quarter of 2 (gradients), of 4 (float32 masters) and of 8 (Adam)
    assert need.other_trainer == round(2 * (2 + 0.5 + 1 + 2) * GB)
    assert need.trainer == need.other_trainer + 2 * 2 * GB  # to publish
    assert need.total == need.trainer + 3 * need.other_trainer + 6 * GB
    offloading = required_memory(config.model_copy(update={"strategy": "zero2_cpu"}), GB)
    assert (offloading.total, offloading.offloaded) == (need.total, 2 * (1 + 2) * GB)
    assert offloading.total_offloaded == 4 * offloading.offloaded
    alike = required_memory(config.model_copy(update={"strategy": "ddp"}), GB)
    assert alike.other_trainer == 2 * 16 * GB


def test_a_model_is_whole_while_it_is_made_and_the_critics_reward_model_is_beside_it() -> None:
    config = PPOConfig(lora=None, strategy="gemini", num_trainers=8, train_batch_size=8, micro_batch_size=8)
    need = required_memory(config, GB)
    # sharded, an eighth of 2 + 2 + 4 + 8 GB per model, 4 GB in all; but first actor and critic are there in float32
    assert need.other_trainer == 2 * 4 * GB
    copied = required_memory(config.model_copy(update={"critic_init": "reward_model"}), GB)
    assert (copied.other_trainer, copied.trainer) == (3 * 4 * GB, 3 * 4 * GB)
    assert copied.maker == need.maker
    adapters = PPOConfig(lora=LoRAConfig(r=8), num_trainers=2, critic_init="reward_model", dtype="bfloat16")
    assert required_memory(adapters, GB).other_trainer == 3 * 4 * GB  # more than the two models with adapters


def test_the_bound_on_adapters_holds_for_a_real_model() -> None:
    # SmolLM2-135M, r 16: per layer q and o 576+576, k and v 576+192, gate, up and down 576+1536; 30 layers
    real = 30 * 16 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    n = 134_515_008
    base_only = 2 * (4 + 2) * n
    bound = (required_memory(PPOConfig(lora=LoRAConfig(r=16)), n).trainer - base_only) / (2 * 16)
    assert real <= bound < 2 * real


def test_a_machine_that_is_too_small_gets_need_machine_and_remedy() -> None:
    with pytest.raises(ModelError) as caught:
        check_memory(PPOConfig(), 6_738_415_616, model="llama-7b", machine=MachineMemory(23 * GB))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("llama-7b (6.74 billion", "at least 165 GB", "has 23 GB and no GPU", "`-p model=PATH`"):
        assert part in message


def test_a_machine_that_is_large_enough_passes_by_a_byte() -> None:
    config = PPOConfig(lora=None)
    total = required_memory(config, 10**6).total
    check_memory(config, 10**6, model="m", machine=MachineMemory(total))
    with pytest.raises(ModelError, match="needs at least"):
        check_memory(config, 10**6, model="m", machine=MachineMemory(total - 1))


def test_with_gpus_their_memory_counts_and_each_process_must_fit_on_one() -> None:
    config = PPOConfig(lora=None)  # 36 GB for the trainer and 2 x 8 GB for the makers
    check_memory(config, GB, model="m", machine=MachineMemory(8 * GB, (40 * GB, 16 * GB)))
    with pytest.raises(ModelError, match="2 GPUs with 60 GB together"):
        check_memory(config, GB, model="m", machine=MachineMemory(500 * GB, (30 * GB, 30 * GB)))


def test_what_is_offloaded_goes_into_host_memory_where_there_are_gpus() -> None:
    config = PPOConfig(lora=None, cluster=ClusterConfig(num_makers=1), strategy="zero2_cpu")
    # on the GPU: 2 x (2 + 2) GB of weights and gradients and 4 to publish; the maker's 6; in host memory 2 x (4 + 8)
    check_memory(config, GB, model="m", machine=MachineMemory(24 * GB, (12 * GB, 6 * GB)))
    with pytest.raises(ModelError, match="needs at least 42 GB"):
        check_memory(config, GB, model="m", machine=MachineMemory(24 * GB - 1, (12 * GB, 6 * GB)))
    with pytest.raises(ModelError, match="needs at least 42 GB"):
        check_memory(config, GB, model="m", machine=MachineMemory(24 * GB, (11 * GB, 7 * GB)))
    with pytest.raises(ModelError, match="needs at least 42 GB"):
        check_memory(config, GB, model="m", machine=MachineMemory(42 * GB - 1))
    check_memory(config, GB, model="m", machine=MachineMemory(42 * GB))


def test_several_trainers_have_their_gpus_each_and_their_need_in_the_message() -> None:
    config = PPOConfig(cluster=ClusterConfig(trainer_gpus=1, maker_gpus=1, num_makers=1), num_trainers=2)
    with pytest.raises(ModelError, match="2 trainers and 1 maker are to have 3 GPUs, but this machine has 2"):
        check_memory(config, 1000, model="m", machine=MachineMemory(GB, (GB, GB)))
    with pytest.raises(ModelError, match=r"for the first trainer, .* for each other trainer, .* each of 1 maker"):
        check_memory(config, GB, model="m", machine=MachineMemory(GB, (GB, GB, GB)))


@pytest.mark.parametrize("stage", ["sft", "reward-model"])
def test_the_trainers_of_a_stage_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    stages = {"sft": SFTConfig(strategy="zero2", num_trainers=2), "reward_model": RewardModelConfig(num_trainers=2)}
    config = pipeline("some/model", GB).model_copy(update=stages)
    # zero2: 2 GB of bfloat16 weights, half of 2 + 4 + 8; plain: 16 each
    need = 2 * (9 if stage == "sft" else 16) * GB
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need))
    check_memory_for(config, tmp_path, trains=stage)  # type: ignore[arg-type]
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need - 1))
    with pytest.raises(ModelError, match=f"training the stage {stage} on some/model .* at least {need // GB} GB"):
        check_memory_for(config, tmp_path, trains=stage)  # type: ignore[arg-type]


def test_more_gpus_than_there_are_is_refused() -> None:
    config = PPOConfig(cluster=ClusterConfig(trainer_gpus=1, maker_gpus=0.5, num_makers=2))
    check_memory(config, 1000, model="m", machine=MachineMemory(GB, (GB, GB)))
    with pytest.raises(ModelError, match="are to have 2 GPUs, but this machine has 0"):
        check_memory(config, 1000, model="m", machine=MachineMemory(GB))


def test_this_machine_has_no_more_than_the_kernel_says() -> None:
    found = machine_memory()
    assert 0 < found.ram <= psutil.virtual_memory().total


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, unlimited = tmp_path / "memory.max", tmp_path / "unlimited"
    limit.write_text("123456789\n")
    unlimited.write_text("max\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(limit), str(unlimited), str(tmp_path / "none")))
    assert machine_memory().ram == 123456789


def pipeline(path: str, num_parameters: int | None = None) -> PipelineConfig:
    return PipelineConfig(
        name="test", data=DataConfig(task="chain_sum"), model=ModelConfig(path=path, num_parameters=num_parameters)
    )


def test_a_hub_model_is_judged_by_the_presets_number(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="PPO on some/giant"):
        check_memory_for(pipeline("some/giant", 10**15), tmp_path)
    check_memory_for(pipeline("some/dwarf", 1000), tmp_path)
    check_memory_for(pipeline("some/unknown"), tmp_path)


def test_a_model_on_this_machine_is_judged_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    check_memory_for(pipeline(str(directory), 10**15), tmp_path)
    need = required_memory(PPOConfig(), tiny_llama().num_parameters()).total
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need - 1))
    with pytest.raises(ModelError, match=f"PPO on {directory}"):
        check_memory_for(pipeline(str(directory), 1000), tmp_path)


def test_a_packaged_model_is_judged_before_it_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(GB))
    with pytest.raises(ModelError, match=r"0\.135 billion parameters"):
        check_memory_for(pipeline("smollm2-135m-instruct"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_leads_nowhere_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        check_memory_for(pipeline(str(tmp_path / "no" / "model")), tmp_path)
