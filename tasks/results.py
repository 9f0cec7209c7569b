"""What crosses a task's border: small and plain."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhf_core.config import PipelineConfig
from rlhf_core.escaping import SHOWN_LENGTH, one_line
from rlhf_core.gating.conditions import Condition


class Plain(BaseModel):
    """A frozen result of a few fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Parent(Plain):
    """An input by reference: an artifact, or a model that lies outside the store (`model/...`)."""

    uri: str
    digest: str
    path: str | None = None
    """Directory or name of an external model; None for an artifact."""


PLANNED, RUN = "planned_episodes", "run"
"""Figures of a policy whose night ended before the last episode: how many there will be, and whose states go on."""
KEPT, STOPPED = "kept_episode", "stopped"
"""Figures of a policy: the measured episode, from 1, whose weights it has; and why PPO ended before its last one."""
PAIRS = "pairs.jsonl"
"""The file of preference pairs, of a dataset or of a policy's samples."""
SHOWN_CONFIDENCE = 0.95
"""Of the intervals in reports; the gate's own is configuration."""


class StageResult(Plain):
    """One finished stage."""

    stage: str
    uri: str
    digest: str
    reused: bool
    """True when the store already held it under this key."""
    seconds: float
    """Time that making it took, whenever that was."""
    metrics: dict[str, Any]

    @property
    def parent(self) -> Parent:
        """This stage's artifact as an input of another."""
        return Parent(uri=self.uri, digest=self.digest)


class PPORun(Plain):
    """All that an episode task needs to find, build or restore the run's trainer group."""

    name: str
    """Name of the run's `ppo-state` artifacts and of its cluster."""
    key: str
    preset: str
    """The project; in runs that earlier releases recorded, it is the preset's name."""
    config: PipelineConfig
    """As it was resolved when the run began."""
    actor: Parent
    reward_model: Parent | None
    dataset: Parent
    base: Parent | None = None
    """Whole model that the actor is, or is adapters over; None in a run that began in an earlier release."""
    reward_model_base: Parent | None = None
    """The same of the reward model."""
    source_digest: str
    flow_run: str | None
    continues: str | None = None
    """Name of the run whose last state it goes on from while it has none of its own: code was changed in mid-run."""

    @property
    def shares_base(self) -> bool:
        """Whether its models are adapters and heads over a mapped base; a run of an earlier release goes on without."""
        return self.base is not None and self.config.ppo.shares_base

    def key_of_policy(self, episodes: int | None = None) -> str:
        """Return the key of the run's policy: of the finished one, or of one from a night that ended before.

        Args:
            episodes: of that one; None: all.
        """
        if episodes in {None, self.config.ppo.episodes}:
            return self.key
        return hashlib.sha256(f"{self.key} after {episodes} episodes".encode()).hexdigest()


class EpisodeResult(Plain):
    """One finished episode, by the triple that names its state, and its figures."""

    run: str
    episode: int
    policy_version: int
    incarnation: str
    row: dict[str, float | int]
    stops: str | None = None
    """Why the run ends with it, before its last one."""


class Night(Plain):
    """Two evaluations on the same problems."""

    policy: Parent
    incumbent: Parent


class Challenge(Plain):
    """A policy that may pass with more problems, against the one that it was compared with."""

    policy: Parent
    against: str
    """Digest of the incumbent; with another one the challenge has ended."""
    nights: tuple[Night, ...]
    level: float
    """Of each of its tests, from the night on which it came."""
    most_nights: int
    """That share the level of that night."""
    is_open: bool
    """False: it was promoted, or has ended."""


class Approval(Plain):
    """What a person said to a promotion; text of theirs is as it was typed."""

    is_given: bool
    who: str
    why: str

    @property
    def told(self) -> str:
        """The answer in words, on one line."""
        who, why = one_line(self.who.strip(), SHOWN_LENGTH), one_line(self.why.strip(), SHOWN_LENGTH)
        return f"{'approved' if self.is_given else 'not approved'} by {who}: {why}"


class Decision(Plain):
    """What the gate decided about a policy."""

    promote: bool
    reason: str
    policy: str
    incumbent: str
    """What it was compared with: the champion, or the SFT model where there is none."""
    champion: str | None
    """The champion at that time; it is not replaced if another has taken its place since."""
    difference: float
    low: float
    high: float
    """Ends of the paired interval of reports, by the normal approximation: the gate does not decide by it."""
    wins: int = 0
    """Problems on which the policy did better; 0 in decisions of earlier releases, as all that follows."""
    losses: int = 0
    problems: int = 0
    """That both were asked, with those on which they did alike."""
    p_value: float | None = None
    """Of the exact test; None where nothing was compared."""
    level: float | None = None
    """That the p-value had to reach."""
    nights: int = 1
    """Whose problems were compared."""
    challenge: Challenge | None = None
    """What becomes of the challenger; None: nothing new."""
    conditions: tuple[Condition, ...] = ()
    """Of the promotion, beside the gain; none in decisions of earlier releases, or where nothing was compared."""
    approval: Approval | None = None
    """A person's, where one was asked."""
