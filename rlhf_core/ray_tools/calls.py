"""Waiting for actors: always with a deadline, and whoever is gone or silent is named.

`wait_for` is the one loop that waits. It is told what to raise when the deadline has passed, what an actor's failure
means, which further actors must stay alive meanwhile, and what to look at between two polls.

All waits here are for futures of Python's, never `ray.wait` or `ray.get`: while those wait, Ray runs the handlers of
signals itself, and what a handler raises is lost or becomes a SystemError, unless it is KeyboardInterrupt or
SystemExit. A flow run that is cancelled would not notice.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from rlhf_core.errors import LostRankError

POLL_S = 2.0
GRACE_S = 15.0
"""How long an awaited actor may take to say itself what is wrong with another: longer than a rank needs to notice."""
_LOOK_S = 0.2
_NAMES_S = 0.05
_SHORTEST_S = 0.001


class SilentError(TimeoutError):
    """An actor gave no sign of life in time."""


def own_sentence(error: RayError, name: str = "") -> Exception | None:  # noqa: ARG001 - as `wait_for` calls it
    """Return what an actor raised, if that is a sentence for the user; None for anything else.

    Such errors, of the core or of what is below a task, have an attribute `passes`.
    """
    if isinstance(error, GetTimeoutError):
        return TimeoutError(str(error))
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if hasattr(cause, "passes") else None


def wait_for(
    calls: Mapping[Any, str],
    timeout_s: float,
    *,
    late: Callable[[Sequence[str]], Exception],
    failed: Callable[[RayError, str], Exception | None] = own_sentence,
    members: Mapping[str, Any] | None = None,
    answer_s: float | None = None,
    look: Callable[[], bool] | None = None,
    each: bool = False,
) -> list[Any]:
    """Return what calls of actors return, in their order.

    A call that failed ends the wait for all: the others may wait for that actor.

    Args:
        calls: reference of each, and whom it was made to.
        timeout_s: longest wait for all together.
        late: returns what is raised after that, given who has not answered.
        failed: returns what a failure of the named actor means; None raises it as it came.
        members: further actors that take part, by name, each with a method `ping`; one that died, failed or is silent
            ends the wait, unless an awaited actor says within moments what is wrong.
        answer_s: longest wait for the members' answers; None takes what is left of `timeout_s`.
        look: called at every poll, to pass on what an actor is doing; returns whether the deadline starts again.
        each: the deadline starts again with each answer.

    Raises:
        Exception: what `late` or `failed` returned, or what is wrong with a member.
    """
    futures: dict[Future[Any], str] = {reference.future(): name for reference, name in calls.items()}
    waiting, until = set(futures), time.monotonic() + timeout_s
    polls = bool(members) or look is not None
    while waiting:
        left_s = max(0.0, until - time.monotonic())
        ready, waiting = concurrent.futures.wait(waiting, min(POLL_S, left_s) if polls else left_s, FIRST_COMPLETED)
        if ready:
            _check(ready, futures, failed)
            until = time.monotonic() + timeout_s if each else until
            continue
        if look is not None and look():
            until = time.monotonic() + timeout_s
        if time.monotonic() >= until:
            raise late([name for future, name in futures.items() if future in waiting])
        trouble = trouble_among(members or {}, left_s if answer_s is None else answer_s)
        if trouble is not None:
            ready, waiting = concurrent.futures.wait(waiting, GRACE_S, FIRST_COMPLETED)
            if not ready:
                raise trouble
            _check(ready, futures, failed)
    return [future.result() for future in futures]


def ask(method: Any, timeout_s: float) -> Any:
    """Call an actor's method without arguments and return its answer.

    Raises:
        TimeoutError: there was none in time.
    """
    (answer,) = wait_for(
        {method.remote(): ""},
        timeout_s,
        late=lambda _: TimeoutError(f"waited {timeout_s:.0f} s for a process of the run's cluster, and no answer came"),
    )
    return answer


def wait_for_all(
    calls: Mapping[Any, str],
    timeout_s: float,
    *,
    what: str,
    setting: str,
    members: Mapping[str, Any] | None = None,
) -> None:
    """Wait for calls of several actors.

    Args:
        calls: reference of each call, and whom it was made to.
        timeout_s: longest wait for all together.
        what: completes the sentence "waited for ...".
        setting: which says how long is waited.
        members: further actors that take part, as for `wait_for`.

    Raises:
        TimeoutError: some did not answer; it names them.
    """

    def late(names: Sequence[str]) -> Exception:
        return TimeoutError(
            f"waited {timeout_s:.0f} s for {what}, and {', '.join(sorted(names))} did not answer; raise {setting}, "
            "or look into the cluster's log"
        )

    wait_for(calls, timeout_s, late=late, members=members)


def follow(
    reference: Any,
    progress: Any,
    timeout_s: float,
    *,
    tell: Callable[[str], None],
    members: Mapping[str, Any] | None = None,
    answer_s: float = 30.0,
) -> Any:
    """Wait for a trainer's call, telling what the trainer does as it changes; return what the call returns.

    Args:
        reference: of the call.
        progress: the actor's method that says what it is doing.
        timeout_s: longest wait for the call.
        tell: takes a line of progress.
        members: further actors that take part, as for `wait_for`.
        answer_s: longest wait for `progress`, and for `members`.

    Raises:
        TimeoutError: it took longer, and the message has what the actor was last seen doing; or a member was silent.
        LostRankError: a member died.
    """
    told = ""

    def look() -> bool:
        nonlocal told
        if (doing := ask(progress, answer_s)) != told:
            tell(doing)
            told = doing
        return False

    def late(_: Sequence[str]) -> Exception:
        return TimeoutError(f"waited {timeout_s:.0f} s for the trainer, which was last seen at: {told}")

    (answer,) = wait_for({reference: ""}, timeout_s, late=late, members=members, answer_s=answer_s, look=look)
    return answer


def trouble_among(members: Mapping[str, Any], answer_s: float) -> BaseException | None:
    """Return what is wrong with the first member that died, failed or is silent; None if all is well.

    Args:
        members: actors by name, each with a method `ping`.
        answer_s: longest wait for all of them.
    """
    found = troubles(members, answer_s)
    for name, error in found.items():
        if isinstance(error, RayActorError):
            return LostRankError(f"{name} has ended, a process of the group: {str(error).splitlines()[0]}")
        if error is not None and not isinstance(error, SilentError):
            return (own_sentence(error) or error) if isinstance(error, RayError) else error
    silent = ", ".join(name for name, error in found.items() if isinstance(error, SilentError))
    return TimeoutError(f"waited {answer_s:.0f} s for {silent} of the group, and no answer came") if silent else None


def troubles(members: Mapping[str, Any], answer_s: float) -> dict[str, BaseException | None]:
    """Return of each actor what its method `ping` raised: `RayActorError` if it has ended, `SilentError` if silent.

    None means that it is alive and that its last work has not failed.
    """
    futures: dict[str, Future[Any]] = {name: actor.ping.remote().future() for name, actor in members.items()}
    ready, _ = concurrent.futures.wait(futures.values(), answer_s)
    silent = SilentError(f"no answer within {answer_s:g} s")
    return {name: future.exception() if future in ready else silent for name, future in futures.items()}


def find_actor(name: str, namespace: str | None = None) -> Any | None:
    """Return the handle of the actor of a name; None if no actor has it."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def await_actor(name: str, timeout_s: float, namespace: str | None = None) -> Any | None:
    """Return the handle of an actor, which may be about to be created, also in the place of one that died.

    Args:
        name: of the actor.
        timeout_s: longest wait for it.
        namespace: Ray's; None is that of this process.

    Returns:
        None if there is none in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = find_actor(name, namespace)
        if found is not None and not _is_dead(found):
            return found
        if time.monotonic() >= deadline:
            return None
        if found is not None:
            ray.kill(found)  # or Ray would give this process the dead actor by that name for ever
        time.sleep(_LOOK_S)


def await_free(names: Collection[str], timeout_s: float) -> set[str]:
    """Wait until actors' names are free, which Ray does a moment after a kill; return those that are not."""
    deadline = time.monotonic() + timeout_s
    while left := set(ray.util.list_named_actors()) & set(names):  # of this process's namespace
        if time.monotonic() > deadline:
            return left
        time.sleep(_NAMES_S)
    return set()


class Deadline:
    """One for all that is waited for in turn.

    Args:
        timeout_s: from now on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._until = timeout_s, time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return what is left of it.

        Raises:
            TimeoutError: if nothing is; a store would take a timeout of 0 ms for none.
        """
        left_s = self._until - time.monotonic()
        if left_s < _SHORTEST_S:
            raise TimeoutError(f"not done within {self._timeout_s:.0f} s")
        return left_s


def within(timeout_s: float, work: Callable[[], object]) -> None:
    """Do something that has no deadline of its own in a thread, which is left to itself if it takes too long.

    Raises:
        TimeoutError: if it does.
        Exception: what it failed with.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # raised again, by whoever waits
            failed.append(error)

    started = time.monotonic()
    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive() or (failed and time.monotonic() - started >= timeout_s):
        raise TimeoutError(f"not done within {timeout_s:.0f} s")
    if failed:
        raise failed[0]


def _check(
    ready: set[Future[Any]], names: Mapping[Future[Any], str], failed: Callable[[RayError, str], Exception | None]
) -> None:
    """Of the calls that have ended, raise the error of the first that failed."""
    for future in (each for each in names if each in ready):
        try:
            future.result()
        except RayError as error:
            _raise(error, failed(error, names[future]))


def _raise(error: RayError, meaning: Exception | None) -> NoReturn:
    if meaning is None:
        raise error
    raise meaning from (None if meaning is getattr(error, "cause", None) else error)  # without Ray's frame around it


def _is_dead(actor: Any) -> bool:
    """Return whether Ray knows that an actor has died for good; Ray says so at once."""
    try:
        actor.__ray_ready__.remote().future().result(_LOOK_S)
    except ActorDiedError:
        return True
    except (RayActorError, TimeoutError):
        return False  # it comes up again, or is busy
    return False
