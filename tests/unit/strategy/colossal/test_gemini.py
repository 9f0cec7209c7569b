"""Gemini in a group of one, what adapts it, and what still makes that necessary; two ranks are in tests/parallel."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.kernels.building import KernelError
from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.colossal import gemini
from rlhf_core.strategy.colossal.compat import gemini as compat
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.adam import Memoryless
from rlhf_core.strategy.colossal.compat.gemini import chunk_elements, padded_elements
from rlhf_core.strategy.colossal.gemini import GeminiBooster
from rlhf_core.strategy.ranks import current_ranks
from tests.parallel.gemini_cases import BETAS, CLIP, STEPS, Run, alone, equal, groups_of, model_of, state_of
from tests.tiny_llama import tiny_llama

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them where there is a GPU"),
]


def run(kind: str = "lm", precision: str = "fp32") -> Run:
    return Run(current_ranks(), kind, precision)


def boosted(booster: GeminiBooster, model: nn.Module) -> tuple[Any, Any]:
    optimizer = booster.new_optimizer([{"params": list(model.parameters()), "lr": 1e-3}], betas=(0.9, 0.95))
    return booster.boost(model, optimizer)[:2]


def test_a_group_of_one_takes_plain_torchs_steps() -> None:
    ours, expected = run(), alone("lm", "fp32")
    for step in range(3):
        numbers = ours.step(step)
        assert numbers == pytest.approx({name: expected.numbers[name] for name in numbers}, rel=1e-5)


def test_a_hybrid_adam_of_the_callers_own_takes_the_same_steps() -> None:
    ours, theirs = run(), Run.__new__(Run)
    theirs.ranks, theirs.kind, theirs.booster = current_ranks(), "lm", GeminiBooster(max_norm=CLIP)
    model = model_of("lm", seed=0)
    own = upstream("colossalai.nn.optimizer").HybridAdam(groups_of(model), betas=BETAS)
    schedule = LambdaLR(own, lambda step: (step + 1) / (STEPS + 1))
    theirs.model, theirs.optimizer, _, _, theirs.scheduler = theirs.booster.boost(model, own, lr_scheduler=schedule)
    assert type(own.cpu_adam_op) is Memoryless
    assert [ours.step(step) for step in range(2)] == [theirs.step(step) for step in range(2)]
    assert equal(state_of(ours), state_of(theirs))


def test_a_state_that_is_loaded_is_gone_on_from_to_the_bit() -> None:
    ours, other = run(precision="bf16"), run(precision="bf16")
    ours.step(0)
    other.step(3)
    other.booster.load_state(other.model, other.optimizer, ours.booster.state(ours.model, ours.optimizer))
    assert ours.step(1) == other.step(1)
    assert equal(state_of(ours), state_of(other))


LLAMA = {  # layers, hidden, intermediate, key and value width, vocabulary
    "135 million": (30, 576, 1536, 192, 49152), "1 billion": (16, 2048, 8192, 512, 128256),
    "7 billion": (32, 4096, 11008, 4096, 32000), "70 billion": (80, 8192, 28672, 1024, 128256),
}  # fmt: skip


def llama_sizes(layers: int, hidden: int, wide: int, narrow: int, vocabulary: int) -> list[int]:
    square, flat = hidden * hidden, hidden * narrow
    layer = [square, flat, flat, square, hidden * wide, hidden * wide, wide * hidden, hidden, hidden]
    return [vocabulary * hidden, *layer * layers, hidden]


@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize("world_size", [2, 8, 48])
def test_chunks_of_any_model_waste_little(name: str, world_size: int) -> None:
    sizes = llama_sizes(*LLAMA[name])
    chunk = chunk_elements(sizes, world_size)
    assert chunk % world_size == 0
    assert chunk <= min(1 << 26, sum(sizes) // 4)
    assert 1 <= padded_elements(sizes, world_size, chunk) / sum(sizes) < 1.01


def test_chunks_are_filled_one_weight_after_the_other() -> None:
    # chunks of 10 for two ranks: [6 3 _] [7 _ _ _] [13 filled to 14] [2 2 2 2 2] [1 and 9 empty]
    assert padded_elements([6, 3, 7, 13, 2, 2, 2, 2, 2, 1], 2, 10) == 10 + 10 + 14 + 10 + 10
    # of 96 in all, four chunks at least: two pairs of 5 and 7 fill one
    assert chunk_elements([5, 7] * 8, 1) == 24


@pytest.mark.parametrize("kind", ["lm", "critic"])
def test_the_formula_is_what_gemini_does(kind: str) -> None:
    sizes = [weight.numel() for weight in model_of(kind, seed=0).parameters()]
    chunks = compat.chunks_of(run(kind).model)
    assert sum(chunk.chunk_size for chunk in chunks) == padded_elements(sizes, 1, chunk_elements(sizes, 1))
    assert len(chunks) > 4


def test_masters_are_the_weights_before_they_were_rounded() -> None:
    held = state_of(run("critic", "bf16"))
    for name, weight in model_of("critic", seed=0).named_parameters():
        assert torch.equal(held[f"weights.{name}"], weight.detach())


def test_between_steps_there_are_shards_alone() -> None:
    ours = run()
    manager = ours.model.chunk_manager
    counted = dict(manager.total_mem)
    ours.backward(0)
    assert manager.total_mem != counted
    ours.optimizer.zero_grad()
    assert manager.total_mem == counted
    ours.step(0)
    assert not any(share.numel() for group in ours.optimizer.param_groups for share in group["params"])
    assert all(chunk.grad_chunk.cuda_shard is None for chunk in compat.chunks_of(ours.model))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_clipped_whatever_they_are_rounded_to(precision: Any) -> None:
    whole, clipped = (Run(current_ranks(), booster=GeminiBooster(precision, limit)) for limit in (None, 0.5))
    norm = whole.step(0)["0.norm"]
    assert clipped.step(0)["0.norm"] == norm > 0.5
    expected = state_of(whole)
    for name, tensor in state_of(clipped).items():
        if name.startswith("exp_avg."):
            torch.testing.assert_close(tensor, expected[name] * (0.5 / (norm + 1e-6)), rtol=1e-6, atol=0)


def test_buffers_keep_their_precision_and_are_the_twins_too() -> None:
    ours = run("reward_model", "bf16")
    twin = ours.booster.plain(ours.model)
    frequencies = twin.trunk.rotary_emb.inv_freq
    assert torch.equal(frequencies, tiny_llama().model.rotary_emb.inv_freq)
    assert ours.model.module.trunk.rotary_emb.inv_freq is frequencies
    ours.booster.load_weights(ours.model, {"score_mean": torch.tensor(1.2345)})
    assert twin.score_mean == ours.model.module.score_mean == torch.tensor(1.2345)


def test_what_comes_out_is_of_torchs_own_class() -> None:
    ours = run()
    output = ours.model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits
    assert type(output) is torch.Tensor
    output = output.detach()
    before = output.clone()
    output.add_(1)
    assert torch.equal(output, before + 1)


def test_weights_are_loaded_after_a_pass_in_inference_mode() -> None:
    ours, other = run(), run()
    with torch.inference_mode():
        ours.evaluated(3)
    ours.booster.load_weights(ours.model, other.booster.weights(other.model))
    assert ours.step(0) == other.step(0)


@pytest.mark.parametrize("kind", ["critic", "reward_model"])
def test_values_and_scores_are_finer_than_the_weights(kind: str) -> None:
    ours = run(kind, "bf16")
    with torch.no_grad():
        found = ours.model(*next(ours.micros(0)))
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())


def test_training_and_evaluation_reach_all_modules() -> None:
    ours = run("critic")
    ours.model.eval()
    assert not any(module.training for module in (ours.model, *ours.model.module.modules()))
    ours.model.train()
    assert all(module.training for module in (ours.model, *ours.model.module.modules()))


def test_what_is_no_longer_used_is_freed() -> None:
    ours = run()
    ours.step(0)
    dead = [weakref.ref(each) for each in (ours.model, ours.model.chunk_manager, ours.booster)]
    del ours
    gc.collect()
    assert [each() for each in dead] == [None] * 3


def test_a_first_pass_without_gradients_is_not_what_placement_goes_by() -> None:
    ours = run()
    manager = ours.model.gemini_manager
    manager.policy_name = "auto"  # as far as a CPU can pretend
    manager.placement_policy.max_prefetch = 1  # so it notes in which order chunks are used
    ours.evaluated(0)
    assert manager.compute_list == []
    ours.backward(0)
    assert len(manager.compute_list) > 10


class Lavish(nn.Module):
    """Has a weight that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


def test_a_weight_that_a_pass_does_not_use_is_named() -> None:
    booster = GeminiBooster()
    model, optimizer = boosted(booster, Lavish())
    with pytest.raises(ConfigError, match=r"this one did without 2 of 4, first spare.weight"):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer)


def test_what_cannot_be_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, frozen, other = tiny_llama(), tiny_llama(), tiny_llama()
    attach_lora(adapted, LoRAConfig(r=2), seed=0)
    with pytest.raises(ConfigError, match="trains no adapters; take zero2, ddp or plain with LoRA"):
        GeminiBooster().boost(adapted)
    frozen.model.norm.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"but 1 are frozen, first model.norm.weight"):
        GeminiBooster().boost(frozen)
    with pytest.raises(ConfigError, match="HybridAdam alone, not with AdamW"):
        GeminiBooster().boost(other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(ConfigError, match="gemini_auto places weights by the GPU memory that is free"):
        GeminiBooster(placement="auto")
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        GeminiBooster("fp16")

    def no_kernel(*_: Any, **__: Any) -> None:
        raise KernelError("its kernel needs a C++ compiler, and there is no g++")

    monkeypatch.setattr(gemini, "hybrid_adam", no_kernel)
    with pytest.raises(ConfigError, match=r"HybridAdam alone, but its kernel needs .* take zero2, ddp or plain"):
        GeminiBooster().new_optimizer(groups_of(other), betas=(0.9, 0.95))


def test_on_a_gpu_the_weights_of_a_group_step_together() -> None:
    ours = run()
    ours.step(0)
    state = ours.booster.state(ours.model, ours.optimizer)
    steps: Any = state.moments["step"]
    steps["model.norm.weight"] = torch.tensor(4.0)
    ours.optimizer.load_moments(state.moments)  # on a CPU each has its own
    ours.optimizer._chunks.device = torch.device("cuda")
    with pytest.raises(ModelError, match="some have taken 1 and some 4"):
        ours.optimizer.load_moments(state.moments)


# What upstream still does: where one of these fails, what adapts it can go.


def theirs(model: nn.Module, **config: Any) -> Any:
    """Upstream's wrapper, in chunks that a CPU can have."""
    size = {"chunk_size": sum(weight.numel() for weight in model.parameters()), "keep_gathered": False}
    GeminiBooster()  # sees to the chunks
    config = {"mixed_precision": torch.bfloat16, "enable_async_reduce": False} | config
    return compat._UpstreamModel(model, {1: size}, torch.device("cpu"), enable_gradient_accumulation=True, **config)


IDS = torch.ones(1, 4, dtype=torch.long)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what was half made
def test_upstream_still_takes_half_precisions_alone() -> None:
    with pytest.raises(AssertionError):
        compat._plugin.GeminiPlugin(precision="fp32")
    with pytest.raises(AssertionError):
        theirs(tiny_llama(), mixed_precision=torch.float32)


def test_upstream_still_takes_a_cpus_shares_for_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    booster = GeminiBooster()
    monkeypatch.setattr(compat._chunk, "Chunk", compat._UpstreamChunk)
    monkeypatch.setattr(compat._manager, "Chunk", compat._UpstreamChunk)
    model, _ = boosted(booster, tiny_llama())
    with pytest.raises(AssertionError):
        model(input_ids=IDS)


def test_upstream_still_rounds_masters_and_buffers() -> None:
    model = tiny_llama()
    wrapped = theirs(model)
    assert wrapped.chunk_manager.get_chunk(wrapped.fp32_params[0]).payload.frac().unique().numel() > 100
    master = wrapped.chunk_manager.get_chunk(wrapped.fp32_params[0]).payload
    assert torch.equal(master, master.bfloat16().float())
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16


def test_upstream_still_returns_tensors_that_nothing_changes_in_place() -> None:
    with torch.no_grad():
        output = theirs(tiny_llama())(input_ids=IDS).logits
    before = output.clone()
    output.add_(1)
    assert type(output).__name__ == "ColoTensor"
    assert torch.equal(output, before)


def test_upstream_still_leaves_the_module_inside_as_it_was() -> None:
    model = tiny_llama().train()
    theirs(model).eval()
    assert model.training


def test_upstream_still_caches_what_could_go_at_one_place_of_a_pass() -> None:
    assert theirs(tiny_llama()).gemini_manager._get_layout_info.cache_info().maxsize is None


def test_upstream_still_wants_gradients_of_a_first_pass_where_it_places_by_memory() -> None:
    wrapped = theirs(tiny_llama())
    wrapped.gemini_manager.policy_name = "auto"  # as far as a CPU can pretend
    with torch.no_grad(), pytest.raises(AssertionError, match="warmup"):
        wrapped(input_ids=IDS)


def steps_of_theirs(model: nn.Module, passes: Sequence[str]) -> torch.Tensor:
    """The first moment after one step under upstream's own wrappers."""
    optimizer = GeminiBooster().new_optimizer([{"params": list(model.parameters()), "lr": 1e-3}], betas=(0.9, 0.95))
    wrapped = theirs(model)
    stepped = compat._optimizer.GeminiOptimizer(optimizer, wrapped)
    for what in passes:
        if what == "backward":
            stepped.backward(wrapped(input_ids=IDS, labels=IDS).loss)
        else:
            stepped.zero_grad()
    stepped.step()
    state: torch.Tensor = next(iter(optimizer.state.values()))["exp_avg"]
    return state


def test_upstream_still_adds_up_gradients_that_were_to_be_forgotten() -> None:
    once = steps_of_theirs(tiny_llama(), ["backward"])
    again = steps_of_theirs(tiny_llama(), ["backward", "zero_grad", "backward"])
    torch.testing.assert_close(again, 2 * once, rtol=1e-2, atol=1e-5)


def test_upstream_still_keeps_a_second_shard_of_weights_without_masters() -> None:
    model = tiny_llama()
    optimizer = GeminiBooster().new_optimizer([{"params": list(model.parameters()), "lr": 1e-3}], betas=(0.9, 0.95))
    wrapped = theirs(model, master_weights=False)
    stepped = compat._optimizer.GeminiOptimizer(optimizer, wrapped)
    stepped.backward(wrapped(input_ids=IDS, labels=IDS).loss)
    stepped.step()
    assert all(share.numel() for group in optimizer.param_groups for share in group["params"])
