from __future__ import annotations

from pathlib import Path

import pytest

from tasks import stages
from tasks.stages import source_digest, stage_key

FACTS = {"config": {"lr": 1e-5, "r": 4}, "inputs": ["a", "b"], "seed": 0, "source": "s"}


def test_the_order_in_which_a_configuration_was_written_does_not_matter() -> None:
    other = FACTS | {"config": {"r": 4, "lr": 1e-5}}
    assert stage_key("sft", **FACTS) == stage_key("sft", **other)


@pytest.mark.parametrize(
    "change",
    [{"config": {"lr": 2e-5, "r": 4}}, {"inputs": ["b", "a"]}, {"seed": 1}, {"source": "t"}],
    ids=["configuration", "inputs", "seed", "source"],
)
def test_whatever_a_result_depends_on_changes_its_key(change: dict[str, object]) -> None:
    assert stage_key("sft", **FACTS) != stage_key("sft", **(FACTS | change))


def test_stages_with_the_same_facts_have_different_keys() -> None:
    assert stage_key("sft", **FACTS) != stage_key("ppo", **FACTS)


def test_the_source_digest_covers_core_stage_and_lock_file_whether_committed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("rlhf_core/data/a.py", "tasks/sft.py", "tasks/ppo.py", "requirements.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    monkeypatch.setattr(stages, "CHECKOUT", tmp_path)

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest("sft")

    before = digest()
    (tmp_path / "tasks/ppo.py").write_text("2")  # another stage's
    assert digest() == before
    for file in ("rlhf_core/data/a.py", "tasks/sft.py", "requirements.txt"):
        (tmp_path / file).write_text("2")
        assert digest() != before
        before = digest()
    source_digest.cache_clear()
