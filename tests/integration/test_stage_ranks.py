"""SFT and reward model on two ranks, on a Ray cluster of the stage's own: what one process learns alone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import ray
import torch
from safetensors.torch import load

from infra.artifacts import ArtifactStore, open_default_store
from infra.settings import settings
from rlhf_core.config import PipelineConfig
from rlhf_core.data import PreferencePair, Problem, pairs_to_jsonl, problems_to_jsonl
from rlhf_core.errors import DataError, LostRankError
from rlhf_core.models.loading import load_causal_lm
from tasks.export import export
from tasks.failures import passes
from tasks.results import Parent, StageResult
from tasks.supervised import train_reward_model, train_sft
from tests.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.integration

LR = 1e-3
NOISE = {"bias", "score_mean"}
"""A pair's difference does not know the bias: its gradient is rounding, of which Adam makes steps like any other's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)


@pytest.fixture
def store(tmp_path: Path, forked: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[ArtifactStore]:
    """A store, in a home of whose stages nothing is left behind."""
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_STORE_URL", f"file://{tmp_path}/store")
    with patch.dict(os.environ, forked):
        yield open_default_store()
    deadline = time.monotonic() + 5  # the watchdog says that all is gone, and then goes
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "home" / "clusters").glob("*.json")) == []
    assert not ray.is_initialized()


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return what runs with its home under a directory, but for ourselves."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            home = process.environ().get("RLHF_HOME", "")
            if home.startswith(str(directory)) and process.pid != os.getpid():
                found.append(process)
    return found


def preset(model: Path, **stages: dict[str, Any]) -> PipelineConfig:
    cluster = {"trainer_threads": 1, "collective_timeout_s": 60.0}
    return PipelineConfig.model_validate(
        {
            "name": "test",
            "data": {"task": "number_sorting"},
            "model": {"path": str(model)},
            "ppo": {"cluster": cluster},
            **stages,
        }
    )


def sft(store: ArtifactStore, model: Path, **settings: Any) -> StageResult:
    shown = [Problem(f"{a}+{a}?", str(2 * a)) for a in range(20)]
    files = {"sft.jsonl": problems_to_jsonl(shown), "evaluation.jsonl": problems_to_jsonl([Problem("9+8?", "17")])}
    made = store.commit("dataset", "test", files)
    values = {"epochs": 3, "micro_batch_size": 4, "lr": LR, "dtype": "float32", **settings}
    return train_sft.fn(preset(model, sft=values), Parent(uri=made.uri, digest=made.digest))


def reward_model(store: ArtifactStore, model: Path, **settings: Any) -> StageResult:
    pairs = [PreferencePair(f"q{row}", f"{row}.", f"{row}!") for row in range(40)]
    made = store.commit("dataset", "pairs", {"pairs.jsonl": pairs_to_jsonl(pairs)})
    values = {"epochs": 2, "micro_batch_size": 4, "lr": LR, "dtype": "float32", **settings}
    policy = Parent(uri="model/tiny", digest="d", path=str(model))
    return train_reward_model.fn(preset(model, reward_model=values), Parent(uri=made.uri, digest=made.digest), policy)


def weights(store: ArtifactStore, made: StageResult) -> dict[str, torch.Tensor]:
    manifest = store.resolve(made.uri)
    if manifest.has_adapters:
        with TemporaryDirectory() as folder:
            export(store, settings(), manifest, Path(folder), merged=True)
            return dict(load_causal_lm(Path(folder), "float32").named_parameters())
    files = [entry.path for entry in manifest.files if entry.path.endswith(".safetensors")]
    return {name: tensor for file in files for name, tensor in load(store.read_bytes(manifest, file)).items()}


def steps(store: ArtifactStore, made: StageResult) -> list[dict[str, float]]:
    body = store.read_bytes(store.resolve(made.uri), "metrics.jsonl")
    return [json.loads(line) for line in body.decode().splitlines()]


def assert_alike(store: ArtifactStore, both: StageResult, alone: StageResult) -> None:
    """Two ranks learnt what one does with batches of twice the size: every step's figures, and the weights."""
    mine, theirs = steps(store, both), steps(store, alone)
    assert len(mine) == len(theirs)
    for step, expected in zip(mine, theirs, strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, expected in weights(store, alone).items():
        if name not in NOISE:
            found, close = weights(store, both)[name], LR * len(mine) * 0.01
            torch.testing.assert_close(
                found, expected, rtol=0, atol=close, msg=lambda said, name=name: f"{name}: {said}"
            )


def test_sft_on_two_ranks_learns_what_it_does_alone_with_batches_of_twice_the_size(
    store: ArtifactStore, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = sft(store, model, strategy="ddp", num_trainers=2, batch_size=4)  # 20 rows: the last batch is uneven
    told = caplog.text
    assert "2 ranks (ddp) ready" in told
    assert "step 9/9" in told
    assert "held out" in told
    assert (both.metrics["trainers"], both.metrics["strategy"]) == (2, "ddp")
    alone = sft(store, model, batch_size=8)
    assert_alike(store, both, alone)
    assert both.metrics["heldout_loss"] == pytest.approx(alone.metrics["heldout_loss"], rel=1e-4)
    assert "trainers" not in alone.metrics
    assert sft(store, model, strategy="ddp", num_trainers=2, batch_size=4).reused


@pytest.mark.parallel
@pytest.mark.parametrize("strategy", ["plain", "zero2", "gemini"])
def test_a_reward_model_on_two_ranks_learns_and_measures_what_it_does_alone(
    store: ArtifactStore, model: Path, strategy: str
) -> None:
    both = reward_model(store, model, strategy=strategy, num_trainers=2, batch_size=4)
    alone = reward_model(store, model, batch_size=8)
    assert_alike(store, both, alone)
    for name in ("accuracy", "heldout_loss", "score_std"):
        assert both.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-3), name


@pytest.mark.parallel
@pytest.mark.parametrize("strategy", ["plain", "zero2", "gemini"])
def test_sft_under_every_strategy(store: ArtifactStore, model: Path, strategy: str) -> None:
    both = sft(store, model, strategy=strategy, num_trainers=2, batch_size=4)
    assert_alike(store, both, sft(store, model, batch_size=8))


@pytest.mark.parallel
@pytest.mark.parametrize("stage", [sft, reward_model])
@pytest.mark.parametrize("size", ["tp", "pp", "sp"])
def test_two_ranks_hold_one_model_in_parts(store: ArtifactStore, model: Path, stage: Any, size: str) -> None:
    both = stage(store, model, strategy="3d", num_trainers=2, batch_size=8, **{size: 2})
    assert both.metrics[size] == 2
    assert_alike(store, both, stage(store, model, batch_size=8))


@pytest.mark.parallel
@pytest.mark.parametrize("size", ["tp", "pp", "sp"])
def test_adapters_over_a_shared_base_in_parts(store: ArtifactStore, model: Path, size: str) -> None:
    adapters = {"lora": {"r": 4}, "epochs": 2, "batch_size": 8}
    both = sft(store, model, strategy="3d", num_trainers=2, **{size: 2}, **adapters)
    assert store.resolve(both.uri).has_adapters
    assert_alike(store, both, sft(store, model, **adapters))


@pytest.mark.parallel
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_adapters_learn_the_same_over_a_shared_base_and_merged_into_one_of_their_own(
    store: ArtifactStore, model: Path, strategy: str
) -> None:
    adapters = {"lora": {"r": 4}, "epochs": 2}
    both = sft(store, model, strategy=strategy, num_trainers=2, batch_size=4, **adapters)
    assert store.resolve(both.uri).has_adapters == (strategy == "ddp")
    assert_alike(store, both, sft(store, model, batch_size=8, **adapters))


@pytest.mark.parallel
def test_one_rank_under_a_strategy_has_a_process_of_its_own(store: ArtifactStore, model: Path) -> None:
    assert_alike(store, sft(store, model, strategy="zero2", batch_size=8), sft(store, model, batch_size=8))


@pytest.mark.parallel
def test_what_is_wrong_with_the_data_is_told_as_by_one_process(store: ArtifactStore, model: Path) -> None:
    with pytest.raises(DataError, match=r"demonstration 1 of 20 has \d+ tokens, but sft.max_length is 4"):
        sft(store, model, strategy="ddp", num_trainers=2, max_length=4)


@pytest.mark.clusters
@pytest.mark.parametrize(("victim", "sentence"), [(0, "died"), (1, "rank 1 of 2 has ended|sft-1 has ended")])
def test_a_stage_whose_rank_dies_ends_naming_it_and_leaves_nothing(
    store: ArtifactStore, model: Path, caplog: pytest.LogCaptureFixture, victim: int, sentence: str
) -> None:
    def kill() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and "step " not in caplog.text:
            time.sleep(0.05)
        os.kill(ray.get(ray.get_actor(f"sft-{victim}").ping.remote(), timeout=30), signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        with pytest.raises((LostRankError, ray.exceptions.RayActorError), match=sentence) as caught:
            sft(store, model, strategy="ddp", num_trainers=2, batch_size=4, epochs=5000)
        killing.result()
    assert passes(caught.value)
    assert store.list("sft") == []
