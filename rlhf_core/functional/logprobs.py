"""Log-probabilities and entropy of tokens, from logits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as nn_functional


def logprobs_from_logits(
    logits: Float[Tensor, "B A V"], tokens: Int[Tensor, "B A"], *, temperature: float
) -> Float[Tensor, "B A"]:
    """Return the log-probability of each token under its logits.

        log p(x) = z_x / T - log sum_v exp(z_v / T)

    `logits[:, t]` are those that predict `tokens[:, t]`: shifting by one token is the caller's work. Computed
    as a cross-entropy in float32 whatever the logits are in, so no log-softmax of shape [B, A, V] is returned
    only to be indexed.

    Args:
        logits: scores of every word of the vocabulary.
        tokens: the token whose log-probability is wanted, at each position.
        temperature: T of the policy, above 0; sampling and learning must use the same.

    Returns:
        Log-probabilities in nats, float32, at most 0.

    Raises:
        ValueError: if the temperature is not above 0.

    Example:
        >>> logits = torch.tensor([[[1.0, 3.0]]]).log()
        >>> logprobs_from_logits(logits, torch.tensor([[1]]), temperature=1.0).exp()
        tensor([[0.7500]])
    """
    scaled = _scaled(logits, temperature)
    losses = nn_functional.cross_entropy(scaled.flatten(0, 1), tokens.flatten(), reduction="none")
    return -losses.view(tokens.shape)  # [B, A]


def entropy(logits: Float[Tensor, "B A V"], *, temperature: float) -> Float[Tensor, "B A"]:
    """Return the entropy of the distribution over the vocabulary at each position.

        H = -sum_v p_v log p_v

    Args:
        logits: scores of every word of the vocabulary; all finite.
        temperature: T of the policy, above 0.

    Returns:
        Entropy in nats, float32, between 0 and log V.

    Raises:
        ValueError: if the temperature is not above 0.

    Example:
        >>> entropy(torch.zeros(1, 1, 4), temperature=1.0).exp()
        tensor([[4.]])
    """
    logprobs = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def _scaled(logits: Float[Tensor, "B A V"], temperature: float) -> Float[Tensor, "B A V"]:
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}; greedy decoding needs no logprobs")
    scaled = logits.float()
    return scaled if temperature == 1.0 else scaled / temperature
