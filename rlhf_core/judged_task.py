"""Which task a policy is for: which problems its answers are judged on, and by whom.

Two runs are of one task if their problems come from the same place, whatever lies there today, and the same judge
decides. How many problems are drawn, with which seed and model, makes no other task of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.config import DataConfig, EvaluationConfig
from rlhf_core.config.data import SourceConfig
from rlhf_core.data.reading.places import SUFFIXES, is_hub_name
from rlhf_core.rewards.verifying import verifier_name

CHECKOUT = Path(__file__).resolve().parents[1]
_ROLES = ("problems", "prompts", "preferences", "demonstrations")
"""Of which the first that is given holds the problems."""
_DATE = re.compile(r"(?<!\d)(?:19|20)\d\d([-_./]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])(?:T[\d:]+Z?)?(?!\d)")
_SIGNATURE = re.compile(r"\?[^/]*=.*$")
_LONGEST_SLUG = 20
_DIGITS = 6
_NOBODY = str(None)
"""So it stands in the digests of names that are stored."""


class JudgedTask(NamedTuple):
    """A task; equal ones are the same."""

    origins: str
    """Where the problems come from, as JSON, without what names no place: keys, signatures, dates."""
    told: str
    """The same in words."""
    judge: str
    """The verifier's name, `reward_model`, or `None` where nobody judges."""
    slug: str
    """A short word for names: letters, digits, dashes."""

    @property
    def digest(self) -> str:
        """The first digits of a hash: the same on every machine."""
        return hashlib.sha256(f"{self.origins} {self.judge}".encode()).hexdigest()[:_DIGITS]

    def __str__(self) -> str:
        return self.told if self.judge == _NOBODY else f"{self.told}, judged by {self.judge}"


def task_of(data: DataConfig, evaluation: EvaluationConfig) -> JudgedTask:
    """Return the task of policies that are made with these settings.

    Held-out problems of their own are part of it. So are preferences where a reward model judges that learnt them.
    Other demonstrations teach the same task.

    Example:
        >>> task = task_of(DataConfig(task="chain_sum"), EvaluationConfig())
        >>> str(task), task.slug, task.digest
        ('chain_sum, judged by reasoning_gym:chain_sum', 'chain-sum', '64c3eb')
    """
    first = () if data.task is not None else next((each,) for each in _ROLES if getattr(data, each))
    by_model = evaluation.judge == "reward_model"
    roles = dict.fromkeys([*first, "evaluation", *(["preferences"] if by_model else [])])  # an ordered set
    sources = {role: getattr(data, role) for role in roles if getattr(data, role)}
    origins: dict[str, Any] = {role: _origins(each) for role, each in sources.items()}
    places = {role: sorted(place_of(each.path) for each in found) for role, found in sources.items()}
    told = [f"{role} of {', '.join(found)}" for role, found in places.items()]
    if data.task is not None:
        origins["task"] = [data.task, data.task_parameters]
        parameters = [f"{name} {_as_json(value)}" for name, value in sorted(data.task_parameters.items())]
        told.insert(0, f"{data.task} ({', '.join(parameters)})" if parameters else data.task)
    return JudgedTask(
        origins=_as_json(origins),
        told="; ".join(told),
        judge=evaluation.judge if by_model else str(verifier_name(data)),
        slug=_slug(places[first[0]][0] if first else str(data.task)),
    )


def task_of_stored(config: Mapping[str, Any]) -> JudgedTask | None:
    """Return the task of what was made with a stored configuration; None where that does not tell."""
    try:
        data = DataConfig.model_validate(config["data"])
        evaluation = EvaluationConfig.model_validate(config.get("evaluation", {}))
    except (KeyError, ValidationError):
        return None
    return task_of(data, evaluation)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _origins(sources: tuple[SourceConfig, ...]) -> list[list[Any]]:
    """Return what tells sources apart, in no order of theirs; how much of each is taken is no part of it."""
    return sorted([place_of(each.path), each.subset or "", each.split, _as_json(each.columns)] for each in sources)


def place_of(path: str) -> str:
    """Return what is the same for all names of one place, today and tomorrow.

    A path is absolute, or relative to this checkout if it is in it. A date stands as `*`: yesterday's file and today's
    are of one place. An address has no keys, no signature and no `/` at its end.

    Example:
        >>> place_of("/data/nights/2026-11-28.jsonl"), place_of("s3://key:secret@bucket/nights/")
        ('/data/nights/*.jsonl', 's3://bucket/nights')
    """
    scheme, is_address, rest = path.partition("://")
    if is_address:
        host, slash, key = _SIGNATURE.sub("", rest).partition("/")
        return _DATE.sub("*", f"{scheme}://{host.rpartition('@')[2]}{slash}{key}".rstrip("/"))
    here = os.path.expanduser(path)  # pathlib's raises for a user that there is not
    if is_hub_name(path) and not os.path.exists(here):
        return path
    absolute = Path(os.path.abspath(here))
    return _DATE.sub("*", str(absolute.relative_to(CHECKOUT) if absolute.is_relative_to(CHECKOUT) else absolute))


def _slug(place: str) -> str:
    """Return the last part of a place that says something, without a data file's suffix."""
    parts = place.rpartition("://")[2].lower().split("/")
    for part in reversed(parts):
        suffix = next((each for each in sorted(SUFFIXES, key=len, reverse=True) if part.endswith(each)), "")
        words = re.findall("[a-z0-9]+", part.removesuffix(suffix))
        if slug := "-".join(words)[:_LONGEST_SLUG].rstrip("-"):
            return slug
    return "data"
