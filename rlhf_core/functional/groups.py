"""Advantages without a critic: a response is compared with others of the same prompt, or of the same batch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.advantages import gae
from rlhf_core.functional.moments import varies
from rlhf_core.functional.precision import out_of_float16

_EPSILON = 1e-6  # added to a deviation of order one: keeps groups of nearly equal scores from exploding


def grpo_advantages(
    *, scores: Float[Tensor, " B"], penalties: Float[Tensor, " B"], group_size: int
) -> Float[Tensor, " B"]:
    """Return scores standardised within each prompt's group, less what each response pays beyond its group's mean.

        A_i = (s_i - mean(s)) / (std(s) + 1e-6) - (p_i - mean(p))

    The deviation is the sample's: squares are divided by G - 1. Scores that do not vary (`varies`) give exactly zero.
    Penalties are not divided by it: where all scores are equal their own spread would be blown up to 1, whatever
    their weight. One number per response: every token of it has this advantage.

    Args:
        scores: of the task, one per response; each group's responses stand next to each other.
        penalties: weight times KL of each response, summed over its tokens.
        group_size: G, responses to one prompt, at least 2.

    Returns:
        Advantages; they add up to zero in each group.

    Raises:
        ValueError: if the group size is below 2 or does not divide the number of scores.

    Source:
        Shao et al. 2024, arXiv:2402.03300 (DeepSeekMath), section 4.1.2, where the penalty is a term of the loss.

    Example:
        >>> scores, penalties = torch.tensor([0.0, 2.0, 5.0, 5.0]), torch.tensor([0.0, 0.0, 0.0, 0.5])
        >>> grpo_advantages(scores=scores, penalties=penalties, group_size=2)
        tensor([-0.7071,  0.7071,  0.2500, -0.2500])
    """
    centred = _centred(scores, group_size)
    variance = centred.square().sum(dim=1, keepdim=True) / (group_size - 1)
    square = out_of_float16(scores).view(-1, group_size).square().mean(dim=1, keepdim=True)
    compared = torch.where(
        varies(variance=variance, square=square), centred / (variance.sqrt() + _EPSILON), torch.zeros_like(centred)
    )
    return (compared - _centred(penalties, group_size)).flatten()


def dr_grpo_advantages(*, scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Return scores minus the mean of each prompt's group.

        A_i = s_i - mean(s)

    Not divided by the deviation, which would make nearly solved and nearly hopeless prompts weigh most.

    Args:
        scores: one per response, KL penalty included; each group's responses stand next to each other.
        group_size: G, responses to one prompt, at least 2.

    Returns:
        Advantages; they add up to zero in each group.

    Raises:
        ValueError: if the group size is below 2 or does not divide the number of scores.

    Source:
        Liu et al. 2025, arXiv:2503.20783, section 3.2; its loss is aggregated with `constant_length`.

    Example:
        >>> dr_grpo_advantages(scores=torch.tensor([0.0, 2.0, 5.0, 5.0]), group_size=2)
        tensor([-1.,  1.,  0.,  0.])
    """
    return _centred(scores, group_size).flatten()


def rloo_advantages(*, scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Return scores minus the mean of the others in each prompt's group.

        A_i = s_i - sum_{j != i} s_j / (G - 1)

    The baseline does not hold the response's own score, so it leaves the gradient unbiased. Equal to
    G / (G - 1) times `dr_grpo_advantages`.

    Args:
        scores: as in `dr_grpo_advantages`.
        group_size: G, responses to one prompt, at least 2.

    Returns:
        Advantages; they add up to zero in each group.

    Raises:
        ValueError: if the group size is below 2 or does not divide the number of scores.

    Source:
        Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al. 2024,
        arXiv:2402.14740, section 3.2.

    Example:
        >>> rloo_advantages(scores=torch.tensor([0.0, 2.0, 5.0, 5.0]), group_size=2)
        tensor([-2.,  2.,  0.,  0.])
    """
    return (_centred(scores, group_size) * (group_size / (group_size - 1))).flatten()


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


def _centred(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, "N G"]:
    if group_size < 2 or scores.numel() % group_size:  # noqa: PLR2004 - one response has nothing to compare with
        raise ValueError(
            f"expected whole groups of at least 2 responses to one prompt, got {scores.numel()} scores "
            f"and group_size {group_size}"
        )
    groups = out_of_float16(scores).view(-1, group_size)
    shifted = groups - groups[:, :1]  # equal scores are now exactly zero, which rounding of a mean would miss
    return shifted - shifted.mean(dim=1, keepdim=True)
