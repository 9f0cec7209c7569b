"""From scores to rewards of tokens and to advantages: with a critic (`gae`), or by comparing responses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.moments import varies
from rlhf_core.functional.precision import out_of_float16

_EPSILON = 1e-6  # added to a deviation of order one: keeps groups of nearly equal scores from exploding


def token_rewards(
    *,
    scores: Float[Tensor, " B"],
    kl: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    kl_coef: float,
) -> Float[Tensor, "B A"]:
    """Return the reward of each response token: the KL penalty, and the score at the last token.

        r_t = -kl_coef * kl_t + [t is the last token] * score

    The whole score goes to the last token that the mask counts (the stop token if there is one): spread over
    all tokens, it would make the return grow with length. Nothing is clipped.

    Args:
        scores: one per response.
        kl: divergence from the reference at each token, in nats.
        mask: True on response tokens; a prefix of each row.
        kl_coef: weight of the penalty, per nat, at least 0.

    Returns:
        Rewards; zero on padding. A row without tokens gets nothing, its score included.

    Source:
        Ouyang et al. 2022, arXiv:2203.02155, equation 2; Stiennon et al. 2020, arXiv:2009.01325.

    Example:
        >>> mask = torch.tensor([[True, True, False]])
        >>> token_rewards(scores=torch.ones(1), kl=torch.ones(1, 3), mask=mask, kl_coef=0.5)
        tensor([[-0.5000,  0.5000,  0.0000]])
    """
    zero = torch.zeros_like(kl)
    counts_next = torch.nn.functional.pad(mask[:, 1:], (0, 1), value=False)
    is_last = mask & ~counts_next
    penalty = torch.where(mask, -kl_coef * kl, zero)
    return penalty + torch.where(is_last, scores.unsqueeze(1).expand_as(kl), zero)


def clip_scores(scores: Float[Tensor, " B"], limit: float) -> Float[Tensor, " B"]:
    """Return the scores cut at plus and minus a limit.

        max(-c, min(s, c))

    An option for reward models, whose scores have no bounds; off by default, as it would make a verifier's 10 a 5.

    Args:
        scores: one per response, after scaling.
        limit: c, above 0.

    Returns:
        Scores between -c and c.

    Raises:
        ValueError: if the limit is not above 0.

    Example:
        >>> clip_scores(torch.tensor([-9.0, 0.5, 9.0]), 2.0)
        tensor([-2.0000,  0.5000,  2.0000])
    """
    if not limit > 0:
        raise ValueError(f"expected a limit above 0, got {limit}")
    return scores.clamp(-limit, limit)


def gae(
    *,
    rewards: Float[Tensor, "B A"],
    values: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "B A"]:
    """Return generalized advantage estimates for each response token.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    The response ends in a terminal state: V and A are zero past its last token.

    Args:
        rewards: reward of each token, KL penalty included.
        values: critic's value of the state before each token.
        mask: True on response tokens; a prefix of each row.
        gamma: discount per token, in [0, 1].
        lam: bias against variance, in [0, 1]; 1 gives Monte Carlo returns.

    Returns:
        Advantages, not whitened; zero on padding.

    Raises:
        ValueError: if gamma or lam lies outside [0, 1].

    Source:
        Schulman et al. 2016, arXiv:1506.02438, section 3.

    Example:
        >>> one = torch.ones(1, 2)
        >>> gae(rewards=one, values=0 * one, mask=one.bool(), gamma=1.0, lam=1.0)
        tensor([[2., 1.]])
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"expected {name} in [0, 1], got {value}")
    zero = torch.zeros_like(values)
    values = torch.where(mask, values, zero)
    rewards = torch.where(mask, rewards, zero)
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values  # [B, A], zero on padding
    advantages = torch.empty_like(deltas)
    running = deltas.new_zeros(len(deltas))
    for t in reversed(range(deltas.shape[1])):
        running = deltas[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages


def grpo_advantages(
    *,
    scores: Float[Tensor, " B"],
    penalties: Float[Tensor, " B"],
    group_size: int,
    mask: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Return scores standardised within each prompt's group, less what each response pays beyond its group's mean.

        A_i = (s_i - mean(s)) / (std(s) + 1e-6) - (p_i - mean(p))

    Of a group's responses those that the mask counts are all that there is. The deviation is the sample's: squares are
    divided by one less than their number. Scores that do not vary (`varies`), as one alone, give exactly zero.
    Penalties are not divided by it: where all scores are equal their own spread would be blown up to 1, whatever
    their weight. One number per response: every token of it has this advantage.

    Args:
        scores: of the task, one per response; each group's responses stand next to each other.
        penalties: weight times KL of each response, summed over its tokens.
        group_size: G, responses to one prompt, at least 2.
        mask: True on responses that were judged; None counts all.

    Returns:
        Advantages; they add up to zero in each group, and are zero where the mask is False.

    Raises:
        ValueError: if the group size is below 2 or does not divide the number of scores.

    Source:
        Shao et al. 2024, arXiv:2402.03300 (DeepSeekMath), section 4.1.2, where the penalty is a term of the loss.

    Example:
        >>> scores, penalties = torch.tensor([0.0, 2.0, 5.0, 5.0]), torch.tensor([0.0, 0.0, 0.0, 0.5])
        >>> grpo_advantages(scores=scores, penalties=penalties, group_size=2)
        tensor([-0.7071,  0.7071,  0.2500, -0.2500])
    """
    centred, counts = _centred(scores, group_size, mask)
    variance = centred.square().sum(dim=1, keepdim=True) / (counts - 1).clamp(min=1)
    judged = scores if mask is None else torch.where(mask, scores, torch.zeros_like(scores))
    square = out_of_float16(judged).view(-1, group_size).square().sum(dim=1, keepdim=True) / counts
    compared = torch.where(
        varies(variance=variance, square=square), centred / (variance.sqrt() + _EPSILON), torch.zeros_like(centred)
    )
    return (compared - _centred(penalties, group_size, mask).values).flatten()


def dr_grpo_advantages(
    *, scores: Float[Tensor, " B"], group_size: int, mask: Bool[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """Return scores minus the mean of each prompt's group.

        A_i = s_i - mean(s)

    Not divided by the deviation, which would make nearly solved and nearly hopeless prompts weigh most.

    Args:
        scores: one per response, KL penalty included; each group's responses stand next to each other.
        group_size: G, responses to one prompt, at least 2.
        mask: True on responses that were judged, over which the mean is; None counts all.

    Returns:
        Advantages; they add up to zero in each group, and are zero where the mask is False.

    Raises:
        ValueError: if the group size is below 2 or does not divide the number of scores.

    Source:
        Liu et al. 2025, arXiv:2503.20783, section 3.2; its loss is aggregated with `constant_length`.

    Example:
        >>> dr_grpo_advantages(scores=torch.tensor([0.0, 2.0, 5.0, 5.0]), group_size=2)
        tensor([-1.,  1.,  0.,  0.])
    """
    return _centred(scores, group_size, mask).values.flatten()


def rloo_advantages(
    *, scores: Float[Tensor, " B"], group_size: int, mask: Bool[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """Return scores minus the mean of the others in each prompt's group.

        A_i = s_i - sum_{j != i} s_j / (G - 1)

    The baseline does not hold the response's own score, so it leaves the gradient unbiased. Equal to
    G / (G - 1) times `dr_grpo_advantages`. G counts the responses that were judged; one that has no other to be
    compared with has advantage 0.

    Args:
        scores: as in `dr_grpo_advantages`.
        group_size: responses to one prompt, judged or not, at least 2.
        mask: as in `dr_grpo_advantages`.

    Returns:
        Advantages; they add up to zero in each group, and are zero where the mask is False.

    Raises:
        ValueError: if the group size is below 2 or does not divide the number of scores.

    Source:
        Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al. 2024,
        arXiv:2402.14740, section 3.2.

    Example:
        >>> rloo_advantages(scores=torch.tensor([0.0, 2.0, 5.0, 5.0]), group_size=2)
        tensor([-2.,  2.,  0.,  0.])
    """
    centred, counts = _centred(scores, group_size, mask)
    return (centred * (counts / (counts - 1).clamp(min=1))).flatten()


def reinforce_pp_advantages(
    *, rewards: Float[Tensor, "B A"], mask: Bool[Tensor, "B A"], gamma: float
) -> Float[Tensor, "B A"]:
    """Return the discounted reward that is still to come at each token.

        A_t = sum_{k >= t} gamma^(k - t) r_k

    REINFORCE++'s baseline is the mean over the whole batch: the learner whitens these numbers over the minibatch of
    all processes, as it whitens every advantage.

    Args:
        rewards: of each token, KL penalty included.
        mask: True on response tokens; a prefix of each row.
        gamma: discount per token, in [0, 1].

    Returns:
        Advantages, not whitened; zero on padding.

    Raises:
        ValueError: if gamma lies outside [0, 1].

    Source:
        Hu 2025, arXiv:2501.03262, section 3.

    Example:
        >>> rewards = torch.tensor([[0.0, 1.0]])
        >>> reinforce_pp_advantages(rewards=rewards, mask=rewards > -1, gamma=0.5)
        tensor([[0.5000, 1.0000]])
    """
    # without values, and with lam 1, the sum of temporal differences is the sum of rewards
    return gae(rewards=rewards, values=torch.zeros_like(rewards), mask=mask, gamma=gamma, lam=1.0)


def share_explained(
    *, unexplained: Float[Tensor, ""], total: Float[Tensor, ""], square: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Return the share of the returns' variance that the critic's values explain.

        1 - var(returns - values) / var(returns)

    A constant error in the values costs nothing. From moments over all counted tokens, which several processes may
    have agreed on. Returns that are equal up to rounding in float32 have no variance to explain.

    Args:
        unexplained: variance of the returns minus the values.
        total: variance of the returns.
        square: mean square of the returns, to which rounding is relative.

    Returns:
        At most 1; 0 for a constant critic, below 0 for one that does harm; 0 if there is nothing to explain.

    Example:
        >>> one = torch.tensor(1.0)
        >>> share_explained(unexplained=one, total=4 * one, square=5 * one)
        tensor(0.7500)
    """
    return torch.where(varies(variance=total, square=square), 1 - unexplained / total, torch.zeros_like(total))


class _Centred(NamedTuple):
    values: Tensor
    """[N G], zero where a response does not count."""
    counts: Tensor
    """[N 1], responses that count, 1 for none."""


def _centred(scores: Float[Tensor, " B"], group_size: int, mask: Bool[Tensor, " B"] | None) -> _Centred:
    if group_size < 2 or scores.numel() % group_size:  # noqa: PLR2004 - one response has nothing to compare with
        raise ValueError(
            f"expected whole groups of at least 2 responses to one prompt, got {scores.numel()} scores "
            f"and group_size {group_size}"
        )
    groups = out_of_float16(scores).view(-1, group_size)
    judged = torch.ones_like(groups, dtype=torch.bool) if mask is None else mask.view(-1, group_size)
    counts = judged.sum(dim=1, keepdim=True).clamp(min=1).to(groups.dtype)
    first = groups.gather(1, judged.int().argmax(dim=1, keepdim=True))
    # equal scores are now exactly zero, which rounding of a mean would miss
    shifted = torch.where(judged, groups - first, torch.zeros_like(groups))
    centred = shifted - shifted.sum(dim=1, keepdim=True) / counts
    return _Centred(torch.where(judged, centred, torch.zeros_like(centred)), counts)
