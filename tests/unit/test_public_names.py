"""Public names of the core: they exist, they load lazily, and their parameters are coati's."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import rlhf_core

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "coati.md"

# coati's signatures: names in order, defaults, kinds. Ours may have keyword-only parameters besides.
SIGNATURES = {
    "PPOTrainer": (
        "actor_booster, critic_booster, actor, critic, reward_model, initial_model, actor_optim, critic_optim, "
        "actor_lr_scheduler, critic_lr_scheduler, tokenizer, kl_coef=0.1, ptx_coef=0.9, train_batch_size=8, "
        "buffer_limit=0, buffer_cpu_offload=True, eps_clip=0.2, vf_coef=1.0, value_clip=0.2, sample_buffer=False, "
        "dataloader_pin_memory=True, offload_inference_models=True, apply_loss_mask=True, accumulation_steps=1, "
        # the one default that differs: coati's [] would be shared by all trainers
        "save_interval=0, save_dir=None, use_tp=False, coordinator=None, callbacks=(), **generate_kwargs"
    ),
    "PPOTrainer.fit": (
        "self, num_episodes, num_collect_steps, num_update_steps, prompt_dataloader, pretrain_dataloader=None, "
        "log_dir=None, use_wandb=False"
    ),
    "SFTTrainer": (
        "model, booster, optim, lr_scheduler, max_epochs=2, plugin=None, accumulation_steps=8, apply_loss_mask=True, "
        "start_epoch=0, save_interval=None, save_dir=None, coordinator=None"
    ),
    "SFTTrainer.fit": "self, train_dataloader, eval_dataloader=None, log_dir=None, use_wandb=False",
    "RewardModelTrainer": (
        "model, booster, optimizer, plugin, lr_scheduler, tokenizer, loss_fn=None, max_epochs=1, beta=0.0, "
        "accumulation_steps=1, start_epoch=0, save_interval=0, save_dir=None, coordinator=None"
    ),
    "RewardModelTrainer.fit": "self, train_dataloader, eval_dataloader=None, log_dir=None, use_wandb=False",
    "NaiveExperienceBuffer": "sample_batch_size, limit=0, cpu_offload=True",
    "NaiveExperienceBuffer.append": "self, experience, samples=()",  # the last one is ours
    "NaiveExperienceBuffer.sample": "self",
    "NaiveExperienceMaker": (
        "actor, critic, reward_model, initial_model, tokenizer, kl_coef=0.01, gamma=1.0, lam=0.95, **options"
    ),
    "NaiveExperienceMaker.make_experience": "self, input_ids, attention_mask, gt_answer=None, **generate_kwargs",
    "PolicyLoss": "clip_eps=0.2, skip_threshold=20.0",
    "PolicyLoss.forward": "self, log_probs, old_log_probs, advantages, action_mask=None",
    "ValueLoss": "clip_eps=0.2",
    "ValueLoss.forward": "self, values, old_values, advantage, action_mask=None",
    "GPTLMLoss.forward": "self, logits, labels",
    "LogSigLoss.forward": "self, chosen_reward, reject_reward",
    "LogExpLoss.forward": "self, chosen_reward, reject_reward",
    "RewardModel.forward": "self, input_ids, attention_mask",
    "Critic.forward": "self, input_ids, attention_mask",
    "RLVRRewardModel": "reward_fn_list, **kwargs",
    "RLVRRewardModel.forward": (
        "self, input_ids, attention_mask=None, response_start=None, response_end=None, gt_answer=None"
    ),
    "gsm8k_reward_fn": "input_ids, attention_mask, **kwargs",
    "math_competition_reward_fn": "input_ids, attention_mask, **kwargs",
    "setup_conversation_template": "tokenizer, chat_template_config=None, save_path=None",
    "PerformanceEvaluator": (
        "actor_num_params, critic_num_params, initial_model_num_params, reward_model_num_params, "
        "enable_grad_checkpoint=False, ignore_episodes=0"
    ),
    "TrainerPerformanceEvaluator": (
        "actor_num_params, critic_num_params, enable_grad_checkpoint=False, ignore_first_episodes=1"
    ),
    "ExperienceMakerPerformanceEvaluator": (
        "actor_num_params, critic_num_params, initial_model_num_params, reward_model_num_params"
    ),
    "DetachedTrainer": (
        "experience_maker_holder_name_list, train_batch_size=8, buffer_limit=0, dataloader_pin_memory=True, "
        "callbacks=(), debug=False"
    ),
    "DetachedTrainer.fit": "self, total_steps, update_steps, train_epochs=1",
    "DetachedTrainer.training_step": "self, experience",
    "DetachedTrainer._update_remote_makers": "self, fully_update=False, **kwargs",
    "DetachedTrainer.sync_models_to_remote_makers": "self, **kwargs",
    "DetachedTrainer.buffer_get_length": "self",
    "DetachedTrainer.buffer_append": "self, experience",
    "DetachedTrainer.buffer_extend": "self, items",
    "DetachedTrainer._buffer_sample": "self",
    "DetachedPPOTrainer": (
        "experience_maker_holder_name_list, strategy_fn, model_fn, env_info=None, train_batch_size=8, buffer_limit=0, "
        "eps_clip=0.2, value_clip=0.4, dataloader_pin_memory=True, callbacks=(), eval_performance=False, debug=False, "
        "update_lora_weights=False"
    ),
    "DetachedPPOTrainer.training_step": "self, experience",
    "DetachedPPOTrainer._update_remote_makers": "self, fully_update=False, **config",
    "DetachedPPOTrainer.strategy_save_actor": "self, path, only_rank0=False",
    "DetachedPPOTrainer.strategy_save_critic": "self, path, only_rank0=False",
    "DetachedPPOTrainer.strategy_save_actor_optim": "self, path, only_rank0=False",
    "DetachedPPOTrainer.strategy_save_critic_optim": "self, path, only_rank0=False",
    "ExperienceMakerHolder": (
        "detached_trainer_name_list, strategy_fn, model_fn, env_info=None, sync_models_from_trainers=False, "
        "buffer_cpu_offload=True, kl_coef=0.1, callbacks=(), eval_performance=False, debug=False, "
        "update_lora_weights=False, **generate_kwargs"
    ),
    "ExperienceMakerHolder.workingloop": "self, dataloader_fn, num_epochs=1, num_steps=0",
    "DetachedReplayBuffer": "sample_batch_size, limit=0",
    "DetachedReplayBuffer.append": "self, experience",
    "DetachedReplayBuffer.extend": "self, items",
    "DetachedReplayBuffer.sample": "self, timeout_s=None",  # the last one is ours
    "DetachedReplayBuffer.clear": "self",
    "DetachedReplayBuffer.get_length": "self",
    "LoRAConstructor": "",
    "LoRAConstructor.filter_state_dict_lora": "state_dict, keep_non_lora=False",
    "LoRAConstructor.extract_lora_config": "model",
    "LoRAConstructor.load_state_dict_increase": "self, model, state_dict_increase",
    "get_receivers_per_sender": "sender_idx, num_senders, num_receivers, allow_idle_sender",
    "get_actor_from_args": "model, pretrained=None, config=None, lora_rank=0",
    "get_critic_from_args": "model, pretrained=None, config=None, lora_rank=0",
    "get_reward_model_from_args": "model, pretrained=None, config=None",
    "get_strategy_from_args": "strategy",
    "get_tokenizer_from_args": "model, **kwargs",
    "get_model_numel": "model",
    "get_rank": "",
    "get_world_size": "",
    "is_rank_0": "",
    "set_dist_env": "env_info",
    "Callback.on_episode_start": "self, episode",
    "Callback.on_make_experience_end": "self, experience",
    "Callback.on_learn_batch_end": "self, experience",
    "TrainerCallback.on_batch_end": "self, metrics, experience",
    "MakerCallback.on_make_experience_end": "self, experience",
    "Strategy.setup_distributed": "self",
    "Strategy.model_init_context": "self",
    "Strategy.prepare": "self, *models_or_pairs",
    "Strategy.backward": "self, loss, model, optimizer",
    "Strategy.optimizer_step": "self, optimizer",
    "Strategy.setup_dataloader": "self, dataset, batch_size, **options",
    "Strategy.setup_sampler": "self, dataset",
    "Strategy.unwrap_model": "self, model",
    "Strategy.save_model": "self, model, path, shard=False",
    "Strategy.load_model": "self, model, path, strict=True",
    "Strategy.save_optimizer": "self, optimizer, path, shard=False",
    "Strategy.load_optimizer": "self, optimizer, path",
    "Strategy.save_pretrained": "self, model, path, tokenizer=None",
    "Strategy.get_model_state_dict_shard": "self, model",
    "StatefulDistributedSampler": "dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False",
    "DataCollatorForPromptDataset": "tokenizer, max_length=4096, ignore_index=-100",
}
HOOKS = {
    "Callback": "fit_start fit_end episode_start episode_end make_experience_start make_experience_end "
    "learn_epoch_start learn_epoch_end learn_batch_start learn_batch_end",
    "TrainerCallback": "fit_start fit_end episode_start episode_end epoch_start epoch_end batch_start batch_end "
    "update_start update_end",
    "MakerCallback": "loop_start loop_end make_experience_start make_experience_end send_start send_end batch_start "
    "batch_end",
}
# coati's eight, then ours
EXPERIENCE = (
    "sequences action_log_probs values reward kl advantages attention_mask action_mask "
    "policy_version rollout_log_probs returns"
)


def test_importing_the_package_and_its_configuration_imports_no_torch() -> None:
    code = (
        "import sys, rlhf_core, rlhf_core.config, rlhf_core.errors; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray', 'prefect')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("module", "absent"),
    [("rlhf_core.strategy.factory", "torch transformers colossalai"), ("rlhf_core.coati.strategy", "colossalai")],
)
def test_strategies_import_colossalai_only_once_one_is_made(module: str, absent: str) -> None:
    code = f"import sys, {module}; sys.exit(bool(set({absent.split()}) & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


@pytest.mark.integration
def test_importing_what_trains_says_nothing() -> None:
    code = "import rlhf_core.models.lora"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("name", rlhf_core.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert _own(getattr(rlhf_core, name)).__name__ == name
    assert name in dir(rlhf_core)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PPOLerner'"):
        _ = rlhf_core.PPOLerner


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_are_coatis_with_their_order_and_defaults(name: str) -> None:
    owner, _, method = name.partition(".")
    found = _own(getattr(rlhf_core, owner))
    signature = inspect.signature(getattr(found, method) if method else found)
    assert _coatis(signature) == SIGNATURES[name]


def _own(found: Any) -> Any:
    """Return what was written; Ray puts another class around an actor's."""
    metadata = getattr(found, "__ray_metadata__", None)
    return found if metadata is None else metadata.modified_class


GROUPS = {
    "DetachedPPOTrainer": "buffer_length buffer_append buffer_sample model_io compute",
    "ExperienceMakerHolder": "status experience_io model_io compute",  # the first one is ours
}


@pytest.mark.parametrize("name", GROUPS)
def test_actors_have_coatis_concurrency_groups_of_one_thread_each(name: str) -> None:
    groups = getattr(rlhf_core, name).__ray_metadata__.concurrency_groups
    assert groups == dict.fromkeys(GROUPS[name].split(), 1)


def test_methods_of_the_base_use_only_groups_that_a_subclass_of_the_seeds_has() -> None:
    used = {getattr(method, "__ray_concurrency_group__", None) for method in vars(rlhf_core.DetachedTrainer).values()}
    assert used - {None} <= {"buffer_length", "buffer_append", "buffer_sample", "compute"}
    assert rlhf_core.DetachedTrainer.buffer_get_length.__ray_concurrency_group__ == "buffer_length"
    assert rlhf_core.DetachedTrainer.buffer_append.__ray_concurrency_group__ == "buffer_append"
    assert rlhf_core.DetachedTrainer.buffer_extend.__ray_concurrency_group__ == "buffer_append"
    assert rlhf_core.DetachedTrainer._buffer_sample.__ray_concurrency_group__ == "buffer_sample"
    assert rlhf_core.DetachedTrainer.__abstractmethods__ == {"training_step", "_update_remote_makers"}


def _coatis(signature: inspect.Signature) -> str:
    """Return a signature without annotations and without what can only be given by name."""
    kept = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            kept.append(parameter.replace(annotation=parameter.empty))
    return str(inspect.Signature(kept))[1:-1]


@pytest.mark.parametrize("name", HOOKS)
def test_callbacks_have_coatis_hooks_which_do_nothing(name: str) -> None:
    hooks = {hook for hook in vars(getattr(rlhf_core, name)) if hook.startswith("on_")}
    assert hooks == {f"on_{hook}" for hook in HOOKS[name].split()}


def test_fields_of_experience_keep_their_order() -> None:
    assert " ".join(field.name for field in fields(rlhf_core.Experience)) == EXPERIENCE


def test_the_document_names_every_public_name_once() -> None:
    rows = re.findall(r"`coati\.[\w.]+\.(\w+)`", DOCUMENT.read_text())
    assert sorted(rows) == sorted(set(rows))
    inherited = {name.partition(".")[0] for name in SIGNATURES} | {"Experience", "Conversation", "OLTrainer", *HOOKS}
    assert set(rows) >= inherited
    assert set(rows) <= set(rlhf_core.__all__)
