"""coati's interface on one process: it trains as torch does, writes what loads again, says what it cannot."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.coati.strategy import Strategy, make_strategy
from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.parts import Parts
from rlhf_core.strategy.plain import PlainBooster
from tests.tiny_llama import tiny_llama, tiny_tokenizer

assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
IDS = torch.arange(48).reshape(3, 16)


@pytest.fixture
def strategy() -> Strategy:
    return make_strategy("plain", device="cpu", seed=3)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def train(strategy: Strategy, model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_trains_as_torch_does(strategy: Strategy) -> None:
    model, reference = tiny_llama(), tiny_llama()
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    model, optimizer = strategy.prepare((model, strategy.new_optimizer(model.parameters(), **options)))
    losses = train(strategy, model, optimizer)
    expected = torch.optim.AdamW(reference.parameters(), **options)
    for loss in losses:
        reached = loss_of(reference)
        assert loss == pytest.approx(reached.item(), rel=1e-5)
        reached.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        expected.step()
        expected.zero_grad()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(parameter, other)


def test_an_optimizer_has_what_is_trained_alone_in_the_groups_that_it_is_given(strategy: Strategy) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[1].parameters(), "weight_decay": 0.5}]
    optimizer = strategy.new_optimizer(groups, lr=2.0, weight_decay=0.25)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1.0, 0.25), (2.0, 0.5)]


def test_each_model_has_a_booster_of_its_own_and_what_is_not_trained_stays_a_model(strategy: Strategy) -> None:
    actor, critic, initial = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (actor, critic)]
    schedule = torch.optim.lr_scheduler.ConstantLR(pairs[1][1])
    prepared = strategy.prepare(
        pairs[0], {"model": critic, "optimizer": pairs[1][1], "lr_scheduler": schedule}, initial
    )
    (actor, optimizer), others, initial = prepared
    assert others.keys() == {"model", "optimizer", "lr_scheduler"}
    assert others["lr_scheduler"] is schedule
    boosters = [strategy.booster_of(model) for model in (actor, critic, initial)]
    assert len(set(map(id, boosters))) == 3
    assert strategy.booster_of(optimizer) is boosters[0]
    assert isinstance(boosters[0], PlainBooster)
    assert strategy.unwrap_model(actor) is actor
    assert strategy.prepare(nn.Linear(1, 1)).weight.shape == (1, 1)


@pytest.mark.parametrize("given", [3, (nn.Linear(1, 1),), {"optimizer": None}])
def test_what_is_no_model_is_refused(strategy: Strategy, given: object) -> None:
    with pytest.raises(ConfigError, match="expected a model, a pair of model and optimizer, or a mapping with 'model'"):
        strategy.prepare(given)


def test_what_was_not_prepared_is_refused(strategy: Strategy) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="this Linear was not prepared by this strategy"):
        strategy.save_model(model, "nowhere")
    with pytest.raises(ConfigError, match="this SGD was not prepared"):
        strategy.optimizer_step(torch.optim.SGD(model.parameters()))


def test_a_strategy_that_cannot_be_had_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="precision fp16 needs a GPU"):
        make_strategy("plain", precision="fp16", device="cpu")
    with pytest.raises(ConfigError, match="strategy zero2 does not cut one model into parts, but is asked for tp 2"):
        make_strategy("zero2", device="cpu", parts=Parts(tp=2))
    with pytest.raises(ConfigError, match="a model in pp 2 needs groups of 2, into which 1 process cannot be cut"):
        make_strategy("3d", device="cpu", parts=Parts(pp=2))


def test_models_made_in_its_context_are_those_of_its_seed_and_nobody_elses_numbers_change(strategy: Strategy) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    before = torch.get_rng_state()
    with strategy.model_init_context():
        assert torch.equal(torch.rand(2), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shard", [False, True])
def test_what_is_saved_goes_on_as_if_nothing_had_happened(strategy: Strategy, tmp_path: Path, shard: bool) -> None:
    def fresh() -> tuple[nn.Module, Any]:
        model = tiny_llama(seed=1)
        prepared: tuple[nn.Module, Any] = strategy.prepare((model, strategy.new_optimizer(model.parameters(), lr=1e-3)))
        return prepared

    model, optimizer = fresh()
    train(strategy, model, optimizer)
    strategy.save_model(model, str(tmp_path / "model"), shard=shard)
    strategy.save_optimizer(optimizer, str(tmp_path / "optimizer"), shard=shard)
    expected = train(strategy, model, optimizer)
    other, its_optimizer = fresh()
    strategy.load_model(other, str(tmp_path / "model"))
    strategy.load_optimizer(its_optimizer, str(tmp_path / "optimizer"))
    assert train(strategy, other, its_optimizer) == expected


def adapted(strategy: Strategy) -> nn.Module:
    model = tiny_llama()
    attach_lora(model, LoRAConfig(r=2), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.01)
    optimizer = strategy.new_optimizer(model.parameters(), lr=1e-3)
    trained = {id(member) for group in optimizer.param_groups for member in group["params"]}
    assert trained == {id(parameter) for name, parameter in model.named_parameters() if "lora_" in name}
    prepared: nn.Module = strategy.prepare((model, optimizer))[0]
    return prepared


def test_adapters_are_saved_merged_and_apart(strategy: Strategy, tmp_path: Path) -> None:
    model = adapted(strategy)
    expected = model(IDS).logits
    strategy.save_pretrained(model, str(tmp_path / "merged"), tiny_tokenizer())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(merged(IDS).logits, expected)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == len(tiny_tokenizer())
    strategy.save_pretrained(model, str(tmp_path / "apart"), merge_adapters=False)
    apart = PeftModel.from_pretrained(tiny_llama(), tmp_path / "apart")
    assert_close(apart(IDS).logits, expected)
    assert (tiny_llama()(IDS).logits - expected).abs().max() > 1e-3


def test_a_critic_is_saved_merged_alone_and_a_bare_module_not_at_all(strategy: Strategy, tmp_path: Path) -> None:
    critic = Critic.from_causal_lm(tiny_llama())
    strategy.save_pretrained(strategy.prepare(critic), str(tmp_path))
    assert torch.equal(Critic.from_pretrained(tmp_path, torch.float32).head.weight, critic.head.weight)
    with pytest.raises(ModelError, match="a Critic is not written with its adapters apart by save_pretrained"):
        strategy.save_pretrained(critic, str(tmp_path), merge_adapters=False)
    with pytest.raises(ModelError, match="a Linear is not written by save_pretrained; use save_model"):
        strategy.save_pretrained(strategy.prepare(nn.Linear(1, 1)), str(tmp_path))


def test_weights_come_in_shards_as_copies_and_make_the_model_again(strategy: Strategy) -> None:
    model = strategy.prepare(tiny_llama(seed=1))
    held = dict(model.named_parameters())
    # a shard ends with the tensor that fills it: the embedding alone has 259 x 64 x 4 bytes, 0.063 MB
    shards = list(strategy.get_model_state_dict_shard(model, shard_size=0.06))
    assert list(shards[0]) == ["model.embed_tokens.weight"]
    assert len(shards) > 2
    assert [name for shard in shards for name in shard] == list(held)
    whole = next(strategy.get_model_state_dict_shard(model))
    fresh = tiny_llama(seed=2)
    assert fresh.load_state_dict(whole, strict=False).missing_keys == ["lm_head.weight"]  # tied to the embedding
    assert torch.equal(fresh(IDS).logits, model(IDS).logits)
    whole["model.norm.weight"].zero_()
    assert model.model.norm.weight.abs().max() > 0


def test_buffers_that_last_come_with_the_weights_and_what_is_trained_comes_alone(strategy: Strategy) -> None:
    module = nn.BatchNorm1d(2)
    module.bias.requires_grad_(False)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    module = strategy.prepare(copy.deepcopy(module))
    whole = next(strategy.get_model_state_dict_shard(module))
    assert list(whole) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    trained = next(strategy.get_model_state_dict_shard(module, requires_grad_only=True))
    assert list(trained) == ["weight"]


def test_rows_come_in_batches_that_the_seed_orders(strategy: Strategy) -> None:
    rows = TensorDataset(torch.arange(10))
    loader = strategy.setup_dataloader(rows, 4)
    batches = [batch[0].tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [4, 4]
    assert batches == [batch[0].tolist() for batch in strategy.setup_dataloader(rows, 4, seed=3)]
    assert batches != [batch[0].tolist() for batch in strategy.setup_dataloader(rows, 4, seed=4)]
    in_order = strategy.setup_dataloader(rows, 4, shuffle=False, drop_last=False, collate_fn=len)
    assert list(in_order) == [4, 4, 2]
    assert list(strategy.setup_sampler(rows, shuffle=False)) == list(range(10))
