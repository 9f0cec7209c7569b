"""Which token comes next: uniforms that depend on their key alone, and the inversion of the distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from rlhf_core.errors import ModelError

KEY_BITS = 128  # of Philox
MANTISSA_BITS = 24  # of a float32: the uniforms are multiples of 2**-24, and below 1


class Choice(NamedTuple):
    """One token per row, and how likely it was."""

    tokens: Int[Tensor, " B"]
    log_probs: Float32[Tensor, " B"]


def sample_uniforms(
    *, seed: int, episode: int, keys: Sequence[str], samples: Sequence[int], max_new_tokens: int
) -> Float32[Tensor, "B T"]:
    """Return one uniform number in [0, 1) per row and token, which depends on nothing but its own key.

    Row b holds the first `max_new_tokens` words of a Philox stream whose key is the SHA-256 of (seed,
    episode, prompt key, sample number): the same whatever the other rows are, and a prefix of a longer draw.
    The words are taken raw: NumPy promises for ever what a bit generator draws, but no more.

    Args:
        seed: seed of the run.
        episode: number of the episode.
        keys: `Problem.key` of each row's prompt.
        samples: number of each row's sample among those of its prompt.
        max_new_tokens: tokens per row.

    Returns:
        Uniform numbers, multiples of 2**-24.

    Raises:
        ValueError: if keys and samples differ in length.
    """
    rows = [
        _uniform_row(f"{seed}\0{episode}\0{key}\0{sample}", max_new_tokens)
        for key, sample in zip(keys, samples, strict=True)
    ]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, max_new_tokens)


def _uniform_row(name: str, length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    digest = hashlib.sha256(name.encode()).digest()
    stream = np.random.Philox(key=int.from_bytes(digest[: KEY_BITS // 8], "little"))
    words = np.asarray(stream.random_raw(length), dtype=np.uint64)
    return (words >> np.uint64(64 - MANTISSA_BITS)).astype(np.float32) * np.float32(2.0**-MANTISSA_BITS)


def choose_greedy(logits: Float[Tensor, "B V"]) -> Choice:
    """Return the likeliest token of each row (the first of equals) and its log-probability.

    Raises:
        ModelError: if the logits are not numbers.
    """
    scores = logits.float()
    tokens = scores.argmax(-1)
    return Choice(tokens, _log_probs(scores, tokens, _log_total(scores)))


def choose_sampled(*, logits: Float[Tensor, "B V"], uniforms: Float32[Tensor, " B"], temperature: float) -> Choice:
    """Return the token at which the cumulative distribution, in token order, passes the row's uniform number.

        token = min { t : sum_{i <= t} p_i > u * sum_i p_i },   p = softmax(logits / temperature)

    All of it in float32. A token of probability zero is never chosen, not even by the largest uniform number.

    Args:
        logits: scores of the next token.
        uniforms: one number in [0, 1) per row.
        temperature: divides the logits, above 0.

    Returns:
        Tokens, and their log-probabilities under the distribution that they were drawn from.

    Raises:
        ModelError: if the logits are not numbers.

    Example:
        >>> thirds = torch.zeros(3, 3)
        >>> choose_sampled(logits=thirds, uniforms=torch.tensor([0.0, 0.5, 0.99]), temperature=1.0).tokens
        tensor([0, 1, 2])
    """
    scores = logits.float() / temperature
    log_total = _log_total(scores)
    cumulative = (scores - log_total[:, None]).exp_().cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return Choice(tokens, _log_probs(scores, tokens, log_total))


def _log_total(scores: Float[Tensor, "B V"]) -> Float32[Tensor, " B"]:
    log_total = scores.logsumexp(-1)
    if not bool(log_total.isfinite().all()):
        raise ModelError("the model's logits are not finite numbers; its weights have diverged, lower lr")
    return log_total


def _log_probs(
    scores: Float[Tensor, "B V"], tokens: Int[Tensor, " B"], log_total: Float[Tensor, " B"]
) -> Float32[Tensor, " B"]:
    return scores.gather(-1, tokens[:, None])[:, 0] - log_total
