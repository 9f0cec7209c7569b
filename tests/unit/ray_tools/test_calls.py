"""How actors are waited for: until when, what ends the wait, and whose word counts. Ray is a stand-in here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from infra.errors import StoreError
from rlhf_core.errors import LostRankError, TrainingError
from rlhf_core.ray_tools import calls
from rlhf_core.ray_tools.calls import ask, follow, trouble_among, wait_for, wait_for_all

SETTING = "ppo.cluster.start_timeout_s"


def raised_in_an_actor(cause: Exception) -> RayTaskError:
    return RayTaskError("run_episode", "a remote\ntraceback", cause).as_instanceof_cause()


class Call:
    """A reference: answers with a value or an error once so many seconds have passed; never with None."""

    def __init__(self, answer: Any = None, after_s: float | None = 0.0) -> None:
        self._future: Future[Any] = Future()
        ends = self._future.set_exception if isinstance(answer, Exception) else self._future.set_result
        if after_s:
            Timer(after_s, ends, [answer]).start()
        elif after_s is not None:
            ends(answer)

    def future(self) -> Future[Any]:
        return self._future


class Actor:
    """A handle whose methods answer alike."""

    def __init__(self, make: Callable[[], Call]) -> None:
        self.ping = self
        self.remote = make


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "POLL_S", 0.01)
    monkeypatch.setattr(calls, "GRACE_S", 0.1)


def late(names: Any) -> Exception:
    return TimeoutError(f"late: {', '.join(names)}")


def silent() -> Actor:
    return Actor(lambda: Call(after_s=None))


def alive() -> Actor:
    return Actor(lambda: Call(7))


def dead() -> Actor:
    return Actor(lambda: Call(ActorDiedError()))


def test_answers_come_in_the_order_of_the_calls() -> None:
    assert wait_for({Call(1, 0.02): "a", Call(2): "b"}, 5.0, late=late) == [1, 2]


@pytest.mark.parametrize("cause", [TrainingError("the loss is not finite"), StoreError("the store is away")])
def test_a_sentence_that_an_actor_raised_is_raised_as_itself(cause: Exception) -> None:
    with pytest.raises(type(cause)) as caught:
        wait_for({Call(raised_in_an_actor(cause)): "trainer"}, 5.0, late=late)
    assert caught.value is cause
    assert str(caught.value) == str(cause)


def test_a_bug_in_an_actor_keeps_its_traceback() -> None:
    with pytest.raises(RayTaskError, match="traceback"):
        wait_for({Call(raised_in_an_actor(ValueError("a shape"))): "trainer"}, 5.0, late=late)


def test_one_that_failed_is_heard_while_another_waits_for_it_in_vain() -> None:
    failed = Call(raised_in_an_actor(TrainingError("its own reason")))
    with pytest.raises(TrainingError, match="its own reason"):
        wait_for({Call(after_s=None): "a", failed: "b"}, 300.0, late=late)


def test_who_has_not_answered_by_the_deadline_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"^late: b, c$"):
        wait_for({Call(1): "a", Call(after_s=None): "b", Call(after_s=None): "c"}, 0.05, late=late)
    with pytest.raises(
        TimeoutError,
        match=r"^waited 0 s for ranks to start, and a, b did not answer; raise ppo\.cluster\.start_timeout_s, or look",
    ):
        wait_for_all({Call(after_s=None): "b", Call(after_s=None): "a"}, 0.05, what="ranks to start", setting=SETTING)
    with pytest.raises(TimeoutError, match="waited 0 s for a process of the run's cluster, and no answer came"):
        ask(silent().ping, 0.05)


def test_a_deadline_from_one_answer_to_the_next_starts_again_with_each() -> None:
    made = {Call(1, 0.2): "a", Call(2, 0.4): "b", Call(3, 0.6): "c"}
    assert wait_for(dict(made), 0.35, late=late, each=True) == [1, 2, 3]
    made = {Call(1, 0.2): "a", Call(2, 0.4): "b", Call(3, 0.6): "c"}
    with pytest.raises(TimeoutError, match="late: b, c"):
        wait_for(made, 0.35, late=late)


def test_a_deadline_starts_again_while_something_is_told() -> None:
    told = iter([True] * 20)
    assert wait_for({Call(1, 0.15): "a"}, 0.05, late=late, look=lambda: next(told, False)) == [1]
    with pytest.raises(TimeoutError, match="late: a"):
        wait_for({Call(1, 0.15): "a"}, 0.05, late=late, look=lambda: False)


@pytest.mark.parametrize(
    ("member", "kind", "sentence"),
    [
        (dead, LostRankError, "trainer-1 has ended, a process of the group: "),
        (silent, TimeoutError, "waited 0 s for trainer-1 of the group, and no answer came"),
        (lambda: Actor(lambda: Call(raised_in_an_actor(TrainingError("nan")))), TrainingError, "nan"),
    ],
)
def test_a_member_that_is_in_trouble_ends_the_wait_for_another(
    member: Callable[[], Actor], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=f"^{sentence}"):
        wait_for(
            {Call(after_s=None): "trainer"},
            300.0,
            late=late,
            members={"trainer": alive(), "trainer-1": member()},
            answer_s=0.05,
        )


def test_who_is_waited_for_says_better_what_is_wrong_with_another() -> None:
    own = Call(raised_in_an_actor(LostRankError("rank 1 of 2 is stopped")), 0.04)
    with pytest.raises(LostRankError, match="rank 1 of 2 is stopped"):
        wait_for({own: "trainer"}, 300.0, late=late, members={"trainer-1": dead()})


def test_what_an_actor_does_is_told_as_it_changes_and_last_in_the_error() -> None:
    told: list[str] = []
    states = iter(["collects", "collects", "learns"])
    progress = Actor(lambda: Call(next(states, "learns")))
    assert follow(Call("record", 0.1), progress, 5.0, tell=told.append) == "record"
    assert told == ["collects", "learns"]
    with pytest.raises(TimeoutError, match=r"^waited 0 s for the trainer, which was last seen at: learns$"):
        follow(Call(after_s=None), progress, 0.05, tell=told.append)


def test_without_members_nothing_is_wrong_with_them() -> None:
    assert trouble_among({}, 0.0) is None
    assert trouble_among({"a": alive()}, 1.0) is None


@pytest.mark.parametrize(
    ("answer", "is_dead"),
    [(Call(ActorDiedError()), True), (Call(ActorUnavailableError("it comes up", b"0" * 16)), False),
     (Call(after_s=None), False), (Call(7), False)],
)  # fmt: skip
def test_only_an_actor_that_died_for_good_is_dead(answer: Call, *, is_dead: bool) -> None:
    actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: answer))
    assert calls._is_dead(actor) is is_dead


def test_an_actor_that_comes_late_is_found_and_one_that_does_not_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, "handle"])

    def get_actor(name: str, namespace: str | None = None) -> Any:
        found = next(looks, None)
        if found is None:
            raise ValueError(f"no {name} in {namespace}")
        return found

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(calls, "_LOOK_S", 0.01)
    monkeypatch.setattr(calls, "_is_dead", lambda _: False)
    assert calls.await_actor("maker-0", 5.0) == "handle"
    assert calls.await_actor("maker-0", 0.03) is None
