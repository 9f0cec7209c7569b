"""A name leads to a function; a path only where the settings allow it."""

from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.rewards import resolve_reward_function


def test_coatis_names_know_their_maximum() -> None:
    for name in ("gsm8k_reward_fn", "math_competition_reward_fn"):
        found = resolve_reward_function(name, allowed_modules=())
        assert (found.name, found.maximum, found.form) == (name, 10.0, "text")


def test_any_task_of_reasoning_gym_is_a_function_that_needs_its_record() -> None:
    found = resolve_reward_function("reasoning_gym:countdown", allowed_modules=())
    assert (found.form, found.maximum, found.arguments["task"]) == ("entry", 1.0, "countdown")


@pytest.mark.parametrize("allowed", [("mine",), ("mine.rewards",), ("other", "mine.rewards.short")])
def test_a_path_is_taken_where_the_module_or_a_package_around_it_is_allowed(allowed: tuple[str, ...]) -> None:
    found = resolve_reward_function("mine.rewards.short:brevity", allowed_modules=allowed)
    assert (found.target, found.form, found.maximum) == ("mine.rewards.short:brevity", "text", 1.0)


@pytest.mark.parametrize("allowed", [(), ("",), ("min",), ("mine.rewards.shorter",), ("rewards",)])
def test_a_path_elsewhere_is_refused_and_the_setting_named(allowed: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"not allowed to run here; add mine\.rewards\.short to RLHF_REWARD_MODULES"):
        resolve_reward_function("mine.rewards.short:brevity", allowed_modules=allowed)


@pytest.mark.parametrize("path", ["os:system", "builtins:eval"])
def test_no_name_leads_to_code_of_the_system(path: str) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        resolve_reward_function(path, allowed_modules=("mine",))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gsm8k_reward", r"did you mean gsm8k_reward_fn\?"),
        ("mine.rewards", "known are gsm8k_reward_fn and math_competition_reward_fn"),
        ("mine:os.system", "known are"),
        ("mine:f()", "known are"),
        ("reasoning_gym:count_down", r"did you mean .*countdown"),
    ],
)
def test_an_unknown_name_is_told_with_what_is_near(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        resolve_reward_function(name, allowed_modules=("mine",))
