"""Calls of actors with a deadline; what an actor raised is raised as itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from infra.errors import InfraError
from rlhf_core.errors import LostRankError, RlhfError
from tasks.sentences import run_logger

POLL_S = 2.0
GRACE_S = 15.0
"""How long a rank may take to say itself what is wrong with another: longer than its wait for heartbeats."""


def ask(method: Any, timeout_s: float) -> Any:
    """Call an actor's method without arguments and return its answer.

    Raises:
        TimeoutError: there was none in time.
    """
    import ray

    call = method.remote()
    done, _ = ray.wait([call], timeout=timeout_s)
    if not done:
        raise TimeoutError(f"waited {timeout_s:.0f} s for a process of the run's cluster, and no answer came")
    return unwrapped(lambda: ray.get(call))


def wait_for_all(
    calls: Mapping[Any, str],
    timeout_s: float,
    *,
    what: str,
    setting: str = "start_timeout_s",
    members: Mapping[str, Any] | None = None,
) -> None:
    """Wait for calls of several actors.

    Args:
        calls: reference of each call, and whom it was made to.
        timeout_s: longest wait for all together.
        what: completes the sentence "waited for ...".
        setting: of `ppo.cluster`, which says how long is waited.
        members: further actors that take part, by name, as for `follow`.

    Raises:
        TimeoutError: some did not answer; it names them.
    """
    import ray

    late, deadline = list(calls), time.monotonic() + timeout_s
    while late:
        left_s = max(0.0, deadline - time.monotonic())
        ready, late = ray.wait(late, timeout=min(POLL_S, left_s) if members else left_s)
        unwrapped(partial(ray.get, ready))  # an actor that failed says why, and nobody is waited for
        if ready:
            continue
        if time.monotonic() >= deadline:
            names = ", ".join(sorted(calls[reference] for reference in late))
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for {what}, and {names} did not answer; raise ppo.cluster.{setting}, "
                "or look into the cluster's log"
            )
        trouble = trouble_among(members or {}, left_s)
        if trouble is not None:
            its_own_word(late[0], trouble)


def follow(
    reference: Any,
    progress: Any,
    timeout_s: float,
    *,
    members: Mapping[str, Any] | None = None,
    answer_s: float = 30.0,
) -> Any:
    """Wait for a call, writing what the actor does into the run's log as it changes.

    Args:
        reference: of the call.
        progress: the actor's method that says what it is doing.
        timeout_s: longest wait for the call.
        members: further actors that take part, by name; each says by `ping` that it lives and has not failed.
        answer_s: longest wait for `progress`, and for `members`.

    Raises:
        TimeoutError: it took longer, and the message has what the actor was last seen doing; or a member was silent.
        LostRankError: a member died.
    """
    import ray

    deadline, said = time.monotonic() + timeout_s, ""
    while True:
        done, _ = ray.wait([reference], timeout=POLL_S)
        if done:
            return unwrapped(lambda: ray.get(reference))
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the trainer, which was last seen at: {said}")
        doing = ask(progress, answer_s)
        if doing != said:
            run_logger().debug("%s", doing)
            said = doing
        trouble = trouble_among(members or {}, answer_s)
        if trouble is not None:
            return its_own_word(reference, trouble)


def trouble_among(members: Mapping[str, Any], answer_s: float) -> Exception | None:
    """Return what is wrong with the first member that died, failed or is silent; None if all is well.

    Args:
        members: actors by name, each with a method `ping`.
        answer_s: longest wait for all of them.
    """
    import ray

    calls = {actor.ping.remote(): name for name, actor in members.items()}
    if not calls:
        return None
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=answer_s)
    for reference in ready:
        try:
            unwrapped(partial(ray.get, reference))
        except ray.exceptions.RayActorError as error:
            return LostRankError(f"{calls[reference]} has ended, a process of the group: {str(error).splitlines()[0]}")
        except Exception as error:
            return error
    names = ", ".join(calls[reference] for reference in late)
    return TimeoutError(f"waited {answer_s:.0f} s for {names} of the group, and no answer came") if late else None


def its_own_word(reference: Any, trouble: Exception) -> Any:
    """Return what a call returns, or raise what it raises, if it ends within moments; else raise `trouble`."""
    import ray

    done, _ = ray.wait([reference], timeout=GRACE_S)
    if done:
        return unwrapped(lambda: ray.get(reference))
    raise trouble


def unwrapped(call: Callable[[], Any]) -> Any:
    """Return what `call` returns; a sentence that an actor raised is raised as itself, not as Ray's wrapper."""
    import ray

    try:
        return call()
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(str(error)) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RlhfError | InfraError):
            raise error.cause from None
        raise
