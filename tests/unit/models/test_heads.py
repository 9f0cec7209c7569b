"""Reward model, critic and the scoring of responses, on two architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf_core.errors import ModelError
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.critic import Critic
from rlhf_core.models.heads import HEAD_FILE
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import position_ids, trunk_of
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm

torch.set_num_threads(1)

TOKENS = [5, 17, 40, 99, 12, 7]
HALF_PRECISION = {"rtol": 3e-2, "atol": 3e-2}


def padded(*, left: int = 0, right: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[3] * left + TOKENS + [3] * right])
    return ids, torch.tensor([[False] * left + [True] * len(TOKENS) + [False] * right])


def with_random_head(critic: Critic) -> Critic:
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.head.weight)
    return critic


def test_positions_count_attended_tokens_only() -> None:
    mask = torch.tensor([[False, False, True, True], [True, True, True, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_score_is_the_head_at_the_last_attended_token(architecture: str) -> None:
    causal_lm = tiny_causal_lm(architecture)
    model = RewardModel.from_causal_lm(causal_lm).eval()
    plain = causal_lm(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[-1][0, -1]
    expected = (plain * model.head.weight[0]).sum() + model.head.bias[0]
    for padding in ({}, {"left": 3}, {"right": 2}, {"left": 1, "right": 4}):
        score = model(*padded(**padding))
        torch.testing.assert_close(score, expected[None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_are_those_of_the_state_before_each_response_token(architecture: str) -> None:
    causal_lm = tiny_causal_lm(architecture)
    critic = with_random_head(Critic.from_causal_lm(causal_lm)).eval()
    ids, mask = padded(left=2, right=1)
    values = critic.response_values(sequences=ids, attention_mask=mask, num_actions=4)  # 3 real tokens
    for token in range(3):
        seen = torch.tensor([TOKENS[: 3 + token]])
        hidden = causal_lm(seen, output_hidden_states=True).hidden_states[-1][0, -1]
        expected = (hidden * critic.head.weight[0]).sum() + critic.head.bias[0]
        torch.testing.assert_close(values[0, token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_response_logprobs_agree_with_the_whole_softmax(architecture: str) -> None:
    causal_lm = tiny_causal_lm(architecture)
    ids, mask = padded(left=2, right=1)
    found = response_logprobs(causal_lm, sequences=ids, attention_mask=mask, num_actions=4, temperature=0.5)
    whole = torch.log_softmax(causal_lm(torch.tensor([TOKENS])).logits[0] / 0.5, dim=-1)
    expected = torch.stack([whole[place - 1, TOKENS[place]] for place in (3, 4, 5)])
    torch.testing.assert_close(found[0, :3], expected, rtol=1e-4, atol=1e-5)


def test_the_head_of_a_language_model_sees_response_positions_only() -> None:
    causal_lm = tiny_causal_lm("llama")
    seen: list[int] = []
    causal_lm.lm_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    ids, mask = padded(left=2)
    response_logprobs(causal_lm, sequences=ids, attention_mask=mask, num_actions=3, temperature=1.0)
    assert seen == [3]


def test_a_new_critic_says_zero_everywhere() -> None:
    critic = Critic.from_causal_lm(tiny_causal_lm("llama"))
    assert torch.equal(critic(*padded()), torch.zeros(1, len(TOKENS)))


def test_a_new_reward_head_is_small_and_random() -> None:
    torch.manual_seed(0)
    weight = RewardModel.from_causal_lm(tiny_causal_lm("llama")).head.weight.detach()
    assert float(weight.std()) == pytest.approx(1 / 65, rel=0.3)


def test_training_the_copy_leaves_the_language_model_alone() -> None:
    causal_lm = tiny_causal_lm("llama")
    reward_model = RewardModel.from_causal_lm(causal_lm)
    critic = Critic.from_reward_model(reward_model)
    before = causal_lm.model.norm.weight.clone()
    for model in (reward_model, critic):
        torch.nn.init.zeros_(model.trunk.norm.weight)
    assert torch.equal(causal_lm.model.norm.weight, before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", [RewardModel, Critic])
def test_what_is_saved_is_what_is_loaded(architecture: str, kind: type[RewardModel | Critic], tmp_path: Path) -> None:
    model = kind.from_causal_lm(tiny_causal_lm(architecture)).eval()
    torch.nn.init.normal_(model.head.weight)
    if isinstance(model, RewardModel):
        model.score_mean.fill_(2.0)
        model.score_std.fill_(4.0)
        assert model.standardise(torch.tensor([6.0])).tolist() == [1.0]
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    again = kind.from_pretrained(tmp_path / "model", torch.float32)
    assert torch.equal(again(*padded(left=1)), model(*padded(left=1)))
    assert {name: value.tolist() for name, value in again.named_buffers() if "score" in name} == {
        name: value.tolist() for name, value in model.named_buffers() if "score" in name
    }


def test_a_trunk_in_bfloat16_keeps_a_float32_head(tmp_path: Path) -> None:
    model = RewardModel.from_causal_lm(tiny_causal_lm("llama")).eval()
    model.save_pretrained(tmp_path)
    half = RewardModel.from_pretrained(tmp_path, torch.bfloat16)
    assert half.trunk.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        score = half(*padded())
    assert (half.head.weight.dtype, score.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(score, model(*padded()), **HALF_PRECISION)


def test_a_directory_without_a_head_is_refused_in_one_sentence(tmp_path: Path) -> None:
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"holds no critic, as it has no {HEAD_FILE}"):
        Critic.from_pretrained(tmp_path, torch.float32)


def test_damaged_and_exchanged_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    causal_lm = tiny_causal_lm("llama")
    Critic.from_causal_lm(causal_lm).save_pretrained(tmp_path / "critic")
    with pytest.raises(ModelError, match=r"holds no reward model, as its .* has no score_mean"):
        RewardModel.from_pretrained(tmp_path / "critic", torch.float32)
    RewardModel.from_causal_lm(causal_lm).save_pretrained(tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    tensors.pop("norm.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weight of its model, such as norm\.weight"):
        RewardModel.from_pretrained(tmp_path / "model", torch.float32)
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="no transformer can be loaded from"):
        RewardModel.from_pretrained(tmp_path / "model", torch.float32)
    (tmp_path / "model" / HEAD_FILE).write_bytes(b"{")
    with pytest.raises(ModelError, match=f"{HEAD_FILE} cannot be read"):
        RewardModel.from_pretrained(tmp_path / "model", torch.float32)


def test_a_bare_trunk_is_not_taken_for_a_language_model() -> None:
    with pytest.raises(ModelError, match="expected a causal language model"):
        trunk_of(tiny_causal_lm("llama").model)


def test_padding_rows_that_attend_to_nothing_give_no_nan() -> None:
    causal_lm = AutoModelForCausalLM.from_config(tiny_causal_lm("llama").config, attn_implementation="sdpa")
    ids, mask = padded(left=3)
    assert torch.isfinite(Critic.from_causal_lm(causal_lm)(ids, mask)).all()
