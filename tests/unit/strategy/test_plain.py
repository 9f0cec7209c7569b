"""The plain booster: loss scaling by hand, and checkpoints that come back to the bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from transformers import AutoModelForCausalLM

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora, merged_parameters
from rlhf_core.strategy import plain
from rlhf_core.strategy.optimizer import GradientError
from rlhf_core.strategy.plain import PlainBooster, PlainOptimizer
from rlhf_core.strategy.ranks import ALONE
from tests.tiny_llama import tiny_llama

torch.set_num_threads(1)


def llama(*, adapters: bool = False, seed: int = 0) -> nn.Module:
    model = tiny_llama(seed=seed)
    if adapters:
        attach_lora(model, LoRAConfig(r=2), seed=seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return model


def critic(*, seed: int = 0, **_: bool) -> nn.Module:
    made = Critic.from_causal_lm(tiny_llama(seed=seed))
    nn.init.normal_(made.head.weight, generator=torch.Generator().manual_seed(seed))
    return made


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    named = dict(second.named_parameters())
    assert all(torch.equal(parameter, named[name]) for name, parameter in first.named_parameters())


def sgd(weight: float, *, lr: float = 1.0, **options: bool | float | None) -> tuple[nn.Linear, PlainOptimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    settings = {"max_norm": None, "ranks": ALONE, **options}
    return model, PlainOptimizer(torch.optim.SGD(model.parameters(), lr=lr), **settings)  # type: ignore[arg-type]


def test_boosting_leaves_the_model_and_wraps_the_optimizer() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    same, wrapped, criterion, loader, scheduler = PlainBooster(max_norm=0.5).boost(
        model, optimizer, nn.MSELoss(), [1], schedule
    )
    assert (same, wrapped.optim, loader, scheduler) == (model, optimizer, [1], schedule)
    assert isinstance(criterion, nn.MSELoss)
    assert (wrapped.max_norm, wrapped.param_groups) == (0.5, optimizer.param_groups)
    assert PlainBooster().boost(model)[1] is None


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected precision fp32, bf16 or fp16, got 'int8'"):
        PlainBooster("int8")  # type: ignore[arg-type]
    assert PlainBooster("fp16").autocast_dtype == torch.float16


def test_a_step_clips_to_the_norm_and_tells_the_one_before() -> None:
    model, optimizer = sgd(1.0, max_norm=0.5)
    (3 * model.weight).sum().backward()
    optimizer.step()
    assert optimizer.get_grad_norm() == 3.0
    assert model.weight.item() == pytest.approx(0.5, abs=1e-5)  # 1 - 0.5


def test_no_step_is_taken_from_a_gradient_that_is_not_finite() -> None:
    model, optimizer = sgd(1.0)
    (math.inf * model.weight).sum().backward()
    with pytest.raises(GradientError, match="the gradient's norm is inf"):
        optimizer.step()
    assert (model.weight.item(), model.weight.grad) == (1.0, None)


def test_a_scaled_loss_gives_the_step_of_the_loss() -> None:
    model, optimizer = sgd(1.0, scaled=True)
    optimizer.backward((3 * model.weight).sum())
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 3 * 65536
    optimizer.step()
    assert (optimizer.get_grad_norm(), model.weight.item()) == (3.0, -2.0)


def test_an_overflow_is_left_out_and_halves_the_scale_until_nothing_is_left_to_halve() -> None:
    model, optimizer = sgd(1.0, scaled=True)
    assert optimizer.scale is not None
    for halvings in range(1, 17):  # 65536 = 2^16
        model.weight.grad = torch.full((1, 1), math.inf)
        optimizer.step()
        assert (optimizer.last_step_skipped, model.weight.grad) == (True, None)
        assert optimizer.scale.factor == 65536 / 2**halvings
    model.weight.grad = torch.full((1, 1), math.inf)
    with pytest.raises(GradientError):
        optimizer.step()
    assert model.weight.item() == 1.0


def test_the_scale_doubles_after_two_thousand_good_steps_and_travels_with_the_state() -> None:
    model, optimizer = sgd(1.0, scaled=True, lr=0.0)
    for _ in range(2000):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert optimizer.scale is not None
    assert (optimizer.scale.factor, optimizer.scale.good_steps) == (131072, 0)
    _, fresh = sgd(1.0, scaled=True)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.scale is not None
    assert fresh.scale.factor == 131072


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(("build", "adapters"), [(llama, False), (llama, True), (critic, False)])
def test_a_model_comes_back_to_the_bit(tmp_path: Path, build: object, adapters: bool, shard: bool) -> None:
    assert callable(build)
    booster, path = PlainBooster(), str(tmp_path / "modeling")
    model, fresh = build(adapters=adapters), build(adapters=adapters, seed=1)
    booster.save_model(model, path, shard=shard, size_per_shard=1)
    assert booster.load_model(fresh, path) is fresh
    assert_equal(model, fresh)


def test_a_directory_is_what_transformers_loads_with_the_adapters_merged(tmp_path: Path) -> None:
    model = llama(adapters=True)
    PlainBooster().save_model(model, str(tmp_path), shard=True)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, expected in merged_parameters(model).items():
        assert torch.equal(loaded[name], expected), name


def test_nothing_is_pickled(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    booster = PlainBooster()
    booster.save_model(model, str(tmp_path / "modeling"), shard=True, use_safetensors=False)
    booster.save_optimizer(optimizer, str(tmp_path / "optimizer"), shard=True)
    booster.save_lr_scheduler(LambdaLR(optimizer, lambda _: 1.0), str(tmp_path / "lr_scheduler"))
    names = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert names == {".safetensors", ".json", ""}
    assert json.loads((tmp_path / "lr_scheduler").read_text())["last_epoch"] == 0


@pytest.mark.parametrize("shard", [False, True])
def test_optimizer_and_schedule_go_on_as_if_they_had_not_stopped(tmp_path: Path, shard: bool) -> None:
    booster = PlainBooster(max_norm=None)

    def fresh() -> tuple[nn.Linear, PlainOptimizer, CosineAnnealingLR]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _, wrapped, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=CosineAnnealingLR(optimizer, 10))
        return model, wrapped, scheduler

    def steps(model: nn.Linear, optimizer: PlainOptimizer, scheduler: CosineAnnealingLR) -> None:
        for row in (1.0, 2.0, 3.0):
            booster.backward(model(torch.full((1, 3), row)).square().sum(), optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    straight, first, second = fresh(), fresh(), fresh()
    steps(*straight)
    steps(*straight)
    steps(*first)
    booster.save_model(first[0], str(tmp_path / "m"))
    booster.save_optimizer(first[1], str(tmp_path / "o"), shard=shard)
    booster.save_lr_scheduler(first[2], str(tmp_path / "s"))
    booster.load_model(second[0], str(tmp_path / "m"))
    booster.load_optimizer(second[1], str(tmp_path / "o"))
    booster.load_lr_scheduler(second[2], str(tmp_path / "s"))
    steps(*second)
    assert_equal(straight[0], second[0])
    assert straight[2].get_last_lr() == second[2].get_last_lr()


@pytest.mark.parametrize("shard", [False, True])
def test_a_truncated_checkpoint_is_told_in_one_sentence_and_changes_nothing(tmp_path: Path, shard: bool) -> None:
    booster, path = PlainBooster(), tmp_path / "modeling"
    booster.save_model(llama(), str(path), shard=shard)
    file = path / "model.safetensors" if shard else path
    file.write_bytes(file.read_bytes()[:-100])
    fresh = llama(seed=1)
    with pytest.raises(ModelError, match=r"modeling cannot be read \(.*\); give one that was written whole"):
        booster.load_model(fresh, str(path))
    assert_equal(fresh, llama(seed=1))


def test_a_checkpoint_of_another_shape_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    booster = PlainBooster()
    booster.save_model(nn.Linear(2, 2), str(tmp_path / "m"))
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    optimizer.step()
    booster.save_optimizer(optimizer, str(tmp_path / "o"))
    booster.save_lr_scheduler(LambdaLR(optimizer, lambda _: 1.0), str(tmp_path / "s"))
    other = nn.Linear(3, 2)
    before = other.weight.clone()
    with pytest.raises(ModelError, match=r"does not fit the model: they disagree on 1 tensor .* first 'weight'"):
        booster.load_model(other, str(tmp_path / "m"))
    assert torch.equal(other.weight, before)
    with pytest.raises(ModelError, match="belongs to other weights"):
        booster.load_optimizer(torch.optim.AdamW(other.parameters()), str(tmp_path / "o"))
    both = torch.optim.AdamW([{"params": [each]} for each in other.parameters()])
    with pytest.raises(ModelError, match="for 1 group of weights, but the optimizer has 2"):
        booster.load_lr_scheduler(LambdaLR(both, lambda _: 1.0), str(tmp_path / "s"))
    with pytest.raises(ModelError, match="there is no such file or directory"):
        booster.load_model(other, str(tmp_path / "nowhere"))


def test_gradients_are_cut_into_buckets_of_one_dtype_and_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "BUCKET_ELEMENTS", 4)
    single, half = torch.arange(9.0), torch.zeros(3, dtype=torch.bfloat16)
    buckets = plain._buckets([single[:3], half, single[3:9]])
    assert [[piece.tolist() for piece in bucket] for bucket in buckets] == [
        [[0, 1, 2], [3]], [[4, 5, 6, 7]], [[8]], [[0, 0, 0]],
    ]  # fmt: skip
    buckets[2][0].fill_(-1)  # a view: what is averaged is the gradient itself
    assert single[8] == -1
