"""The configuration's keys, and which of them was meant by a key that there is not."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import takewhile
from typing import NamedTuple, get_args, get_origin

from pydantic import BaseModel

from rlhf_core.config import PipelineConfig

ELSEWHERE = {
    "*.lr": "learning_rate base_lr",
    "ppo.lr": "actor_learning_rate actor_lr policy_learning_rate policy_lr actor.lr actor.optim.lr",
    "ppo.critic_lr": "critic_learning_rate value_learning_rate value_lr critic.lr critic.optim.lr",
    "*.warmup_steps": "num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "*.grad_clip": "max_grad_norm max_norm clip_grad gradient_clipping clip_grad_norm",
    "*.epochs": "num_train_epochs max_epochs num_epochs total_epochs",
    "ppo.max_epochs": "ppo_epochs num_ppo_epochs num_train_epochs num_iterations update_epochs",
    "ppo.episodes": "num_episodes total_episodes max_steps total_training_steps",
    "*.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu micro_train_batch_size "
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu gradient_accumulation_steps "
    "accumulation_steps",
    "ppo.train_batch_size": "batch_size global_batch_size mini_batch_size minibatch_size ppo_mini_batch_size",
    "sft.batch_size": "train_batch_size global_batch_size mini_batch_size",
    "reward_model.batch_size": "train_batch_size global_batch_size mini_batch_size",
    "evaluation.batch_size": "per_device_eval_batch_size eval_batch_size val_batch_size",
    "ppo.prompts_per_episode": "rollout_batch_size gen_batch_size num_prompts",
    "ppo.chunk_size": "experience_batch_size micro_rollout_batch_size generation_batch_size "
    "local_rollout_forward_batch_size",
    "ppo.samples_per_prompt": "n_samples_per_prompt num_generations num_return_sequences rollout_n group_size rloo_k n",
    "ppo.eps_clip": "cliprange clip_range clip_ratio clip_eps epsilon eps_clip_low clip_ratio_low",
    "ppo.eps_clip_high": "epsilon_high clip_ratio_high cliprange_high",
    "ppo.dual_clip": "clip_ratio_c delta",
    "ppo.value_clip": "cliprange_value clip_range_vf value_clip_range vf_clip",
    "ppo.vf_coef": "value_loss_coef value_coef critic_coef",
    "ppo.entropy_coef": "entropy_coeff ent_coef entropy_loss_coef",
    "ppo.kl_coef": "init_kl_coef kl_ctl kl_ctrl beta kl_beta kl_coeff kl_loss_coef kl_penalty_coef",
    "ppo.kl_target": "target_kl target",
    "ppo.kl_horizon": "horizon",
    "ppo.kl_estimator": "kl_penalty kl_type kl_loss_type",
    "ppo.gamma": "discount discount_factor",
    "ppo.lam": "lambda lambd lambda_ lmbda gae_lambda",
    "ppo.advantage_estimator": "adv_estimator estimator",
    "ppo.normalise_rewards": "normalize_rewards normalize_reward whiten_rewards scale_rewards use_score_scaling",
    "ppo.reward_clip": "reward_clip_range clip_reward cliprange_reward",
    "ppo.aggregation": "loss_agg_mode loss_type",
    "ppo.max_new_tokens": "response_length max_response_length max_completion_length generate_max_len max_tokens",
    "evaluation.max_new_tokens": "response_length max_response_length max_completion_length max_tokens",
    "ppo.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_len prompt_length",
    "*.max_length": "max_seq_length max_seq_len max_len cutoff_len seq_length model_max_length",
    "ppo.temperature": "sampling_temperature rollout_temperature",
    "*.lora": "use_peft use_lora peft_config",
    "*.lora.r": "lora_r lora_rank rank",
    "*.lora.alpha": "lora_alpha",
    "*.lora.dropout": "lora_dropout",
    "*.lora.target_modules": "lora_target_modules lora_target",
    "*.dtype": "bf16 fp16 torch_dtype mixed_precision precision param_dtype",
    "*.gradient_checkpointing": "grad_checkpoint enable_gradient_checkpointing use_gradient_checkpointing",
    "*.compile_layers": "torch_compile use_torch_compile",
    "*.flash_attention": "flash_attn use_flash_attn use_flash_attention_2 attn_implementation",
    "*.num_trainers": "num_gpus world_size n_gpus_per_node num_processes nproc_per_node actor_num_gpus_per_node",
    "*.tp": "tensor_parallel_size tensor_model_parallel_size tp_size",
    "*.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "*.sp": "sequence_parallel_size ulysses_sequence_parallel_size context_parallel_size ring_attn_size sp_size",
    "ppo.cluster.num_makers": "num_rollout_workers vllm_num_engines num_inference_engines num_experience_makers",
    "*.strategy": "plugin deepspeed deepspeed_config zero_stage fsdp",
    "sft.packing": "use_packing packing_samples use_remove_padding",
    "ppo.engine": "use_vllm rollout_engine",
    "ppo.max_staleness": "staleness_threshold async_level",
    "ppo.correction": "tis importance_sampling_correction",
    "ppo.importance_cap": "tis_imp_ratio_cap vllm_importance_sampling_cap importance_sampling_cap",
    "ppo.reward.functions": "reward_funcs reward_fn custom_reward_function",
    "reward_model.centring": "center_rewards_coefficient",
    "reward_model.heldout_fraction": "test_size val_split",
    "reward_model.loss": "loss_fn loss_type",
    "model.path": "model_name_or_path pretrained_model_name_or_path model_name model_path base_model pretrain",
    "data.problems": "dataset dataset_name train_files",
    "data.prompts": "prompt_data prompt_dataset dataset dataset_name train_files",
    "data.demonstrations": "train_file sft_data ptx_dataset pretrain_data dataset dataset_name train_files",
    "data.preferences": "preference_data preference_dataset dataset dataset_name train_files",
    "data.evaluation": "eval_data eval_dataset eval_files val_files validation_file test_file",
    "template.prompt": "prompt_template input_template",
    "template.system_message": "system_prompt",
    "template.stop_strings": "stop_sequences",
    "seed": "random_seed data_seed",
    "name": "run_name experiment_name project_name",
}
"""By key of ours (`*.`: in every section that has it), its names in HF Trainer, TRL, OpenRLHF, verl and coati."""

DIFFERENT = {
    "gradient_accumulation_steps": "batch_size / micro_batch_size, which is counted here",
    "accumulation_steps": "batch_size / micro_batch_size, which is counted here",
    "warmup_ratio": "counted in optimizer steps",
    "lr_warmup_ratio": "counted in optimizer steps",
    "lr_warmup_steps_ratio": "counted in optimizer steps",
    "bf16": 'such as "bfloat16"',
    "fp16": 'such as "float16"',
    "target_kl": "nats per response that an adaptive coefficient steers to",
}
"""What to know of a name elsewhere whose values are not ours."""


FORMER = {
    "gate.confidence": "gate.year_error (0.05) and gate.nights_a_year (365) say how sure the gate must be: of all the "
    "promotions of a year, any is due to chance with this probability at most (docs/gate.md)",
}
"""Keys of earlier releases, and what replaces them."""


class Key(NamedTuple):
    """A key of the configuration."""

    name: str
    """Dotted."""
    is_free: bool
    """Free keys may follow it: it is a mapping such as task parameters."""
    is_section: bool
    """Its value is a mapping of keys of its own."""
    may_be_null: bool
    """Null switches it off, or clears it."""


def keys(config: type[BaseModel] = PipelineConfig, prefix: str = "") -> Iterator[Key]:
    """Yield every key, a section before what is in it."""
    for name, field in config.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        nested = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)
        may_be_null = type(None) in kinds
        is_section = nested is not None and (nested is field.annotation or may_be_null)
        yield Key(f"{prefix}{name}", any(get_origin(each) is dict for each in kinds), is_section, may_be_null)
        if nested is not None:
            yield from keys(nested, f"{prefix}{name}.")


def no_such_key(key: str) -> str:
    """Return the sentence on a key that there is not, with those that were probably meant."""
    if key in FORMER:
        return f"there is no configuration key {key!r} any longer; {FORMER[key]}"
    near, name = meant(key), key.rpartition(".")[2]
    hint = f"did you mean {' or '.join(near)}?" if near else "see rlhf_core/config/ for the keys there are"
    return f"there is no configuration key {key!r}; {hint}" + (f" ({DIFFERENT[name]})" if name in DIFFERENT else "")


def meant(key: str) -> list[str]:
    """Return the keys that were probably meant: by meaning, in the section that was named; else by spelling.

    Example:
        >>> meant("ppo.learning_rate")
        ['ppo.lr']
    """
    known = [key.name for key in keys()]
    parts = [part for part in key.lower().replace("-", "_").split(".") if not part.isdigit()]
    by_word: dict[str, dict[str, None]] = {}  # the inner ones used as ordered sets
    for name in known:
        for word in _words(name):
            by_word.setdefault(word, {})[name] = None
    endings = [".".join(parts[start:]) for start in range(len(parts))]  # the longest first
    found = next((by_word[ending] for ending in endings if ending in by_word), None)
    if found is None:
        slip = get_close_matches(endings[-1], by_word, n=1, cutoff=0.8)
        found = by_word[slip[0]] if slip else dict.fromkeys(get_close_matches(key, known, n=3, cutoff=0.65))
    shared = {name: _shared_parts(name.split("."), parts) for name in found}
    return [name for name, count in shared.items() if count == max(shared.values())]


def _shared_parts(one: list[str], other: list[str]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _words(key: str) -> Iterator[str]:
    """Yield all that a key may be called: its own endings (`ppo.lora.r`, `lora.r`, `r`), and its names elsewhere."""
    parts = key.split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        yield ending
        yield from ELSEWHERE.get(ending if start == 0 else f"*.{ending}", "").split()
