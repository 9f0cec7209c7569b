"""Which token comes next: uniforms that depend on their key alone, and the inversion of the distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from rlhf_core.errors import ModelError
from rlhf_core.kernels.compiled import call, has_kernels

if TYPE_CHECKING:
    from rlhf_core.generation.settings import GenerationSettings

KEY_BITS = 128  # of Philox
MANTISSA_BITS = 24  # of a float32: the uniforms are multiples of 2**-24, and below 1
WEIGHT_BITS = 40  # a sum of 2**22 such weights (no vocabulary is so large) is below 2**63
_NOT_FINITE = "the model's logits are not finite numbers; its weights have diverged, lower lr"


class Choice(NamedTuple):
    """One token per row, and how likely it was."""

    tokens: Int[Tensor, " B"]
    log_probs: Float32[Tensor, " B"]


Chooser = Callable[[Tensor, Tensor, int | Tensor], Choice]
"""From the logits of some rows, their places in the batch, and the number of the token in the response."""


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


def chooser(
    settings: GenerationSettings,
    uniforms: Float32[Tensor, "B T"] | None,
    *,
    rows: int,
    steps: int,
    device: torch.device,
) -> Chooser:
    """Return what chooses each next token: by the uniforms, or greedily without them.

    Args:
        settings: the distribution to draw from.
        uniforms: a number for each row and token; None is greedy.
        rows: of the batch.
        steps: most tokens of a response.
        device: of the model.

    Raises:
        ValueError: if there are fewer uniforms than may be needed.
    """
    if uniforms is None:
        return lambda logits, _place, _step: choose_greedy(logits)
    if len(uniforms) != rows or uniforms.shape[1] < steps:
        raise ValueError(f"expected uniforms for {rows} rows of {steps} tokens, got {tuple(uniforms.shape)}")
    noise = uniforms.to(device)

    def choose(logits: Tensor, place: Tensor, step: int | Tensor) -> Choice:
        return choose_sampled(
            logits=logits,
            uniforms=noise[place, step],
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )

    return choose


def choose_greedy(logits: Float[Tensor, "B V"]) -> Choice:
    """Return the likeliest token of each row (the first of equals) and its log-probability.

    Raises:
        ModelError: if the logits are not numbers.
    """
    if has_kernels(logits):
        return _chosen_by_kernel(logits, None, 1.0)
    scores = logits.float()
    tokens = scores.argmax(-1)
    return Choice(tokens, _log_probs(scores, tokens, _log_total(scores)))


def choose_sampled(
    *,
    logits: Float[Tensor, "B V"],
    uniforms: Float32[Tensor, " B"],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Choice:
    """Return the token at which the cumulative distribution, in token order, passes the row's uniform number.

        token = min { t : sum_{i <= t} w_i > u * sum_i w_i },   w = floor(2**40 * p / max p)
        p     = softmax(logits / temperature), then cut to the top_k, then to the top_p, in float32

    The weights are whole numbers because sums of those are exact: the running sum never falls, and is the same
    in whatever order a device adds. A running sum of floats on CUDA is neither (its blocks are summed apart,
    and in an order that changes from run to run), and a search in it may give another token each time. A
    token of probability zero is never chosen, nor one below 2**-40 of the likeliest: uniforms have 24 bits.

    Tokens as likely as the last one kept by top_k or top_p are kept too: which of equals a sort puts first
    depends on the device.

    Args:
        logits: scores of the next token.
        uniforms: one number in [0, 1) per row; its first 24 bits count.
        temperature: divides the logits, above 0.
        top_k: number of likeliest tokens to draw from; 0 is all.
        top_p: probability that the tokens drawn from have together at least, in (0, 1]; 1 is all.

    Returns:
        Tokens, and their log-probabilities under the distribution that they were drawn from.

    Raises:
        ModelError: if the logits are not numbers.

    Example:
        >>> thirds = torch.zeros(3, 3)
        >>> choose_sampled(logits=thirds, uniforms=torch.tensor([0.0, 0.5, 0.99]), temperature=1.0).tokens
        tensor([0, 1, 2])
    """
    if has_kernels(logits) and not _truncates(logits.shape[-1], top_k, top_p):
        return _chosen_by_kernel(logits, uniforms, temperature)
    scores = logits.float()
    if temperature != 1.0:
        scores = scores / temperature
    scores = _truncate(scores, top_k, top_p)
    log_total = _log_total(scores)  # refuses what is not a number, before anything is drawn from it
    cumulative = _whole_weights(scores, scores.amax(-1)).cumsum(-1)
    target = _times_fraction(cumulative[:, -1], uniforms.to(scores.device))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return Choice(tokens, _log_probs(scores, tokens, log_total))


def _chosen_by_kernel(
    logits: Float[Tensor, "B V"], uniforms: Float32[Tensor, " B"] | None, temperature: float
) -> Choice:
    """Return what the two functions above say, in two passes over the logits as they are."""
    tokens = logits.new_empty(len(logits), dtype=torch.long)
    log_probs = logits.new_empty(len(logits), dtype=torch.float32)
    numbers = None if uniforms is None else uniforms.to(logits.device, torch.float32).contiguous()
    call("draw", logits.dtype, logits.contiguous(), numbers, temperature, tokens, log_probs, *logits.shape)
    if bool((tokens < 0).any()):
        raise ModelError(_NOT_FINITE)
    return Choice(tokens, log_probs)


def _truncates(vocabulary: int, top_k: int, top_p: float) -> bool:
    return 0 < top_k < vocabulary or top_p < 1.0


def _truncate(scores: Float[Tensor, "B V"], top_k: int, top_p: float) -> Float[Tensor, "B V"]:
    """Return the scores with minus infinity outside the top_k, and then outside the top_p of what is left."""
    vocabulary = scores.shape[-1]
    if not _truncates(vocabulary, top_k, top_p):
        return scores
    if not 0 < top_k < vocabulary:
        top_k = 0
    ordered = scores.topk(top_k, -1).values if top_k else scores.sort(-1, descending=True).values
    if top_k:
        scores = scores.masked_fill(scores < ordered[:, -1:], -torch.inf)
    if top_p < 1.0:
        best = ordered[:, 0]
        weights = _whole_weights(ordered, best)
        before = weights.cumsum(-1) - weights
        # the total over all that is left: with equals of the k-th it is more than these k
        total = _whole_weights(scores, best).sum(-1, keepdim=True)
        kept = (before.double() < top_p * total.double()).sum(-1, keepdim=True)
        scores = scores.masked_fill(scores < ordered.gather(-1, (kept - 1).clamp(min=0)), -torch.inf)
    return scores


def _whole_weights(scores: Float[Tensor, "B V"], best: Float[Tensor, " B"]) -> Int[Tensor, "B V"]:
    """Return 2**40 times each probability relative to the best one's, rounded down."""
    relative: Tensor = (scores - best[:, None]).exp_()
    return relative.mul_(2.0**WEIGHT_BITS).long()


def _times_fraction(total: Int[Tensor, " B"], fraction: Float32[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return floor(fraction * total) exactly, which is below the total; in halves, as the product has 80 bits."""
    numerator = (fraction * 2.0**MANTISSA_BITS).long()
    high, low = total >> MANTISSA_BITS, total & (2**MANTISSA_BITS - 1)
    product: Tensor = numerator * high + ((numerator * low) >> MANTISSA_BITS)
    return product


def _log_total(scores: Float[Tensor, "B V"]) -> Float32[Tensor, " B"]:
    log_total = scores.logsumexp(-1)
    if not bool(log_total.isfinite().all()):
        raise ModelError(_NOT_FINITE)
    return log_total


def _log_probs(
    scores: Float[Tensor, "B V"], tokens: Int[Tensor, " B"], log_total: Float[Tensor, " B"]
) -> Float32[Tensor, " B"]:
    return scores.gather(-1, tokens[:, None])[:, 0] - log_total
