"""Cross-entropy of packaged text: what a policy forgets of language, code and arithmetic shows here first.

The passages were written for this, so that none is another's text or stands in a training set. The first 24 hold at
least one of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf_core.errors import ConfigError
from rlhf_core.forgetting.measures import TEXT, Measure
from rlhf_core.functional.logprobs import logprobs_from_logits
from rlhf_core.models.head_slices import read_logits
from rlhf_core.models.trunk import autocast, device_of, evaluating, max_positions, model_inputs
from rlhf_core.training.padding import TokenIds, pad_right

if TYPE_CHECKING:
    from torch import Tensor

PASSAGES = Path(__file__).parent / "passages.txt"
_MARK = "## "
_BATCH = 8


def packaged_passages(count: int) -> dict[str, str]:
    """Return the first passages by name.

    Args:
        count: at most as many as there are.

    Raises:
        ConfigError: if there are fewer.
    """
    _, *parts = f"\n{PASSAGES.read_text(encoding='utf-8')}".split(f"\n{_MARK}")
    if count > len(parts):
        raise ConfigError(
            f"evaluation.forgetting.passages is {count}, but {len(parts)} are packaged; lower it to {len(parts)}"
        )
    named = (part.partition("\n") for part in parts[:count])
    return {name.strip(): text.strip() for name, _, text in named}


def text_cross_entropy(
    model: Any, tokenizer: Any, passages: Mapping[str, str], *, most: int, dtype: torch.dtype
) -> Measure:
    """Return the mean cross-entropy of each passage's tokens but the first, in nats per token.

    Args:
        model: a causal language model; its mode comes out as it was.
        tokenizer: the model's.
        passages: by name; at least one.
        most: tokens of a passage; the rest, and what the model has no positions for, is not read. At least 2.
        dtype: arithmetic of the passes.
    """
    limit = min(most, max_positions(model) or most)
    rows = {name: tokenizer(text)["input_ids"][:limit] for name, text in passages.items()}
    losses = [-logprobs.mean().item() for logprobs in token_logprobs(model, list(rows.values()), dtype=dtype)]
    return Measure(TEXT, dict(zip(rows, losses, strict=True)))


def token_logprobs(model: Any, rows: Sequence[TokenIds], *, dtype: torch.dtype) -> list[Tensor]:
    """Return the log-probability of each token but the first of each row, in nats, in host memory.

    Args:
        model: a causal language model; its mode comes out as it was.
        rows: of at least two tokens each.
        dtype: arithmetic of the passes.
    """
    device = device_of(model)
    found: dict[int, Tensor] = {}
    by_length = sorted(range(len(rows)), key=lambda place: (len(rows[place]), place))
    with evaluating(model), torch.no_grad(), autocast(device, dtype):
        for start in range(0, len(rows), _BATCH):
            places = by_length[start : start + _BATCH]
            ids, mask = pad_right([rows[place] for place in places], device)
            for place, logprobs in zip(places, _logprobs(model, ids, mask), strict=True):
                found[place] = logprobs[: len(rows[place]) - 1].float().cpu()
    return [found[place] for place in range(len(rows))]


def _logprobs(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, [B S-1], whatever it is on padding."""
    inputs = model_inputs(model, ids[:, :-1], mask[:, :-1])  # nothing is predicted after the last token
    (logprobs,) = read_logits(
        model,
        lambda: model(**inputs).logits,
        ids[:, 1:],
        lambda logits, tokens: (logprobs_from_logits(logits, tokens, temperature=1.0),),
    )
    return logprobs
