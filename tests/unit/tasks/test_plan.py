"""A run is what it was when it began, whatever happens beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect.client import orchestration
from prefect.context import FlowRunContext

from flows import begin as beginning
from flows import presets
from flows.begin import Begun
from flows.presets import Draft, draft_of, resolve
from infra.artifacts import ArtifactRef, ArtifactStore
from infra.errors import ReferenceNotFoundError, StoreError
from infra.settings import CHECKOUT
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models import loading
from tasks import context as contexts
from tasks import plan, ppo, source
from tasks.context import open_context
from tasks.evaluate import contestants
from tasks.parents import base_model, settle_policy, settle_reward_model
from tasks.plan import Asker, recalled, recorded, settled_once
from tasks.ppo import next_episode
from tasks.ppo_keeper import StoreKeeper, last_state
from tasks.promote import promote
from tasks.results import Decision, Parent, PPORun, StageResult
from tasks.stages import once_in_a_run
from tests.tiny_llama import write_tiny_llama
from tests.unit.tasks.data_files import SMALL, write
from tests.unit.tasks.planned import Planned


@pytest.fixture
def as_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process the one of a run."""
    return lambda run: monkeypatch.setattr(contexts, "root_flow_run", lambda: run)


@pytest.fixture
def base(model: Path) -> Parent:
    return base_model(open_context(), preset(model))


def preset(model: Path, **changes: Any) -> PipelineConfig:
    return resolve("quickstart", model=str(model), overrides=changes)


def put(store: ArtifactStore, kind: str, body: bytes, base: Parent) -> ArtifactRef:
    return store.commit(kind, "quickstart", {"f": body}, parents=[ArtifactRef(base.uri, base.digest)])


def test_outside_prefect_nothing_is_recorded(store: ArtifactStore) -> None:
    assert [settled_once(open_context(), "n", int, lambda n=n: n) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
    assert store._backend.children("plans/") == []


def test_the_first_answer_stands_and_each_run_has_its_own(as_run: Any) -> None:
    as_run("one")
    assert [settled_once(open_context(), "n", int, lambda n=n: n) for n in (1, 2)] == [1, 1]  # type: ignore[misc]
    as_run("two")
    assert settled_once(open_context(), "n", int, lambda: 3) == 3


def test_each_call_of_a_flow_in_a_run_asks_for_itself(as_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_run("one")

    def told(call: str, answer: int, *, by_all: bool = False) -> int:
        monkeypatch.setattr(plan, "asker_of", lambda _: Asker("one", call))
        return settled_once(open_context(), "n", int, lambda: answer, by_all=by_all)

    assert [told("sweep", 1), told("ppo-00", 2), told("ppo-00-2", 3), told("ppo-11", 4)] == [1, 2, 3, 4]
    assert [told("sweep", 5), told("ppo-00", 6), told("ppo-00-2", 7), told("ppo-11", 8)] == [1, 2, 3, 4]
    assert [told(call, n, by_all=True) for n, call in enumerate(("sweep", "ppo-00", "ppo-11"))] == [0, 0, 0]


def test_each_call_of_a_task_in_a_flow_asks_for_itself_and_each_attempt_at_it_the_same(
    as_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_run("one")

    def told(process: str, task_run: str, answer: int) -> int:
        monkeypatch.setattr(plan, "asker_of", lambda _: Asker("one", "sweep"))
        monkeypatch.setattr(plan, "_ASKED", asked.setdefault(process, {}))
        monkeypatch.setattr(plan, "_task_run", lambda: task_run)
        return settled_once(open_context(), "n", int, lambda: answer)

    asked: dict[str, dict[Any, list[str]]] = {}
    assert [told("first", "a", 1), told("first", "a", 2), told("first", "b", 3)] == [1, 1, 3]
    assert [told("second", "c", 4), told("second", "d", 5)] == [1, 3]


class TestAskers:
    """Whose answer it is: that of the run which a worker starts again, and of the call in it."""

    @pytest.fixture(autouse=True)
    def server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand for the flow runs `own` of a deployment, in it the task runs a, b and c, and `alone` without one."""
        runs = {
            "own": SimpleNamespace(id="own", deployment_id="d", parent_task_run_id=None),
            "alone": SimpleNamespace(id="alone", deployment_id=None, parent_task_run_id=None),
        }
        client = SimpleNamespace(
            read_task_run=lambda key: SimpleNamespace(flow_run_id="alone" if key == "z" else "own"),
            read_flow_run=lambda key: runs[key],
        )
        monkeypatch.setattr(orchestration, "get_client", lambda **_: nullcontext(client))
        monkeypatch.setattr(plan, "_ASKERS", {})
        monkeypatch.setattr(plan, "_CALLS", {})

    def asker(
        self, patch: pytest.MonkeyPatch, run: str, *, task: str | None, deployment: str | None = None, **given: Any
    ) -> Asker:
        def ppo(seed: int = 0) -> None:
            """Stand for a flow."""

        found = SimpleNamespace(id=run, deployment_id=deployment, parent_task_run_id=task)
        here = SimpleNamespace(flow_run=found, flow=SimpleNamespace(name="ppo", fn=ppo), parameters=given)
        patch.setattr(FlowRunContext, "get", lambda: here)
        told = plan.asker_of(SimpleNamespace(flow_run="outermost"))  # type: ignore[arg-type]
        assert told is not None
        return told

    def test_the_run_of_a_deployment_asks_as_itself_whoever_called_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.asker(monkeypatch, "own", task=None, deployment="d") == Asker("own", "ppo")
        assert self.asker(monkeypatch, "child", task="a", deployment="other") == Asker("child", "ppo")

    def test_calls_in_it_are_told_apart_by_arguments_that_are_not_defaults_and_by_number(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = self.asker(monkeypatch, "1", task="a")
        assert plain.run == "own"
        assert self.asker(monkeypatch, "2", task="b", seed=7).call != plain.call
        again = self.asker(monkeypatch, "3", task="c", seed=0)
        assert (again.run, again.call) == ("own", f"{plain.call}-2")
        assert self.asker(monkeypatch, "4", task="a") == plain, "its caller was tried again"

    def test_without_a_deployment_the_outermost_run_asks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.asker(monkeypatch, "1", task="z").run == "alone"


def test_whatever_a_flow_is_told_is_read_as_it_was_written(as_run: Any, model: Path) -> None:
    as_run("one")
    context = open_context()
    draft = draft_of("quickstart", data="x.jsonl", overrides={"data.splits.ppo": 32, "ppo.prompts_per_episode": 16})
    assert recorded(context, "draft", Draft, draft) == draft
    assert recalled(context, "draft", Draft) == draft
    dataset = StageResult(stage="data", uri="dataset/a@1", digest="d", reused=False, seconds=0.5, metrics={"n": 3})
    begun = Begun(preset(model), dataset, "sft/a@1", None)
    assert recorded(context, "began", Begun, begun) == begun
    assert recalled(context, "began", Begun) == begun


def test_a_record_in_a_form_of_another_release_is_refused_in_a_sentence(as_run: Any) -> None:
    as_run("one")
    recorded(open_context(), "n", str, "x")
    with pytest.raises(StoreError, match="in a form that this release does not read; start a new run"):
        recalled(open_context(), "n", int)


def test_a_base_model_that_was_changed_beside_the_run_is_refused(as_run: Any, model: Path, tmp_path: Path) -> None:
    as_run("one")
    own = shutil.copytree(model, tmp_path / "own")
    config = preset(own)
    base_model(open_context(), config)
    write_tiny_llama(own, initializer_range=0.1)
    with pytest.raises(ConfigError, match="has other content than when this run began"):
        base_model(open_context(), config)
    as_run("another")
    base_model(open_context(), config)


class TestModels:
    """The latest and the champion, as they were when the run began."""

    def test_the_first_sft_model_of_another_run_does_not_take_the_place_of_the_base(
        self, as_run: Any, model: Path, store: ArtifactStore, base: Parent, caplog: pytest.LogCaptureFixture
    ) -> None:
        as_run("one")
        assert settle_policy(open_context(), preset(model), None, trained=False) == "model/base"
        assert "takes the base model " in caplog.messages[-1]
        assert "there is no sft/quickstart yet (the parameter `actor` names another)" in caplog.messages[-1]
        put(store, "sft", b"1", base)
        assert settle_policy(open_context(), preset(model), None, trained=False) == "model/base"
        as_run("two")
        assert settle_policy(open_context(), preset(model), None, trained=False) == "sft/quickstart@1"
        assert "takes sft/quickstart@1, the latest SFT model that was made from " in caplog.messages[-1]
        assert "of 1 version of sft/quickstart (the parameter" in caplog.messages[-1]

    def test_an_alias_is_what_it_was(
        self, as_run: Any, model: Path, store: ArtifactStore, base: Parent, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = (put(store, "policy", body, base) for body in (b"1", b"2"))
        store.promote(first.uri, why="", who="")
        as_run("one")
        champion = "policy/quickstart@champion"
        assert settle_policy(open_context(), preset(model), champion, trained=False) == first.uri
        assert f"takes {first.uri}, which {champion} is now, of 2 versions" in caplog.messages[-1]
        store.promote(second.uri, why="", who="")
        assert settle_policy(open_context(), preset(model), champion, trained=False) == first.uri
        as_run("two")
        assert settle_policy(open_context(), preset(model), champion, trained=False) == second.uri

    def test_a_version_is_taken_as_it_is_and_is_in_no_record(
        self, as_run: Any, model: Path, store: ArtifactStore, base: Parent
    ) -> None:
        as_run("one")
        made = put(store, "reward-model", b"1", base)
        before = store.plan("one")
        assert settle_reward_model(open_context(), preset(model), made.uri) == made.uri
        assert store.plan("one") == before
        with pytest.raises(ReferenceNotFoundError, match="the store has no reward-model/quickstart@2"):
            settle_reward_model(open_context(), preset(model), "reward-model/quickstart@2")

    def test_what_a_run_began_with_and_is_gone_is_told_in_a_sentence(
        self, as_run: Any, model: Path, store: ArtifactStore, base: Parent
    ) -> None:
        as_run("one")
        put(store, "sft", b"1", base)
        settle_policy(open_context(), preset(model), None, trained=False)
        put(store, "sft", b"2", base)
        store.prune("sft", "quickstart", keep=1)
        with pytest.raises(
            ReferenceNotFoundError, match=r"this run began with sft/quickstart@1, but .*start a new run"
        ):
            settle_policy(open_context(), preset(model), None, trained=False)

    def test_a_record_that_names_something_else_is_refused(
        self, as_run: Any, model: Path, store: ArtifactStore, base: Parent
    ) -> None:
        as_run("one")
        made = put(store, "dataset", b"1", base)
        recorded(open_context(), "actor", Parent, Parent(uri=made.uri, digest=made.digest))
        with pytest.raises(StoreError, match="dataset/quickstart@1 is a dataset, but a reference to sft or policy"):
            settle_policy(open_context(), preset(model), None, trained=False)


ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(80)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "rows.jsonl", ROWS))


@pytest.fixture
def own_presets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Call a flow's beginning without a server, on presets of our own; return where they lie."""
    own = shutil.copytree(presets.DIRECTORY, tmp_path / "presets", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(presets, "DIRECTORY", own)
    for name in ("preflight", "prepare_data", "check_data", "check_rows_fit"):
        monkeypatch.setattr(beginning, name, getattr(beginning, name).fn)
    monkeypatch.setattr("tasks.data._show", lambda *_: None)
    return own


def begin(data: Path | str, model: Path, **parameters: Any) -> Begun:
    flow = {"name": "quickstart", "trains": "sft", "reads": ("sft",)}
    found: Begun = beginning.begin("quickstart", str(data), **flow, model=str(model), overrides=SMALL, **parameters)
    return found


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "quickstart.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))


class TestData:
    """Configuration and data, as they were when the run began."""

    def test_a_run_keeps_both_when_both_are_edited(
        self, as_run: Any, rows: Path, model: Path, own_presets: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        as_run("one")
        before = begin(rows, model)
        edit(own_presets, seed=77)
        rows.unlink()
        caplog.clear()
        assert begin(rows, model) == before
        assert "goes on as it began (" in caplog.messages[0]
        assert f" UTC): {before.dataset.uri}" in caplog.messages[0]
        assert "the preset quickstart was edited since: that counts for new runs, not for this one" in caplog.text
        as_run("two")
        with pytest.raises(DataError, match=r"rows\.jsonl"):
            begin(rows, model)

    def test_a_preset_that_is_edited_in_mid_run_means_the_next_run(
        self, as_run: Any, rows: Path, model: Path, own_presets: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        as_run("one")

        def called_by(call: str, data: str) -> Begun:
            monkeypatch.setattr(plan, "asker_of", lambda _: Asker("one", call))
            return begin(data, model)

        first = called_by("pipeline", str(rows))
        edit(own_presets, seed=77)
        assert called_by("ppo-00", first.dataset.uri).config.seed == first.config.seed != 77

    @pytest.mark.usefixtures("own_presets")
    def test_all_flows_and_starts_of_a_run_compute_alike(
        self, as_run: Any, rows: Path, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def begun_by(call: str, *, is_fast: bool) -> Begun:
            monkeypatch.setattr(plan, "asker_of", lambda _: Asker("one", call))
            monkeypatch.setattr(loading, "has_fast_bfloat16", lambda: is_fast)
            return begin(rows, model)

        as_run("one")
        slow = begun_by("pipeline", is_fast=False)
        assert slow.config.sft.dtype == "float32"
        assert begun_by("pipeline", is_fast=True) == slow
        assert begun_by("sft-00", is_fast=True).config.sft.dtype == "float32"

    def test_a_mistake_is_not_recorded(self, as_run: Any, rows: Path, model: Path, own_presets: Path) -> None:
        as_run("one")
        edit(own_presets, sede=1)
        with pytest.raises(ConfigError, match="sede"):
            begin(rows, model)
        shutil.copy(Path(presets.__file__).parent / "quickstart.yaml", own_presets)
        begin(rows, model)

    def test_a_mistake_that_preflight_finds_is_not_recorded_either(
        self, as_run: Any, rows: Path, model: Path, own_presets: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise ConfigError("two choices exclude each other")

        as_run("one")
        with monkeypatch.context() as patch:
            patch.setattr(beginning, "preflight", refuse)
            with pytest.raises(ConfigError, match="exclude each other"):
                begin(rows, model)
        edit(own_presets, seed=77)
        assert begin(rows, model).config.seed == 77

    @pytest.mark.usefixtures("own_presets")
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda file: write(file, [*ROWS, ROWS[0] | {"question": "And 9?"}]), "is 81 rows of .* now, and was not"),
            (lambda file: write(file, ROWS[1:]), r"was 80 rows of \S+rows.jsonl when this run began, is 79 rows of"),
            (
                lambda file: write(file, [*ROWS[1:], ROWS[0] | {"question": "And 9?"}]),
                "is 80 rows of .* of other content",
            ),
            (lambda file: file.unlink(), r"rows.jsonl.* \(data.problems was 80 rows of \S+ when this run began, and"),
        ],
        ids=["appended to", "cut", "altered", "deleted"],
    )
    def test_data_that_were_changed_before_they_were_stored_are_refused(
        self, as_run: Any, rows: Path, model: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
    ) -> None:
        as_run("one")

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("tasks.data._made", killed)
            with pytest.raises(KeyboardInterrupt):
                begin(rows, model)
        change(rows)
        with pytest.raises(DataError, match=said) as refused:
            begin(rows, model)
        assert "put back what was there, or start a new run" in str(refused.value)
        write(rows, ROWS)
        begin(rows, model)

    @pytest.mark.usefixtures("own_presets")
    def test_data_that_were_stored_are_needed_no_longer(
        self, as_run: Any, rows: Path, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        as_run("one")

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(beginning, "settled", killed)
            with pytest.raises(KeyboardInterrupt):
                begin(rows, model)
        rows.unlink()
        assert begin(rows, model).dataset.uri == "dataset/quickstart@1"

    @pytest.mark.usefixtures("own_presets")
    def test_a_new_file_of_a_pattern_is_for_the_next_run(self, as_run: Any, model: Path, tmp_path: Path) -> None:
        (tmp_path / "rows").mkdir()
        write(tmp_path / "rows" / "1.jsonl", ROWS)
        as_run("one")
        before = begin(tmp_path / "rows" / "*.jsonl", model)
        write(tmp_path / "rows" / "2.jsonl", [{"question": "And 9?", "answer": "9"}])
        assert begin(tmp_path / "rows" / "*.jsonl", model) == before
        as_run("two")
        assert begin(tmp_path / "rows" / "*.jsonl", model).dataset.digest != before.dataset.digest

    @pytest.mark.usefixtures("own_presets")
    def test_the_latest_dataset_is_what_it_was(
        self, as_run: Any, rows: Path, model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        as_run("first")
        begin(rows, model)
        as_run("one")
        before = begin("dataset/quickstart", model)
        assert "takes dataset/quickstart@1, which dataset/quickstart is now, of 1 version" in caplog.text
        write(rows, ROWS[1:])
        as_run("second")
        assert begin(rows, model).dataset.uri == "dataset/quickstart@2"
        as_run("one")
        assert begin("dataset/quickstart", model) == before
        as_run("two")
        assert begin("dataset/quickstart", model).dataset.uri == "dataset/quickstart@2"


class TestOtherCode:
    """A run that is started again with other code goes on, and what that makes is found by this run alone."""

    @pytest.fixture
    def planned(
        self, as_run: Any, model: Path, store: ArtifactStore, base: Parent, monkeypatch: pytest.MonkeyPatch
    ) -> Any:
        """Return a function that says what PPO's run is, by flow run and by code."""
        put(store, "reward-model", b"1", base)
        made = put(store, "dataset", b"1", base)
        dataset = Parent(uri=made.uri, digest=made.digest)

        def find(run: str, code: str) -> PPORun:
            as_run(run)
            monkeypatch.setattr(ppo, "source_digest", lambda *_: code * 64)
            return ppo.plan_ppo.fn(preset(model), "model/base", None, dataset)  # type: ignore[attr-defined,no-any-return]

        return find

    def test_its_name_and_key_are_its_own_whatever_the_code_is_by_then(self, planned: Any) -> None:
        first, other = planned("one", "a"), planned("one", "b")
        assert (other.continues, other.source_digest) == (first.name, "b" * 64)
        assert {other.name, other.key}.isdisjoint({first.name, first.key})
        assert (other.actor, other.dataset, other.config) == (first.actor, first.dataset, first.config)
        for code in "cab":  # it stays under that name, with the first code again too: its last commit is there
            again = planned("one", code)
            assert (again.name, again.key, again.source_digest) == (other.name, other.key, code * 64)
        assert planned("two", "a") == first.model_copy(update={"flow_run": "two"})
        new = planned("three", "b")
        assert {new.name, new.key}.isdisjoint({first.name, first.key, other.name, other.key})

    def test_it_goes_on_from_its_last_commit(
        self, planned: Any, store: ArtifactStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = planned("one", "a")
        left = store.commit("ppo-state", first.name, {"state.json": b""}, version=3)
        other = planned("one", "b")
        assert "it goes on from its last commit with the code of now" in caplog.messages[-1]
        assert next_episode(other) == 3
        assert f"goes on from {left.uri}: 3 of 10 episodes are done" in caplog.messages[-1]
        own = store.commit("ppo-state", other.name, {"state.json": b"1"}, version=4)
        assert (next_episode(other), next_episode(first)) == (4, 3)
        found = last_state(store, planned("one", "c"))
        assert found is not None
        assert found.ref == own

    def test_its_states_and_policy_come_from_the_state_that_it_continues(
        self, planned: Any, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = planned("one", "a")
        left = store.commit("ppo-state", first.name, {"state.json": b"{}"}, version=3)
        other = planned("one", "b")
        monkeypatch.setattr("tasks.ppo_keeper.state_from_json", lambda *_, **__: None)

        def parents_of_a_start() -> list[str]:
            keeper = StoreKeeper(other)
            keeper.last_state()
            return [parent.uri for parent in keeper._parents()]

        inputs = [other.actor.uri, "reward-model/quickstart@1", "dataset/quickstart@1"]
        assert parents_of_a_start() == [*inputs, left.uri]
        refs = [left if uri == left.uri else uri for uri in parents_of_a_start()]
        store.commit("ppo-state", other.name, {"state.json": b"{}"}, version=4, parents=refs)
        assert parents_of_a_start() == [*inputs, left.uri]

    def test_a_policy_that_the_first_code_has_finished_is_taken(self, planned: Any, store: ArtifactStore) -> None:
        first = planned("one", "a")
        store.commit("policy", "quickstart", {"f": b"p"}, key=first.key)
        assert planned("one", "b") == first

    def test_a_reward_function_is_code_too(self, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        first = planned("one", "a")
        monkeypatch.setattr("rlhf_core.rewards.verifying.judge_facts", lambda *_: {"code": "edited"})
        assert planned("one", "a").continues == first.name

    def test_a_run_of_an_earlier_release_goes_on_with_models_of_its_own(self, planned: Any, as_run: Any) -> None:
        first = planned("one", "a")
        assert first.shares_base
        facts = first.model_dump(mode="json", exclude={"base", "reward_model_base"})
        facts["config"]["ppo"]["update_lora_weights"] = False  # as it stood in every record
        as_run("old")
        recorded(open_context(), "run", PPORun, PPORun.model_validate(facts))
        for code in "ab":
            again = planned("old", code)
            assert (again.base, again.reward_model_base, again.shares_base) == (None, None, False)
            assert again.config.ppo.update_lora_weights is False

    def test_the_record_leads_to_no_directory(self, planned: Any, store: ArtifactStore, model: Path) -> None:
        assert planned("one", "a").actor.path == str(model)
        [recorded_run] = [each.answer for each in store.plan("one") if each.question == "run"]
        assert isinstance(recorded_run, dict)
        assert str(model.parent) not in json.dumps([recorded_run["actor"], recorded_run["base"]])


class TestEditedCode:
    """A run half done is found again after an edit that changes no number, by any flow run; after another it is not."""

    CORE = Path("rlhf_core/ppo/episode.py")

    @pytest.fixture
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """Return a copy of all that the digest of the code covers, which takes the place of ours."""
        own = tmp_path / "checkout"
        for name in ("rlhf_core", "tasks"):
            shutil.copytree(CHECKOUT / name, own / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(CHECKOUT / "requirements.txt", own)
        monkeypatch.setattr(source, "CHECKOUT", own)
        yield own
        self.forget()

    @pytest.fixture
    def planned(self, checkout: Path, as_run: Any, model: Path, store: ArtifactStore, base: Parent) -> Any:
        """Return a function that says what PPO's run is, by flow run and by what lies in the checkout now."""
        del checkout
        put(store, "reward-model", b"1", base)
        made = put(store, "dataset", b"1", base)
        dataset = Parent(uri=made.uri, digest=made.digest)

        def find(run: str) -> PPORun:
            as_run(run)
            self.forget()
            return ppo.plan_ppo.fn(preset(model), "model/base", None, dataset)  # type: ignore[attr-defined,no-any-return]

        return find

    @staticmethod
    def forget() -> None:
        source.source_digest.cache_clear()
        source._core.cache_clear()

    def half_done(self, planned: Any, store: ArtifactStore) -> PPORun:
        run: PPORun = planned("one")
        config = run.config.model_dump(mode="json")
        store.commit(
            "ppo-state", run.name, {"state.json": b""}, version=3, config=config, source_digest=run.source_digest
        )
        return run

    def edit(self, checkout: Path, old: str, new: str) -> None:
        file = checkout / self.CORE
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))

    def test_a_run_half_done_before_an_edit_of_a_comment_goes_on_after_it(
        self, planned: Any, checkout: Path, store: ArtifactStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = self.half_done(planned, store)
        line = "    def _take(self, window: Window) -> PPOStats:\n"
        self.edit(checkout, line, f"    # Once.\n{line}        '''Take a step.'''\n\n")
        for run in ("one", "two"):  # the flow run that began it, and another
            after = planned(run)
            assert after == before.model_copy(update={"flow_run": run})
            assert next_episode(after) == 3
            assert f"goes on from ppo-state/{before.name}@3: 3 of 10 episodes are done" in caplog.messages[-1]

    def test_after_an_edit_of_code_another_flow_run_begins_anew(
        self, planned: Any, checkout: Path, store: ArtifactStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = self.half_done(planned, store)
        self.edit(checkout, "self.position.windows += 1", "self.position.windows += 2")
        after = planned("two")
        assert {after.name, after.key, after.source_digest}.isdisjoint({before.name, before.key, before.source_digest})
        assert next_episode(after) == 0
        assert f"ppo-state/{before.name}@3 is of the same configuration, but was made by other code" in caplog.text


def test_a_stage_that_was_done_is_not_done_again_with_other_code(as_run: Any, store: ArtifactStore) -> None:
    as_run("one")

    def make(body: bytes) -> StageResult:
        ref = store.commit("sft", "s", {"f": body})
        return StageResult(stage="sft", uri=ref.uri, digest=ref.digest, reused=False, seconds=1.0, metrics={})

    first = once_in_a_run(open_context(), "sft", lambda: make(b"1"))
    assert once_in_a_run(open_context(), "sft", lambda: make(b"2")) == first
    as_run("two")
    assert once_in_a_run(open_context(), "sft", lambda: make(b"2")).uri == "sft/s@2"
    store.prune("sft", "s", keep=1)
    as_run("one")
    assert once_in_a_run(open_context(), "sft", lambda: make(b"3")).uri == "sft/s@3"


class TestPromotion:
    """The gate compares with the champion of that moment, and the run moves the alias once."""

    def test_whoever_is_evaluated_is_who_was_evaluated(
        self, as_run: Any, model: Path, store: ArtifactStore, base: Parent, caplog: pytest.LogCaptureFixture
    ) -> None:
        old, new, another = (put(store, "policy", body, base) for body in (b"1", b"2", b"3"))
        store.promote(old.uri, why="", who="")
        as_run("one")
        before = contestants(preset(model), new.uri)
        assert {role: each.uri for role, each in before.items()} == {
            "base": base.uri, "ppo": new.uri, "champion": old.uri,
        }  # fmt: skip
        assert f"base {base.uri}, ppo {new.uri}, champion {old.uri}" in caplog.messages[-1]
        store.promote(another.uri, why="", who="")
        assert contestants(preset(model), new.uri) == before
        decision = decided(new, champion=old.uri)
        with pytest.raises(StoreError, match=r"points at policy/quickstart@3"):
            promote.fn(decision)  # type: ignore[attr-defined]
        assert store.alias("policy", "quickstart", "champion") == another.uri

    @pytest.mark.parametrize("since", ["nothing", "rolled back", "replaced"])
    def test_a_run_that_is_started_again_after_its_promotion_leaves_what_was_done_since(
        self, as_run: Any, store: ArtifactStore, base: Parent, since: str
    ) -> None:
        old, new, another = (put(store, "policy", body, base) for body in (b"1", b"2", b"3"))
        store.promote(old.uri, why="", who="")
        as_run("one")
        decision = decided(new, champion=old.uri)
        assert promote.fn(decision) == new.uri  # type: ignore[attr-defined]
        if since == "rolled back":
            store.rollback("policy", "quickstart", why="worse", who="a person")
        if since == "replaced":
            store.promote(another.uri, why="better", who="another")
        now = store.alias("policy", "quickstart", "champion")
        assert promote.fn(decision) == now  # type: ignore[attr-defined]
        assert store.alias("policy", "quickstart", "champion") == now


def decided(policy: ArtifactRef, *, champion: str) -> Decision:
    figures = {"difference": 0.1, "low": 0.05, "high": 0.2}
    return Decision(promote=True, reason="better", policy=policy.uri, incumbent=champion, champion=champion, **figures)


TestWhateverHappensBeside = Planned.TestCase
