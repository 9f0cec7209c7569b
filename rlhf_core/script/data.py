"""Prompts and demonstrations of `train_ppo`, encoded by the conversation template of its flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader

from rlhf_core.data.conversation import Conversation, encode_conversation
from rlhf_core.data.dialogues import Message, read_dialogues
from rlhf_core.data.loaders import (
    DataCollatorForPromptDataset,
    DataCollatorForSupervisedDataset,
    demonstration_dataset,
    make_loader,
    prompt_dataset,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from rlhf_core.data.template import PromptTemplate

_PTX_SEED = 1
"""Added to the run's seed: prompts and demonstrations of one file should not come in one order."""


class Loaders(NamedTuple):
    """What the trainer reads from."""

    prompts: DataLoader[dict[str, Any]]
    demonstrations: DataLoader[dict[str, Any]] | None


def build_loaders(args: Namespace, conversation: Conversation, tell: Callable[[str], None]) -> Loaders:
    """Read and encode what the flags name.

    Args:
        args: the flags, checked.
        conversation: the template, with the policy's tokenizer.
        tell: is told how many rows were left out.

    Raises:
        DataError: if a file has another form, or too few rows are left.
    """
    room = args.max_length - args.max_seq_len
    encode = partial(prompt_ids, conversation.template())
    prompts = prompt_dataset(read_dialogues(args.prompt_dataset), encode, max_tokens=room)
    if prompts.dropped:
        tell(f"{prompts.dropped} prompts are longer than the {room} tokens that --max_length leaves; they are left out")
    loader = make_loader(
        prompts.dataset,
        DataCollatorForPromptDataset(conversation.tokenizer, max_length=room),
        batch_size=args.experience_batch_size,
        seed=args.seed,
        what="prompts (--experience_batch_size)",
    )
    return Loaders(loader, _demonstrations(args, conversation, tell))


def prompt_ids(template: PromptTemplate, messages: Sequence[Message]) -> list[int]:
    """Return the ids of messages, after the template's system message, up to where the assistant begins."""
    ids: list[int] = template.tokenizer(template.render(messages, for_answer=True), add_special_tokens=False).input_ids
    return ids


def _demonstrations(
    args: Namespace, conversation: Conversation, tell: Callable[[str], None]
) -> DataLoader[dict[str, Any]] | None:
    if args.ptx_coef == 0:
        return None

    def encode(messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        encoded = encode_conversation(messages, conversation)
        return encoded.ids, encoded.loss_mask

    fitted = demonstration_dataset(read_dialogues(args.ptx_dataset), encode, max_tokens=args.max_length)
    if fitted.dropped:
        tell(f"{fitted.dropped} demonstrations are longer than --max_length {args.max_length}; they are left out")
    return make_loader(
        fitted.dataset,
        DataCollatorForSupervisedDataset(conversation.tokenizer, max_length=args.max_length),
        batch_size=args.ptx_batch_size,
        seed=args.seed + _PTX_SEED,
        what="demonstrations (--ptx_batch_size)",
    )
