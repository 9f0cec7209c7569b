"""Batches of preference pairs, as `RewardModelTrainer` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_core.counting import counted
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.errors import DataError
from rlhf_core.training.base import pad_right

_HOST = torch.device("cpu")


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
        rows = [_named(instance) for instance in instances]
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


def _named(instance: EncodedPair | Mapping[str, Any]) -> Mapping[str, Any]:
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
