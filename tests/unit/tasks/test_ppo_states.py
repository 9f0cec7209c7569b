"""Training states of every format are read by this release, or refused in a sentence that says where to begin again."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from infra.artifacts import ArtifactStore
from infra.artifacts.manifest import ENDED
from infra.errors import StoreError
from infra.settings import settings
from rlhf_core.config import LoRAConfig, PipelineConfig, PPOConfig
from rlhf_core.errors import ModelError
from rlhf_core.ppo import state as states
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.state import EpisodeRecord, RolloutState, TrainingState
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import EpisodeControls, Sample
from tasks import ppo_keeper
from tasks.ppo import delete_states, ends_before, finished_policy, next_episode, ppo_episode, publish_policy
from tasks.ppo_keeper import StoreKeeper
from tasks.results import Parent, PPORun
from tests.unit.ppo.test_learner import learner

CONFIG = PipelineConfig.model_validate(
    {"name": "p", "data": {"task": "number_sorting"}, "ppo": {"episodes": 10}}
).model_dump(mode="json")
PARENT = Parent(uri="model/tiny", digest="0" * 64)

FORMAT_1 = """{
 "format": 1,
 "learner": {
  "actor": {"schedule": {"base_lrs": [0.0001], "last_epoch": 2, "_step_count": 3, "_is_initial": false,
   "_get_lr_called_within_step": false, "_last_lr": [7.5e-05]}},
  "critic": {"schedule": {"base_lrs": [0.001], "last_epoch": 2, "_step_count": 3, "_is_initial": false,
   "_get_lr_called_within_step": false, "_last_lr": [0.00075]}},
  "learner": {"steps": 2, "value_line": null},
  "controls": {"kl_coef": 0.25, "scores": [8, 0.5, 1.5]}
 },
 "history": [
  {"episode": 0, "policy_version": 1, "incarnation": "a", "metrics": {"score": 0.5}, "seconds": {"learn": 2.0}},
  {"episode": 1, "policy_version": 2, "incarnation": "b", "metrics": {"reward": 0.75}, "seconds": {"learn": 1.0}}
 ]
}"""
"""As the release that called its format 1 wrote it. Never to be changed: states like it are in people's stores."""
PROJECTIONS = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 128), "mlp.up_proj": (64, 128), "mlp.down_proj": (128, 64),
}  # fmt: skip
"""Of the tiny Llama: features that go in, and out."""


def named_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of such a state: adapters of rank 2 on two layers, and the critic's head."""
    weights: dict[str, tuple[int, ...]] = {"critic.{}.head.weight": (1, 64), "critic.{}.head.bias": (1,)}
    for role, layers in (("actor", "model.layers"), ("critic", "trunk.layers")):
        for layer in (0, 1):
            for projection, (into, out) in PROJECTIONS.items():
                path = f"{role}.{{}}.{layers}.{layer}.{projection}"
                weights |= {
                    f"{path}.lora_A.default.weight": (2, into),
                    f"{path}.lora_B.default.weight": (out, 2),
                }
    for name, shape in weights.items():
        yield name.format("weights"), shape
        yield name.format("optimizer.step"), ()
        yield name.format("optimizer.exp_avg"), shape
        yield name.format("optimizer.exp_avg_sq"), shape


def value(name: str) -> float:
    """What every number of a tensor is; exact in float32."""
    return 2.0 if ".step." in name else sum(name.encode()) % 64 / 64


def safetensors() -> bytes:
    """The tensors as the format has them: length of the header, the header, the numbers."""
    header, body = {}, b""
    random = bytes(torch.Generator().manual_seed(5).get_state().tolist())
    tensors = {"random.cpu": ("U8", [len(random)], random)} | {
        name: ("F32", list(shape), struct.pack(f"<{prod(shape)}f", *[value(name)] * prod(shape)))
        for name, shape in named_shapes()
    }
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def run(**changes: Any) -> PPORun:
    facts = {
        "name": "p-aaaaaaaaaaaa", "key": "a" * 64, "preset": "p", "config": CONFIG, "actor": PARENT,
        "reward_model": None, "dataset": PARENT, "source_digest": "new", "flow_run": None,
    }  # fmt: skip
    return PPORun.model_validate(facts | changes)


def put(store: ArtifactStore, state: str, tensors: bytes) -> StoreKeeper:
    files: dict[str, Path | bytes] = {
        "state.json": state.encode(), "samples.jsonl": b"", "training-00000.safetensors": tensors,
    }  # fmt: skip
    store.commit("ppo-state", run().name, files, version=2)
    return StoreKeeper(run())


def without_format(state: str) -> str:
    return state.replace(' "format": 1,\n', "")


@pytest.mark.parametrize("text", [FORMAT_1, without_format(FORMAT_1)], ids=["format 1", "before formats had numbers"])
def test_a_state_of_format_1_is_gone_on_with(store: ArtifactStore, text: str) -> None:
    state = put(store, text, safetensors()).last_state()
    assert state is not None
    assert state.history[1] == EpisodeRecord(1, 2, "b", {"score": 0.75}, {"learn": 1.0}, rollouts={})
    assert state.position == Position(2, 0, 2)
    assert state.rollouts == RolloutState(counts={}, controls={}, waiting=())  # lockstep: nothing was on its way
    ours = learner(warmup_steps=3, lora=LoRAConfig(r=2))
    with torch.random.fork_rng():
        ours.load_state(state.tensors, state.learner)
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())

    held, facts = ours.state()
    assert {name: tuple(tensor.shape) for name, tensor in held.items() if name != "random.cpu"} == dict(named_shapes())
    for name, tensor in held.items():
        assert name == "random.cpu" or (tensor == value(name)).all(), name
    assert ours.steps == 2
    assert facts["actor"]["schedule"]["_last_lr"] == [7.5e-05]
    controls = RewardControls(PPOConfig.model_validate(CONFIG["ppo"]), ALONE)
    assert state.controls is not None
    controls.load_state(state.controls)
    assert controls.state() == {"kl_coef": 0.25, "scores": [8, 0.5, 1.5]}


FORMAT_2 = """{
 "format": 2,
 "learner": {"learner": {"steps": 3, "value_line": null}, "controls": {"kl_coef": 0.25, "scores": [8, 0.5, 1.5]}},
 "history": [{"episode": 0, "policy_version": 1, "incarnation": "a", "metrics": {"reward": 0.5, "kl": 1.0},
  "seconds": {"learn": 2.0}, "dealing": {"queue_depth": 8.0}}],
 "dealing": {"books": {"issued": 9, "waiting": 1}, "controls": {"1": [0.1, 0.0, 1.0]}, "waiting": [
  {"index": 3, "maker": "maker-1", "experience": {}, "samples": [], "seconds": {"score": 0.5}, "episode": 1,
   "version": 0}]}
}"""
"""As the release that called its format 2 wrote it, with a chunk made ahead. Never to be changed."""


def test_a_state_of_format_2_is_gone_on_with_its_chunks_made_ahead_included(store: ArtifactStore) -> None:
    tensors = save({"w": torch.ones(2), "waiting.1.3.reward": torch.full((1, 2), 0.5)})
    state = put(store, FORMAT_2, tensors).last_state()
    assert state is not None
    assert state.history == (EpisodeRecord(0, 1, "a", {"score": 0.5, "kl": 1.0}, {"learn": 2.0}, {"queue_depth": 8.0}),)
    assert (state.position, state.learner) == (Position(1, 0, 3), {"learner": {"steps": 3, "value_line": None}})
    assert state.controls == {"kl_coef": 0.25, "scores": [8, 0.5, 1.5]}
    assert list(state.tensors) == ["w"]
    assert state.rollouts.counts == {"issued": 9, "waiting": 1}
    assert state.rollouts.controls == {1: EpisodeControls(0.1, 0.0, 1.0)}
    (chunk,) = state.rollouts.waiting
    assert (chunk.episode, chunk.index, chunk.experience["reward"].tolist()) == (1, 3, [[0.5, 0.5]])


def commit(tensors: dict[str, torch.Tensor], *history: EpisodeRecord, rollouts: RolloutState | None = None) -> None:
    position = Position(len(history), 0, 1)
    state = TrainingState(position, {"steps": 1}, None, tensors, history=history, rollouts=rollouts or RolloutState())
    StoreKeeper(run()).commit_state(state, [])


def test_what_is_written_says_its_format(store: ArtifactStore) -> None:
    record = EpisodeRecord(0, 1, "a", {"score": 0.5}, {"learn": 2.0}, {"queue_depth": 8.0})
    commit({"w": torch.tensor([1.5, -2.0])}, record)
    manifest = store.resolve(f"ppo-state/{run().name}@1")
    assert store.read_json(manifest, "state.json") == {
        "format": 3,
        "position": {"episode": 1, "windows": 0, "step": 1, "passes": 0},
        "learner": {"steps": 1},
        "controls": None,
        "history": [
            {"episode": 0, "policy_version": 1, "incarnation": "a", "metrics": {"score": 0.5},
             "seconds": {"learn": 2.0}, "rollouts": {"queue_depth": 8.0}}
        ],
        "rollouts": {"counts": {}, "controls": {}, "waiting": [], "pushed": 0},
        "front": {},
    }  # fmt: skip
    state = StoreKeeper(run()).last_state()
    assert state is not None
    assert (state.learner, state.history) == ({"steps": 1}, (record,))
    assert state.tensors["w"].tolist() == [1.5, -2.0]


@pytest.mark.usefixtures("store")
def test_what_was_made_and_not_learnt_comes_back_as_it_was() -> None:
    sample = Sample(
        prompt="p", answer="a", response="r", key="k", score=0.1, verifier=0.0, well_formed=True, rm_score=None,
        kl=0.2, length=3, ended=True, index=1, raw_scores={"gsm8k": 10.0},
    )  # fmt: skip
    arrays = {
        "sequences": np.array([[1, 2, 3]]),
        "action_mask": np.array([[True, False]]),
        "reward": np.array([[0.1, 0.0]], dtype=np.float32),
    }
    chunk = MadeChunk(3, "maker-1", arrays, [sample], {"generate": 1.0, "score": 0.5}, episode=2, version=1)
    books = {"issued": 9, "learnt": 8, "dropped": 0, "lost": 0, "out": 0, "waiting": 1}
    rollouts = RolloutState(books, {2: EpisodeControls(0.1), 3: EpisodeControls(0.3, score_std=2.5)}, (chunk,))
    commit({"w": torch.ones(1)}, EpisodeRecord(0, 1, "a", {"score": 0.5}, {"learn": 2.0}), rollouts=rollouts)
    state = StoreKeeper(run()).last_state()
    assert state is not None
    assert list(state.tensors) == ["w"]  # the learner is given its own alone
    assert (state.rollouts.counts, state.rollouts.controls) == (books, rollouts.controls)
    (back,) = state.rollouts.waiting
    assert replace(back, experience={}) == replace(chunk, experience={})
    assert back.experience.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back.experience[name].dtype == array.dtype
        np.testing.assert_array_equal(back.experience[name], array)


@pytest.mark.parametrize(
    ("retention", "kept"), [(None, [3, 4]), ("ppo-state=3", [2, 3, 4]), ("ppo-state=all", [1, 2, 3, 4])]
)
def test_a_run_keeps_as_many_states_as_the_settings_say(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, retention: str | None, kept: list[int]
) -> None:
    if retention is not None:
        monkeypatch.setenv("RLHF_RETENTION", retention)
        assert settings().child_environment()["RLHF_RETENTION"] == retention  # an actor's too
    history: tuple[EpisodeRecord, ...] = ()
    for episode in range(4):
        history += (EpisodeRecord(episode, episode + 1, "a", {"score": 0.5}, {"learn": 2.0}),)
        tensors = {"w": torch.tensor([float(episode)])}
        commit(tensors, *history)
    assert [manifest.version for manifest in store.list("ppo-state")] == kept


@pytest.mark.parametrize(
    ("retention", "kept"), [(None, [11]), ("sft=5", [11]), ("ppo-state=2", [9, 10]), ("policy=5", [9, 10])]
)
def test_states_go_when_the_policy_is_stored_unless_the_settings_keep_them(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, retention: str | None, kept: list[int]
) -> None:
    if retention is not None:
        monkeypatch.setenv("RLHF_RETENTION", retention)
    delete_states(run())  # whose policy an earlier release stored, and whose states are gone
    history = tuple(EpisodeRecord(each, each + 1, "a", {"score": 0.5}, {"learn": 2.0}) for each in range(10))
    for episode in (8, 9):
        commit({"w": torch.tensor([float(episode)])}, *history[: episode + 1])
    keeper = StoreKeeper(run())
    keeper.commit_policy(lambda directory: (directory / "weights").write_bytes(b"w"), history=history)
    assert publish_policy.fn(run()).uri == "policy/p@1"  # asked again: no cluster is started
    for _ in range(2):  # the second time, by a run that was killed meanwhile
        delete_states(run())
    assert [manifest.version for manifest in store.list("ppo-state")] == kept
    if kept == [11]:
        ended = store.resolve(f"ppo-state/{run().name}")
        assert {entry.path for entry in ended.files} == {"state.json", "samples.jsonl"}
        assert len(store.read_json(ended, "state.json")["history"]) == 10
        for go_on in (lambda: next_episode(run()), keeper.last_state):
            with pytest.raises(ModelError, match=r"p-aaaaaaaaaaaa has ended, .*; if that was deleted, .* another seed"):
                go_on()
        assert ppo_episode.fn(run(), 9) is None  # of a second flow run, which waited for the cluster of the first
        assert next_episode(run(name="p-bbbbbbbbbbbb", continues=run().name)) == 0


def test_the_best_episodes_policy_survives_in_every_state_and_is_what_is_stored(store: ArtifactStore) -> None:
    figures = [0.5, 0.75, 0.25]
    history = tuple(
        EpisodeRecord(at, at + 1, "a", {"score": 0.5, "development": figure}, {"learn": 2.0})
        for at, figure in enumerate(figures)
    )
    keeper = StoreKeeper(run())

    def write(text: bytes) -> Any:
        def save(directory: Path) -> None:
            (directory / "tokens").mkdir()
            (directory / "tokens" / "t.json").write_bytes(b"t")
            (directory / "model.safetensors").write_bytes(text)

        return save

    for at in range(3):
        if at < 2:
            keeper.keep_best(write(b"weights of episode %d" % (at + 1)))
        position = Position(at + 1, 0, 1)
        tensors = {"w": torch.tensor([float(at)])}
        keeper.commit_state(TrainingState(position, {"steps": 1}, None, tensors, history=history[: at + 1]), [])
    assert [manifest.version for manifest in store.list("ppo-state")] == [2, 3]
    again = pickle.loads(pickle.dumps(StoreKeeper(run())))
    state = again.last_state()  # another process
    assert state is not None
    assert state.tensors["w"].tolist() == [2.0]
    again.commit_policy(write(b"weights of the last episode"), history=history)
    policy = store.resolve("policy/p")
    assert store.read_bytes(policy, "model.safetensors") == b"weights of episode 2"
    assert store.read_bytes(policy, "tokens/t.json") == b"t"
    kept = {name: policy.metrics[name] for name in ("kept_episode", "development", "episodes", "planned_episodes")}
    assert kept == {"kept_episode": 2, "development": 0.75, "episodes": 3, "planned_episodes": 10}


def test_a_run_that_stops_early_is_finished_and_its_restart_decides_the_same(store: ArtifactStore) -> None:
    config = {**CONFIG, "ppo": {**CONFIG["ppo"], "stop": {"kl": 0.5, "episodes": 1}}}
    stopping = run(config=config)
    history = tuple(EpisodeRecord(at, at + 1, "a", {"kl": 0.4 * at}, {"learn": 2.0}) for at in range(3))
    keeper = StoreKeeper(stopping)
    keeper.commit_state(TrainingState(Position(2, 0, 1), {}, None, {"w": torch.ones(1)}, history=history[:2]), [])
    assert ends_before(stopping, 2, None) is None  # KL is 0.4
    keeper.commit_state(TrainingState(Position(3, 0, 1), {}, None, {"w": torch.ones(1)}, history=history), [])
    ended = ends_before(stopping, 3, None)
    assert ended is not None
    assert ended == ("PPO stops after 3 episodes: KL was 0.800 nats in the last episodes, above ppo.stop.kl 0.5", True)
    keeper.commit_policy(lambda directory: (directory / "w").write_bytes(b"w"), history=history)
    done = publish_policy.fn(stopping, 3)
    assert (done.metrics["stopped"], "planned_episodes" in done.metrics) == (ended.why.partition(": ")[2], False)
    assert finished_policy(stopping, reused=True) is not None
    delete_states(stopping)
    assert [manifest.version for manifest in store.list("ppo-state")] == [4]


@pytest.mark.usefixtures("store")
def test_states_that_cannot_go_end_no_run_whose_policy_is_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit({"w": torch.zeros(1)}, EpisodeRecord(0, 1, "a", {"score": 0.5}, {"learn": 2.0}))

    def away(*_: object, **__: object) -> None:
        raise StoreError("the store is away")

    for broken in ("prune", "latest"):
        monkeypatch.setattr(ArtifactStore, broken, away)
        delete_states(run())
        assert "training states of p-aaaaaaaaaaaa are still there: the store is away" in caplog.text
        caplog.clear()


def test_a_shard_is_one_blob_with_its_header(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo_keeper, "SHARD_BYTES", 4096)
    monkeypatch.setattr("infra.artifacts.commit.PIECE_BYTES", 4096)
    names = [f"{n:0200d}" for n in range(8)]  # of 1024 bytes each: four would fill a shard, but for the header
    record = EpisodeRecord(0, 1, "a", {"score": 0.5}, {"learn": 2.0})
    tensors = {name: torch.full((4, 8, 8), float(name)) for name in names} | {"large": torch.ones(2048)}
    commit(tensors, record)
    files = [entry for entry in store.resolve(f"ppo-state/{run().name}").files if entry.path.startswith("training-")]
    assert [len(entry.pieces) for entry in files] == [1, 1, 1, 3]  # 3 + 3 + 2 tensors, and the large one
    state = StoreKeeper(run()).last_state()
    assert state is not None
    assert all(torch.equal(state.tensors[name], tensors[name]) for name in tensors)


BEGIN_AGAIN = "begin the stage ppo again under another seed, which keeps what it starts from"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"format": 1', '"format": 4', "has format 4, but this release reads formats up to 3; upgrade rlhf-flows, or "),
        ('"format": 1', '"format": "x"', "has format x, but this release reads formats up to 3"),
        ('"format": 1', '"format": 0', "has format 0, which this release no longer reads; go on with the release "),
        ('"learner": {\n', '"lerner": {\n', r"is incomplete or damaged \('learner'\); "),
        ('"incarnation": "a", ', "", "is incomplete or damaged .*incarnation"),
        ('"episode": 1, ', '"episode": 1, "surprise": 1, ', "is incomplete or damaged .*surprise"),
    ],
)
def test_a_state_that_cannot_be_read_says_where_to_begin_again(
    store: ArtifactStore, old: str, new: str, complaint: str
) -> None:
    assert old in FORMAT_1
    keeper = put(store, FORMAT_1.replace(old, new), safetensors())
    with pytest.raises(ModelError, match=f"the training state ppo-state/p-aaaaaaaaaaaa@2 {complaint}") as refused:
        keeper.last_state()
    assert str(refused.value).endswith(BEGIN_AGAIN)
    assert len(str(refused.value).splitlines()) == 1


def test_a_later_format_reads_the_former_step_by_step(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fourth(facts: Any, tensors: Any) -> tuple[Any, Any]:
        return {**facts, "format": 4, "learner": {"was": "3"}}, {"four": tensors["critic.weights.head.bias"]}

    def fifth(facts: Any, tensors: Any) -> tuple[Any, Any]:
        return {**facts, "format": 5, "learner": facts["learner"] | {"then": "4"}}, {"five": tensors["four"]}

    monkeypatch.setattr(states, "STATE_FORMAT", 5)
    monkeypatch.setattr(states, "NEWER", states.NEWER | {3: fourth, 4: fifth})
    keeper = put(store, FORMAT_1, safetensors())
    state = keeper.last_state()
    assert state is not None
    assert (state.learner, list(state.tensors)) == ({"was": "3", "then": "4"}, ["five"])
    monkeypatch.setattr(states, "NEWER", {4: fifth})
    with pytest.raises(ModelError, match=r"has format 1, which this release no longer reads"):
        keeper.last_state()


class TestWhatOlderCodeLeft:
    """A run is named by its code too: a state of another release is never gone on with in silence, nor unsaid."""

    def leave(self, store: ArtifactStore, name: str = "p-bbbbbbbbbbbb", **facts: Any) -> None:
        facts = {"config": CONFIG, "source_digest": "old", "version": 3} | facts
        store.commit("ppo-state", name, {"state.json": b""}, **facts)

    def said(self, caplog: pytest.LogCaptureFixture) -> str:
        with caplog.at_level("INFO"):
            assert next_episode(run()) == 0
        return " ".join(record.getMessage() for record in caplog.records)

    def test_it_is_named_with_the_stage_that_begins_again(
        self, store: ArtifactStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.leave(store)
        assert (
            "ppo          begins with the first episode: ppo-state/p-bbbbbbbbbbbb@3 is of the same configuration, but "
            "was made by other code (source old, now new), and is not gone on with" in self.said(caplog)
        )

    def test_keys_that_only_one_release_knows_make_no_difference(
        self, store: ArtifactStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        older = json.loads(json.dumps(CONFIG))
        del older["ppo"]["lr"]
        older["ppo"]["forgotten"] = 1
        self.leave(store, config=older)
        assert "p-bbbbbbbbbbbb@3 is of the same configuration" in self.said(caplog)

    @pytest.mark.parametrize(
        "facts", [{"source_digest": "new"}, {"config": CONFIG | {"seed": 9}}, {"name": "q-bbbbbbbbbbbb"}], ids=str
    )
    def test_what_is_not_its_forerunner_is_not_named(
        self, store: ArtifactStore, caplog: pytest.LogCaptureFixture, facts: dict[str, Any]
    ) -> None:
        self.leave(store, **facts)
        assert "ppo-state" not in self.said(caplog)

    def test_nor_is_one_that_was_finished(self, store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
        self.leave(store)
        store.commit("policy", "p", {"f": b""}, key="b" * 64)
        assert "ppo-state" not in self.said(caplog)

    def test_nor_is_one_whose_policy_was_deleted(self, store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
        self.leave(store, metrics={ENDED: True})
        assert "ppo-state" not in self.said(caplog)

    def test_a_state_of_its_own_is_gone_on_with(self, store: ArtifactStore) -> None:
        self.leave(store)
        self.leave(store, run().name, version=5, source_digest="new")
        assert next_episode(run()) == 5
