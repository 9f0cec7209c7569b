"""`train_ppo` after its flags are known to be good: build everything, hand it to `PPOTrainer`, store what comes out."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

from rlhf_core.config import PPOOptions, RewardConfig
from rlhf_core.counting import counted
from rlhf_core.data.conversation import setup_conversation_template
from rlhf_core.errors import TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import default_device
from rlhf_core.rewards.scoring import Scorer, build_scorer
from rlhf_core.script.data import Loaders, build_loaders
from rlhf_core.script.models import Models, build_models
from rlhf_core.script.outputs import Trainees, save_outputs
from rlhf_core.script.places import checkpoint_step
from rlhf_core.script.plugin import Plugin, choose_plugin
from rlhf_core.script.progress import EpisodeLine, teller
from rlhf_core.script.record import RecordWriter, record_of, tell_differences
from rlhf_core.script.schedule import schedule_of
from rlhf_core.strategy.making import make_booster
from rlhf_core.strategy.ranks import Ranks, join, leave
from rlhf_core.strategy.roll_call import naming_lost_rank
from rlhf_core.trainer.callbacks import Callback
from rlhf_core.trainer.optim import Trained, make_trained
from rlhf_core.trainer.ppo.trainer import PPOTrainer

if TYPE_CHECKING:
    from rlhf_core.data.conversation import Conversation

TEMPERATURE = 0.7
TOP_K = 50
LAM = 0.95
"""These three are fixed in the original script too."""


def run(args: Namespace) -> None:
    """Train as the flags say, with the ranks that torchrun started, and write the models to `args.save_path`.

    Raises:
        RlhfError: a file or model is not what it should be, or training cannot go on.
    """
    ranks = join()
    try:
        with naming_lost_rank(ranks):
            _run(args, ranks)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            "the GPU's memory does not hold this run; lower --train_batch_size and --experience_batch_size, or set "
            "--grad_checkpoint or --lora_config"
        ) from error
    # After an error of its own a rank keeps the group until its end: the others would speak of its loss, not of that.
    leave()


def _run(args: Namespace, ranks: Ranks) -> None:
    tell, device = teller(ranks), default_device()
    plugin = choose_plugin(args, cuda=device.type == "cuda", num_ranks=ranks.world_size, tell=tell)
    args = Namespace(**vars(args) | {"plugin": plugin.strategy})
    models = build_models(args, device, tell)
    conversation = setup_conversation_template(models.tokenizer, args.conversation_template_config)
    loaders = build_loaders(args, conversation, tell)
    trainees = _trainees(args, models, plugin, ranks)
    record = record_of(args, loaders)
    callbacks = (RecordWriter(record, Path(args.save_path), ranks), EpisodeLine(args.num_episodes, ranks, tell))
    trainer = _trainer(args, models, trainees, conversation, plugin, callbacks)
    checkpoint = checkpoint_step(args)
    if checkpoint is not None:
        trainer.load_checkpoint(checkpoint)
        tell(f"going on from {checkpoint.name}")
        tell_differences(record, checkpoint.parent.parent, tell)
    if trainer.position.episode < args.num_episodes:
        _fit(trainer, args, loaders)
    else:
        tell(f"{counted(args.num_episodes, 'episode')} done already; raise --num_episodes to train more")
    save_outputs(args, models.tokenizer, trainees, ranks)
    tell(f"stored {args.save_path}/actor/modeling and {args.save_path}/critic/modeling")


def _fit(trainer: PPOTrainer, args: Namespace, loaders: Loaders) -> None:
    trainer.fit(
        num_episodes=args.num_episodes,
        num_collect_steps=args.num_collect_steps,
        num_update_steps=args.num_update_steps,
        prompt_dataloader=loaders.prompts,
        pretrain_dataloader=loaders.demonstrations,
        log_dir=args.log_dir,
        use_wandb=args.use_wandb,
    )


def _trainees(args: Namespace, models: Models, plugin: Plugin, ranks: Ranks) -> Trainees:
    def trained(model: torch.nn.Module, lr: float) -> Trained:
        booster = make_booster(plugin.strategy, precision=plugin.precision, max_norm=args.grad_clip, ranks=ranks)
        return make_trained(model, lr=lr, weight_decay=args.weight_decay, schedule=schedule_of(args), booster=booster)

    return Trainees(trained(models.actor, args.lr), trained(models.critic, args.critic_lr))


def _trainer(
    args: Namespace,
    models: Models,
    trainees: Trainees,
    conversation: Conversation,
    plugin: Plugin,
    callbacks: tuple[Callback, ...],
) -> PPOTrainer:
    return PPOTrainer(
        actor_booster=trainees.actor.booster,
        critic_booster=trainees.critic.booster,
        actor=cast(PreTrainedModel, trainees.actor.model),
        critic=cast(Critic, trainees.critic.model),  # as the booster returned it
        reward_model=models.reward_model,
        initial_model=models.initial_model,
        actor_optim=trainees.actor.optimizer,
        critic_optim=trainees.critic.optimizer,
        actor_lr_scheduler=trainees.actor.scheduler,
        critic_lr_scheduler=trainees.critic.scheduler,
        tokenizer=models.tokenizer,
        kl_coef=args.kl_coef,
        ptx_coef=args.ptx_coef,
        train_batch_size=args.train_batch_size,
        apply_loss_mask=not args.disable_loss_mask,
        accumulation_steps=args.accumulation_steps,
        save_interval=args.save_interval,
        save_dir=args.save_path,
        callbacks=callbacks,
        options=_options(args, models, plugin),
        scorer=reward_functions(args, conversation),
        seed=args.seed,
        max_new_tokens=args.max_seq_len,
        max_length=args.max_length,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        do_sample=True,
        stop_token_ids=list(conversation.stop_ids),
    )


def reward_functions(args: Namespace, conversation: Conversation) -> Scorer | None:
    """Return the sum of the functions that the flags name, which read the template's tags; None without any.

    Raises:
        ConfigError: if one cannot be imported.
    """
    if not args.reward_functions:
        return None
    config = RewardConfig(verifier=0.0, functions=dict.fromkeys(args.reward_functions, 1.0))
    template = conversation.template()
    return build_scorer(config, None, template=template, allowed_modules=args.allowed_reward_modules)


def _options(args: Namespace, models: Models, plugin: Plugin) -> PPOOptions:
    dtypes: dict[str, Any] = {"fp16": "float16", "bf16": "bfloat16"}
    return PPOOptions(
        lam=LAM,
        dtype=dtypes[plugin.precision],
        rollout_dtype="bfloat16",
        critic_init="reward_model" if models.critic_init == "reward_model" else "policy",
        gradient_checkpointing=args.grad_checkpoint,
    )
