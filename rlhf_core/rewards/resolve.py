"""Which reward function a name means; code that the settings do not allow is refused."""

from __future__ import annotations

import difflib
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.structure import Tags

GYM = "reasoning_gym"
SETTING = "RLHF_REWARD_MODULES"
BUILT_IN_MAXIMUM = 10.0
BUILT_IN = {
    "gsm8k_reward_fn": "rlhf_core.rewards.math_answers:gsm8k_score",
    "math_competition_reward_fn": "rlhf_core.rewards.competition:math_competition_score",
}
_PATH = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class RewardFunction:
    """A function as the process that runs it is told of it."""

    name: str
    """For weights, logs and warnings."""
    target: str | bytes
    """`package.module:function`, or a pickle of the function with its keyword arguments."""
    form: Literal["text", "entry", "tokens"] = "text"
    """f(prompt, response, answer); the same with the task's record; or coati's, of token ids."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of each call."""
    maximum: float = 1.0
    """What the raw value is divided by, so that PPO sees values of order one."""


def resolve_reward_function(
    name_or_path: str, *, allowed_modules: Sequence[str], tags: Tags | None = None, setting: str = SETTING
) -> RewardFunction:
    """Return the function that a name or path means, without importing it.

    Args:
        name_or_path: `gsm8k_reward_fn`, `math_competition_reward_fn`, `reasoning_gym:<task>`, or
            `package.module:function` of the user's own, called as f(prompt, response, answer) and expected
            to return numbers of order one.
        allowed_modules: modules and packages from which functions may be taken by path.
        tags: the form of a response, for the functions that look at it; None is coati's.
        setting: what the user would add a module to, for the message.

    Raises:
        ConfigError: if there is no such function, or its module is not allowed.
    """
    if name_or_path in BUILT_IN:
        return RewardFunction(name_or_path, BUILT_IN[name_or_path], arguments={"tags": tags}, maximum=BUILT_IN_MAXIMUM)
    match = _PATH.fullmatch(name_or_path)
    if match is None:
        near = difflib.get_close_matches(name_or_path, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {' and '.join(BUILT_IN)}."
        raise ConfigError(
            f"there is no reward function {name_or_path!r}; {hint} Others are given as reasoning_gym:<task> or "
            "package.module:function"
        )
    if match["module"] == GYM:
        return _gym_function(name_or_path, match["function"], tags)
    own_function(name_or_path, allowed_modules=allowed_modules, setting=setting)
    return RewardFunction(name_or_path, name_or_path)


class FunctionPath(NamedTuple):
    """`package.module:function`, taken apart."""

    module: str
    function: str


def own_function(
    path: str, *, allowed_modules: Sequence[str], what: str = "reward function", setting: str = SETTING
) -> FunctionPath | None:
    """Return where a function of the user's own is, without importing it; None if this is no path of one.

    Args:
        path: `package.module:function`.
        allowed_modules: modules and packages from which functions may be taken.
        what: the function is, for the message.
        setting: what the user would add a module to, for the message.

    Raises:
        ConfigError: if its module is not allowed.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    if not _is_allowed(match["module"], allowed_modules):
        raise ConfigError(
            f"{what} {path!r} lies in a module that is not allowed to run here; "
            f"add {match['module']} to {setting}{' (a list with commas)' if setting == SETTING else ''} if you trust it"
        )
    return FunctionPath(match["module"], match["function"])


def code_digest(name_or_path: str) -> str | None:
    """Return the SHA-256 of the file of a user's own function, none of which is run; None for any other name.

    It is of the function's module alone, not of what that imports. Without such a file it is None too.
    """
    match = _PATH.fullmatch(name_or_path)
    if name_or_path in BUILT_IN or match is None or match["module"] == GYM:
        return None
    spec: ModuleSpec | None = None
    parts = match["module"].split(".")
    for depth in range(1, len(parts) + 1):  # finding a module through its package's name would run the package
        places = None if spec is None else spec.submodule_search_locations
        spec = _spec(".".join(parts[:depth]), places)
        if spec is None:
            return None
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None


def _spec(module: str, places: Sequence[str] | None) -> ModuleSpec | None:
    found = (finder.find_spec(module, places) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _is_allowed(module: str, allowed: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed if name)


def _gym_function(name: str, task: str, tags: Tags | None) -> RewardFunction:
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415  # a second's import that few names need

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see the library's gallery"
        raise ConfigError(f"reward function {name!r} names none of reasoning-gym's {len(DATASETS)} tasks; {hint}")
    return RewardFunction(name, "rlhf_core.rewards.gym:score", form="entry", arguments={"task": task, "tags": tags})
