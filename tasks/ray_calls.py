"""Calls of actors with a deadline; what an actor raised is raised as itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from infra.errors import InfraError
from rlhf_core.errors import RlhfError
from tasks.sentences import run_logger

POLL_S = 2.0


def ask(method: Any, timeout_s: float) -> Any:
    """Call an actor's method without arguments and return its answer.

    Raises:
        TimeoutError: there was none in time.
    """
    import ray

    return unwrapped(lambda: ray.get(method.remote(), timeout=timeout_s))


def wait_for_all(calls: Mapping[Any, str], timeout_s: float, *, what: str) -> None:
    """Wait for calls of several actors.

    Args:
        calls: reference of each call, and whom it was made to.
        timeout_s: longest wait for all together.
        what: completes the sentence "waited for ...".

    Raises:
        TimeoutError: some did not answer; it names them.
    """
    import ray

    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    unwrapped(lambda: ray.get(ready))  # an actor that failed says why here
    if late:
        names = ", ".join(sorted(calls[reference] for reference in late))
        raise TimeoutError(
            f"waited {timeout_s:.0f} s for {what}, and {names} did not answer; raise ppo.cluster.start_timeout_s, or "
            "look into the cluster's log"
        )


def follow(reference: Any, progress: Any, timeout_s: float, *, answer_s: float = 30.0) -> Any:
    """Wait for a call, writing what the actor does into the run's log as it changes.

    Args:
        reference: of the call.
        progress: the actor's method that says what it is doing.
        timeout_s: longest wait for the call.
        answer_s: longest wait for `progress`.

    Raises:
        TimeoutError: it took longer; the message has what the actor was last seen doing.
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


def may_pass(error: BaseException) -> bool:
    """Whether a new group of actors can mend it: a dead process or a late answer; never a bug or a bad number."""
    import ray

    from rlhf_core.detached.dealer import MakersLostError

    if isinstance(error, ray.exceptions.RayTaskError):  # raised inside an actor: what it raised decides
        error = error.cause
    return isinstance(error, ray.exceptions.RayActorError | MakersLostError | TimeoutError | ConnectionError)


def sentence(error: BaseException) -> str:
    """Return one line for a person, of an error that `may_pass` and did not."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, ray.exceptions.RayActorError):
        return f"a process of the run's cluster died, three times in a row: {first} Look into the cluster's log"
    return first
