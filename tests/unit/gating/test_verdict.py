from __future__ import annotations

from rlhf_core.gating import Contender, Tally, judge, level_of_each

FRESH = Tally(0, 0, 100)


def test_a_candidates_tests_share_its_nights_level_whoever_waits() -> None:
    assert level_of_each(0.03, 3) == 0.01
    # six wins of six: p = 0.0156. Beside a challenger the candidate needs no less, and no more
    candidate = Contender(Tally(6, 0, 100), level=0.02)
    assert judge(candidate, None).promoted == "candidate"
    assert judge(candidate, Contender(FRESH, level=0.02)).promoted == "candidate"
    assert judge(candidate._replace(level=0.015), None).promoted is None


def test_each_is_tested_at_the_level_of_the_night_on_which_it_came() -> None:
    both = Tally(6, 0, 100)
    verdict = judge(Contender(both, level=0.01), Contender(both, level=0.02))
    assert (verdict.promoted, verdict.candidate_p, verdict.challenger_p) == ("challenger", 1 / 64, 1 / 64)
    assert judge(Contender(both, level=0.0), None).promoted is None


def test_a_challenger_waits_while_it_may_pass_and_then_makes_room() -> None:
    candidate = Contender(Tally(12, 5, 100), level=0.001, more=200)
    assert judge(candidate, None).waits == "candidate"
    hopeful = Contender(Tally(24, 10, 200), level=0.001, more=100)
    assert judge(candidate, hopeful).waits == "challenger"
    assert judge(candidate, hopeful._replace(more=0)).waits == "candidate"
    assert judge(candidate._replace(found=Tally(5, 12, 100)), hopeful._replace(more=0)).waits is None
    assert judge(candidate._replace(is_better=False), None).waits is None


def test_of_two_that_pass_the_one_with_the_higher_lower_bound_is_promoted() -> None:
    # the same gain of 0.2: shown to be larger by three hundred problems than by a hundred
    few, many = Contender(Tally(20, 0, 100), level=0.01), Contender(Tally(60, 0, 300), level=0.01)
    assert judge(few, many).promoted == "challenger"
    assert judge(many, few).promoted == "candidate"
