"""Runs that are killed anywhere in their beginning and started again, and whatever may happen beside them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from flows import begin as beginning
from flows import presets
from infra.artifacts import ArtifactRef, ArtifactStore
from infra.errors import InfraError, StoreError
from rlhf_core.errors import RlhfError
from tasks import context as contexts
from tasks import plan, ppo
from tasks.context import open_context
from tasks.data import SPLITS
from tasks.evaluate import contestants
from tasks.parents import BASE_MODEL, base_model
from tasks.plan import Asker
from tasks.results import Parent, PPORun
from tests.tiny_llama import write_tiny_llama
from tests.unit.tasks.data_files import SMALL, write

MOST_ANSWERS = 20
"""More than a run is given from its beginning to its end."""
KINDS = ("sft", "reward-model", "policy", "dataset")


class KilledError(Exception):
    """The run's process has ended here."""


class Parameters(NamedTuple):
    """What a run is given: its flow, and what was typed or stood in its deployment."""

    flow: str
    actor: str | None
    reward_model: str | None
    seed: int | None


FLOWS: dict[str, dict[str, Any]] = {
    "pipeline": {"trains": "ppo", "reads": SPLITS},
    "sft": {"trains": "sft", "reads": ("sft",)},
    "reward-model": {"trains": "reward-model", "reads": ()},
    "evaluate": {"trains": None, "reads": ("evaluation",)},
    "ppo": {"trains": "ppo", "reads": ("ppo", "evaluation")},
}
PARAMETERS = st.builds(
    Parameters,
    flow=st.just("ppo") | st.sampled_from(sorted(FLOWS)),
    actor=st.sampled_from([None, BASE_MODEL, *(f"{name}/quickstart@latest" for name in ("sft", "policy"))])
    | st.just("policy/quickstart@champion"),
    reward_model=st.sampled_from([None, "reward-model/quickstart@latest"]),
    seed=st.sampled_from([None, 7]),
)


class Found(NamedTuple):
    """What a run is, as one start of it finds out."""

    config: dict[str, Any]
    dataset: str
    actor: str | None
    reward_model: str | None
    run: dict[str, Any] | None = None
    """PPO's, without what depends on the code."""
    contestants: dict[str, Parent] | None = None
    evaluated_with: dict[str, Any] | None = None


class Planned(RuleBasedStateMachine):
    """Models are stored, champions come and go, presets, data and code are edited, runs begin, die and go on."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.directory = Path(tempfile.mkdtemp())
        self.code, self.asker, self.left = "a", Asker("", ""), MOST_ANSWERS
        self.bodies = self.number = 0
        self.parameters: dict[str, Parameters] = {}
        self.found: dict[str, Found] = {}
        self.first_name: dict[str, str] = {}
        self.told: dict[str, dict[str, Any]] = {}

    @initialize()
    def set_up(self) -> None:
        """A store with a model of each kind, presets and data of our own, and flows that are plain functions."""
        for name, value in (
            ("RLHF_HOME", str(self.directory / "home")),
            ("RLHF_ENV_FILE", str(self.directory / ".env")),
            ("RLHF_STORE_URL", f"file://{self.directory}/store"),
        ):
            self.patch.setenv(name, value)
        self.presets = shutil.copytree(presets.DIRECTORY, self.directory / "presets")
        self.patch.setattr(presets, "DIRECTORY", self.presets)
        self.patch.setattr(contexts, "root_flow_run", lambda: self.asker.run)
        for module in (plan, ppo):
            self.patch.setattr(module, "asker_of", lambda _: self.asker)
        self.patch.setattr(ppo, "source_digest", lambda *_: self.code * 64)
        for name in ("preflight", "prepare_data", "check_data", "check_rows_fit"):
            self.patch.setattr(beginning, name, getattr(beginning, name).fn)
        self.patch.setattr("tasks.data._show", lambda *_: None)
        self.patch.setattr("rlhf_core.models.memory.check_memory_for", lambda *_, **__: None)  # half of the time
        self.patch.setattr(ArtifactStore, "record", self._record_unless_killed(ArtifactStore.record))
        self.model = write_tiny_llama(self.directory / "tiny")
        self.rows = self.directory / "rows"
        self.rows.mkdir()
        self.data_are_replaced(0)
        self.asker = Asker("before", "")
        self.store = open_context().store
        self.base = base_model(open_context(), presets.resolve("quickstart", model=str(self.model)))
        for kind in ("reward-model", "policy"):
            self.something_is_stored(kind)
        self.the_latest_is_promoted()

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.directory)

    def _record_unless_killed(self, record: Any) -> Any:
        def call(store: ArtifactStore, *args: Any) -> Any:
            if self.left == 0:
                raise KilledError
            self.left -= 1
            return record(store, *args)

        return call

    def start(self, run: str, *, answers: int = MOST_ANSWERS) -> Found:
        """Return what a run finds out when it is started, and is killed where it would record one answer more."""
        self.left = answers
        model = {"name": "quickstart", "model": str(self.model), "overrides": SMALL}
        flow, actor, reward_model, seed = self.parameters[run]
        self.asker = Asker(run, flow)
        reward_model = None if flow in {"sft", "reward-model"} else reward_model  # they take none
        begun = beginning.begin(
            "quickstart", str(self.rows), **FLOWS[flow], actor=actor, reward_model=reward_model, seed=seed, **model
        )
        config = begun.config.model_dump(mode="json")
        if flow != "ppo":
            return Found(config, begun.dataset.uri, begun.actor, begun.reward_model)
        dataset = begun.dataset.parent
        its: PPORun = ppo.plan_ppo.fn(begun.config, begun.actor, begun.reward_model, dataset)  # type: ignore[attr-defined]
        assert self.first_name.setdefault(run, its.name) in {its.name, its.continues}
        self.asker = Asker(run, "evaluate-00")
        evaluated = beginning.begin("quickstart", dataset.uri, trains=None, reads=("evaluation",), **model)
        return Found(
            config,
            begun.dataset.uri,
            begun.actor,
            begun.reward_model,
            its.model_dump(exclude={"name", "key", "source_digest", "continues"}),
            contestants(evaluated.config, evaluated.actor),
            evaluated.config.model_dump(mode="json"),
        )

    @rule(target=runs, parameters=PARAMETERS, answers=st.integers(0, MOST_ANSWERS))
    def a_run_begins(self, parameters: Parameters, answers: int) -> Any:
        self.number += 1
        run = f"run-{self.number}"
        self.told[run], self.parameters[run] = {}, parameters
        self.it_is_started_again(run, answers)
        return run

    @rule(run=runs, answers=st.integers(0, MOST_ANSWERS))
    def it_is_started_again(self, run: str, answers: int) -> None:
        try:
            found = self.start(run, answers=answers)
        except KilledError:
            return
        except (RlhfError, InfraError):
            if run in self.found:
                raise  # what has begun goes on
            return  # what it needs was broken or is gone before it was stored
        assert self.found.setdefault(run, found) == found

    @rule(kind=st.sampled_from(KINDS))
    def something_is_stored(self, kind: str) -> None:
        self.bodies += 1
        ref = ArtifactRef(self.base.uri, self.base.digest)
        self.store.commit(kind, "quickstart", {"f": str(self.bodies).encode()}, parents=[ref])

    @rule()
    def the_latest_is_promoted(self) -> None:
        self.store.promote(self.store.resolve("policy/quickstart").uri, why="better", who="another run")

    @rule()
    def the_champion_is_rolled_back(self) -> None:
        try:
            self.store.rollback("policy", "quickstart", why="worse", who="a person")
        except StoreError:
            return  # nothing to go back to

    @rule(letter=st.sampled_from("abc"))
    def the_code_is_edited(self, letter: str) -> None:
        self.code = letter

    @rule(seed=st.integers(0, 3))
    def the_preset_is_edited(self, seed: int) -> None:
        file = self.presets / "quickstart.yaml"
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "seed": seed}))

    @rule(first=st.integers(0, 2))
    def data_are_replaced(self, first: int) -> None:
        rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(first, 60)]
        write(self.rows / "1.jsonl", rows)

    @rule(number=st.integers(2, 3))
    def a_file_is_added(self, number: int) -> None:
        write(self.rows / f"{number}.jsonl", [{"question": f"What is 9{number}?", "answer": str(number)}])

    @rule()
    def data_are_deleted(self) -> None:
        for file in self.rows.iterdir():
            file.unlink()

    @invariant()
    def an_answer_that_was_given_stands(self) -> None:
        for run, before in self.told.items():
            now = {f"{each.when} {each.question}": each.answer for each in self.store.plan(run)}
            assert before.items() <= now.items()
            self.told[run] = now

    @invariant()
    def a_restart_finds_what_the_first_start_found(self) -> None:
        for run, found in self.found.items():
            assert self.start(run) == found


Planned.TestCase.settings = hypothesis_settings(max_examples=30, stateful_step_count=12, deadline=None)
