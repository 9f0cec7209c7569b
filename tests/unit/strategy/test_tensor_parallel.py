"""Which models can be cut, said from their configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config

from rlhf_core.config import SFTConfig
from rlhf_core.errors import ConfigError
from rlhf_core.strategy.parts import Parts
from rlhf_core.strategy.tensor_parallel import check_parts_of
from tests.tiny_llama import tiny_llama


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """4 heads, 2 of keys and values, 128 units."""
    tiny_llama().config.save_pretrained(tmp_path)
    return tmp_path


def test_a_model_is_cut_by_a_number_that_divides_its_heads(directory: Path) -> None:
    for parts in (Parts(), Parts(tp=2), Parts(pp=2, sp=2)):
        check_parts_of(directory, parts)
    with pytest.raises(ConfigError, match="tp is 3, which does not divide the model's 4 attention heads; choose a "):
        check_parts_of(directory, Parts(tp=3))
    with pytest.raises(ConfigError, match="tp is 4, which does not divide the model's 2 heads of keys and values"):
        check_parts_of(directory, Parts(tp=4))
    with pytest.raises(ConfigError, match="tp x sp is 4, which does not divide the model's 2 heads of keys and values"):
        check_parts_of(directory, Parts(tp=2, sp=2))
    check_parts_of(directory, Parts(tp=2, sp=2, sp_mode="split_gather"))
    with pytest.raises(ConfigError, match="pp is 3, but the model has 2 layers, and each stage needs one; lower pp"):
        check_parts_of(directory, Parts(pp=3))


def test_a_form_that_was_not_tried_is_refused(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cuts models of the forms Llama, Mistral, Qwen2, Qwen3, not GPT2; take gemi"):
        check_parts_of(tmp_path, Parts(tp=2))


def test_what_is_no_model_is_left_to_who_loads_it(tmp_path: Path) -> None:
    check_parts_of(tmp_path / "nowhere", Parts(tp=2))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tp": 2}, "tp 2 cuts one model into parts, but the strategy is plain; set strategy to 3d, or tp to 1"),
        (
            {"strategy": "3d", "tp": 2, "pp": 2, "num_trainers": 6},
            "a model in tp 2 x pp 2 needs groups of 4, into which num_trainers 6 cannot be cut; choose a multiple of 4",
        ),
        (
            {"strategy": "3d", "sp": 2, "num_trainers": 2, "sp_mode": "split_gather"},
            "sp is 2, but split_gather cuts rows over the 1 that have the parts of matrices; set sp to tp",
        ),
        ({"strategy": "3d", "sp": 2, "sp_mode": "ring"}, "all_to_all"),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SFTConfig.model_validate(given)


def test_a_model_in_parts_learns_from_one_batch() -> None:
    config = SFTConfig(strategy="3d", num_trainers=8, tp=2, pp=2)
    assert config.dp == 2
    assert config.figures == {"trainers": 8, "strategy": "3d", "tp": 2, "pp": 2}
    assert SFTConfig(strategy="3d", num_trainers=8, tp=2, sp=2).dp == 2
    assert SFTConfig(strategy="3d", num_trainers=8, tp=2, sp=2, sp_mode="split_gather").dp == 4
