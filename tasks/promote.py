"""The gate with its side conditions, and the champion's alias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import JsonValue

from infra.artifacts import ArtifactRef
from infra.errors import ReferenceNotFoundError
from rlhf_core.config import PipelineConfig
from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.escaping import SHOWN_LENGTH, one_line
from rlhf_core.functional.intervals import Interval, paired_difference_interval
from rlhf_core.gating import Contender, Verdict, judge, level_of_each, tally
from rlhf_core.gating.conditions import Compared, Condition, Known, broken_in_words, side_conditions
from tasks.challenger import CHALLENGER, incumbent_of, open_challenge, record_challenge
from tasks.context import Context, open_context
from tasks.error_budget import spend
from tasks.evaluate import MEASURES, OUTCOMES, REWARD_MODEL
from tasks.plan import settled_once
from tasks.progress import say
from tasks.projects import expected_champion, why_not_comparable
from tasks.results import SHOWN_CONFIDENCE, Challenge, Decision, Night, Parent, StageResult
from tasks.stages import stage_result
from tasks.taken_over import leave_if_taken_over
from tasks.task_errors import stage_task

if TYPE_CHECKING:
    from infra.artifacts import Manifest
    from rlhf_core.evaluation import Outcome
    from rlhf_core.forgetting.measures import Measure


@stage_task(name="gate")
def gate(config: PipelineConfig, evaluations: dict[str, StageResult], question: str = "decision") -> Decision:
    """Return whether the policy, or the challenger that waits, replaces the champion: from the stored outcomes.

    A run that is started again decides the same.

    Args:
        config: the preset; its gate says how sure the gain must be.
        evaluations: by role; `ppo` is the candidate. The incumbent is `champion`, else `start`, `sft` or `base`.
        question: under which the run remembers the decision; another one decides anew.

    Raises:
        ConfigError: there is none of them.
    """
    context = open_context()
    decision: Decision = settled_once(context, question, Decision, lambda: _decide(context, config, evaluations))
    say("gate", f"{'promote' if decision.promote else 'keep the incumbent'}: {decision.reason}")
    return decision


def _decide(context: Context, config: PipelineConfig, evaluations: dict[str, StageResult]) -> Decision:
    candidate = evaluations["ppo"]
    policy = str(candidate.metrics["policy"])
    role = incumbent_of(evaluations)
    if role is None:
        raise ConfigError(
            f"there is nothing to compare {policy} with: no champion, and it came from no SFT model, no policy and not "
            "from the preset's base model; run with the `model` that it came from"
        )
    incumbent = evaluations[role]
    opponent = str(incumbent.metrics["policy"])
    champion = opponent if role == "champion" else None
    refusal = why_not_comparable(context, config, policy, opponent) if champion else None
    if refusal is None and _policy(candidate).digest == _policy(incumbent).digest:
        refusal = f"{policy} {_since(opponent) if champion else f'holds the very weights of {opponent} ({role})'}"
    if refusal is not None:
        return Decision(
            promote=False, reason=refusal, policy=policy, incumbent=opponent, champion=champion,
            difference=0.0, low=0.0, high=0.0,
        )  # fmt: skip
    nights = config.gate.challenger_nights if config.data.rotate_evaluation else 1
    level = level_of_each(spend(context, policy, config.gate), nights)
    holds = conditions_of(config, evaluations, incumbent, candidate)
    tonight = _Case.of(context, config, [_night(candidate, incumbent)], _policy(candidate), level, nights, holds)
    waiting, ended = _waiting(context, config, evaluations, incumbent)
    # of scores, the wins are by more than the least gain already
    min_gain = 0.0 if _by_score(candidate) else config.gate.min_gain
    verdict = judge(tonight.contender, waiting and waiting.contender, min_gain=min_gain)
    cases = {"candidate": tonight} if waiting is None else {"candidate": tonight, CHALLENGER: waiting}
    p = {"candidate": verdict.candidate_p, CHALLENGER: verdict.challenger_p}
    first = verdict.promoted or "candidate"
    shown = cases[first]
    told = f"{shown.policy.uri} against {opponent} ({role}): {shown.told(p[first])}"
    for name, other in cases.items():
        if name != first:
            told += f"; the {name} {other.policy.uri}: {other.told(p[name])}"
    challenge = _challenge(verdict, tonight, waiting, against=_policy(incumbent).digest) or ended
    return Decision(
        promote=verdict.promoted is not None,
        reason=told + _outcome(config, verdict, challenge),
        policy=shown.policy.uri,
        incumbent=opponent,
        champion=champion,
        difference=shown.interval.estimate,
        low=shown.interval.low,
        high=shown.interval.high,
        wins=shown.contender.found.wins,
        losses=shown.contender.found.losses,
        problems=shown.contender.found.problems,
        p_value=p[first],
        level=shown.contender.level,
        nights=len(shown.nights),
        challenge=challenge,
        conditions=shown.conditions,
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
    """Move the aliases as the gate says; return the champion's reference, or None if there is none.

    A run moves it once: one that is started again after its move leaves what others have done since.

    Raises:
        StoreError: the champion is no longer the one that the gate compared with; start a new run to compare anew.
    """
    context = open_context()
    name = context.store.resolve(decision.policy).name
    who = f"run {context.flow_run}" if context.flow_run else "a run without Prefect"
    if decision.promote and not (context.flow_run and _has_moved(context, name, who, decision.policy)):
        leave_if_taken_over()
        expected = expected_champion(decision.policy, decision.champion)
        facts: dict[str, JsonValue] = {"approval": decision.approval.model_dump()} if decision.approval else {}
        context.store.set_alias(
            decision.policy, "champion", why=decision.reason, who=who, expected=expected, facts=facts or None
        )
    if decision.challenge is not None:
        leave_if_taken_over()
        record_challenge(context, decision.challenge, who)
    champion: str | None = context.store.alias("policy", name, "champion")
    return champion


def _has_moved(context: Context, name: str, who: str, policy: str) -> bool:
    """Whether a run has made a policy the champion before: a person may have taken it back since."""
    alias = context.store.aliases("policy", name).get("champion")
    return alias is not None and any((move.who, move.uri) == (who, policy) for move in alias.history)


class _Case(NamedTuple):
    """A contender with all that is told of it."""

    policy: Parent
    nights: tuple[Night, ...]
    contender: Contender
    interval: Interval
    unit: str
    most_nights: int
    """On which it may be tested."""
    conditions: tuple[Condition, ...]
    """Beside the gain, by tonight's evaluation."""

    @classmethod
    def of(
        cls,
        context: Context,
        config: PipelineConfig,
        nights: list[Night],
        policy: Parent,
        level: float,
        most_nights: int,
        conditions: tuple[Condition, ...],
    ) -> _Case:
        """Return the case of a policy over several nights' problems, each once, if it was judged for both.

        Raises:
            DataError: there are fewer than two.
        """
        from rlhf_core.evaluation import FEWEST_JUDGED

        before: dict[str, float] = {}
        after: dict[str, float] = {}
        new = 0
        for night in nights:
            new = len(before)
            theirs, own = _scores(_stored(context, night.incumbent)), _scores(_stored(context, night.policy))
            judged = theirs.keys() & own.keys()
            before = {key: theirs[key] for key in judged} | before
            after = {key: own[key] for key in judged} | after
            new = len(before) - new
        if len(before) < FEWEST_JUDGED:
            raise DataError(
                f"only {counted(len(before), 'problem')} has a verdict for both {nights[-1].policy.uri} and "
                f"{nights[-1].incumbent.uri}, and two are needed to compare them; repair the judge, and evaluate both "
                "again"
            )
        by_score = _by_score(_stored(context, nights[-1].policy))
        found = tally(before, after, config.gate.min_gain if by_score else 0.0)
        interval = _interval(before, after)
        is_better = not by_score or interval.estimate > config.gate.min_gain
        contender = Contender.after(
            found,
            level=level,
            nights=len(nights),
            new=new if config.data.rotate_evaluation else 0,
            most_nights=most_nights,
            is_better=is_better and not broken_in_words(conditions),
        )
        unit = "standard deviations of the reward model's score" if by_score else "right"
        return cls(policy, tuple(nights), contender, interval, unit, most_nights, conditions)

    def told(self, p: float | None) -> str:
        """Return its figures in words."""
        found, gain = self.contender.found, self.interval
        nights = f" in {len(self.nights)} nights" if len(self.nights) > 1 else ""
        needed = self.contender.level
        broken = broken_in_words(self.conditions)
        return (
            f"{gain.estimate:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] {self.unit}, {found.wins} better and "
            f"{found.losses} worse of {counted(found.problems, 'problem')}{nights}, p = {p:.2g} ({needed:.2g} needed)"
            + (f"; what else is asked does not hold: {broken}" if broken else "")
        )


class _Waiting(NamedTuple):
    """The challenger that was evaluated tonight."""

    case: _Case | None = None
    """None if there is none, or it can be compared no longer."""
    ended: Challenge | None = None
    """Its challenge, if it can be compared no longer."""


def _waiting(
    context: Context, config: PipelineConfig, evaluations: dict[str, StageResult], incumbent: StageResult
) -> _Waiting:
    asked = evaluations.get(CHALLENGER)
    if asked is None:
        return _Waiting()
    name = context.store.resolve(str(asked.metrics["policy"])).name
    found = open_challenge(context, name, _policy(incumbent), _policy(evaluations["ppo"]))
    if found is None or found.policy.digest != _policy(asked).digest:  # another run was quicker
        return _Waiting()
    ended = _Waiting(ended=found.model_copy(update={"is_open": False}))
    refusal = why_not_comparable(context, config, found.policy.uri, found.policy.uri)
    if refusal is not None:
        say("gate", f"{found.policy.uri} challenges no longer: it was made for another task")
        return ended
    try:
        judges = {str(_stored(context, night.policy).metrics["judge"]) for night in found.nights}
        if judges != {asked.metrics["judge"]}:
            say("gate", f"{found.policy.uri} challenges no longer: another judge scored its answers then")
            return ended
        holds = conditions_of(config, evaluations, incumbent, asked)
        nights = [*found.nights, _night(asked, incumbent)]
        return _Waiting(_Case.of(context, config, nights, found.policy, found.level, found.most_nights, holds))
    except ReferenceNotFoundError as error:
        say("gate", f"{found.policy.uri} challenges no longer, as an evaluation of it is gone: {error}")
        return ended


def _challenge(verdict: Verdict, tonight: _Case, waiting: _Case | None, *, against: str) -> Challenge | None:
    """Return what the alias of the challenger is to say from now on; None if nothing new."""
    waits = {"candidate": tonight, CHALLENGER: waiting, None: None}[verdict.waits]
    case = waits or waiting
    if case is None:
        return None
    return Challenge(
        policy=case.policy,
        against=against,
        nights=case.nights,
        level=case.contender.level,
        most_nights=case.most_nights,
        is_open=waits is not None,
    )


def _outcome(config: PipelineConfig, verdict: Verdict, challenge: Challenge | None) -> str:
    least = f" for a gain above {config.gate.min_gain:g}" if config.gate.min_gain else ""
    if verdict.promoted is not None or challenge is None:
        return least
    if not challenge.is_open:
        return f"{least}; {challenge.policy.uri} challenges no longer"
    nights = f"night {len(challenge.nights)} of {challenge.most_nights}"
    return f"{least}; {challenge.policy.uri} is the challenger ({nights})"


def _policy(evaluation: StageResult) -> Parent:
    return Parent(uri=str(evaluation.metrics["policy"]), digest=str(evaluation.metrics["policy_digest"]))


def _night(policy: StageResult, incumbent: StageResult) -> Night:
    return Night(policy=policy.parent, incumbent=incumbent.parent)


def _stored(context: Context, evaluation: Parent) -> StageResult:
    return stage_result("evaluate", context.store.resolve(ArtifactRef(evaluation.uri, evaluation.digest)), reused=True)


def _interval(before: dict[str, float], after: dict[str, float]) -> Interval:
    keys = sorted(before)
    return paired_difference_interval([before[key] for key in keys], [after[key] for key in keys], SHOWN_CONFIDENCE)


def _scores(evaluation: StageResult) -> dict[str, float]:
    """Return 1 for each right answer and 0 for each wrong one; the scores themselves where a reward model judged."""
    from rlhf_core.evaluation import judged

    by_score = _by_score(evaluation)
    found = judged(_outcomes(open_context(), evaluation))
    return {each.key: each.score if by_score else float(each.correct) for each in found}


def _outcomes(context: Context, evaluation: StageResult) -> list[Outcome]:
    from rlhf_core.evaluation import outcomes_from_jsonl

    return outcomes_from_jsonl(context.store.read_bytes(context.store.resolve(evaluation.uri), OUTCOMES))


def _by_score(evaluation: StageResult) -> bool:
    return bool(evaluation.metrics["judge"] == REWARD_MODEL)


def conditions_of(
    config: PipelineConfig, evaluations: Mapping[str, StageResult], incumbent: StageResult, candidate: StageResult
) -> tuple[Condition, ...]:
    """Return what came of each side condition of promoting a policy.

    Args:
        config: the preset.
        evaluations: by role; `base` is the base model's.
        incumbent: evaluation of who would be replaced.
        candidate: evaluation of who would be promoted.
    """
    context, base = open_context(), evaluations.get("base")
    policy = _manifest_of(context, str(candidate.metrics["policy"]))
    compared = Compared(
        _known(context, incumbent),
        _known(context, candidate),
        base=_measures(context, base) if base else {},
        by_score=candidate.metrics.get("judge") == REWARD_MODEL,
        ppo=policy.metrics if policy else {},
        reward_model=_reward_model(context, config, policy, candidate),
    )
    return side_conditions(compared, config.gate.conditions)


def _known(context: Context, evaluation: StageResult) -> Known:
    return Known(_outcomes(context, evaluation), _measures(context, evaluation))


def _measures(context: Context, evaluation: StageResult) -> dict[str, Measure]:
    from rlhf_core.forgetting.measures import measures_from_jsonl

    manifest = context.store.resolve(evaluation.uri)
    if MEASURES not in {file.path for file in manifest.files}:  # of an earlier release
        return {}
    return measures_from_jsonl(context.store.read_bytes(manifest, MEASURES))


def _reward_model(
    context: Context, config: PipelineConfig, policy: Manifest | None, candidate: StageResult
) -> Mapping[str, Any] | None:
    """Return the figures of the reward model that paid the policy, else of the one that judged it; None if none did."""
    paid = policy if config.ppo.reward.reward_model > 0 else None
    judged = context.store.resolve(candidate.uri) if candidate.metrics.get("judge") == REWARD_MODEL else None
    for artifact in (paid, judged):
        for parent in artifact.parents if artifact else ():
            found = _manifest_of(context, parent.uri) if parent.uri.startswith("reward-model/") else None
            if found is not None:
                return found.metrics
    return None


def _manifest_of(context: Context, uri: str) -> Manifest | None:
    """Return an artifact's manifest; None of a model outside the store, or of what was deleted since."""
    try:
        return context.store.resolve(uri)
    except ReferenceNotFoundError:
        return None
