"""What math-verify is shown, and what it makes of it: values that Python's fractions say."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from fractions import Fraction

import pytest

from rlhf_core.rewards import competition
from rlhf_core.rewards.competition import same_answer
from rlhf_core.rewards.formulas import is_formula
from rlhf_core.rewards.notation import plain


def formula(draw: random.Random, depth: int) -> tuple[str, Fraction]:
    """A formula of numbers, in brackets, and its value."""
    if depth == 0:
        number = draw.choice(["1", "2", "3", "7", "1.5", ".25"])
        return number, Fraction(number)
    (left, first), (right, second) = formula(draw, depth - 1), formula(draw, depth - 1)
    return draw.choice([
        (f"({left}+{right})", first + second), (f"({left} \u2212 {right})", first - second),
        (f"({left})({right})", first * second), (f"{draw.choice(['3', '(3)'])}({right})", 3 * second),
        (f"({left} \u00d7 ({right}))", first * second), (f"\\frac{{{left}}}{{3}}({right})", first * second / 3),
        (f"({left})\u00b2", first**2), (f"2^{{3}}({right})", 8 * second), (f"e^0({right})", second),
        (f"\\binom{{4}}{{2}}({right})", 6 * second), (f"({left})\\dfrac1{{4}}", first / 4),
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_formula_is_worth_what_fractions_say(seed: int) -> None:
    text, value = formula(random.Random(seed), depth=2)
    assert is_formula(plain(text)), text
    assert same_answer(str(value), text), (text, value)
    for other in (value + 1, value + Fraction(1, 10**9), -value - 1):
        assert not same_answer(str(other), text), (text, other)


@pytest.mark.parametrize("text", [
    "2{3}", "2[3]", "1/2x", "1/2(3)", "2\\frac{4}{3}", "\\cos 0 \\cdot 2", "x2", "2 3", "no", "no-go", "2 no", "42?",
    "42+", "2516_{8}", "9^{9^{9}}", "2^{99999}", "((2^{999})^{999})^{999}", "2^{9 \\cdot 9}", "5!!", "(5!)!", "99999!",
    "\\frac{1}{}", "\\sum n",
    "9^{999999999x/x}", "9^{\\frac{\\frac{99999999}{1}}{1}}", "\\binom{99!}{98!}", "(x+1)^{9999}", "999!+" * 240 + "1",
    "(12)(13)", "2\\infty", "0.3333333333333x", "\\sqrt{2+10^{-16}}", "9" * 900 + "$", "|" * 900,
])  # fmt: skip
def test_what_is_read_in_two_ways_or_takes_for_ever_is_not_shown(text: str) -> None:
    assert not is_formula(text)


def test_answers_are_compared_in_any_thread() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend([same_answer("x^2-1", "(x-1)(x+1)"), same_answer("x", "y")]))
    thread.start()
    thread.join(60)
    assert found == [True, False]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_that_is_lost_comes_again_and_leaves_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[float] = []

    def collecting(*_: object) -> None:  # an exception that is raised here is printed, and lost
        if not lost:
            lost.append(0.5)
            time.sleep(0.5)

    def compare(*_: str) -> bool:
        gc.collect()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            pass
        return True

    monkeypatch.setattr(competition, "LIMIT_S", 0.2)
    monkeypatch.setattr(competition, "_same", compare)
    gc.callbacks.append(collecting)
    handler, (left_s, _) = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        assert not same_answer("x", "y")
        assert lost
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 59.8
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        gc.callbacks.remove(collecting)
