"""A run is what it was when it began, whatever happens beside it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flows import begin as beginning
from flows import presets
from flows.presets import resolve
from infra.artifacts import ArtifactRef, ArtifactStore
from infra.errors import StoreError
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError, DataError
from tasks import context as contexts
from tasks import ppo
from tasks.context import open_context
from tasks.evaluate import contestants
from tasks.parents import base_model, resolve_policy, resolve_reward_model
from tasks.plan import settled_once
from tasks.promote import promote
from tasks.results import Decision, Parent, PPORun
from tests.tiny_llama import write_tiny_llama


@pytest.fixture
def as_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process the one of a run."""
    return lambda run: monkeypatch.setattr(contexts, "root_flow_run", lambda: run)


def test_outside_prefect_nothing_is_recorded(store: ArtifactStore) -> None:
    assert [settled_once(open_context(), "n", int, lambda n=n: n) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
    assert store._backend.children("plans/") == []


def test_the_first_answer_stands_and_each_run_has_its_own(as_run: Any) -> None:
    as_run("one")
    assert [settled_once(open_context(), "n", int, lambda n=n: n) for n in (1, 2)] == [1, 1]  # type: ignore[misc]
    as_run("two")
    assert settled_once(open_context(), "n", int, lambda: 3) == 3


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (b"{", "which says what a run began with, cannot be read; start a new run"),
        (b'{"schema_version": 2, "answer": {"is": 1}}', "but this release reads 1: a later one wrote it"),
        (b'{"schema_version": 1, "answer": {"is": "x"}}', "in a form that this release does not read"),
    ],
)
def test_a_record_of_no_use_is_told_in_a_sentence(as_run: Any, store: ArtifactStore, note: bytes, said: str) -> None:
    as_run("one")
    settled_once(open_context(), "n", int, lambda: 1)
    [name] = store._backend.children("plans/one/")
    store._backend.delete(f"plans/one/{name}")
    store._backend.create(f"plans/one/{name}", note)
    with pytest.raises(StoreError, match=said):
        settled_once(open_context(), "n", int, lambda: 1)


def test_a_base_model_that_was_changed_beside_the_run_is_refused(as_run: Any, model: Path, tmp_path: Path) -> None:
    as_run("one")
    own = shutil.copytree(model, tmp_path / "own")
    config = resolve("quickstart", model=str(own))
    base_model(open_context(), config)
    write_tiny_llama(own, initializer_range=0.1)
    with pytest.raises(ConfigError, match="has other content than when this run began"):
        base_model(open_context(), config)
    as_run("another")
    base_model(open_context(), config)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(200))
    )
    return file


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Call a flow's beginning without a server, on presets of our own; return where they lie."""
    own = shutil.copytree(presets.DIRECTORY, tmp_path / "presets", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(presets, "DIRECTORY", own)
    for name in ("preflight", "prepare_data", "check_data"):
        monkeypatch.setattr(beginning, name, getattr(beginning, name).fn)
    monkeypatch.setattr("tasks.data._show", lambda *_: None)
    return own


def begun(rows: Path, model: Path) -> tuple[dict[str, Any], str]:
    found = beginning.begin("quickstart", str(rows), trains="sft", reads=("sft",), model=str(model))
    return found.config.model_dump(mode="json"), found.dataset.uri


def test_a_run_keeps_its_configuration_and_its_data_when_both_are_edited(
    as_run: Any, rows: Path, model: Path, plainly: Path
) -> None:
    as_run("one")
    before = begun(rows, model)
    preset = plainly / "quickstart.yaml"
    values = yaml.safe_load(preset.read_text())
    values["seed"] = 77
    preset.write_text(yaml.safe_dump(values))
    rows.unlink()
    assert begun(rows, model) == before
    as_run("two")
    with pytest.raises(DataError):
        begun(rows, model)


@pytest.mark.usefixtures("plainly")
def test_data_that_were_changed_before_they_were_stored_are_refused(
    as_run: Any, rows: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_run("one")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tasks.data.reuse_or_make", killed)
        with pytest.raises(KeyboardInterrupt):
            begun(rows, model)
    text = rows.read_text()
    rows.write_text(text + json.dumps({"question": "What is 500 + 1?", "answer": "501"}) + "\n")
    with pytest.raises(DataError, match=r"the data for .* have changed since this run began, and were not stored yet"):
        begun(rows, model)
    rows.write_text(text)
    begun(rows, model)


class Beside(RuleBasedStateMachine):
    """What may happen beside a run: models are stored, champions come and go, code is edited, other runs begin."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.directory = Path(tempfile.mkdtemp())
        self.code, self.run = "a" * 64, "first"
        for name, value in (
            ("RLHF_HOME", str(self.directory / "home")),
            ("RLHF_ENV_FILE", str(self.directory / ".env")),
            ("RLHF_STORE_URL", f"file://{self.directory}/store"),
        ):
            self.patch.setenv(name, value)
        (self.directory / "store").mkdir()
        self.patch.setattr(contexts, "root_flow_run", lambda: self.run)
        self.patch.setattr(ppo, "source_digest", lambda *_: self.code)

    @initialize()
    def begin(self) -> None:
        model = write_tiny_llama(self.directory / "tiny")
        self.config = resolve("quickstart", model=str(model), overrides={"bootstrap": True})
        self.store = open_context().store
        self.base = base_model(open_context(), self.config)
        self.dataset = self.commit("dataset", [])
        self.commit("reward-model", [self.base])
        self.commit("policy", [self.base])
        self.number = 0
        self.plans: dict[str, tuple[Any, ...]] = {}
        self.other_run("first")

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.directory)

    def commit(self, kind: str, parents: list[Parent]) -> Parent:
        """Store a model of a few bytes."""
        self.number = getattr(self, "number", 0) + 1
        made = self.store.commit(
            kind,
            "quickstart",
            {"f": bytes([self.number])},
            parents=[ArtifactRef(each.uri, each.digest) for each in parents],
        )
        return Parent(uri=made.uri, digest=made.digest)

    def plan(self, run: str) -> tuple[Any, ...]:
        """Return what a run is, as each of its starts finds it out."""
        self.run = run
        context = open_context()
        its: PPORun = ppo.plan_ppo.fn(self.config, None, None, self.dataset)  # type: ignore[attr-defined]
        return (
            its.model_copy(update={"key": "", "source_digest": ""}),
            resolve_policy(context, self.config, None),
            resolve_reward_model(context, self.config, None),
            contestants(self.config, None),
        )

    @rule(run=st.sampled_from(["second", "third"]))
    def other_run(self, run: str) -> None:
        self.plans.setdefault(run, self.plan(run))

    @rule(kind=st.sampled_from(["sft", "reward-model", "policy"]))
    def something_is_stored(self, kind: str) -> None:
        self.commit(kind, [self.base])

    @rule()
    def the_latest_is_promoted(self) -> None:
        self.store.promote(self.store.resolve("policy/quickstart").uri, why="better", who="another run")

    @rule()
    def the_champion_is_rolled_back(self) -> None:
        alias = self.store.aliases("policy", "quickstart").get("champion")
        if alias and len({move.uri for move in alias.history}) > 1:
            try:
                self.store.rollback("policy", "quickstart", why="worse", who="a person")
            except StoreError:
                return  # nothing to go back to

    @rule(letter=st.sampled_from("abc"))
    def the_code_is_edited(self, letter: str) -> None:
        self.code = letter * 64

    @invariant()
    def a_restart_finds_what_the_first_start_found(self) -> None:
        for run, plan in getattr(self, "plans", {}).items():
            assert self.plan(run) == plan


Beside.TestCase.settings = hypothesis_settings(max_examples=10, stateful_step_count=12, deadline=None)
TestBeside = Beside.TestCase


def test_what_new_code_makes_is_not_found_as_if_the_old_had_made_it(
    as_run: Any, model: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: PipelineConfig = resolve("quickstart", model=str(model), overrides={"bootstrap": True})
    base = base_model(open_context(), config)
    made = store.commit("reward-model", "quickstart", {"f": b"1"}, parents=[ArtifactRef(base.uri, base.digest)])
    dataset = Parent(uri=made.uri, digest=made.digest)
    as_run("one")
    found = {}
    for code in "aab":
        monkeypatch.setattr(ppo, "source_digest", lambda *_, code=code: code * 64)
        found[code] = ppo.plan_ppo.fn(config, None, None, dataset)  # type: ignore[attr-defined]
    assert found["a"].name == found["b"].name, "it goes on from its last commit"
    assert found["a"].key != found["b"].key
    assert found["b"].source_digest == "b" * 64
    as_run("two")
    assert ppo.plan_ppo.fn(config, None, None, dataset).key not in {found["a"].key, found["b"].key}  # type: ignore[attr-defined]


def test_a_run_that_was_killed_after_it_had_promoted_leaves_the_champion_when_it_is_started_again(
    as_run: Any, store: ArtifactStore
) -> None:
    old, new, later = (store.commit("policy", "quickstart", {"f": bytes([n])}) for n in range(3))
    store.promote(old.uri, why="first", who="another run")
    decision = Decision(
        promote=True,
        reason="better",
        policy=new.uri,
        incumbent=old.uri,
        champion=old.uri,
        difference=0.2,
        low=0.1,
        high=0.3,
    )
    as_run("one")
    assert promote.fn(decision) == new.uri  # type: ignore[attr-defined]
    assert promote.fn(decision) == new.uri  # type: ignore[attr-defined]
    store.promote(later.uri, why="better still", who="another run")
    assert promote.fn(decision) == later.uri  # type: ignore[attr-defined]
    assert len(store.aliases("policy", "quickstart")["champion"].history) == 3
