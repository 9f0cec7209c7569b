"""coati's helpers: models of its four families, strategies by its names, and a place among ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, GPT2Config, LlamaConfig, OPTConfig

from rlhf_core.coati.detached import factories
from rlhf_core.coati.detached.trainer_state import Stored, read_trainer_state, write_trainer_state
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.state import TrainingState
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.training.loaders import LoaderState
from tests.tiny_llama import tiny_llama, write_tiny_llama

SIZES: dict[str, Any] = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=17, n_embd=8, n_layer=1, n_head=2, n_positions=16),
    "bloom": BloomConfig(vocab_size=17, hidden_size=8, n_layer=1, n_head=2),
    "opt": OPTConfig(**SIZES, ffn_dim=16, word_embed_proj_dim=8, max_position_embeddings=16),
    "llama": LlamaConfig(**SIZES, intermediate_size=16, max_position_embeddings=16),
}
IDS = torch.tensor([[3, 4, 5]])
FIVE = {"rank": "1", "local_rank": "0", "world_size": "2", "master_port": "29500", "master_addr": "127.0.0.1"}


@pytest.mark.parametrize("family", CONFIGS)
def test_all_families_make_actors_critics_and_reward_models(family: str) -> None:
    config = CONFIGS[family]
    actor = factories.get_actor_from_args(family, config=config, lora_rank=2)
    assert actor(IDS).logits.shape == (1, 3, 17)
    trained = {name for name, weight in actor.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    critic = factories.get_critic_from_args(family, config=config)
    assert critic(IDS, torch.ones_like(IDS)).tolist() == [[0.0, 0.0, 0.0]]
    reward_model = factories.get_reward_model_from_args(family, config=config)
    assert reward_model(IDS, torch.ones_like(IDS)).shape == (1,)


def test_weights_and_tokenizers_come_from_directories(tmp_path: Path) -> None:
    directory = str(write_tiny_llama(tmp_path / "tiny"))
    actor = factories.get_actor_from_args("llama", directory)
    assert torch.equal(actor.get_input_embeddings().weight, tiny_llama().get_input_embeddings().weight)
    assert factories.get_model_numel(actor) == sum(weight.numel() for weight in tiny_llama().parameters())
    assert factories.get_tokenizer_from_args("llama", pretrained=directory).pad_token == "<|endoftext|>"
    scorer = RewardModel.from_causal_lm(tiny_llama())
    scorer.save_pretrained(tmp_path / "scorer")
    again = factories.get_reward_model_from_args("llama", str(tmp_path / "scorer"))
    assert torch.equal(again.head.weight, scorer.head.weight)
    with pytest.raises(ConfigError, match="is of a llama, but a gpt2 was asked for"):
        factories.get_actor_from_args("gpt2", directory)


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="unsupported model 'bert'; take one of gpt2, bloom, opt, llama"):
        factories.get_actor_from_args("bert")
    with pytest.raises(ConfigError, match="unsupported strategy 'naive'; take one of ddp, colossalai_gemini"):
        factories.get_strategy_from_args("naive")
    with pytest.raises(ConfigError, match="takes pretrained, but not 'padding'"):
        factories.get_tokenizer_from_args("gpt2", padding="left")


def test_a_strategy_comes_by_each_of_coatis_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factories, "make_strategy", lambda name: name)  # what it makes is tested elsewhere
    found = [factories.get_strategy_from_args(name) for name in factories.STRATEGIES]
    assert found == ["ddp", "colossalai_gemini", "colossalai_gemini", "colossalai_zero2", "colossalai_zero2_cpu"]


def test_a_place_among_ranks_needs_all_five_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in factories.ENVIRONMENT:
        monkeypatch.setenv(name.upper(), "before")
    with pytest.raises(ConfigError, match="env_info lacks local_rank, master_port; it must name rank, local_rank"):
        factories.set_dist_env({name: FIVE[name] for name in ("rank", "world_size", "master_addr")})
    with pytest.raises(ConfigError, match="env_info has rank 1, but all five must be texts"):
        factories.set_dist_env({**FIVE, "rank": 1})  # type: ignore[dict-item]
    assert os.environ["RANK"] == "before"
    factories.set_dist_env(FIVE)
    assert [os.environ[name.upper()] for name in factories.ENVIRONMENT] == [
        FIVE[name] for name in factories.ENVIRONMENT
    ]


def test_a_process_alone_is_the_first_of_one() -> None:
    assert (factories.get_rank(), factories.get_world_size(), factories.is_rank_0()) == (0, 1, True)


def test_a_state_replaces_the_one_before_and_none_is_ever_half_there(tmp_path: Path) -> None:
    place = tmp_path / "state"
    for step in (1, 2):
        loader = LoaderState({"pass": 0, "batches": step, "samples": step}, {"torch": torch.tensor([step])})
        state = TrainingState(Position(step, 0, step), {}, None, {"w": torch.full((2,), step)})
        write_trainer_state(place, Stored(state, loader), ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
    place.rename(tmp_path / "state.former")  # a process that died between taking the old one away and the new one in
    (tmp_path / "state.writing").mkdir()
    found = read_trainer_state(place, ALONE)
    assert found.state.position == Position(2, 0, 2)
    assert found.state.tensors["w"].tolist() == [2, 2]
    assert found.demonstrations is not None
    assert found.demonstrations.facts["batches"] == 2
    with pytest.raises(ModelError, match="holds no state of a detached trainer"):
        read_trainer_state(tmp_path / "other", ALONE)
