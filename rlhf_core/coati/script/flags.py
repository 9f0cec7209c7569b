"""The flags of `train_ppo`: coati's names and defaults; and how a command line that fails says why, from one rank."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from os.path import expanduser
from typing import NoReturn

from rlhf_core.errors import ConfigError
from rlhf_core.escaping import visible
from rlhf_core.strategy.launch import launched_rank, tell_launcher

# The ranks usually make the same mistake at once: torchrun ends the others before they repeat what rank 0 said. It
# sees that rank 0 has ended some seconds after that spoke, once torch is loaded.
_RANK_0_SPEAKS_FIRST_S = 10.0


class Parser(argparse.ArgumentParser):
    """Raises its complaint, so that who called it says it: under torchrun one rank alone."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message)


def end_with(sentence: str, *, program: str, status: int) -> int:
    """Say why a command line failed, and return its exit status; torchrun is told too, and repeats it last.

    Args:
        sentence: for the person who can correct it.
        program: the command's name.
        status: above 0.
    """
    rank = launched_rank()
    if rank:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C ends the wait, not the sentence
            time.sleep(_RANK_0_SPEAKS_FIRST_S)
        sentence = f"rank {rank}: {sentence}"
    told = f"{program}: {sentence}"
    sys.stderr.write(f"{visible(told)}\n")
    tell_launcher(told)
    return status


_HIGHEST_SEED = 2**63 - 1  # PyTorch takes no more


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from error


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from error


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def count(text: str) -> int:
    """Return a whole number of at least 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value


def seed(text: str) -> int:
    """Return a whole number that seeds NumPy and PyTorch."""
    value = _whole(text)
    if not 0 <= value <= _HIGHEST_SEED:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_HIGHEST_SEED}, not {value}")
    return value


def above_zero(text: str) -> float:
    """Return a finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def non_negative(text: str) -> float:
    """Return a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value


def fraction(text: str) -> float:
    """Return a number of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, not {text}")
    return value


PLUGINS = ("gemini", "gemini_auto", "zero2", "zero2_cpu", "3d", "ddp", "plain")
"""coati's five, then ours."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `train_ppo`'s command line; a bad value is a ConfigError."""
    parser = Parser(
        prog="train_ppo",
        description="PPO from prompts: reward by a trained model or by functions, KL to the starting policy.",
        epilog="Run it under `torchrun --nproc_per_node=N -m rlhf_core.train_ppo ...` to train with N ranks; sizes of "
        "batches are those of one rank.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=30, width=110),
    )
    models = parser.add_argument_group("models")
    _add_models(models)
    _add_starts(models)
    _add_data(parser.add_argument_group("data"))
    _add_rewards(parser.add_argument_group("reward"))
    _add_loop(parser.add_argument_group("loop"))
    _add_objective(parser.add_argument_group("objective"))
    _add_optimizer(parser.add_argument_group("optimizer"))
    _add_placement(parser.add_argument_group("placement and arithmetic"))
    _add_outputs(parser.add_argument_group("outputs"))
    return parser


def _add_models(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--pretrain",
        type=expanduser,
        metavar="MODEL",
        help="policy to start from: a directory, a peft adapter's directory (it is merged "
        "first), or a hub name; required",
    )
    add(
        "--rm_pretrain",
        type=expanduser,
        metavar="MODEL",
        help="base model of reward model and critic; a directory of a whole reward model serves as both",
    )
    add(
        "--tokenizer_dir",
        type=expanduser,
        metavar="DIR",
        help="tokenizer of the policy; else the one beside --pretrain",
    )
    add(
        "--rm_checkpoint_path",
        type=expanduser,
        metavar="DIR",
        help="trained reward model, as RewardModel.save_pretrained or RewardModelTrainer wrote it",
    )


def _add_starts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--checkpoint_path",
        type=expanduser,
        metavar="DIR",
        help="actor checkpoint (.../actor/epoch-E_step-S) to go on from",
    )
    add("--critic_checkpoint_path", type=expanduser, metavar="DIR", help="critic checkpoint of the same step")
    add(
        "--critic_init",
        choices=("reward_model", "policy"),
        help="where the critic starts: as the reward model, its "
        "head rescaled to the first returns, or on the policy's transformer with a zero head; by default on the "
        "reward model if there is one, else on --rm_pretrain with a zero head",
    )
    add(
        "--lora_config",
        type=expanduser,
        metavar="JSON",
        help="train adapters: a file with r, lora_alpha (32), linear_lora_dropout (0.1), "
        "embedding_lora_dropout (0), lora_train_bias (none), lora_initialization_method (kaiming_uniform or PiSSA), "
        "target_modules",
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prompt_dataset",
        type=expanduser,
        nargs="+",
        default=[],
        metavar="PATH",
        help="prompts: JSON lines (also .gz), directories of them, or directories of datasets.save_to_disk; required",
    )
    add(
        "--ptx_dataset",
        type=expanduser,
        nargs="+",
        default=[],
        metavar="PATH",
        help="demonstrations for the language-model loss, in the same forms",
    )
    add(
        "--conversation_template_config",
        type=expanduser,
        metavar="JSON",
        help="coati's template file: chat_template (null takes the "
        "tokenizer's own), system_message, stop_ids, end_of_assistant, response_format_tags; required",
    )
    add("--max_length", type=positive, default=2048, help="most tokens of prompt and response together")
    add("--max_seq_len", type=positive, default=256, help="most tokens of a response")


def _add_rewards(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--no_neural_reward_model", action="store_true", help="reward by --reward_functions instead of a trained model")
    add(
        "--reward_functions",
        nargs="+",
        metavar="NAME",
        help="functions whose scores are added: gsm8k_reward_fn, math_competition_reward_fn; also (ours) "
        "reasoning_gym:TASK, for rows that have the task's entry, and package.module:function",
    )
    add(
        "--allowed_reward_modules",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules and packages that package.module:function may name (ours); rlhf train-ppo takes those of "
        "RLHF_REWARD_MODULES by default",
    )


def _add_loop(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num_episodes", type=positive, default=1, help="rounds of collecting and learning")
    add("--num_collect_steps", type=positive, default=2, help="batches of experience per episode")
    add("--num_update_steps", type=positive, default=5, help="passes over an episode's experience")
    add("--experience_batch_size", type=positive, default=16, help="prompts per collecting step")
    add("--train_batch_size", type=positive, default=16, help="samples per forward and backward pass")
    add(
        "--accumulation_steps",
        type=positive,
        default=8,
        help="training batches per optimizer step; their losses are averaged",
    )
    add("--ptx_batch_size", type=positive, default=4, help="demonstrations per training batch")
    add("--seed", type=seed, default=42, help="decides every prompt order, sample and adapter (ours)")


def _add_objective(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--kl_coef", type=non_negative, default=0.1, help="weight of the KL penalty, per nat and token")
    add(
        "--ptx_coef",
        type=fraction,
        default=0.0,
        help="weight of the language-model loss on --ptx_dataset; the policy's loss gets the rest of 1",
    )
    add(
        "--disable_loss_mask", action="store_true", help="learn all tokens of demonstrations, not the assistant's alone"
    )


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--lr", type=above_zero, default=9e-6, help="peak learning rate of the actor")
    add("--critic_lr", type=above_zero, default=9e-6, help="peak learning rate of the critic")
    add("--weight_decay", type=non_negative, default=0.1, help="of matrices, per step, times the learning rate")
    add("--grad_clip", type=above_zero, default=1.0, help="largest norm of a gradient")
    add(
        "--warmup_steps",
        type=count,
        help="optimizer steps of linear warm-up before the cosine to 10 %%; None takes "
        "2.5 %% of the run's optimizer steps",
    )


def _add_placement(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--plugin",
        choices=PLUGINS,
        help="how ranks share the models: zero2 shards gradients and optimizer state, zero2_cpu keeps that state in "
        "host memory, gemini shards weights too, gemini_auto moves them between GPU and host; ddp and plain (ours) "
        "shard nothing; 3d cuts matrices into --tp parts, layers into --pp stages and rows into --sp parts. None takes "
        "gemini on GPUs (zero2 with --lora_config), plain on a CPU",
    )
    add(
        "--mixed_precision",
        choices=("fp16", "bf16"),
        default="fp16",
        help="arithmetic of forward passes; fp16 runs as bf16 on a CPU",
    )
    add("--grad_checkpoint", action="store_true", help="compute activations again instead of keeping them")
    add(
        "--use_flash_attn",
        action="store_true",
        help="flash-attention kernels, on GPUs that have the library; else sdpa",
    )
    add("--tp", type=positive, default=1, help="parts of every matrix, of 3d; as many ranks have the same rows")
    add("--pp", type=positive, default=1, help="stages of layers, of 3d; as many ranks have the same rows")
    add("--sp", type=positive, default=1, help="parts of every row's tokens, of 3d; ranks have the same rows")
    add(
        "--sp_mode",
        choices=("split_gather", "ring", "all_to_all"),
        default="split_gather",
        help="all_to_all: --sp times as many ranks hold a model; split_gather: those that --tp counts cut the rows, "
        "too; ring is refused",
    )
    add("--enable_sequence_parallelism", action="store_true", help="cut rows by --sp_mode, as --sp above 1 does")
    add("--zero_stage", type=int, choices=(0, 1, 2), default=0, help="does nothing: 3d shards no moments")
    add("--zero_cpu_offload", action="store_true", help="does nothing; see zero2_cpu")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--save_path",
        type=expanduser,
        default="actor_checkpoint_prompts",
        metavar="DIR",
        help="gets actor/modeling and critic/modeling",
    )
    add(
        "--save_interval",
        type=count,
        default=1000,
        help="optimizer steps between checkpoints; 0 writes none on the way",
    )
    add(
        "--keep_lora",
        action="store_true",
        help="write the actor's adapters in peft's format instead of merging them (ours)",
    )
    add("--log_dir", type=expanduser, metavar="DIR", help="gets TensorBoard's files and JSON lines")
    add("--use_wandb", action="store_true", help="log to Weights & Biases or trackio too; needs --log_dir")
