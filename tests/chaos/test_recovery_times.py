"""How long a real model's processes take to come back: the figures are printed, and stand in docs/chaos.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flows.presets import resolve
from infra.artifacts import open_default_store
from rlhf_core.models.loading import has_fast_bfloat16
from tasks.data import prepare_data
from tasks.ppo import plan_ppo
from tests.chaos.plan import Aim
from tests.chaos.runs import Campaign, campaign
from tests.integration.ppo_runs import Run

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(1800)]

EPISODES = 2


class FromTheBase(Run):
    """A run that starts from the preset's base model, and is rewarded by the verifier alone."""

    def begin(self) -> None:
        self.store = open_default_store()
        dataset = prepare_data.fn(self.config, None, reads=("ppo",))
        self.plan = plan_ppo.fn(self.config, "model/base", None, dataset.parent)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """The preset quickstart with fewer prompts."""
    overrides: dict[str, object] = {
        "data.demonstrations": [],
        "ppo.reward": {"verifier": 1.0, "reward_model": 0.0},
        "ppo.prompts_per_episode": 32,
        "ppo.chunk_size": 8,
        "ppo.train_batch_size": 16,
        "ppo.micro_batch_size": 16,
    }
    if not has_fast_bfloat16():  # as a flow's preflight settles it
        overrides |= {"ppo.dtype": "float32", "ppo.rollout_dtype": "float32"}
    config = resolve("quickstart", episodes=EPISODES, overrides=overrides)
    with campaign(config, tmp_path_factory.mktemp("smollm2"), repeats=False, run_type=FromTheBase) as made:
        yield made


@pytest.mark.parametrize("aim", [Aim("maker", "generate"), Aim("trainer", "learn")], ids=str)
def test_smollm2_comes_back(smollm2: Campaign, aim: Aim) -> None:
    assert smollm2.strike(aim).seconds > 0
