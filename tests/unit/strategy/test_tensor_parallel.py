"""Which models can be cut, said from their configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config

from rlhf_core.config import SFTConfig
from rlhf_core.errors import ConfigError
from rlhf_core.strategy.tensor_parallel import check_parts_of
from tests.tiny_llama import tiny_llama


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """4 heads, 2 of keys and values, 128 units."""
    tiny_llama().config.save_pretrained(tmp_path)
    return tmp_path


def test_a_model_is_cut_by_a_number_that_divides_its_heads(directory: Path) -> None:
    check_parts_of(directory, 1)
    check_parts_of(directory, 2)
    with pytest.raises(ConfigError, match="tp is 3, which does not divide the model's 4 attention heads; choose a "):
        check_parts_of(directory, 3)
    with pytest.raises(ConfigError, match="tp is 4, which does not divide the model's 2 heads of keys and values"):
        check_parts_of(directory, 4)


def test_a_form_that_was_not_tried_is_refused(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cuts models of the forms Llama, Mistral, Qwen2, Qwen3, not GPT2; take gemi"):
        check_parts_of(tmp_path, 2)


def test_what_is_no_model_is_left_to_who_loads_it(tmp_path: Path) -> None:
    check_parts_of(tmp_path / "nowhere", 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tp": 2}, "tp is 2, which cuts one model into parts, but the strategy is plain; set strategy to 3d"),
        ({"strategy": "3d", "tp": 2, "num_trainers": 3}, "tp is 2, but num_trainers 3 cannot be cut into groups of 2"),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SFTConfig.model_validate(given)


def test_a_model_in_parts_learns_from_one_batch() -> None:
    config = SFTConfig(strategy="3d", num_trainers=4, tp=2)
    assert config.dp == 2
    assert config.figures == {"trainers": 4, "strategy": "3d", "tp": 2}
