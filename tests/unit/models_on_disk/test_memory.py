"""The memory check: its formula against arithmetic by hand, its refusals, and what it needs to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from flows.presets import resolve
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
from rlhf_core.models import locating, memory
from rlhf_core.models.loading import count_built, count_parameters
from rlhf_core.models.memory import (
    MachineMemory,
    check_memory,
    check_memory_for,
    machine_memory,
    required_memory,
)
from rlhf_core.models.shape import Shape, shape_of
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


@pytest.mark.parametrize("lora", [None, LoRAConfig()])
def test_vllm_holds_the_actor_once_more(lora: LoRAConfig | None) -> None:
    config = PPOConfig(lora=lora, rollout_dtype="bfloat16")
    with_vllm = config.model_copy(update={"engine": "vllm"})
    assert required_memory(with_vllm, GB).maker - required_memory(config, GB).maker == 2 * GB
    shape = Shape(layers=2, hidden=100, intermediate=300, queries=100, keys=50, vocabulary=1000, heads=4)
    more = required_memory(with_vllm, GB, shape=shape).maker - required_memory(config, GB, shape=shape).maker
    assert more == 2 * (GB + 100 * 1000)  # and a second head


def test_adapters_on_a_billion_parameters_by_hand() -> None:
    reward = RewardConfig(verifier=1, reward_model=0.5)
    config = PPOConfig(lora=LoRAConfig(r=8), dtype="bfloat16", rollout_dtype="float32", reward=reward)
    # N^(2/3) is a million: 2 x 8 x 10^6 adapter parameters, for actor and critic
    adapters = 16 * 10**6
    need = required_memory(config, GB)
    assert need.shared == 4 * GB
    assert need.trainer == pytest.approx(2 * (16 + 4) * adapters, rel=1e-6)
    assert need.maker == pytest.approx(2 * 4 * adapters + 4 * GB, rel=1e-6)  # and a whole reward model
    assert need.total == need.trainer + 2 * need.maker + 4 * GB
    narrow = required_memory(config, GB, published_bytes=2, reward_adapters=True)
    assert narrow.shared == 2 * GB  # float32 arithmetic widens what was published in 16 bits as it is used
    assert narrow.maker == pytest.approx(3 * 4 * adapters, rel=1e-6)
    assert narrow.on_gpus(2).total == narrow.total + 2 * 2 * GB  # trainer and two makers, each with a base to itself
    borrowed = narrow.on_gpus(1)
    assert (borrowed.total, borrowed.trainer) == (narrow.total, narrow.trainer + 2 * GB)


def test_adapters_whose_base_cannot_be_shared_have_weights_of_their_own() -> None:
    reward = RewardConfig(verifier=1, reward_model=0.5)
    lora = LoRAConfig(r=8, init="pissa")
    config = PPOConfig(lora=lora, dtype="bfloat16", rollout_dtype="float32", reward=reward)
    need = required_memory(config, GB)
    # 2 x 8 x 10^6 adapter parameters of 16 bytes, on 4 GB of float32, for actor and critic; and 4 GB each to publish
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
    adapters = PPOConfig(
        lora=LoRAConfig(r=8, init="pissa"), num_trainers=2, critic_init="reward_model", dtype="bfloat16"
    )
    assert required_memory(adapters, GB).other_trainer == 3 * 4 * GB  # more than the two models with adapters
    shared = adapters.model_copy(update={"lora": LoRAConfig(r=8)})
    # the critic starts from a whole reward model: 4 GB of its own, and 16 bytes for each of 16 million twice
    assert required_memory(shared, GB).other_trainer == pytest.approx(4 * GB + 2 * 16 * 16 * 10**6, rel=1e-6)


def test_the_bound_on_adapters_holds_for_a_real_model() -> None:
    # SmolLM2-135M, r 16: per layer q and o 576+576, k and v 576+192, gate, up and down 576+1536; 30 layers
    real = 30 * 16 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    n = 134_515_008
    bound = required_memory(PPOConfig(lora=LoRAConfig(r=16)), n).trainer / (2 * (16 + 4))
    assert real <= bound < 2 * real


def test_a_machine_that_is_too_small_gets_need_machine_and_remedy() -> None:
    with pytest.raises(ModelError) as caught:
        check_memory(PPOConfig(lora=None), 6_738_415_616, model="llama-7b", machine=MachineMemory(23 * GB))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("llama-7b (6.74 billion", "at least 323 GB", "has 23 GB and no GPU", "`-p model=PATH`"):
        assert part in message


def test_seven_billion_parameters_are_let_in_with_adapters_on_24_gb_and_not_on_16() -> None:
    config = resolve("llama7b").ppo
    check_memory(config, 6_738_415_616, model="llama-7b", machine=MachineMemory(24 * GB))
    with pytest.raises(ModelError, match=r"\(13\.5 GB for the base that all share, 4\.57 GB for the trainer"):
        check_memory(config, 6_738_415_616, model="llama-7b", machine=MachineMemory(16 * GB))


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


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
def test_the_trainers_of_a_stage_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    stages = {"sft": SFTConfig(strategy="zero2", num_trainers=2), "reward_model": RewardModelConfig(num_trainers=2)}
    config = pipeline("some/model", GB).model_copy(update=stages)
    # zero2: 2 GB of bfloat16 weights, half of 2 + 4 + 8; plain: 16 each
    need = 2 * (9 if stage == "sft" else 16) * GB
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need))
    check_memory_for(config, tmp_path, stages=[stage])  # type: ignore[list-item]
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need - 1))
    with pytest.raises(
        ModelError, match=f"training the stage {stage.replace('_', '-')} on some/model .* at least {need // GB} GB"
    ):
        check_memory_for(config, tmp_path, stages=[stage])  # type: ignore[list-item]


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
    need = required_memory(PPOConfig(), tiny_llama().num_parameters(), shape=shape_of(directory)).total
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need - 1))
    with pytest.raises(ModelError, match=f"PPO on {directory}"):
        check_memory_for(pipeline(str(directory), 1000), tmp_path)


def write_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
# embeddings and head 128256 x 8192; per layer q and o 8192 x 8192, k and v 8192 x 1024, three of 8192 x 28672, two
# norms; the last norm
BUILT_70B = 2 * 128256 * 8192 + 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 8192


@pytest.mark.parametrize("stage", ["ppo", "sft", "reward_model"])
def test_a_configuration_of_70b_over_small_files_counts_what_it_builds(tmp_path: Path, stage: Any) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    held = count_parameters(directory)
    write_config(directory, **LLAMA_70B)
    assert count_built(directory) == BUILT_70B == 70_553_706_496
    with pytest.raises(
        ModelError,
        match=rf"\(70\.6 billion parameters, which its config\.json builds; its files hold {held:,}\)",
    ):
        check_memory_for(pipeline(str(directory)), tmp_path, stages=[stage])


def test_files_that_hold_more_than_the_configuration_builds_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    save_file({"weights": torch.zeros(1000, 1000)}, directory / "more.safetensors")
    need = required_memory(PPOConfig(), count_parameters(directory)).total
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need - 1))
    with pytest.raises(
        ModelError, match=r"1\.09 million parameters, which its files hold; its config\.json builds 90,"
    ):
        check_memory_for(pipeline(str(directory)), tmp_path)


def test_adapters_of_the_reward_model_over_another_base_need_that_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    ppo = PPOConfig(lora=LoRAConfig(), reward=RewardConfig(verifier=1, reward_model=0.5))
    config = pipeline(str(directory)).model_copy(
        update={"ppo": ppo, "reward_model": RewardModelConfig(lora=LoRAConfig())}
    )
    number, shape = count_parameters(directory), shape_of(directory)
    need = required_memory(ppo, number, published_bytes=4, reward_adapters=True, shape=shape)
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need.total))
    check_memory_for(config, tmp_path)
    with pytest.raises(ModelError, match="needs at least"):
        check_memory_for(config, tmp_path, bases=2)
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need.total + need.shared))
    check_memory_for(config, tmp_path, bases=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "nobody"},
        {"num_attention_heads": 0},
        {"pad_token_id": 10**6},
        {"hidden_size": None},
        {"num_hidden_layers": "x"},
        {"auto_map": {"AutoConfig": "mine.C"}, "model_type": "mine"},
    ],
)
def test_where_a_configuration_builds_nothing_the_files_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    write_config(directory, **changes)
    assert count_built(directory) is None
    need = required_memory(PPOConfig(), count_parameters(directory), shape=shape_of(directory)).total
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(need - 1))
    with pytest.raises(ModelError, match=r"\([\d,]+ parameters\) needs"):
        check_memory_for(pipeline(str(directory)), tmp_path)
    (directory / "config.json").unlink()  # as beside adapters alone
    need = required_memory(PPOConfig(), count_parameters(directory)).total
    with pytest.raises(ModelError, match=r"\([\d,]+ parameters\) needs"):
        check_memory_for(pipeline(str(directory)), tmp_path)


def test_a_configuration_that_asks_for_code_is_not_built(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    write_config(directory, _attn_implementation="someone/kernels")
    with pytest.raises(ModelError, match="asks for code of the hub"):
        check_memory_for(pipeline(str(directory)), tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_built_is_what_is_stored(tmp_path: Path, *, tied: bool) -> None:
    config = tiny_llama().config
    config.tie_word_embeddings = tied
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert count_built(tmp_path) == count_parameters(tmp_path) == sum(p.numel() for p in model.parameters())


def test_quantised_files_are_counted_by_what_they_become(tmp_path: Path) -> None:
    """Eight weights of four bits lie in one stored number."""
    directory = write_tiny_llama(tmp_path / "tiny")
    built = count_built(directory)
    write_config(directory, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64})
    save_file({"packed": torch.zeros(10_000, dtype=torch.int32)}, directory / "model.safetensors")
    assert count_built(directory) == built == tiny_llama().num_parameters()


def test_counting_what_is_built_draws_no_random_number_and_allocates_nothing(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    write_config(directory, **LLAMA_70B)
    before, held = torch.get_rng_state(), psutil.Process().memory_info().rss
    assert count_built(directory) == BUILT_70B
    assert torch.equal(torch.get_rng_state(), before)
    assert psutil.Process().memory_info().rss - held < GB


def test_a_hub_model_that_was_fetched_is_judged_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    write_config(directory, **LLAMA_70B)
    monkeypatch.setattr(locating, "find_fetched", {"some/giant": directory}.get)
    with pytest.raises(ModelError, match=r"PPO on some/giant \(70\.6 billion"):
        check_memory_for(pipeline("some/giant"), tmp_path)


def test_the_presets_numbers_are_what_their_configurations_build(tmp_path: Path) -> None:
    llama = LlamaConfig()  # transformers' defaults are Llama 7B's; intermediate 11008, vocabulary 32000
    qwen = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    for preset, config in (("llama7b", llama), ("qwen-gsm8k", qwen)):
        config.save_pretrained(tmp_path)
        assert resolve(preset).model.num_parameters == count_built(tmp_path)


def test_a_packaged_model_is_judged_before_it_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(GB))
    with pytest.raises(ModelError, match=r"the stage sft on smollm2-135m-instruct \(135 million parameters"):
        check_memory_for(pipeline("smollm2-135m-instruct"), tmp_path, stages=["ppo", "sft"])
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_leads_nowhere_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        check_memory_for(pipeline(str(tmp_path / "no" / "model")), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_in_float32_are_told_what_halves_them(dtype: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_memory(PPOConfig(rollout_dtype=dtype), GB, model="m", machine=MachineMemory(GB))  # type: ignore[arg-type]
    assert ("; set ppo.rollout_dtype to bfloat16, take a smaller model" in str(caught.value)) == (dtype == "float32")
