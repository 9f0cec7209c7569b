"""The challenger: a candidate that was not promoted, and may pass with the problems of more nights.

It is the alias `policy/<name>@challenger`, whose moves name the evaluations so far. It challenges the incumbent that it
was compared with, and no other.
"""

from __future__ import annotations

from collections.abc import Container

from infra.artifacts import ArtifactRef
from rlhf_core.counting import counted
from tasks.context import Context
from tasks.progress import say
from tasks.results import Challenge, Parent

INCUMBENTS = ("champion", "start", "sft", "base")
"""Roles of which the first that there is must be beaten."""
CHALLENGER = "challenger"


def incumbent_of(roles: Container[str]) -> str | None:
    """Return the role of the policy that must be beaten; None if there is none."""
    return next((role for role in INCUMBENTS if role in roles), None)


def open_challenge(context: Context, name: str, incumbent: Parent, candidate: Parent) -> Challenge | None:
    """Return the challenge that waits for tonight's problems; None if there is none.

    Args:
        context: the open context.
        name: of the policies.
        incumbent: who must be beaten tonight.
        candidate: tonight's, which does not challenge twice.
    """
    alias = context.store.aliases("policy", name).get(CHALLENGER)
    if alias is None or alias.history[-1].facts is None:  # none, or a person moved it
        return None
    found = Challenge.model_validate(alias.history[-1].facts)
    if not found.is_open or found.policy.digest in {candidate.digest, incumbent.digest}:
        return None
    if found.against != incumbent.digest:
        say("evaluate", f"{found.policy.uri} challenges nobody any longer: {incumbent.uri} must be beaten now")
        return None
    held = context.store.holds(ArtifactRef(found.policy.uri, found.policy.digest))
    return found if held else None


def record_challenge(context: Context, challenge: Challenge, who: str) -> None:
    """Move the alias to a challenge, or let it say that one has ended; a run that did so before leaves it."""
    name = context.store.resolve(challenge.policy.uri).name
    facts = challenge.model_dump(mode="json", exclude_none=True)
    alias = context.store.aliases("policy", name).get(CHALLENGER)
    if context.flow_run and alias and any((move.who, move.facts) == (who, facts) for move in alias.history):
        return
    nights = counted(len(challenge.nights), "night")
    why = f"may pass with more problems; {nights} so far" if challenge.is_open else f"ended after {nights}"
    context.store.set_alias(challenge.policy.uri, CHALLENGER, why=why, who=who, facts=facts)
