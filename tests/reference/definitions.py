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


def objective(
    new: float, before: float, advantage: float, *, low: float, high: float, dual: float | None = None
) -> float:
    """PPO's objective of one token, by cases: a clip matters only where it makes the objective smaller."""
    ratio = exp(new) / exp(before)
    if advantage > 0 and ratio > 1 + high:
        ratio = 1 + high
    if advantage < 0 and ratio < 1 - low:
        ratio = 1 - low
    if advantage < 0 and dual is not None and ratio > dual:
        ratio = dual
    return ratio * advantage


def policy_loss(logprobs: Row, old: Row, advantages: Row, clip_eps: float) -> float:
    """Sum over tokens."""
    tokens = zip(logprobs, old, advantages, strict=True)
    return -sum(objective(*token, low=clip_eps, high=clip_eps) for token in tokens)


def value_loss(values: Row, old: Row, returns: Row, clip_eps: float) -> float:
    """Half the sum over tokens of the larger of two squared errors."""
    total = 0.0
    for new, before, target in zip(values, old, returns, strict=True):
        kept = min(max(new, before - clip_eps), before + clip_eps)
        total += max((new - target) ** 2, (kept - target) ** 2)
    return total / 2


def pairwise_loss(chosen: Row, rejected: Row) -> float:
    return sum(-log(exp(good) / (exp(good) + exp(bad))) for good, bad in zip(chosen, rejected, strict=True))


def group_advantages(scores: Row, *, leave_one_out: bool = False, scaled: bool = False) -> Row:
    """One group: each score against the mean of all, or of the others, in sample deviations of the group or not."""
    found = []
    for index, score in enumerate(scores):
        compared = [*scores[:index], *scores[index + 1 :]] if leave_one_out else scores
        found.append(score - sum(compared) / len(compared))
    if not scaled:
        return found
    mean = sum(scores) / len(scores)
    deviation = sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    return [advantage / deviation for advantage in found]


def reward_to_go(rewards: Row, gamma: float) -> Row:
    return [sum(gamma**ahead * reward for ahead, reward in enumerate(rewards[now:])) for now in range(len(rewards))]


def variance(row: Row) -> float:
    mean = sum(row) / len(row)
    return sum((x - mean) ** 2 for x in row) / len(row)


def legacy_sequence_reward(score: float, logprobs: Row, reference: Row, kl_coef: float) -> float:
    ratios = [exp(new) / exp(old) for new, old in zip(logprobs, reference, strict=True)]
    return score - kl_coef * sum(ratio - 1 - log(ratio) for ratio in ratios) / len(ratios)


def explained_variance(values: Row, returns: Row) -> float:
    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)
