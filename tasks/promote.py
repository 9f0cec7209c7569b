"""The gate, and the champion's alias."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_core.config import PipelineConfig
from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError
from rlhf_core.escaping import SHOWN_LENGTH, one_line
from rlhf_core.functional.intervals import Interval, paired_difference_interval
from tasks.context import Context, open_context
from tasks.evaluate import OUTCOMES, REWARD_MODEL
from tasks.progress import say
from tasks.results import Decision, StageResult
from tasks.taken_over import leave_if_taken_over
from tasks.task_errors import stage_task

INCUMBENTS = ("champion", "start", "sft", "base")
"""Roles of which the first that there is must be beaten."""


@stage_task(name="gate")
def gate(config: PipelineConfig, evaluations: dict[str, StageResult]) -> Decision:
    """Return whether the policy replaces the champion, from the stored outcomes of both.

    Args:
        config: the preset; its gate says how sure the gain must be.
        evaluations: by role; `ppo` is the candidate. The incumbent is `champion`, else `start`, `sft` or `base`.

    Raises:
        ConfigError: there is none of them.
    """
    candidate = evaluations["ppo"]
    policy = str(candidate.metrics["policy"])
    role = next((role for role in INCUMBENTS if role in evaluations), None)
    if role is None:
        raise ConfigError(
            f"there is nothing to compare {policy} with: no champion, and it came from no SFT model, no policy and not "
            "from the preset's base model; run with the `model` that it came from"
        )
    incumbent = evaluations[role]
    opponent = str(incumbent.metrics["policy"])
    if candidate.metrics["policy_digest"] == incumbent.metrics["policy_digest"]:
        interval, promote = Interval(0.0, 0.0, 0.0), False
        is_champion = role == "champion"
        reason = f"{policy} {_since(opponent) if is_champion else f'holds the very weights of {opponent} ({role})'}"
    else:
        interval, problems = _gain(incumbent, candidate, config.gate.confidence)
        promote = interval.low > config.gate.min_gain
        figures = f"{interval.estimate:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
        unit = "standard deviations of the reward model's score" if _by_score(candidate) else "right"
        reason = (
            f"{policy} against {opponent} ({role}): {figures} {unit} on the same "
            f"{counted(problems, 'problem')}; the lower end is "
            f"{'above' if promote else 'not above'} {config.gate.min_gain:g}"
        )
    say("gate", f"{'promote' if promote else 'keep the incumbent'}: {reason}")
    return Decision(
        promote=promote,
        reason=reason,
        policy=policy,
        incumbent=opponent,
        champion=opponent if role == "champion" else None,
        difference=interval.estimate,
        low=interval.low,
        high=interval.high,
    )


def _since(champion: str) -> str:
    """Return since when a policy is the champion: an earlier run may have ended before it could say so."""
    name, _, _ = champion.partition("@")
    alias = open_context().store.aliases("policy", name.partition("/")[2]).get("champion")
    moves = [] if alias is None else [move for move in alias.history if move.uri == champion]
    if not moves:
        return "is the champion already"
    last = moves[-1]
    why = one_line(last.why, SHOWN_LENGTH)
    return f"is the champion already, since {last.when:%Y-%m-%d %H:%M} UTC ({one_line(last.who, SHOWN_LENGTH)}: {why})"


@stage_task(name="promote")
def promote(decision: Decision) -> str | None:
    """Move the alias `champion` if the gate says so; return the champion's reference, or None if there is none.

    A run moves it once: one that is started again after its move leaves what others have done since.

    Raises:
        StoreError: the champion is no longer the one that the gate compared with; start a new run to compare anew.
    """
    context = open_context()
    name = context.store.resolve(decision.policy).name
    who = f"run {context.flow_run}" if context.flow_run else "a run without Prefect"
    if decision.promote and not (context.flow_run and _has_moved(context, name, who, decision.policy)):
        leave_if_taken_over()
        context.store.set_alias(decision.policy, "champion", why=decision.reason, who=who, expected=decision.champion)
    champion: str | None = context.store.alias("policy", name, "champion")
    return champion


def _has_moved(context: Context, name: str, who: str, policy: str) -> bool:
    """Whether a run has made a policy the champion before: a person may have taken it back since."""
    alias = context.store.aliases("policy", name).get("champion")
    return alias is not None and any((move.who, move.uri) == (who, policy) for move in alias.history)


class _Gain(NamedTuple):
    interval: Interval
    problems: int


def _gain(incumbent: StageResult, candidate: StageResult, confidence: float) -> _Gain:
    """Return the candidate's paired gain over the incumbent."""
    before, after = _scores(incumbent), _scores(candidate)
    keys = sorted(before)
    interval = paired_difference_interval([before[key] for key in keys], [after[key] for key in keys], confidence)
    return _Gain(interval, len(keys))


def _scores(evaluation: StageResult) -> dict[str, float]:
    """Return 1 for each right answer and 0 for each other; the scores themselves where a reward model judged."""
    from rlhf_core.evaluation import outcomes_from_jsonl

    store = open_context().store
    body = store.read_bytes(store.resolve(evaluation.uri), OUTCOMES)
    by_score = _by_score(evaluation)
    return {each.key: each.score if by_score else float(each.correct) for each in outcomes_from_jsonl(body)}


def _by_score(evaluation: StageResult) -> bool:
    return bool(evaluation.metrics["judge"] == REWARD_MODEL)
