"""What can be said of a command line before torch is loaded: flags that do not fit together, missing files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.formats import json_fault
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.resolve import resolve_reward_function
from rlhf_core.strategy.parts import Parts

if TYPE_CHECKING:
    from argparse import Namespace
from typing import TYPE_CHECKING

from rlhf_core.training.run_directory import TRAINER, check_no_other_run, check_writable, checkpoint_place

if TYPE_CHECKING:
    from argparse import Namespace

ALLOWED_FLAG = "--allowed_reward_modules"
_GEMINI = ("gemini", "gemini_auto")
_LORA_KEYS = {
    "r",
    "lora_alpha",
    "linear_lora_dropout",
    "embedding_lora_dropout",
    "lora_train_bias",
    "lora_initialization_method",
    "target_modules",
}


def check_arguments(args: Namespace) -> None:
    """Check that the flags can be run together.

    Raises:
        ConfigError: if they cannot; one sentence with the flags' names.
    """
    _check_required(args)
    _check_rewards(args)
    _check_placement(args)
    _check_sizes(args)
    _check_outputs(args)
    if args.ptx_coef > 0 and not args.ptx_dataset:
        raise ConfigError(f"--ptx_coef {args.ptx_coef} needs demonstrations: give --ptx_dataset, or leave it at 0")
    for path in (*args.prompt_dataset, *args.ptx_dataset):
        if not Path(path).exists():
            raise ConfigError(f"data {path} does not exist; give a file of JSON lines or a directory")
    from rlhf_core.data.conversation import read_template  # noqa: PLC0415  # pydantic, which help can do without

    read_template(args.conversation_template_config)
    if args.lora_config and read_lora(args.lora_config)["init"] == "pissa" and args.keep_lora:
        raise ConfigError("--keep_lora does not go with PiSSA, which changes the weights below the adapters too")
    checkpoint_step(args)
    check_places(args)


def _check_required(args: Namespace) -> None:
    for name in ("pretrain", "prompt_dataset", "conversation_template_config"):
        if not getattr(args, name):
            raise ConfigError(f"--{name} is required")
    if not args.no_neural_reward_model and not (args.rm_pretrain or args.rm_checkpoint_path):
        raise ConfigError(
            "a reward model is required: give --rm_checkpoint_path (or --rm_pretrain with a whole one), "
            "or --no_neural_reward_model with --reward_functions"
        )


def _check_rewards(args: Namespace) -> None:
    if args.no_neural_reward_model and not args.reward_functions:
        raise ConfigError("--no_neural_reward_model needs --reward_functions: nothing else would give a reward")
    if args.reward_functions and not args.no_neural_reward_model:
        raise ConfigError("--reward_functions are used with --no_neural_reward_model only; give both or neither")
    if args.no_neural_reward_model and args.rm_checkpoint_path:
        raise ConfigError("--rm_checkpoint_path is a reward model, which --no_neural_reward_model leaves out; drop one")
    if args.no_neural_reward_model and args.critic_init == "reward_model":
        raise ConfigError("--critic_init reward_model needs a reward model, which --no_neural_reward_model leaves out")
    for name in args.reward_functions or ():
        resolve_reward_function(name, allowed_modules=args.allowed_reward_modules, setting=ALLOWED_FLAG)


def _check_placement(args: Namespace) -> None:
    parts = parts_of(args)
    if parts.sizes and args.plugin != "3d":
        flags = " and ".join(f"--{name} {size}" for name, size in parts.sizes.items())
        raise ConfigError(
            f"{flags} would cut one model into parts, which only --plugin 3d does; set that, or leave it out"
        )
    if parts.fault:
        raise ConfigError(parts.fault)
    if args.lora_config and args.plugin in _GEMINI:
        raise ConfigError(f"--lora_config does not go with --plugin {args.plugin}; take zero2, ddp or plain")
    if args.plugin == "gemini_auto" and args.accumulation_steps > 1:
        raise ConfigError(
            f"--plugin gemini_auto does not accumulate gradients, but --accumulation_steps is "
            f"{args.accumulation_steps}; set it to 1 or take another plugin"
        )


def parts_of(args: Namespace) -> Parts:
    """Return into what parts the flags cut a model.

    Raises:
        ConfigError: if sequences are to be cut in a way that is not known here, or into one part.
    """
    cuts_sequences = args.enable_sequence_parallelism or args.sp > 1
    sp = args.tp if cuts_sequences and args.sp_mode == "split_gather" and args.sp == 1 else args.sp
    if cuts_sequences and sp == 1:
        by = "--tp" if args.sp_mode == "split_gather" else "--sp"
        raise ConfigError(f"--enable_sequence_parallelism with --sp_mode {args.sp_mode} needs {by} above 1; set it")
    return Parts(args.tp, args.pp, sp, args.sp_mode if cuts_sequences else "all_to_all")


def _check_sizes(args: Namespace) -> None:
    if args.max_seq_len >= args.max_length:
        raise ConfigError(
            f"--max_seq_len {args.max_seq_len} (the response) leaves no room for a prompt in --max_length "
            f"{args.max_length} (prompt and response)"
        )


def _check_outputs(args: Namespace) -> None:
    if args.use_wandb and not args.log_dir:
        raise ConfigError("--use_wandb needs --log_dir")
    if args.keep_lora and not args.lora_config:
        raise ConfigError("--keep_lora needs --lora_config: there are no adapters to keep")


def read_json(path: str, flag: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: if there is none; the message names the flag.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{flag} {path} cannot be read: {why}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{flag} {path} {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {path} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def read_lora(path: str) -> dict[str, Any]:
    """Return the keywords of `LoRAConfig` from a file of coati's form.

    Raises:
        ConfigError: if the file cannot be read, a key is unknown, or a value is not supported.
    """
    given = read_json(path, "--lora_config")
    unknown = sorted(given.keys() - _LORA_KEYS)
    if unknown:
        raise ConfigError(f"--lora_config {path} has an unknown key {unknown[0]!r}; known are {sorted(_LORA_KEYS)}")
    if given.get("embedding_lora_dropout"):
        raise ConfigError(f"--lora_config {path}: embedding_lora_dropout is not supported; leave it at 0")
    settings = {
        "r": given.get("r", 0),
        "alpha": given.get("lora_alpha", 32),
        "dropout": given.get("linear_lora_dropout", 0.1),
        "bias": given.get("lora_train_bias", "none"),
        "init": str(given.get("lora_initialization_method", "kaiming_uniform")).lower(),
        "target_modules": given.get("target_modules") or "all-linear",
    }
    if not isinstance(settings["r"], int) or settings["r"] < 1:
        raise ConfigError(f"--lora_config {path}: r (the rank) must be a whole number above 0, not {settings['r']!r}")
    if settings["init"] not in {"kaiming_uniform", "pissa"}:
        raise ConfigError(
            f"--lora_config {path}: lora_initialization_method must be kaiming_uniform or PiSSA, "
            f"not {given['lora_initialization_method']!r}"
        )
    return settings


def check_places(args: Namespace) -> None:
    """Check that what is read is there, and make what is written to.

    Raises:
        ConfigError: naming the flag, if a directory is missing, cannot be written to, or holds another run.
    """
    for name in ("tokenizer_dir", "rm_checkpoint_path"):
        path = getattr(args, name)
        if path and not Path(path).is_dir():
            raise ConfigError(f"--{name} {path} is not a directory")
    _check_no_other_run(args)
    for name in ("save_path", "log_dir"):
        if path := getattr(args, name):
            check_writable(Path(path), what=f"--{name}")


def checkpoint_step(args: Namespace) -> Path | None:
    """Return the trainer's part of the checkpoint to go on from; None for a new run.

    Raises:
        ConfigError: if one of the two paths is missing, or they are not of one step of one run.
    """
    actor, critic = args.checkpoint_path, args.critic_checkpoint_path
    if not actor and not critic:
        return None
    if not (actor and critic):
        raise ConfigError("--checkpoint_path and --critic_checkpoint_path go together: give both or neither")
    for flag, path in (("--checkpoint_path", actor), ("--critic_checkpoint_path", critic)):
        if not Path(path).is_dir():
            raise ConfigError(f"{flag} {path} is not a directory")
        if checkpoint_place(Path(path).name) is None:
            raise ConfigError(f"{flag} {path} is no checkpoint; its directory's name should be like epoch-1_step-20")
    actor, critic = Path(actor).resolve(), Path(critic).resolve()
    if actor.name != critic.name or actor.parent.parent != critic.parent.parent:
        raise ConfigError(
            f"--checkpoint_path is {actor.name} of {actor.parent.parent} and --critic_checkpoint_path {critic.name} of "
            f"{critic.parent.parent}; give one step of one run"
        )
    trainer = actor.parent.parent / TRAINER / actor.name
    if not trainer.is_dir():
        raise ConfigError(f"{actor} has no {trainer} beside it, so it is not a whole checkpoint; give an earlier one")
    return trainer


def _check_no_other_run(args: Namespace) -> None:
    """Allow the checkpoints of the run that is continued: one that goes on elsewhere may not mix with another."""
    root, step = Path(args.save_path), checkpoint_step(args)
    if step is not None and step.parent.parent == root.resolve():
        return

    def way_on(name: str) -> str:
        return f"--checkpoint_path {root / 'actor' / name} --critic_checkpoint_path {root / 'critic' / name}"

    check_no_other_run(root, what="--save_path", way_on=way_on)
