"""Models in parts: every form over twenty steps, who holds what, what travels, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhf_core.config import LoRAConfig
from rlhf_core.functional import logprobs
from rlhf_core.functional.logprobs import VocabularyPart
from rlhf_core.models import attention
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.trunk import checkpoint_gradients
from rlhf_core.ppo.published_weights import pieces_to_publish, weights_to_publish
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.parts import Parts
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.supervised import step as step_module
from rlhf_core.supervised.sft import train_sft
from rlhf_core.weights import Publisher
from rlhf_core.weights.in_parts import write_pieces
from tests.parallel import strategy_stages as stages
from tests.parallel.ranks import Found
from tests.parallel.strategy_cases import laid_out, loss_of, trained_by
from tests.tiny_llama import tiny_llama

EPOCHS = 4
"""Of five steps each."""
FORMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama_biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}
"""Biases where there are some; a window; heads in and behind one matrix of words; norms over heads."""


def form(name: str, *, vocabulary: int = 259) -> PreTrainedModel:
    """Return a tiny model; 259 words cannot be cut evenly."""
    config, model, options = FORMS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made: PreTrainedModel = model(
            config(
                vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.2,
                **options,
            )
        )  # fmt: skip
        for parameter in made.parameters():  # norms and biases begin as ones and zeros
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return made.eval().to(stages.DEVICE)


def steps(ranks: Ranks, name: str, strategy: str, precision: str, option: str = "") -> Found:
    """Twenty steps of SFT on all weights; fewer of packed rows."""
    changes = {"gradient_checkpointing": option == "checkpointing", "packing": option == "packing"}
    config = stages.sft_config(ranks, strategy, precision, epochs=EPOCHS, **changes)
    with stages._watched(step_module) as watch:
        train_sft(
            form(name), stages.demonstrations(), config, seed=stages.SEED,
            autocast_dtype=stages.DTYPES[precision], on_step=watch.step, ranks=ranks,
        )  # fmt: skip
    return watch.found("model", steps=watch._steps if option == "packing" else EPOCHS * stages.STEPS)


def widths(ranks: Ranks, strategy: str) -> Found:
    """Two passes of different widths and one that learns nothing, then one backward, which computes both again."""
    model = form("llama")
    trained = trained_by(model, strategy, "fp32", ranks)
    checkpoint_gradients(model)
    model.train()

    def mean(width: int) -> Tensor:
        ids = torch.arange(3 * width).view(3, width)
        rows = {"sequences": ids, "attention_mask": ids >= 0, "num_actions": width - 1}
        return response_logprobs(model, **rows, temperature=1.0).mean()

    loss = mean(7) + mean(12)
    with torch.no_grad():
        mean(3)
    trained.booster.backward(loss, trained.optimizer)
    trained.optimizer.step()
    state = trained.booster.state(model, trained.optimizer)  # type: ignore[attr-defined]
    return Found({"loss": loss.item()}, dict(state.moments.get("exp_avg", {})))


def words(ranks: Ranks, dtype: str, kernels: str) -> Found:
    """Log-probabilities, entropies and gradients, each rank with its words' logits; tokens of every part."""
    shards = ranks.laid_out(Parts(tp=ranks.world_size)).shards
    draw = torch.Generator().manual_seed(7)
    whole = (3 * torch.randn(2, 9, 259, generator=draw)).to(getattr(torch, dtype))
    tokens = torch.randint(0, 259, (2, 9), generator=draw)
    weights = torch.randn(2, 2, 9, generator=draw)
    start, stop = (259 * (shards.rank + each) // shards.world_size for each in (0, 1))
    part = VocabularyPart(start, shards.stack)
    here, gradient = read(whole[..., start:stop], tokens, weights, part, kernels=kernels == "yes")
    expected, expected_gradient = read(whole, tokens, weights, None, kernels=kernels == "yes")
    return Found(
        tensors={
            "found": here, "found.gradient": gradient, "whole": expected,
            "whole.gradient": expected_gradient[..., start:stop],
        }
    )  # fmt: skip


def read(
    logits: Tensor, tokens: Tensor, weights: Tensor, part: VocabularyPart | None, *, kernels: bool
) -> tuple[Tensor, Tensor]:
    """Return both numbers of each token, and the gradient of their weighted sum."""
    own = logits.clone().requires_grad_()
    with patch.object(logprobs, "has_kernels", logprobs.has_kernels if kernels else lambda _: False):
        found = logprobs.logprobs_and_entropy(own, tokens, temperature=0.7, entropy_needs_grad=True, part=part)
        (torch.stack(found) * weights).sum().backward()
    assert own.grad is not None
    return torch.stack(found).detach(), own.grad


def traffic(ranks: Ranks, strategy: str) -> Found:
    """Bytes that this rank adds to the sums of its model, in a pass there and back."""
    _, laid = laid_out(ranks, strategy)
    model = form("llama", vocabulary=256)
    trained = trained_by(model, strategy, "fp32", ranks)
    given: list[int] = []
    total = Ranks.sum

    def counted(self: Ranks, tensor: Tensor) -> Tensor:
        if self is laid.shards:
            given.append(tensor.nbytes)
        return total(self, tensor)

    with patch.object(Ranks, "sum", counted):
        loss = loss_of(trained.model)
        there = sum(given)
        trained.booster.backward(loss, trained.optimizer)
    trained.optimizer.step()
    return Found({"there": float(there), "back": float(sum(given) - there)})


def stages_of_four_layers(ranks: Ranks) -> Found:
    """What a stage has of a model with four layers, and what it sends in a pass over five rows, there and back."""
    _, laid = laid_out(ranks, "3d-pp2")
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    trained = trained_by(model, "3d-pp2", "fp32", ranks)
    ids = torch.arange(80).view(5, 16)
    sent: list[float] = []
    send = Ranks.send

    def counted(self: Ranks, tensor: Tensor, rank: int) -> Any:
        assert self is laid.stages
        sent.append(float(tensor.nbytes))
        return send(self, tensor, rank)

    with patch.object(Ranks, "send", counted):
        found = response_logprobs(model, sequences=ids, attention_mask=ids >= 0, num_actions=15, temperature=1.0)
        there = len(sent)
        trained.booster.backward(found.mean(), trained.optimizer)
    held = {name: each.nbytes for name, each in model.named_parameters() if each.numel()}
    layers = sorted({int(name.split(".")[2]) for name in held if ".layers." in name})
    trained.optimizer.step()
    moments = sum(each.nbytes for state in trained.optimizer.state.values() for each in state.values() if each.ndim)
    return Found(
        {"there": sum(sent[:there]), "back": sum(sent[there:]), "messages": float(len(sent)), "moments": float(moments)}
        | {f"layer {number}": 1.0 for number in layers}
        | {"in layers": float(sum(size for name, size in held.items() if ".layers." in name))}
        | {"bytes": float(sum(held.values()))}
    )


def columns(ranks: Ranks, strategy: str) -> Found:
    """Shapes of what layers and attention are given, of 5 rows of 7 tokens."""
    model = form("llama", vocabulary=256)
    trained = trained_by(model, strategy, "fp32", ranks)
    shapes: dict[str, float] = {}

    def see(name: str, tensor: Tensor) -> None:
        shapes.update({f"{name}.{dim}": float(size) for dim, size in enumerate(tensor.shape)})

    layer: Any = model.model.layers[1]  # the first is given all columns, and takes its own
    layer.register_forward_pre_hook(lambda _, given: see("layer", given[0]))
    layer.self_attn.q_proj.register_forward_pre_hook(lambda _, given: see("queries", given[0]))
    kernel = attention.sdpa_attention_forward

    def seen(module: Any, query: Tensor, *others: Any, **options: Any) -> Any:
        see("attention", query)
        return kernel(module, query, *others, **options)

    ids = torch.arange(35).view(5, 7)
    with patch.object(attention, "sdpa_attention_forward", seen):
        trained.model(input_ids=ids)
    return Found(shapes)


def published(ranks: Ranks, strategy: str, what: str) -> Found:
    """Checksums of the buckets that all write together, and of those that the first gathers; who had how much."""
    lora = stages.LORA if what == "adapters" else None
    learner = stages.ppo_learner(ranks, strategy, "fp32", lora=lora)
    config = stages.ppo_config(ranks, strategy, "fp32", lora=lora)
    publisher = Publisher(
        transport="shared_memory", dtype=torch.bfloat16, bucket_bytes=1 << 16, sparse=what == "differences"
    )
    pieces, gathered = pieces_to_publish(learner, config), weights_to_publish(learner, config)
    assert pieces is not None
    facts: dict[str, Any] = {"version": 1, "fully": not config.sends_adapters, "nodes": ()}
    if not ranks.is_first:
        written = write_pieces(pieces, learner.ranks, **publisher.form)
        assert list(gathered) == []
        return Found({"pieces": float(len(pieces)), "written": float(written)})
    together = publisher.publish_pieces(pieces, learner.ranks, **facts)
    alone = publisher.publish(gathered, **facts)
    if together is None:
        return Found({"pieces": float(len(alone.slots)), "written": 0.0})
    numbers = {"pieces": float(len(together.slots)), "buckets": float(len(together.buckets)), "written": 1.0}
    numbers["same"] = float(together.slots == alone.slots and together.buckets == alone.buckets)
    publisher.close()
    return Found(numbers)


def refused(ranks: Ranks, what: str) -> Found:
    """What cannot be cut says so in one sentence."""
    laid = ranks.laid_out(Parts(pp=2) if what == "layers" else Parts(sp=2) if what in {"eager", "sp"} else Parts(tp=2))
    if what == "world":
        ranks.laid_out(Parts(tp=3))
    model: Any = tiny_llama()
    if what in {"heads", "sp"}:
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, vocab_size=9)
        )
    elif what == "layers":
        model = tiny_llama(num_hidden_layers=1)
    elif what == "cache":
        model, *_ = make_booster("3d", ranks=ranks.laid_out(Parts(pp=2)), device="cpu").boost(model)
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    elif what == "split_gather":
        ranks.laid_out(Parts(sp=2, sp_mode="split_gather"))
    elif what == "eager":
        model.set_attn_implementation("eager")
    elif what == "form":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=32, n_layer=1, n_head=2))
    elif what == "adapters":
        attach_lora(model, LoRAConfig(r=2, alpha=4.0, target_modules=["q_proj", "embed_tokens"]), seed=0)
    elif what == "none inside":
        model = torch.nn.Linear(2, 2)
    model, *_ = make_booster("3d", ranks=laid, device="cpu").boost(model)
    loss = model(input_ids=torch.full((1, 3), ranks.rank)).logits  # other rows on each
    return Found({"sum": loss.sum().item()})


def waits(ranks: Ranks) -> Found:
    """The longest waits of a group and of the groups in it, which stay; and who draws what."""
    laid = ranks.laid_out(Parts(tp=2))
    assert ranks.laid_out(Parts(tp=2)) is laid
    assert laid.laid_out(Parts(tp=1)).world_size == ranks.world_size
    four = ranks.laid_out(Parts(pp=2, sp=2))
    groups = {"all": dist.group.WORLD, "shards": laid.shards._group, "rank": laid._group} | {
        "stages": four.stages._group, "columns": four.sequence._group
    }  # fmt: skip
    device = torch.device(stages.DEVICE)
    waits = {name: group._get_backend(device).options._timeout.total_seconds() for name, group in groups.items()}
    return Found(waits | {"draws": float(laid.draws), "draws of four": float(four.draws)})
