"""The flags of `train_prompts_on_ray`: coati's names and defaults, then ours. Imports nothing heavy: help is quick."""

from __future__ import annotations

import argparse
from os.path import expanduser
from pathlib import Path

from rlhf_core.coati.script.flags import Parser, above_zero, count, fraction, non_negative, positive, seed
from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError
from rlhf_core.strategy.launch import launched_ranks

ROLES = ("actor", "critic", "initial", "reward")
STRATEGIES = ("ddp", "colossalai_gemini", "colossalai_zero2", "plain")
"""coati's three, then ours."""
MODELS = ("gpt2", "bloom", "opt", "auto")
"""coati's three, then ours: whatever transformers loads."""
_LEAST_OF_A_GPU = 0.0001
"""Ray counts in these."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `train_prompts_on_ray`'s command line; a bad value is a ConfigError."""
    parser = Parser(
        prog="train_prompts_on_ray",
        description="PPO from the prompts of a CSV file: policy, critic, initial model and reward model on four groups "
        "of Ray actors.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=30, width=110),
    )
    _add_coatis(parser.add_argument_group("coati's flags"))
    _add_learning(parser.add_argument_group("learning (ours)"))
    _add_running(parser.add_argument_group("cluster and outputs (ours)"))
    return parser


def _add_coatis(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prompt_csv_url",
        metavar="PLACE",
        help="CSV with a column `prompt`: a path, or an http(s):// address; required",
    )
    add("--strategy", choices=STRATEGIES, default="ddp", help="how a group's processes share actor and critic")
    add("--model", choices=MODELS, default="gpt2", help="architecture that --pretrain must hold; auto takes any")
    add("--pretrain", default="gpt2", type=expanduser, metavar="MODEL", help="a directory, or a hub name")
    add(
        "--save_path", default="actor_checkpoint_prompts.pt", type=expanduser, metavar="PATH",
        help="of the policy at the end: one file of weights (safetensors, whatever its suffix); without a suffix a "
        "directory that transformers loads",
    )  # fmt: skip
    add(
        "--need_optim_ckpt", nargs="?", const=True, default=False, type=boolean, metavar="BOOL",
        help="write the policy's optimizer beside it",
    )  # fmt: skip
    add("--num_episodes", type=positive, default=10, metavar="N", help="times --max_timesteps: time steps of the run")
    add("--max_timesteps", type=positive, default=10, metavar="N", help="time steps of an episode")
    add("--update_timesteps", type=positive, default=10, metavar="N", help="time steps that are learnt from together")
    add(
        "--train_batch_size", type=positive, default=8, metavar="N",
        help="responses of one actor process in an optimizer step",
    )  # fmt: skip
    add(
        "--experience_batch_size", type=positive, default=8, metavar="N",
        help="prompts of one actor process in a time step",
    )  # fmt: skip
    for role in ("actor", "critic", "initial", "reward"):
        add(f"--num_{role}_nodes", type=positive, default=1, metavar="N", help=f"machines of the {role} group")
    add("--num_gpus_per_node", type=positive, default=1, metavar="N", help="processes of a group on each machine")


def _add_learning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rm_pretrain", type=expanduser, metavar="DIR",
        help="trained reward model, as RewardModel.save_pretrained or RewardModelTrainer wrote it; without one an "
        "untrained head scores, as upstream's does",
    )  # fmt: skip
    add("--lr", type=above_zero, default=5e-6, metavar="X", help="learning rate of the actor")
    add("--critic_lr", type=above_zero, metavar="X", help="of the critic; by default --lr")
    add("--grad_clip", type=above_zero, default=1.0, metavar="X", help="largest norm of a gradient")
    add("--max_epochs", type=positive, default=1, metavar="N", help="passes over what a round collected")
    add("--kl_coef", type=non_negative, default=0.1, metavar="X", help="weight of the KL penalty, per nat")
    add("--lam", type=fraction_or_one, default=0.95, metavar="X", help="GAE's lambda")
    add("--eps_clip", type=fraction, default=0.2, metavar="X", help="half-width of the trust region on the ratio")
    add("--value_clip", type=above_zero, default=0.4, metavar="X", help="half-width of that on values")
    add("--max_length", type=positive, default=128, metavar="N", help="tokens of prompt and response together")
    add("--max_prompt_tokens", type=positive, default=96, metavar="N", help="what is beyond is cut off a prompt")
    add("--temperature", type=above_zero, default=1.0, metavar="X", help="divides the logits")
    add("--top_k", type=count, default=50, metavar="N", help="draw from the k likeliest tokens; 0 from all")
    add("--mixed_precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="arithmetic; fp16 needs GPUs")
    add("--seed", type=seed, default=42, metavar="N", help="decides every token, order and new weight")


def _add_running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--address", metavar="HOST:PORT",
        help="of a running Ray cluster, or auto for one of this machine; else RAY_ADDRESS, and without either a "
        "cluster that ends with the command",
    )  # fmt: skip
    add(
        "--threads",
        type=positive,
        default=1,
        metavar="N",
        help="CPU threads of each process; part of what is repeatable",
    )
    add(
        "--gpus_per_actor", type=gpus, metavar="X",
        help="GPUs of each process, such as 0.25; by default one if there are enough for all, else none",
    )  # fmt: skip
    add("--start_timeout_s", type=above_zero, default=120.0, metavar="S", help="longest wait for room and processes")
    add("--timeout_s", type=above_zero, default=1800.0, metavar="S", help="longest wait from one answer to the next")
    add("--timeline", type=expanduser, metavar="PNG", help="write a picture of when each process was busy")


def processes_of(args: argparse.Namespace) -> dict[str, int]:
    """Return how many processes each role has."""
    return {role: getattr(args, f"num_{role}_nodes") * args.num_gpus_per_node for role in ROLES}


def boolean(text: str) -> bool:
    """Return what a word says: yes or no."""
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join((*_TRUE, *_FALSE))}, got {text!r}")
    return word in _TRUE


def fraction_or_one(text: str) -> float:
    """Return a number from 0 to 1."""
    value = non_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {text}")
    return value


def gpus(text: str) -> float:
    """Return how much of the GPUs an actor gets, as Ray takes it: none, a part of one, or whole ones."""
    value = non_negative(text)
    if 0 < value < _LEAST_OF_A_GPU or (value > 1 and not value.is_integer()):
        raise argparse.ArgumentTypeError(f"must be 0, from {_LEAST_OF_A_GPU} to 1, or a whole number, not {text}")
    return value


def check_arguments(args: argparse.Namespace) -> None:
    """See that the flags can be run together, before anything is started. Imports no torch.

    Raises:
        ConfigError: if they cannot; one sentence with the flags' names.
    """
    if launched_ranks() > 1:
        raise ConfigError(
            f"torchrun started {launched_ranks()} of this command, and each would start a group of actors; "
            "start it once, with python: --num_actor_nodes and its like say how many processes train"
        )
    if not args.prompt_csv_url:
        raise ConfigError("--prompt_csv_url is required: a CSV file with a column `prompt`")
    if args.max_prompt_tokens >= args.max_length:
        raise ConfigError(
            f"--max_prompt_tokens {args.max_prompt_tokens} leaves no room for a response in --max_length "
            f"{args.max_length} (prompt and response)"
        )
    rows, ranks = args.train_batch_size * args.num_actor_nodes, args.num_critic_nodes
    if rows % ranks:
        raise ConfigError(
            f"an optimizer step learns from {counted(rows * args.num_gpus_per_node, 'response')} (--train_batch_size "
            f"{args.train_batch_size} on each actor process), which do not divide by the critic's "
            f"{ranks * args.num_gpus_per_node} processes; choose another --train_batch_size or --num_critic_nodes"
        )
    if args.eps_clip <= 0:
        raise ConfigError(f"--eps_clip must be above 0, not {args.eps_clip:g}")
    if args.address and "://" in args.address:
        raise ConfigError(f"--address {args.address} is not read; give host:port of the cluster's control server")
    check_can_be_written("--save_path", args.save_path, is_directory=not Path(args.save_path).suffix)
    if args.timeline:
        check_can_be_written("--timeline", args.timeline)


def check_can_be_written(flag: str, path: str, *, is_directory: bool = False) -> None:
    """See that something can be written to a path, on this machine.

    Args:
        flag: that names it.
        path: which may be written over.
        is_directory: whether it is to be one.

    Raises:
        ConfigError: if it cannot.
    """
    place = Path(path).absolute()
    if not place.parent.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: there is no directory {place.parent}; make it")
    if place.is_dir() and not is_directory:
        raise ConfigError(f"{flag} {path} is a directory; give a file's path")
    if place.is_file() and is_directory:
        raise ConfigError(f"{flag} {path} is a file; without a suffix it is to be a directory")
    probe = (place if place.is_dir() else place.parent) / f".{place.name}.probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror or error}") from error
