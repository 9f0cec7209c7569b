"""How a flow ends that met an error."""

from __future__ import annotations

import pickle
import signal
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from prefect import State
from prefect.exceptions import FailedRun, TerminationSignal
from prefect.states import StateType

from infra.errors import ClusterError, InfraError, StoreAwayError
from infra.services.automations import RESUMES
from rlhf_core.errors import DataError, ModelError, RlhfError
from rlhf_core.models import memory
from tasks import task_errors
from tasks.failures import ends_as, is_unattended
from tasks.task_errors import give_memory_back, in_one_sentence, memory_held


def test_a_users_mistake_is_a_failed_state_with_its_sentence() -> None:
    @in_one_sentence
    def task() -> None:
        raise DataError("no row")

    state = task()  # type: ignore[func-returns-value]
    assert (state.type, state.message) == (StateType.FAILED, "no row")  # type: ignore[attr-defined]


class Run(NamedTuple):
    """As much of Prefect's flow run as the end of a flow looks at."""

    deployment_id: object = "d"
    tags: tuple[str, ...] = (RESUMES,)
    run_count: int = 1
    parent_task_run_id: object = None


def ended_by(error: Exception, run: Run | None, monkeypatch: pytest.MonkeyPatch) -> State[Any]:
    """Return the state of a flow that met an error."""

    @in_one_sentence
    def flow() -> None:
        raise error

    monkeypatch.setattr(task_errors, "_flow_run", lambda: run)
    return flow()  # type: ignore[func-returns-value,return-value]


AWAY = StoreAwayError("the store did not answer")
NAME = "Failed: artifact store out of reach"


def raised_by(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Return what a subflow that an error ended raises in its caller: Prefect raises what lies in the state."""
    data = ended_by(error, Run(deployment_id=None, tags=(), parent_task_run_id="t"), monkeypatch).data
    assert isinstance(data, Exception)
    return data


@pytest.mark.parametrize(
    ("run", "ends", "says"),
    [
        (Run(), "Crashed", "; this was start 1 of 4, and the next goes on from the last commit"),
        (Run(run_count=3), "Crashed", "; this was start 3 of 4, and the next goes on from the last commit"),
        (Run(run_count=4), NAME, "; this was the last of 4 starts, and the run is not started again by itself"),
        (Run(tags=()), NAME, "; run it again when that has passed: it goes on from its last commit"),
        (Run(deployment_id=None), NAME, "; run it again when that has passed: it goes on from its last commit"),
        (None, NAME, "; run it again when that has passed: it goes on from its last commit"),
        (Run(deployment_id=None, tags=(), parent_task_run_id="t"), "Crashed", ""),
        (Run(parent_task_run_id="t"), "Crashed", "; this was start 1 of 4, and the next goes on from the last commit"),
    ],
)
def test_what_passes_leaves_a_run_to_be_started_again_where_somebody_does_that(
    run: Run | None, ends: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (AWAY, raised_by(AWAY, monkeypatch)):  # its own, or that of a task or subflow
        state = ended_by(error, run, monkeypatch)
        assert state.name == ends
        assert str(state.message).startswith(f"{AWAY}{says}")


def test_what_is_final_ends_a_run_as_failed_whoever_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = DataError("no row")
    users_own = FailedRun("no row")
    for error, name in (
        (refused, "Refused: data"),
        (raised_by(refused, monkeypatch), "Refused: data"),
        (users_own, "Failed"),
    ):
        for run in (Run(), Run(run_count=4), None, Run(parent_task_run_id="t")):
            state = ended_by(error, run, monkeypatch)
            assert (state.type, state.name, state.message) == (StateType.FAILED, name, "no row")


def test_the_name_of_an_end_is_one_of_a_few_and_fits_a_line() -> None:
    kinds: list[Any] = [RlhfError, InfraError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) > 20
    for name in {kind.ends_as for kind in kinds} | {memory._TOO_LITTLE}:
        assert name == "Failed" or name.startswith(("Failed: ", "Refused: "))
        assert len(name) <= 40
    crash = httpx.ConnectError("refused")
    assert (ends_as(crash), ends_as(TimeoutError())) == ("Failed: server out of reach", "Failed: timed out")


def test_an_error_keeps_the_name_that_it_was_given_in_another_process() -> None:
    error = ModelError("80 GB", ends_as="Refused: too little memory")
    assert pickle.loads(pickle.dumps(error)).ends_as == "Refused: too little memory"


def test_the_prefect_server_that_is_away_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    request = httpx.Request("POST", "http://127.0.0.1:4200/api/flow_runs/")
    state = ended_by(httpx.ConnectError("Connection refused", request=request), Run(), monkeypatch)
    assert state.type is StateType.CRASHED
    assert str(state.message).startswith("the Prefect server at http://127.0.0.1:4200 did not answer, however often")


def test_nobody_waits_for_a_run_of_a_deployment_nor_for_its_subflows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    look = in_one_sentence(lambda: seen.append(is_unattended()))
    inner = Run(deployment_id=None, parent_task_run_id="t")
    runs = [Run(), Run(deployment_id=None), None, inner, Run(parent_task_run_id="t")]
    for run in runs:
        monkeypatch.setattr(task_errors, "_flow_run", lambda run=run: run)
        look()
    assert seen == [True, False, False, False, True]

    @in_one_sentence
    def around() -> None:
        monkeypatch.setattr(task_errors, "_flow_run", lambda: inner)
        look()

    monkeypatch.setattr(task_errors, "_flow_run", Run)
    around()
    assert seen[5:] == [True]
    assert not is_unattended()


def test_a_signal_that_ray_turned_into_an_error_is_raised_as_itself() -> None:
    @in_one_sentence
    def task() -> None:
        hidden = "<built-in method __new__ of type object> returned a result with an exception set"
        raise SystemError(hidden) from TerminationSignal(signal.SIGTERM)

    with pytest.raises(TerminationSignal):
        task()


def test_what_fails_while_a_cancelled_run_clears_up_does_not_make_it_a_failed_one() -> None:
    @in_one_sentence
    def flow() -> None:
        try:
            raise TerminationSignal(signal.SIGTERM)
        finally:
            raise ClusterError("the cluster has died")

    with pytest.raises(TerminationSignal):
        flow()


def test_an_error_without_a_signal_behind_it_stays_what_it_is() -> None:
    @in_one_sentence
    def task() -> None:
        raise SystemError("a bug")

    with pytest.raises(SystemError, match="a bug"):
        task()


def test_freed_memory_goes_back_to_the_system_where_there_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[None] = []
    monkeypatch.setattr(task_errors.gc, "collect", lambda: collected.append(None))
    give_memory_back()
    collected.clear()
    give_memory_back()
    assert not collected
    before = memory_held()
    pieces = [torch.zeros(2000) for _ in range(30_000)]  # 240 MB, in pieces that glibc keeps
    pieces = pieces[-1:]  # behind all others
    assert memory_held() > before + (128 << 20)
    give_memory_back()
    assert collected == [None]
    assert memory_held() < before + (64 << 20)
