"""Minibatches of demonstrations and of preference pairs, from token ids and from a dataloader's mappings.

They are made in host memory, where lengths and largest ids are known without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nn_functional

from rlhf_core.counting import counted
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.errors import DataError
from rlhf_core.functional.losses import IGNORED
from rlhf_core.models.trunk import position_ids
from rlhf_core.training.padding import TokenIds, pad_right

_HOST = torch.device("cpu")


class MaskedTokens(NamedTuple):
    """A demonstration: what is read, and which of it is to be learnt."""

    ids: TokenIds
    loss_mask: Sequence[int | bool]
    """True, or 1, on tokens to learn, normally the assistant's, whichever turn they are in."""


Demonstration = MaskedTokens | tuple[TokenIds, Sequence[int | bool]]
"""Token ids of prompt and response; or all ids with the mask of those to learn: as `MaskedTokens`, or of bools only."""


class TokenBatch(NamedTuple):
    """Rows of tokens of which some are to be learnt; its fields are what `SFTTrainer` finds in a dataloader's batch."""

    input_ids: Tensor
    """[B S]"""
    attention_mask: Tensor
    """[B S], True on tokens; of packed rows [B 1 S S], True where a token (third place) sees another (fourth)."""
    position_ids: Tensor
    """[B S], each token's place in its sequence, from 0."""
    loss_mask: Tensor
    """[B S], True on tokens to learn; never on a sequence's first, which nothing predicts."""

    @property
    def tokens(self) -> int:
        """Number of tokens to learn."""
        return int(self.loss_mask.sum())


class PairBatch(NamedTuple):
    """Preference pairs, padded together."""

    input_ids: Tensor
    """[2B S], all chosen sequences, then all rejected ones."""
    attention_mask: Tensor
    """[2B S], True on tokens."""
    margin: Tensor | None
    """[B], by how much the chosen one's score should exceed the other's; None asks for no margin."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids of each pair's prompt; none where nobody asks, as pairs were split by prompt before."""
    guessed: bool = False
    """Whether prompts are what both sequences begin with, as nothing said where they end."""

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.input_ids.shape[0] // 2


def as_masked(example: Demonstration) -> MaskedTokens:
    """Return (ids, loss mask) from either form of a demonstration: that one, or ids of prompt and response.

    A plain pair whose second part is bools is ids and mask; otherwise its second part is the response.

    Raises:
        DataError: if a plain pair's second part could be a mask of zeros and ones: as many as tokens, more than one.
    """
    first, second = example
    if isinstance(example, MaskedTokens):
        return MaskedTokens(first, [bool(learnt) for learnt in second])
    if second and isinstance(second[0], bool):
        return MaskedTokens(first, [bool(learnt) for learnt in second])
    if len(second) == len(first) > 1 and {*second} <= {0, 1}:  # a response of one token may well be an end token of 1
        raise DataError(
            "a demonstration's second part is zeros and ones, as many as tokens: a loss mask, or a response? Give "
            "MaskedTokens(ids, loss_mask), or the mask as bools"
        )
    return MaskedTokens([*first, *second], [False] * len(first) + [True] * len(second))


def token_batch(rows: Sequence[MaskedTokens]) -> TokenBatch:
    """Return demonstrations padded on the left, so that their responses end together and few positions need logits."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([[*[0] * (width - len(row.ids)), *row.ids] for row in rows])
    learnt = torch.tensor([[*[False] * (width - len(row.ids)), *row.loss_mask] for row in rows])
    lengths = torch.tensor([len(row.ids) for row in rows])
    attended = torch.arange(width) >= width - lengths[:, None]
    return _batch(ids, attended, position_ids(attended), learnt)


def token_batch_of(batch: Mapping[str, Any], *, apply_loss_mask: bool) -> TokenBatch:
    """Return what a dataloader gave: {"input_ids", "attention_mask"} and "loss_mask", "labels" or both.

    Args:
        batch: also "position_ids", which a 4-dimensional attention mask of packed rows needs.
        apply_loss_mask: False learns every token that is attended.

    Raises:
        DataError: if a key is missing or of another shape, or labels are not the tokens themselves.
    """
    ids = _tensor(batch, "input_ids")
    _check_shape("input_ids", ids, (*ids.shape[:1], *ids.shape[-1:]))
    attended = _tensor(batch, "attention_mask").bool()
    rows, width = ids.shape
    _check_shape("attention_mask", attended, (rows, width) if attended.dim() == ids.dim() else (rows, 1, width, width))
    if attended.dim() == ids.dim():
        places = position_ids(attended)
    elif "position_ids" not in batch:
        raise DataError("a batch with a 4-dimensional attention_mask needs position_ids too: packed rows restart them")
    if "position_ids" in batch:
        places = _tensor(batch, "position_ids", like=ids).long()
    if not apply_loss_mask:
        learnt = torch.ones_like(ids, dtype=torch.bool)
    elif "loss_mask" not in batch and "labels" not in batch:
        raise DataError(
            f"a batch of demonstrations says by loss_mask or labels what to learn, but this one has {_names(batch)}; "
            "add one, or set apply_loss_mask=False to learn every token"
        )
    else:
        learnt = _tensor(batch, "loss_mask", like=ids).bool() if "loss_mask" in batch else torch.ones_like(ids).bool()
        learnt = learnt & _labelled(batch, ids, learnt)
    return _batch(ids, attended, places, learnt)


def pair_batch(pairs: Sequence[EncodedPair]) -> PairBatch:
    """Return preference pairs padded on the right, without their prompts."""
    ids, attended = pad_right([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)], _HOST)
    margin = _checked_margin(torch.tensor([pair.margin for pair in pairs]), len(pairs))
    return PairBatch(ids, attended, margin if margin.any() else None)


def pair_batch_of(batch: Mapping[str, Any]) -> PairBatch:
    """Return what a dataloader gave: {"chosen_input_ids", "chosen_attention_mask", "rejected_...", optional "margin"}.

    coati's `reject_...` is read as `rejected_...`. A pair's prompt has as many tokens as "prompt_length" says, [B]; or
    is what stands before the response by "chosen_loss_mask"; else it is guessed: what both sequences begin with.

    Raises:
        DataError: if a key is missing or of another shape, a sequence has no token, or a margin is below 0.
    """
    _tensor(batch, "chosen_input_ids")
    named = {key.replace("reject_", "rejected_", 1) if key.startswith("reject_") else key: batch[key] for key in batch}
    sides = [_side(named, side) for side in _SIDES]
    if len(sides[0][0]) != len(sides[1][0]):
        raise DataError(f"a batch has {counted(len(sides[0][0]), 'chosen sequence')} and {len(sides[1][0])} rejected")
    width = max(ids.shape[1] for ids, _ in sides)
    ids, attended = (
        torch.cat([nn_functional.pad(side[part], (0, width - side[part].shape[1])) for side in sides])
        for part in (0, 1)
    )
    margin = None
    if named.get("margin") is not None:
        margin = _checked_margin(_tensor(named, "margin").float(), len(sides[0][0]))
    known = {"prompt_length", "chosen_loss_mask"} & named.keys()
    return PairBatch(ids, attended, margin, _prompts(named, sides), guessed=not known)


@dataclass
class DataCollatorForPreferenceDataset:
    """Pads pairs on the right: `chosen_input_ids`, `..._attention_mask`, `..._loss_mask`, the same as `reject_...`.

    The loss masks are True on the responses: they tell the trainer where a prompt ends. There is `margin`, [B], if the
    pairs have one.
    """

    tokenizer: Any = None
    """coati's; padding is not attended to, so which token it is does not matter."""
    max_length: int = 4096
    """Longer sequences are cut at their end."""

    def __call__(self, instances: Sequence[EncodedPair | Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return one batch.

        Args:
            instances: pairs that know where their prompt ends; or mappings of "chosen_input_ids", "chosen_loss_mask",
                "rejected_input_ids", "rejected_loss_mask" and optional "margin", one pair each.

        Raises:
            DataError: if a pair does not say where its prompt ends, or nothing of a response is left.
        """
        rows = [_named_sides(instance) for instance in instances]
        batch: dict[str, Tensor] = {}
        for side, name in (("chosen", "chosen"), ("rejected", "reject")):
            ids = [list(row[f"{side}_input_ids"])[: self.max_length] for row in rows]
            masks = [[int(each) for each in row[f"{side}_loss_mask"]][: self.max_length] for row in rows]
            for number, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
                if len(tokens) != len(mask) or not any(mask):
                    raise DataError(
                        f"of pair {number} of {len(rows)}, {side} has a loss mask of another length than its tokens, "
                        f"or no response within max_length, {counted(self.max_length, 'token')}; leave it out, or "
                        "raise that"
                    )
            batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"] = pad_right(ids, _HOST)
            batch[f"{name}_loss_mask"] = pad_right(masks, _HOST)[0].bool()
        margin = torch.tensor([float(row.get("margin") or 0.0) for row in rows])
        return batch | ({"margin": margin} if bool(margin.any()) else {})


def _named_sides(instance: EncodedPair | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(instance, Mapping):
        wanted = {f"{side}_{key}" for side in ("chosen", "rejected") for key in ("input_ids", "loss_mask")}
        if missing := sorted(wanted - instance.keys()):
            raise DataError(f"a preference pair lacks {missing[0]!r}; it has {', '.join(map(repr, instance))}")
        return instance
    prompt = instance.prompt_tokens
    if prompt is None:
        raise DataError(
            "a preference pair does not say where its prompt ends; give prompt_tokens, as encode_pairs does"
        )
    named: dict[str, Any] = {"margin": instance.margin}
    for side, ids in (("chosen", instance.chosen), ("rejected", instance.rejected)):
        named[f"{side}_input_ids"] = ids
        named[f"{side}_loss_mask"] = [place >= prompt for place in range(len(ids))]
    return named


_SIDES = ("chosen", "rejected")


def _side(named: Mapping[str, Any], side: str) -> tuple[Tensor, Tensor]:
    ids = _tensor(named, f"{side}_input_ids")
    _check_shape(f"{side}_input_ids", ids, (*ids.shape[:1], *ids.shape[-1:]))
    attended = _tensor(named, f"{side}_attention_mask", like=ids).bool()
    if empty := (~attended.any(dim=1)).nonzero().flatten().tolist():
        raise DataError(f"row {empty[0]} of {len(ids)} {side} sequences has no token; leave its pair out of the batch")
    return ids, attended


def _checked_margin(margin: Tensor, pairs: int) -> Tensor:
    _check_shape("margin", margin, (pairs,))
    if not bool((margin >= 0).all() and margin.isfinite().all()):
        raise DataError(
            f"a pair's margin is {margin[~((margin >= 0) & margin.isfinite())][0].item()}, but it says by how much the "
            "chosen response is better, at least 0; swap the pair's responses, or leave it out"
        )
    return margin


def _prompts(named: Mapping[str, Any], sides: Sequence[Sequence[Tensor]]) -> tuple[tuple[int, ...], ...]:
    (chosen, chosen_mask), (rejected, rejected_mask) = sides
    if "prompt_length" in named:
        lengths = _tensor(named, "prompt_length")
        _check_shape("prompt_length", lengths, (len(chosen),))
        before = (chosen_mask.cumsum(dim=1) <= lengths[:, None]) & chosen_mask
        return tuple(tuple(row[mask].tolist()) for row, mask in zip(chosen, before, strict=True))
    if "chosen_loss_mask" in named:
        before = (_tensor(named, "chosen_loss_mask", like=chosen).bool().cumsum(dim=1) == 0) & chosen_mask
        return tuple(tuple(row[mask].tolist()) for row, mask in zip(chosen, before, strict=True))
    rows = zip(chosen, chosen_mask, rejected, rejected_mask, strict=True)
    return tuple(_common_start(good[there].tolist(), bad[here].tolist()) for good, there, bad, here in rows)


def _common_start(one: TokenIds, other: TokenIds) -> tuple[int, ...]:
    common = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return tuple(one[: min(len(one), len(other)) if common is None else common])


def _batch(ids: Tensor, attended: Tensor, places: Tensor, learnt: Tensor) -> TokenBatch:
    """Return the rows; a token is learnt only if the one in the column before is of its sequence, wherever it begins.

    Positions say where a sequence begins only if they count from 0, which a caller's need not.
    """
    seen = attended if attended.dim() == ids.dim() else attended.diagonal(dim1=-2, dim2=-1)[:, 0]
    follows = torch.zeros_like(seen)
    if attended.dim() == ids.dim():
        follows[:, 1:] = attended[:, :-1]
    else:
        follows[:, 1:] = attended.diagonal(offset=-1, dim1=-2, dim2=-1)[:, 0]
    return TokenBatch(ids, attended, places, learnt & seen & follows & (places > 0))


def _labelled(batch: Mapping[str, Any], ids: Tensor, learnt: Tensor) -> Tensor:
    if "labels" not in batch:
        return torch.ones_like(learnt)
    labels = _tensor(batch, "labels", like=ids)
    labelled = labels != IGNORED
    if bool((labelled & learnt & (labels != ids)).any()):
        raise DataError(
            f"labels must be the tokens of input_ids themselves, not shifted, or {IGNORED} where nothing is learnt"
        )
    return labelled


def _tensor(batch: Mapping[str, Any], key: str, *, like: Tensor | None = None) -> Tensor:
    if not isinstance(batch, Mapping):
        raise DataError(f"a batch is a {type(batch).__name__}, expected a mapping with {key!r}; look at its collate_fn")
    if key not in batch:
        raise DataError(f"a batch lacks {key!r}; it has {_names(batch)}")
    try:
        found = torch.as_tensor(batch[key]).detach().to(_HOST)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"a batch's {key} is no tensor and cannot be made one ({error}); pad its rows") from error
    if like is not None:
        _check_shape(key, found, tuple(like.shape))
    return found


def _check_shape(key: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected or not tensor.dim():
        raise DataError(f"a batch's {key} has shape {list(tensor.shape)}, expected {list(expected)}")


def _names(batch: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, batch)) or "nothing"
