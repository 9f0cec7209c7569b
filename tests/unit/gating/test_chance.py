from __future__ import annotations

import math
from itertools import product

import pytest

from rlhf_core.gating.chance import rejected, symmetric_bound


@pytest.mark.parametrize("differences", [[1.0, 1.0, 1.0], [0.5, -2.0, 3.0, 4.0, 0.1], [9.0, 0.1, 0.1, 0.1, -0.2, 1.0]])
def test_the_bound_is_above_the_share_of_all_signs_that_give_as_much(differences: list[float]) -> None:
    sums = [
        math.fsum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    exact = sum(each >= math.fsum(differences) - 1e-12 for each in sums) / len(sums)
    assert exact <= symmetric_bound(differences) < 1


def test_what_did_not_get_worse_is_explained_by_chance() -> None:
    assert symmetric_bound([-1.0, 0.5]) == symmetric_bound([]) == symmetric_bound([0.0]) == 1.0


def test_holm_stops_at_the_first_that_is_not_small_enough() -> None:
    # thresholds 0.05/4, 0.05/3, 0.05/2, 0.05 for 0.01, 0.015, 0.03, 0.04: the third is above 0.025
    assert rejected([0.04, 0.01, 0.03, 0.015], 0.05) == [False, True, False, True]
    assert rejected([], 0.05) == []
