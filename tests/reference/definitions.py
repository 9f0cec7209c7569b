"""Slow definitions, written from the papers in plain Python numbers: no tensors, no masks, no shared code.

A row is a list of floats for the tokens that exist; padding does not occur here.
"""

from __future__ import annotations

from math import exp, log, sqrt

Row = list[float]


def whiten(rows: list[Row]) -> list[Row]:
    every = [x for row in rows for x in row]
    mean = sum(every) / len(every)
    deviation = sqrt(sum((x - mean) ** 2 for x in every) / len(every))
    return [[(x - mean) / deviation for x in row] for row in rows]


def log_softmax(logits: Row, temperature: float) -> Row:
    weights = [exp(z / temperature) for z in logits]
    return [log(weight / sum(weights)) for weight in weights]


def entropy(logits: Row, temperature: float) -> float:
    return -sum(exp(logp) * logp for logp in log_softmax(logits, temperature))


def divergence(probabilities: Row, reference: Row) -> float:
    """KL(p || q) summed over the whole vocabulary: what the estimators estimate."""
    return sum(p * log(p / q) for p, q in zip(probabilities, reference, strict=True))


def rewards(score: float, kl: Row, kl_coef: float) -> Row:
    penalties = [-kl_coef * token for token in kl]
    return [*penalties[:-1], penalties[-1] + score]


def gae(rewards: Row, values: Row, gamma: float, lam: float) -> Row:
    """Equation 16 of the paper, as the sum that it is: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    states = [*values, 0.0]
    deltas = [r + gamma * states[t + 1] - states[t] for t, r in enumerate(rewards)]
    return [
        sum((gamma * lam) ** ahead * deltas[t + ahead] for ahead in range(len(deltas) - t)) for t in range(len(deltas))
    ]


def policy_loss(logprobs: Row, old: Row, advantages: Row, clip_eps: float) -> float:
    """Sum over tokens, by cases: the clip matters only where it makes the objective smaller."""
    total = 0.0
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = exp(new) / exp(before)
        if advantage > 0 and ratio > 1 + clip_eps:
            ratio = 1 + clip_eps
        if advantage < 0 and ratio < 1 - clip_eps:
            ratio = 1 - clip_eps
        total -= ratio * advantage
    return total


def value_loss(values: Row, old: Row, returns: Row, clip_eps: float) -> float:
    """Half the sum over tokens of the larger of two squared errors."""
    total = 0.0
    for new, before, target in zip(values, old, returns, strict=True):
        kept = min(max(new, before - clip_eps), before + clip_eps)
        total += max((new - target) ** 2, (kept - target) ** 2)
    return total / 2


def pairwise_loss(chosen: Row, rejected: Row) -> float:
    return sum(-log(exp(good) / (exp(good) + exp(bad))) for good, bad in zip(chosen, rejected, strict=True))


def explained_variance(values: Row, returns: Row) -> float:
    def variance(row: Row) -> float:
        return sum(x * x for x in row) / len(row) - (sum(row) / len(row)) ** 2

    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)
