"""Log-probabilities and entropy of tokens, from logits.

A float32 log-softmax over the vocabulary is the largest tensor of a training step: 8 responses of 1,000 tokens
over 150,000 words are 4.8 GB. Here it exists for a slice of the tokens at a time, in the forward pass and in the
backward pass, which computes it again from the logits; for a word at a time where there are kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_core.functional.precision import at_least_float32
from rlhf_core.kernels.compiled import call, has_kernels

_SLICE_ELEMENTS = 1 << 24  # 64 MiB of float32 at a time
_LEAST_LOGPROB = -1e4  # stands for -inf in p log p, so that words of probability zero add zero


class VocabularyPart(NamedTuple):
    """The words whose logits are here, where several processes have some each."""

    first: int
    """Of them."""
    stack: Callable[[Tensor], Tensor]
    """Returns a tensor of each process, in the order of their words, [processes ...]; all of them call it."""


class LogprobsAndEntropy(NamedTuple):
    """Both from one pass over the logits; [B, A] each, in nats."""

    logprobs: Tensor
    entropy: Tensor


def logprobs_from_logits(
    logits: Float[Tensor, "B A V"],
    tokens: Int[Tensor, "B A"],
    *,
    temperature: float,
    part: VocabularyPart | None = None,
) -> Float[Tensor, "B A"]:
    """Return the log-probability of each token under its logits.

        log p(x) = z_x / T - log sum_v exp(z_v / T)

    `logits[:, t]` are those that predict `tokens[:, t]`: shifting by one token is the caller's work. Computed in
    float32 whatever the logits are in (float64 stays), a slice of the tokens at a time.

    Args:
        logits: scores of every word of the vocabulary.
        tokens: the token whose log-probability is wanted, at each position.
        temperature: T of the policy, above 0; sampling and learning must use the same.
        part: which words the logits are of; None: all. Each process gets the same result, and gradients of its words.

    Returns:
        Log-probabilities in nats, float32, at most 0.

    Raises:
        ValueError: if the temperature is not above 0.

    Example:
        >>> logits = torch.tensor([[[1.0, 3.0]]]).log()
        >>> logprobs_from_logits(logits, torch.tensor([[1]]), temperature=1.0).exp()
        tensor([[0.7500]])
    """
    return _statistics(logits, tokens, temperature, part, with_entropy=False, entropy_needs_grad=False).logprobs


def logprobs_and_entropy(
    logits: Float[Tensor, "B A V"],
    tokens: Int[Tensor, "B A"],
    *,
    temperature: float,
    entropy_needs_grad: bool,
    part: VocabularyPart | None = None,
) -> LogprobsAndEntropy:
    """Return the log-probability of each token and the entropy of the distribution that it comes from.

        log p(x) = z_x / T - log sum_v exp(z_v / T)
        H        = -sum_v p_v log p_v

    As `logprobs_from_logits` and `entropy`, in one pass over the logits. A word of logit -inf has probability zero
    and adds nothing to the entropy.

    Args:
        logits: scores of every word of the vocabulary.
        tokens: the token whose log-probability is wanted, at each position.
        temperature: T of the policy, above 0.
        entropy_needs_grad: False if the entropy is only looked at, which saves work in the backward pass.
        part: as for `logprobs_from_logits`.

    Returns:
        Both, in nats, float32 (float64 stays).

    Raises:
        ValueError: if the temperature is not above 0.

    Example:
        >>> logits = torch.tensor([[[1.0, 1.0]]])
        >>> found = logprobs_and_entropy(logits, torch.tensor([[1]]), temperature=1.0, entropy_needs_grad=False)
        >>> found.entropy  # log 2
        tensor([[0.6931]])
    """
    return _statistics(logits, tokens, temperature, part, with_entropy=True, entropy_needs_grad=entropy_needs_grad)


def entropy(logits: Float[Tensor, "B A V"], *, temperature: float) -> Float[Tensor, "B A"]:
    """Return the entropy of the distribution over the vocabulary at each position.

        H = -sum_v p_v log p_v

    Args:
        logits: scores of every word of the vocabulary; a word of logit -inf has probability zero.
        temperature: T of the policy, above 0.

    Returns:
        Entropy in nats, float32 (float64 stays), between 0 and log V.

    Raises:
        ValueError: if the temperature is not above 0.

    Example:
        >>> entropy(torch.zeros(1, 1, 4), temperature=1.0).exp()
        tensor([[4.]])
    """
    any_token = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return logprobs_and_entropy(logits, any_token, temperature=temperature, entropy_needs_grad=True).entropy


def _statistics(
    logits: Float[Tensor, "B A V"],
    tokens: Int[Tensor, "B A"],
    temperature: float,
    part: VocabularyPart | None,
    *,
    with_entropy: bool,
    entropy_needs_grad: bool,
) -> LogprobsAndEntropy:
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}; greedy decoding needs no logprobs")
    return LogprobsAndEntropy(
        *_TokenStatistics.apply(logits, tokens.long(), temperature, part, with_entropy, entropy_needs_grad)  # type: ignore[no-untyped-call]
    )


class _TokenStatistics(torch.autograd.Function):
    """Keeps logits and two numbers per token for the backward pass, not a log-softmax.

    With m = max_v z_v / T and s = log sum_v exp(z_v / T - m), log p_v = (z_v / T - m) - s: the same order as in
    torch's log_softmax, which keeps the small log-probabilities of likely tokens exact. Where the vocabulary is in
    parts, m, s and the entropy become those of all words before they are kept: the backward pass is the same.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        part: VocabularyPart | None,
        with_entropy: bool,
        entropy_needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs, highest, logsum, spread = (
            torch.zeros(tokens.shape, dtype=dtype, device=logits.device) for _ in range(4)
        )
        by_kernel = dtype == torch.float32 and logits.stride(-1) == 1 and has_kernels(logits)
        is_here = None
        if part is not None:
            tokens = tokens - part.first
            is_here = (tokens >= 0) & (tokens < logits.shape[-1])
            tokens = torch.where(is_here, tokens, 0)
        fit = tokens.shape == logits.shape[:2] and tokens.device == logits.device
        # others PyTorch refuses
        by_kernel = by_kernel and fit and bool(((tokens >= 0) & (tokens < logits.shape[-1])).all())
        if by_kernel:
            tokens, entropies = tokens.contiguous(), spread if with_entropy else None
            found = (logprobs, highest, logsum, entropies)
            call("read", logits.dtype, logits, tokens, temperature, *found, *_places(logits))
        for at in () if by_kernel else _slices(logits):
            scaled = _scaled(logits[:, at], temperature)  # [B, a, V]
            highest[:, at] = scaled.amax(dim=-1)
            shifted = scaled - highest[:, at, None]
            logsum[:, at] = shifted.exp().sum(dim=-1).log()
            logprobs[:, at] = shifted.gather(-1, tokens[:, at, None]).squeeze(-1) - logsum[:, at]
            if with_entropy:
                every = shifted.sub_(logsum[:, at, None])
                spread[:, at] = -(every.exp() * every.clamp_(min=_LEAST_LOGPROB)).sum(dim=-1)
        if part is not None and is_here is not None:
            score = _scaled(logits.gather(-1, tokens[..., None]).squeeze(-1), temperature)
            logprobs, highest, logsum, spread = _over_parts(
                part, torch.stack([highest, logsum, spread, torch.where(is_here, score, 0.0)])
            )
            tokens = torch.where(is_here, tokens, -1)
        if not entropy_needs_grad:
            ctx.mark_non_differentiable(spread)
        ctx.save_for_backward(logits, tokens, highest, logsum, spread)
        ctx.temperature, ctx.entropy_needs_grad, ctx.by_kernel = temperature, entropy_needs_grad, by_kernel
        return logprobs, spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Return dL/dz_v = (g (1[v = x] - p_v) - h p_v (log p_v + H)) / T, in the dtype of the logits."""
        logits, tokens, highest, logsum, spread = ctx.saved_tensors
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if ctx.by_kernel:
            of_entropy = grad_entropy.contiguous() if ctx.entropy_needs_grad else None
            call(
                "read_backward", logits.dtype, logits, tokens, ctx.temperature, highest, logsum, spread,
                grad_logprobs.contiguous(), of_entropy, gradient, *_places(logits),
            )  # fmt: skip
            return gradient, None, None, None, None, None
        for at in _slices(logits):
            every = _scaled(logits[:, at], ctx.temperature) - highest[:, at, None]
            every.sub_(logsum[:, at, None])
            weight = grad_logprobs[:, at, None] / ctx.temperature
            part = every.exp()  # [B, a, V]
            if ctx.entropy_needs_grad:
                pull = every.clamp_(min=_LEAST_LOGPROB).add_(spread[:, at, None])
                part.mul_(pull.mul_(grad_entropy[:, at, None] / ctx.temperature).add_(weight).neg_())
            else:
                part.mul_(-weight)
            own = tokens[:, at, None]
            part.scatter_add_(-1, own.clamp(min=0), torch.where(own < 0, 0.0, weight))
            gradient[:, at] = part.to(logits.dtype)
        return gradient, None, None, None, None, None


def _over_parts(part: VocabularyPart, found: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability, m, s and entropy over all words.

    With w the share of a part's words in the whole probability, H = sum_parts w (H_part - log w).

    Args:
        part: one of the parts.
        found: [4 B A], of its words: m, s, entropy, and the token's z / T where it is one of them, else 0.
    """
    highest, logsum, spread, score = part.stack(found).unbind(dim=1)  # [parts B A]
    most = highest.amax(dim=0)
    total = (highest - most + logsum).logsumexp(dim=0)
    log_share = (highest - most + logsum - total).clamp(min=_LEAST_LOGPROB)
    entropy = (log_share.exp() * (spread - log_share)).sum(dim=0)
    return score.sum(dim=0) - most - total, most, total, entropy


def _places(logits: Tensor) -> tuple[int, ...]:
    """Return where a kernel finds the logits of each token: their number, those of a row, strides, words."""
    rows, actions, words = logits.shape
    return rows * actions, actions, logits.stride(0), logits.stride(1), words


def _slices(logits: Tensor) -> list[slice]:
    """Cut the tokens, not the rows: a slice of a view stays a view, and nothing is copied to be cut."""
    rows, actions, words = logits.shape
    size = max(1, _SLICE_ELEMENTS // max(1, rows * words))
    return [slice(start, start + size) for start in range(0, actions, size)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = at_least_float32(logits)
    return scaled if temperature == 1.0 else scaled / temperature
