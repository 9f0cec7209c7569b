"""`train_ppo` after its flags are known to be good: build everything, hand it to `PPOTrainer`, store what comes out.

It decides on the plugin, counts the steps, says a line per episode, and keeps what it was started with.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from rlhf_core.coati.callbacks import Callback
from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.coati.script.checks import checkpoint_step, parts_of
from rlhf_core.coati.script.data import Loaders, build_loaders
from rlhf_core.coati.script.models import Models, Trainees, build_models, save_outputs
from rlhf_core.config import PPOOptions, RewardConfig
from rlhf_core.counting import counted, ordinal
from rlhf_core.data.conversation import setup_conversation_template
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import default_device
from rlhf_core.ppo.order import episode_windows
from rlhf_core.rewards.scoring import Scorer, build_scorer
from rlhf_core.strategy.factory import check_strategy, make_booster
from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import Ranks, join, leave
from rlhf_core.training.optim import Trained, make_trained, warmup_then_cosine
from rlhf_core.types import Experience

if TYPE_CHECKING:
    from rlhf_core.config.strategy import StrategyName
    from rlhf_core.data.conversation import Conversation

Precision = Literal["fp16", "bf16"]


class Plugin(NamedTuple):
    """How the ranks of a run share their models."""

    strategy: StrategyName
    precision: Precision


def choose_plugin(args: Namespace, *, cuda: bool, num_ranks: int, tell: Callable[[str], None]) -> Plugin:
    """Return what the flags name; without --plugin the original's default, gemini, where it can be had and is of use.

    Args:
        args: the flags, checked.
        cuda: whether there are GPUs.
        num_ranks: processes that train together.
        tell: is told in one line what is not as the flags, or the original's defaults, say.

    Raises:
        ConfigError: if the plugin cannot be had here.
    """
    precision: Precision = "fp16" if args.mixed_precision == "fp16" else "bf16"
    if precision == "fp16" and not cuda:
        tell("--mixed_precision fp16 runs as bf16 on a CPU")
        precision = "bf16"
    strategy: StrategyName = args.plugin or "gemini"
    if args.plugin is None and not cuda:
        strategy = "plain"
        tell("--plugin plain: gemini, the default, is for GPUs; here every rank holds whole models")
    elif args.plugin is None and args.lora_config:
        strategy = "zero2"
        tell("--plugin zero2: gemini, the default, trains no adapters")
    try:
        check_strategy(
            strategy,
            precision=precision,
            cuda=cuda,
            num_trainers=num_ranks,
            adapters=args.lora_config is not None,
            accumulates=args.accumulation_steps > 1,
            parts=parts_of(args),
        )
    except ConfigError as error:
        raise ConfigError(f"--plugin {strategy} cannot be had: {error}") from error
    return Plugin(strategy, precision)


Tell = Callable[[str], None]


def teller(ranks: Ranks) -> Tell:
    """Return what writes a line on standard output on rank 0, and nothing on the others."""

    def tell(line: str) -> None:
        if ranks.is_first:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    return tell


class EpisodeLine(Callback):
    """Tells at each episode's end what it collected, over all ranks, and how long it took.

    Args:
        num_episodes: of the run.
        ranks: who collects together.
        tell: takes a line.
    """

    def __init__(self, num_episodes: int, ranks: Ranks, tell: Tell) -> None:
        self._num_episodes = num_episodes
        self._ranks = ranks
        self._tell = tell
        self._started = 0.0
        self._sums = torch.zeros(4)

    def on_episode_start(self, episode: int) -> None:  # noqa: ARG002
        """Begin to count."""
        self._started = time.perf_counter()
        self._sums = torch.zeros(4)

    def on_make_experience_end(self, experience: Experience) -> None:
        """Add one batch: rows, reward, KL and tokens."""
        per_rank = [float(len(experience)), *(float(x.sum()) for x in (experience.reward, experience.kl))]
        sums = torch.tensor([*per_rank, float(experience.action_mask.sum())])
        self._sums += self._ranks.sum(sums)  # here, not at the episode's end, which an error on one rank reaches too

    def on_episode_end(self, episode: int) -> None:
        """Tell the episode's means."""
        rows = self._sums[0].item()
        if not rows:  # an error came before the first batch
            return
        reward, divergence, length = (self._sums[1:] / rows).tolist()
        self._tell(
            f"episode {ordinal(episode)}/{self._num_episodes}: {counted(int(rows), 'sample')}, reward {reward:.4f} (KL "
            f"penalty included), KL {divergence:z.4f}, {length:.1f} tokens, {time.perf_counter() - self._started:.1f} s"
        )


FILE = "train_ppo.json"
_PLACES = {"save_path", "save_interval", "log_dir", "use_wandb", "checkpoint_path", "critic_checkpoint_path"}
_BY_CONTENT = {"prompt_dataset", "ptx_dataset", "conversation_template_config", "lora_config"}
"""Paths may differ: what they hold is compared."""


def record_of(args: Namespace, loaders: Loaders) -> dict[str, Any]:
    """Return every flag that has a part in the numbers, and a digest of each file's content."""
    flags = {name: value for name, value in vars(args).items() if name not in _PLACES | _BY_CONTENT}
    demonstrations = loaders.demonstrations
    content = {
        "prompt_dataset": loaders.prompts.dataset.digest(),  # type: ignore[attr-defined]  # a PromptDataset
        "ptx_dataset": None if demonstrations is None else demonstrations.dataset.digest(),  # type: ignore[attr-defined]
        "conversation_template_config": _digest(args.conversation_template_config),
        "lora_config": None if args.lora_config is None else _digest(args.lora_config),
    }
    return {**flags, **content}


def tell_differences(record: dict[str, Any], run: Path, tell: Callable[[str], None]) -> None:
    """Tell in a line what differs from what the run in a directory was started with.

    Args:
        record: of this command line.
        run: directory of the run that is continued.
        tell: takes the line.
    """
    try:
        earlier = json.loads((run / FILE).read_text(encoding="utf-8"))
        differing = [name for name in record if record[name] != earlier.get(name)]
    except (OSError, ValueError, AttributeError):
        tell(f"{run} has no {FILE} that says what it was started with; flags and data are taken as they are")
        return
    if differing:
        said = [
            f"--{name} (another content)" if name in _BY_CONTENT else f"--{name} {record[name]} ({earlier.get(name)})"
            for name in differing
        ]
        tell(f"going on with other settings than the run was started with, which are in brackets: {', '.join(said)}")


class RecordWriter(Callback):
    """Writes what a run was started with once its fit begins: until then, the directory may be another run's.

    Args:
        record: of this command line.
        run: directory of the run.
        ranks: who trains together; the first one writes.
    """

    def __init__(self, record: dict[str, Any], run: Path, ranks: Ranks) -> None:
        self._record = record
        self._run = run
        self._ranks = ranks

    def on_fit_start(self) -> None:
        """Write the file."""
        if self._ranks.is_first:
            text = json.dumps(self._record, indent=2, sort_keys=True) + "\n"
            (self._run / FILE).write_text(text, encoding="utf-8")


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


WARMUP_SHARE = 0.025


def optimizer_steps(args: Namespace) -> int:
    """Return the optimizer steps of the whole run, which are the same on every rank."""
    windows = episode_windows(
        seed=0,
        episode=0,
        passes=args.num_update_steps,
        samples=args.num_collect_steps * args.experience_batch_size,
        batch_size=args.train_batch_size,
        accumulation_steps=args.accumulation_steps,
        sampled=False,
    )
    return int(args.num_episodes) * len(windows)


def schedule_of(args: Namespace) -> Callable[[int], float]:
    """Return the schedule of a run: warm-up of 2.5 % of its steps unless the flags say otherwise, then the cosine."""
    total = optimizer_steps(args)
    warmup = math.ceil(WARMUP_SHARE * total) if args.warmup_steps is None else args.warmup_steps
    return warmup_then_cosine(warmup, total)


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
    ranks = ranks.laid_out(parts_of(args))
    args = Namespace(**vars(args) | {"plugin": plugin.strategy})
    models = build_models(args, device, tell)
    conversation = setup_conversation_template(models.tokenizer, args.conversation_template_config)
    loaders = build_loaders(args, conversation, tell, ranks)
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
