"""What cannot be is refused in a sentence on every rank; a rank that dies ends the others, by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.ranks import COLLECTIVE_S, Found, run_and_lose, run_on_ranks

pytestmark = pytest.mark.parallel

CASES = "tests.parallel.strategy_refusals"
REFUSED = {
    "adapters:gemini": "strategy gemini shards all weights and trains no adapters; take zero2, ddp or plain",
    "frozen": "strategy gemini trains all weights, but 1 are frozen",
    "optimizer:gemini": "strategy gemini takes steps with ColossalAI's HybridAdam alone, not with SGD",
    "made:gemini_auto:bf16": "there is no GPU; take gemini",
    "made:zero3:bf16": "strategy 'zero3' is unknown; take one of plain, ddp,",
    "made:plain:fp16": "precision fp16 needs a GPU",
    "made:zero2:fp16": "precision fp16 needs a GPU",
    "fewer_ranks": "strategy zero2 shards over the whole group (2 processes), but is asked for 1 rank",
    "twice": "this booster has a model already; make one booster for each model",
    "strangers": "expected the optimizer to have the 11 trainable weights",
    "other_model:file": "does not fit the model",
    "other_model:directory": "does not fit the model",
    "other_optimizer": "belongs to other weights",
    "damaged": "cannot be read",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_on_ranks(CASES, list(REFUSED), tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_says_the_same_sentence(refused: list[dict[str, Found]], case: str) -> None:
    for found in refused:
        assert REFUSED[case] in found[case].sentence
        assert "\n" not in found[case].sentence


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("plain", 2),
        ("ddp", 2),
        ("zero2", 2),
        ("zero2_cpu", 2),
        ("gemini", 2),
        ("3d-tp2", 2),
        ("3d-pp2", 2),
        ("3d-sp2", 2),
        ("zero2", 3),
        ("gemini", 3),
    ],
)
def test_a_rank_that_dies_in_a_step_ends_the_others_by_its_name(tmp_path: Path, strategy: str, world_size: int) -> None:
    *others, dead = run_and_lose("tests.parallel.strategy_cases", f"dying:{strategy}", tmp_path, world_size=world_size)
    assert dead is None
    for found in others:
        assert found is not None
        assert f"rank {world_size - 1} of {world_size} has ended" in found.sentence
        assert "the others cannot go on without it" in found.sentence
        assert found.numbers["step"] == 2.0
        assert found.numbers["waited_s"] < COLLECTIVE_S / 2
