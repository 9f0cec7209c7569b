"""Calls of reward functions and judges that fail: their samples abstain, and above a share of them all stops.

A failed call says nothing of a response. To take it for a zero would teach that the response was bad (ADR 48).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rlhf_core.counting import counted
from rlhf_core.errors import RlhfError, TrainingError
from rlhf_core.escaping import SHOWN_LENGTH, one_line

RAISED, TIMED_OUT, DIED, NO_NUMBER = "raised", "timed_out", "died", "no_number"
KINDS = (RAISED, TIMED_OUT, DIED, NO_NUMBER)
"""How a call fails: an exception, too long, the end of its process, or what it returned is no number in its range."""
ENDS_AS = "Failed: rewards that abstain"


def failure(kind: str, told: str) -> str:
    """Return why a call failed, as samples, verdicts and outcomes keep it.

    Args:
        kind: one of `KINDS`.
        told: a sentence about `it`.

    Example:
        >>> failure(TIMED_OUT, "it took longer than 10 s")
        'timed_out: it took longer than 10 s'
    """
    return f"{kind}: {told}"


def kind_of(failed: str) -> str:
    """Return which of `KINDS` a failure is."""
    return failed.partition(": ")[0]


def told_of(failed: str) -> str:
    """Return what the function did, for people."""
    return failed.partition(": ")[2]


def check_share(
    failures: Iterable[Mapping[str, str]],
    *,
    abstained: int,
    of: int,
    most: float,
    what: str,
    error: type[RlhfError] = TrainingError,
) -> None:
    """See that not too many abstain.

    Args:
        failures: of each, by source; may be fewer than abstain, where others know why.
        abstained: how many abstain.
        of: how many there are.
        most: the largest share that may, `ppo.max_abstained`.
        what: they are: "samples of episode 3".
        error: to raise.

    Raises:
        RlhfError: if more do; it names the function that fails most often, how often, and why.
    """
    if abstained <= most * of:
        return
    calls = [(name, failed) for each in failures for name, failed in each.items()]
    told = ""
    if calls:
        [(name, times)] = Counter(name for name, _ in calls).most_common(1)
        kinds = Counter(kind_of(failed) for source, failed in calls if source == name)
        listed = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in kinds.most_common())
        first = told_of(next(failed for source, failed in calls if source == name))
        told = (
            f": {one_line(name, SHOWN_LENGTH)} failed {counted(times, 'time')} ({listed}; first, "
            f"{one_line(first, SHOWN_LENGTH)})"
        )
    raise error(
        f"{abstained} of {of} {what} could not be judged, more than ppo.max_abstained allows ({most:g}){told}; repair "
        "what it needs and start the run again, which goes on from its last commit, or raise ppo.max_abstained",
        ends_as=ENDS_AS,
    )
