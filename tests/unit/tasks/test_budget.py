"""A night's budget: PPO ends at a commit, starts after a crash decide the same, and the next night goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infra.artifacts import ArtifactRef, ArtifactStore
from rlhf_core.config import PipelineConfig
from rlhf_core.ppo.state import EpisodeRecord
from tasks import budget, forecast, plan
from tasks import context as contexts
from tasks.plan import Asker
from tasks.ppo import delete_states, ends_before, finished_policy, next_episode, publish_policy
from tasks.ppo_keeper import StoreKeeper
from tasks.results import PPORun
from tasks.taken_over import HELD
from tests.unit.tasks import test_ppo_states
from tests.unit.tasks.test_ppo_states import CONFIG, PARENT

HOUR_S = 3600.0


class Night:
    """One run of a flow, whose clock moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked_s = 0.0
        self.said: list[str] = []
        HELD.set(self)  # type: ignore[arg-type]  # it has what is asked of a lock
        monkeypatch.setattr(contexts, "root_flow_run", lambda: self.id)
        monkeypatch.setattr(plan, "asker_of", lambda _: Asker(self.id, "ppo"))
        for module in ("ppo", "forecast"):
            monkeypatch.setattr(f"tasks.{module}.say", lambda _, text: self.said.append(text))
        monkeypatch.setattr(budget, "is_alone", lambda: True)
        self.begin("one")

    def check(self) -> None:
        """No other process has the run."""

    def begin(self, name: str) -> None:
        """Be the first start of another run."""
        self.id, self.worked_s = name, 0.0


@pytest.fixture
def night(monkeypatch: pytest.MonkeyPatch) -> Any:
    token = HELD.set(None)
    yield Night(monkeypatch)
    HELD.reset(token)


def run(episodes: int = 10, **limits: float) -> PPORun:
    config = {**CONFIG, "ppo": {**CONFIG["ppo"], "episodes": episodes}, "budget": limits or {"max_hours": 1.0}}
    return test_ppo_states.run(config=config)


def history(count: int, hours: float = 0.3) -> tuple[EpisodeRecord, ...]:
    seconds = {"generate": hours * HOUR_S / 3, "learn": hours * HOUR_S * 2 / 3}
    return tuple(EpisodeRecord(each, each + 1, "a", {"score": 0.5}, seconds) for each in range(count))


@pytest.fixture
def commit(store: ArtifactStore) -> Callable[[int], None]:
    """Return a function that commits the state after so many episodes of 0.3 hours."""

    def state(count: int) -> None:
        parents = [ArtifactRef(PARENT.uri, PARENT.digest)]
        row = history(count)[-1].as_row()
        config = run().config.model_dump(mode="json")
        files = {"state.json": b"{}", "samples.jsonl": b""}
        store.commit("ppo-state", run().name, files, version=count, parents=parents, config=config, metrics=row,
                     source_digest="new")  # fmt: skip

    return state


def play(night: Night, commit: Callable[[int], None], run: PPORun, *, takes_h: float = 0.3) -> int:
    """Run a night's episodes as the flow does, each in so much time; return how many are done."""
    due = next_episode(run)
    while due < run.config.ppo.episodes and ends_before(run, due, None) is None:
        night.worked_s += takes_h * HOUR_S
        due += 1
        commit(due)
    return due


def test_ppo_ends_before_an_episode_that_would_not_fit_and_says_so_in_one_sentence(
    night: Night, commit: Callable[[int], None]
) -> None:
    assert play(night, commit, run()) == 3  # 0.9 h of 1; a fourth would end at 1.2
    assert night.said[-1] == (
        "the night's budget of 1 hours (budget.max_hours) ends PPO after 3 of 10 episodes: 54:00 min of 60:00 min are "
        "spent, the next would take 18:00 min; the next run with the same configuration and data goes on"
    )


def test_the_next_night_goes_on_and_the_last_one_has_all_episodes(night: Night, commit: Callable[[int], None]) -> None:
    done = []
    for name in ("one", "two", "three", "four"):
        night.begin(name)
        done.append(play(night, commit, run()))
    assert done == [3, 6, 9, 10]


def test_a_start_after_a_crash_counts_on_and_decides_the_same(night: Night, commit: Callable[[int], None]) -> None:
    assert ends_before(run(), 0, None) is None
    night.worked_s += 0.5 * HOUR_S  # and the process dies: its lock has counted this
    assert play(night, commit, run()) == 1  # 0.8 h: with a second episode it would be 1.1
    assert play(night, commit, run()) == 1
    night.worked_s = 0.0  # whatever is counted later, what was said stands
    assert play(night, commit, run()) == 1


def test_every_night_comes_one_episode_further_as_long_as_anything_is_left(
    night: Night, commit: Callable[[int], None]
) -> None:
    tight = run(max_hours=0.1)
    assert [(night.begin(name), play(night, commit, tight))[1] for name in ("one", "two")] == [1, 2]
    night.begin("three")
    night.worked_s = 0.1 * HOUR_S  # SFT has spent all
    assert play(night, commit, tight) == 2
    assert "after 2 of 10 episodes: 6:00 min of 6:00 min are spent" in night.said[-1]


def test_room_is_left_for_the_evaluation_which_earlier_nights_took(
    night: Night, commit: Callable[[int], None], store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flow_run, seconds in (("old", 400.0), ("old", 500.0), ("other", 100.0)):
        store.commit("evaluation", "p", {"f": str(seconds).encode()}, metrics={"seconds": seconds}, flow_run=flow_run)
    assert play(night, commit, run(max_hours=1.0)) == 3  # PPO alone
    night.begin("two")
    monkeypatch.setattr(budget, "is_alone", lambda: False)
    assert play(night, commit, run(max_hours=1.0)) == 5  # 0.6 + 0.3 + 900 s would be 1.15 h
    assert "the next would take 18:00 min, the evaluation 15:00 min; the next run" in night.said[-1]


def test_gpus_and_cost_count_and_are_asked_for_once(
    night: Night, commit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [4, 1]
    monkeypatch.setattr("tasks.gpu_allocation.available_gpus", lambda _: gpus.pop(0))
    assert play(night, commit, run(max_gpu_hours=4.0)) == 3
    assert budget.spent(contexts.open_context(), run(cost_per_hour=10, cost_per_gpu_hour=5).config) == pytest.approx(
        (0.9, 3.6, 27.0)  # of 4 GPUs, at 10 + 4 * 5 an hour
    )
    assert gpus == [1]


def test_without_a_budget_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "open_context", None)
    monkeypatch.setattr("tasks.ppo.open_context", None)
    assert ends_before(test_ppo_states.run(), 0, None) is None


def test_the_policy_of_a_night_is_its_own_and_the_finished_one_is_found_by_the_runs_key(
    commit: Callable[[int], None], store: ArtifactStore
) -> None:
    commit(3)

    def save(directory: Any) -> None:
        (directory / "weights").write_bytes(b"w")

    StoreKeeper(run()).commit_policy(save, history=history(3))
    assert finished_policy(run(), reused=True) is None
    made = publish_policy.fn(run(), 3, is_over=False)  # asked again: no cluster is started
    assert (made.uri, made.metrics["episodes"], made.metrics["planned_episodes"]) == ("policy/p@1", 3, 10)
    assert next_episode(run()) == 3  # its states stay
    commit(10)
    StoreKeeper(run()).commit_policy(save, history=history(10))
    found = finished_policy(run(), reused=True)
    assert found is not None
    assert (found.uri, found.metrics["episodes"], "planned_episodes" in found.metrics) == ("policy/p@2", 10, False)
    delete_states(run())
    assert [manifest.version for manifest in store.list("ppo-state")] == [11]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"dataset": PARENT.model_copy(update={"uri": "dataset/p@2", "digest": "1" * 64})},
            "its data is now dataset/p@2",
        ),
        (
            {"config": {**CONFIG, "seed": 5, "ppo": {**CONFIG["ppo"], "lr": 0.5}}},
            "the configuration has other ppo.lr, seed",
        ),
    ],
)
def test_a_night_that_begins_anew_says_why(
    night: Night, commit: Callable[[int], None], changes: dict[str, Any], why: str
) -> None:
    commit(3)
    StoreKeeper(run()).commit_policy(lambda directory: (directory / "w").write_bytes(b""), history=history(3))
    other = test_ppo_states.run(name="p-bbbbbbbbbbbb", **changes)
    assert next_episode(other) == 0
    assert night.said[-1] == (
        "begins with the first episode: ppo-state/p-aaaaaaaaaaaa@3, which a night's budget ended, is not gone on with, "
        f"for {why}"
    )


class TestForecast:
    def config(self, **limits: float) -> PipelineConfig:
        return PipelineConfig.model_validate({**CONFIG, "budget": limits})

    def earlier(self, store: ArtifactStore) -> None:
        for kind, seconds in (("sft", 360.0), ("reward-model", 180.0), ("evaluation", 72.0)):
            store.commit(kind, "p", {"f": b""}, metrics={"seconds": seconds}, flow_run="old")
        store.commit("dataset", "p-preferences", {"f": b""}, metrics={"seconds": 180.0})
        store.commit("policy", "p", {"f": b""}, metrics={"seconds": 720.0, "episodes": 2})

    def test_the_first_night_has_none(self, night: Night) -> None:
        forecast.foretell(self.config(max_hours=1.0), sft=True)
        assert night.said == ["forecast: no earlier run to forecast from (p)"]

    def test_it_tells_hours_and_cost_by_stage(self, night: Night, store: ArtifactStore) -> None:
        self.earlier(store)
        forecast.foretell(self.config(max_hours=2.0, cost_per_hour=10.0), sft=True, evaluation=True)
        assert night.said == [
            "forecast: sft 0.10 h (cost 1.00), ppo 1.00 h (cost 10.00), evaluate 0.02 h (cost 0.20); in all 1.12 h "
            "(cost 11.20) for 10 episodes, less what the store holds already; the limit is 2 hours (budget.max_hours)"
        ]

    def test_it_warns_where_not_even_one_episode_fits(self, night: Night, store: ArtifactStore) -> None:
        self.earlier(store)
        forecast.foretell(self.config(max_hours=0.15), sft=True)  # 0.1 h of SFT and 0.1 h for an episode
        assert night.said[-1].startswith(
            "warning: 0.15 hours (budget.max_hours) do not hold even one episode, which takes 12:00 min with the other"
        )

    def test_nothing_is_said_without_a_budget(self, night: Night, store: ArtifactStore) -> None:
        self.earlier(store)
        forecast.foretell(self.config(), sft=True)
        assert night.said == []


def test_outside_of_a_run_nothing_is_counted() -> None:
    assert budget.worked_s() == 0.0
