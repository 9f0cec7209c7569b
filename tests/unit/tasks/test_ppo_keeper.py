"""Where a failed batch goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import DataConfig, PipelineConfig
from tasks.ppo_keeper import StoreKeeper
from tasks.results import Parent, PPORun


def test_failed_batches_lie_under_the_home_directory_each_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    config = PipelineConfig(name="quickstart", data=DataConfig(task="chain_sum"))
    parent = Parent(uri="sft/a@1", digest="0")
    keeper = StoreKeeper(
        PPORun(
            name="quickstart-0123", key="0", preset="quickstart", config=config, actor=parent, reward_model=None,
            dataset=parent, source_digest="", flow_run=None,
        )
    )  # fmt: skip
    places = [Path(keeper.keep_failed_batch(lambda directory: (directory / "batch.json").touch())) for _ in range(2)]
    assert len(set(places)) == 2
    for place in places:
        assert place.parent == tmp_path / "failed-batches"
        assert place.name.startswith("quickstart-0123-")
        assert (place / "batch.json").exists()
