"""For every test of a task: a home and a store of its own. For those that ask: the open store, and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore
from tasks.context import Context, open_context
from tests.tiny_llama import write_tiny_llama


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setenv("RLHF_STORE_URL", f"file://{tmp_path}/store")


@pytest.fixture
def context() -> Context:
    return open_context()


@pytest.fixture
def store(context: Context) -> ArtifactStore:
    return context.store
