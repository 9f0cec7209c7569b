"""Prompts and demonstrations of `train_ppo`, encoded by the conversation template of its flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader

from rlhf_core.counting import counted
from rlhf_core.data.conversation import Conversation, encode_conversation
from rlhf_core.data.loaders import (
    DataCollatorForPromptDataset,
    DataCollatorForSupervisedDataset,
    Dialogue,
    Limits,
    demonstration_dataset,
    make_loader,
    prompt_dataset,
    read_dialogues,
)
from rlhf_core.data.reading.messages import MessageView
from rlhf_core.data.transcripts import Message
from rlhf_core.errors import DataError
from rlhf_core.rewards.resolve import BUILT_IN
from rlhf_core.strategy.ranks import Ranks

if TYPE_CHECKING:
    from argparse import Namespace

    from rlhf_core.data.template import PromptTemplate

_PTX_SEED = 1
"""Added to the run's seed: prompts and demonstrations of one file should not come in one order."""


class Loaders(NamedTuple):
    """What the trainer reads from."""

    prompts: DataLoader[dict[str, Any]]
    demonstrations: DataLoader[dict[str, Any]] | None


def build_loaders(
    args: Namespace, conversation: Conversation, tell: Callable[[str], None], ranks: Ranks | None = None
) -> Loaders:
    """Read and encode what the flags name.

    Args:
        args: the flags, checked.
        conversation: the template, with the policy's tokenizer.
        tell: is told how many rows were left out.
        ranks: who shares them; None takes torch.distributed's default group.

    Raises:
        DataError: if a file has another form, too few rows are left, or functions have no answers to compare with.
    """
    room = args.max_length - args.max_seq_len
    template = conversation.template()
    encode = partial(prompt_ids, template)
    read = read_dialogues(args.prompt_dataset)
    asked = [each if each.messages is None else each._replace(messages=each.before_answer()) for each in read]
    dialogues = _shown(asked, template, lambda told: tell(f"--prompt_dataset: left out {told}"))
    _check_answers(args, dialogues, tell)
    known = len(conversation.tokenizer)
    prompts = prompt_dataset(dialogues, encode, limits=Limits(room, known, "--max_length"))
    if prompts.dropped:
        tell(f"left out: {counted(prompts.dropped, 'prompt')} longer than the {room} tokens that --max_length leaves")
    loader = make_loader(
        prompts.dataset,
        DataCollatorForPromptDataset(conversation.tokenizer, max_length=room),
        batch_size=args.experience_batch_size,
        seed=args.seed,
        what="prompts (--experience_batch_size)",
        ranks=ranks,
    )
    return Loaders(loader, _demonstrations(args, conversation, tell, ranks))


def prompt_ids(template: PromptTemplate, messages: Sequence[Message]) -> list[int]:
    """Return the ids of messages, after the template's system message, up to where the assistant begins."""
    ids: list[int] = template.tokenizer(template.render(messages, for_answer=True), add_special_tokens=False).input_ids
    return ids


def _shown(dialogues: Sequence[Dialogue], template: PromptTemplate, tell: Callable[[str], None]) -> list[Dialogue]:
    """Return the rows with those keys of their messages that the model is shown; the others are told."""
    view, shown = MessageView(template), []
    for dialogue in dialogues:
        try:
            messages = dialogue.messages and tuple(view.prompt(dialogue.messages))
        except DataError as error:
            raise DataError(f"{dialogue.where}: {error}") from error
        shown.append(dialogue._replace(messages=messages))
    for each in view.not_shown():
        tell(str(each))
    return shown


def _check_answers(args: Namespace, dialogues: Sequence[Dialogue], tell: Callable[[str], None]) -> None:
    """Check that functions which compare a response with an answer have answers to compare with."""
    comparing = [name for name in args.reward_functions or () if name in BUILT_IN]
    without = [dialogue for dialogue in dialogues if not (dialogue.answer or "").strip()]
    if not comparing or not without:
        return
    if len(without) == len(dialogues):
        raise DataError(
            f"{comparing[0]} compares responses with answers, but no row of --prompt_dataset has one; give rows "
            "'gt_answer', or 'question' and 'answer'"
        )
    tell(
        f"prompts that have no answer, for which {comparing[0]} gives 0: {len(without)} of {len(dialogues)}, such as "
        f"{without[0].where}"
    )


def _demonstrations(
    args: Namespace, conversation: Conversation, tell: Callable[[str], None], ranks: Ranks | None
) -> DataLoader[dict[str, Any]] | None:
    if args.ptx_coef == 0:
        return None

    def encode(messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        encoded = encode_conversation(messages, conversation)
        return encoded.ids, encoded.loss_mask

    limits = Limits(args.max_length, len(conversation.tokenizer), "--max_length")
    dialogues = _shown(
        read_dialogues(args.ptx_dataset), conversation.template(), lambda told: tell(f"--ptx_dataset: left out {told}")
    )
    fitted = demonstration_dataset(dialogues, encode, limits=limits)
    if fitted.dropped:
        tell(f"left out: {counted(fitted.dropped, 'demonstration')} longer than --max_length {args.max_length}")
    return make_loader(
        fitted.dataset,
        DataCollatorForSupervisedDataset(conversation.tokenizer, max_length=args.max_length),
        batch_size=args.ptx_batch_size,
        seed=args.seed + _PTX_SEED,
        what="demonstrations (--ptx_batch_size)",
        ranks=ranks,
    )
