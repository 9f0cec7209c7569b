"""The decoder gives what the model's own layers give, by kernels or without, whatever adapters and base it has."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from rlhf_core.config import RolloutConfig
from rlhf_core.generation import (
    Generation,
    GenerationSettings,
    decoder,
    engine,
    make_engine,
    notes_suffice,
    sample_uniforms,
)
from rlhf_core.generation.sampling import Choice
from rlhf_core.kernels import compiled
from rlhf_core.models.base import load_base, open_base
from rlhf_core.models.shape import PassRows, Shape
from rlhf_core.models.trunk import autocast
from rlhf_core.training.micro_batches import PassCost
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm
from tests.unit.models.test_adapted_linear import two_sets

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [200, 100, 50, 25, 12, 6, 3], [77], [10, 11]]
SETTINGS = GenerationSettings(max_new_tokens=12, stop_ids=(), pad_id=0)
ENGINE = "native"
OURS = ("llama", "qwen2")


@pytest.fixture(params=["kernels", "PyTorch"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.param == "PyTorch":
        monkeypatch.setattr(decoder, "has_kernels", lambda _tensor: False)
    else:
        assert compiled.library() is not None, "no C++ compiler: see README"
    yield
    torch.set_num_threads(threads)


def generated(model: Any, uniforms: torch.Tensor | None = None) -> Generation:
    return make_engine(ENGINE, model).generate(PROMPTS, SETTINGS, uniforms=uniforms)


def by_own_layers(model: Any, uniforms: torch.Tensor | None = None) -> Generation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "can_decode", lambda _model: False)
        return generated(model, uniforms)


def numbers() -> torch.Tensor:
    keys = [str(row) for row in range(len(PROMPTS))]
    return sample_uniforms(seed=0, episode=0, keys=keys, samples=[0] * len(keys), max_new_tokens=12)


def on_a_base(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype, arithmetic: torch.dtype) -> PreTrainedModel:
    model.to(dtype).save_pretrained(folder / "model")
    base = open_base(folder / "model", "0" * 64, arithmetic=arithmetic, models_dir=folder / "models")
    return load_base(base, arithmetic=arithmetic)


def check_same(model: Any) -> None:
    assert engine.can_decode(model)
    for uniforms in (None, numbers()):
        ours, theirs = generated(model, uniforms), by_own_layers(model, uniforms)
        assert torch.equal(ours.sequences, theirs.sequences)
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", OURS)
def test_in_float32_tokens_are_the_same(architecture: str) -> None:
    check_same(tiny_causal_lm(architecture))


def shapes_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows and tokens of each pass over the prompts."""
    read: list[tuple[int, ...]] = []
    plain = engine._last_logits
    monkeypatch.setattr(
        engine,
        "_last_logits",
        lambda model, tokens, *others: read.append(tuple(tokens.shape)) or plain(model, tokens, *others),
    )
    generated(model)
    return read[:]


@pytest.mark.parametrize("architecture", OURS)
@pytest.mark.parametrize(
    "prompts", [[[5, 6, 7, 8], [5, 6, 7], [5, 6, 9, 10, 11]], [[5, 6, 7], [5, 6, 8]], [[5], [5, 6]]]
)
def test_what_all_prompts_begin_with_is_read_once(
    architecture: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_sets(tiny_causal_lm(architecture))
    monkeypatch.setattr(engine, "WORTH_A_PASS", 1)
    monkeypatch.setattr(f"{__name__}.PROMPTS", [*prompts, prompts[0], *prompts[::-1]])
    read = shapes_read(model, monkeypatch)
    shared = {4: 2, 3: 2, 1: 0}[len(prompts[0])]
    longest = max(map(len, prompts))
    assert read == [(1, shared)] * bool(shared) + [(len(prompts), longest - shared)]
    check_same(model)


@pytest.mark.parametrize("architecture", OURS)
@pytest.mark.parametrize("begins", [[], [5, 6, 7, 8]])
def test_prompts_of_like_length_are_read_together(
    architecture: str, begins: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_sets(tiny_causal_lm(architecture))
    prompts = [begins + [30 + row + place for place in range(length)] for row, length in enumerate([9, 1, 8, 1, 5, 9])]
    monkeypatch.setattr(f"{__name__}.PROMPTS", [*prompts, prompts[2]])
    monkeypatch.setattr(engine, "WORTH_A_PASS", 1)
    monkeypatch.setattr(engine, "cost_on", lambda *_: PassCost(4, most=20))
    read = shapes_read(model, monkeypatch)
    assert read == [(1, len(begins))] * bool(begins) + [(2, 9), (2, 8), (2, 1)]
    check_same(model)


def test_where_the_longest_row_decides_on_the_angles_prompts_are_read_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = copy.deepcopy(tiny_causal_lm("llama").config)
    half = config.head_dim // 2
    config.original_max_position_embeddings = 16
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * half, "long_factor": [4.0] * half,
    }  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(f"{__name__}.PROMPTS", [[5 + place for place in range(length)] for length in (20, 3, 9, 2)])
    monkeypatch.setattr(engine, "cost_on", lambda *_: PassCost(0))
    check_same(model)
    options = RolloutConfig(rollout_dtype="float32")
    assert not notes_suffice(options, options, model)


class Recorded:
    """Stands where a CUDA graph does: it has the memory of one, and runs what a graph would replay."""

    recorded: ClassVar[list[int]] = []

    def __init__(self, step: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
        self._step, self._inputs = step, [each.clone() for each in inputs]
        self._output = step(*self._inputs)
        self.recorded.append(len(inputs[0]))

    def __call__(self, *inputs: torch.Tensor | int) -> torch.Tensor:
        for held, each in zip(self._inputs, inputs, strict=True):
            held.copy_(torch.as_tensor(each))
        return self._output.copy_(self._step(*self._inputs))


@pytest.mark.parametrize("architecture", OURS)
def test_a_step_that_is_recorded_once_for_each_number_of_rows_gives_the_same_tokens(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "has_kernels", lambda _tensor: False)  # there are none on CUDA
    monkeypatch.setattr(f"{__name__}.ENGINE", "native_graphs")
    monkeypatch.setattr(decoder, "_can_record", lambda _tensor: True)
    monkeypatch.setattr(decoder, "_Graph", Recorded)
    monkeypatch.setattr(decoder, "WORTH_A_GRAPH", 4)  # the last steps go without
    monkeypatch.setattr(Recorded, "recorded", [])
    monkeypatch.setattr(f"{__name__}.SETTINGS", dataclasses.replace(SETTINGS, stop_ids=tuple(range(0, 259, 5))))
    check_same(two_sets(tiny_causal_lm(architecture)))
    assert Recorded.recorded[0] == len(PROMPTS) > Recorded.recorded[1]


def test_kernels_keep_a_prompt_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[decoder.Decoder] = []
    plain = decoder.Decoder.keep

    def keep(self: decoder.Decoder, rows: torch.Tensor) -> None:
        plain(self, rows)
        made.append(self)

    monkeypatch.setattr(decoder.Decoder, "keep", keep)
    monkeypatch.setattr(f"{__name__}.PROMPTS", PROMPTS[:2] * 4)
    generated(tiny_causal_lm("llama"))
    prompts, own = made[0]._kept[0]
    if made[0]._rows.apart:
        assert (prompts.keys.shape[0], prompts.keys.shape[3], own.keys.shape[0]) == (2, len(PROMPTS[0]), 8)
    else:
        assert (prompts.keys.numel(), own.keys.shape[0]) == (0, 8)
    check_same(tiny_causal_lm("llama"))


def test_a_few_tokens_are_not_worth_a_pass() -> None:
    beginning = list(range(10, 42))
    assert engine._shared_tokens([[*beginning, 1], [*beginning, 2]]) == 0
    assert engine._shared_tokens([[*beginning, 1], [*beginning, 2], [*beginning, 3, 4]]) == 32
    assert engine._shared_tokens([[*beginning, 1]]) == 0


def test_mistral_without_a_window() -> None:
    model = tiny_causal_lm("mistral")
    config = copy.deepcopy(model.config)
    config.sliding_window = None
    check_same(type(model)(config).eval())


@pytest.mark.parametrize("architecture", OURS)
def test_over_a_base_with_two_sets_of_adapters(architecture: str, tmp_path: Path) -> None:
    model = on_a_base(tiny_causal_lm(architecture), tmp_path, dtype=torch.float32, arithmetic=torch.float32)
    layer = model.model.layers[0]
    joined = decoder._Product([layer.mlp.gate_proj, layer.mlp.up_proj], torch.float32)
    assert len(joined._weights) == 1, "gate and up lie side by side in a base's file"
    check_same(two_sets(model))


def test_adapters_joined_take_what_memory_arithmetic_says() -> None:
    model, rank = two_sets(tiny_causal_lm("llama")), 4 + 2
    layer = decoder._Layer.of(model.model.layers[0], torch.float32)
    held = 0
    for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
        assert product._factors is not None
        held += product._factors.a.nbytes + sum(b.nbytes for _, _, b in product._factors.parts)
    config = model.config
    keys = config.num_key_value_heads * config.head_dim
    shape = Shape(1, config.hidden_size, config.intermediate_size, config.hidden_size, keys, vocabulary=0, heads=4)
    assert shape.sampling_bytes(PassRows(0, 0, 0), "float32", rank=rank) == held


def test_over_a_base_of_16_bits_in_float32(tmp_path: Path) -> None:
    model = on_a_base(tiny_causal_lm("llama"), tmp_path, dtype=torch.bfloat16, arithmetic=torch.float32)
    check_same(two_sets(model))


@pytest.mark.parametrize("is_cast", [True, False])
def test_in_bfloat16_it_is_no_further_from_float32_than_the_own_layers(
    is_cast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(259, (len(PROMPTS), 12), generator=torch.Generator().manual_seed(0))

    def forced(logits: torch.Tensor, place: torch.Tensor, step: int) -> Choice:
        """The tokens are given, so that all compute the same."""
        given = tokens[place, step]
        return Choice(given, logits.float().log_softmax(-1).gather(1, given[:, None])[:, 0])

    monkeypatch.setattr(engine, "chooser", lambda *_args, **_options: forced)
    expected = by_own_layers(two_sets(tiny_causal_lm("llama").bfloat16().float())).log_probs
    model = two_sets(tiny_causal_lm("llama").bfloat16())
    if is_cast:
        model.float()
    with autocast(torch.device("cpu"), torch.bfloat16 if is_cast else torch.float32):
        ours, theirs = (float((run(model).log_probs - expected).abs().mean()) for run in (generated, by_own_layers))
    assert 0 < ours < 1.3 * theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_of_16_bits_in_float32_under_autocast(dtype: torch.dtype, tmp_path: Path) -> None:
    model = on_a_base(tiny_causal_lm("llama"), tmp_path, dtype=dtype, arithmetic=torch.float32)
    with autocast(torch.device("cpu"), torch.bfloat16):
        generated(two_sets(model), numbers())


def test_the_bits_do_not_depend_on_threads() -> None:
    model = tiny_causal_lm("llama").bfloat16()
    together = generated(model, numbers())
    torch.set_num_threads(2)
    assert all(torch.equal(a, b) for a, b in zip(generated(model, numbers()), together, strict=True))


def test_other_architectures_go_through_their_own_layers() -> None:
    assert [name for name in ARCHITECTURES if engine.can_decode(tiny_causal_lm(name))] == ["llama", "qwen2"]


def is_watched(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def has_another_gate(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def has_another_projection(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)


def has_another_norm(model: Any) -> None:
    model.model.norm = torch.nn.RMSNorm(64)


def is_merged(model: Any) -> None:
    two_sets(model).model.layers[0].mlp.up_proj.merge()


def is_sharded(model: Any) -> None:
    class Shard(torch.nn.Parameter):
        pass

    model.lm_head.weight = Shard(model.lm_head.weight.detach())


@pytest.mark.parametrize(
    "change", [is_watched, has_another_gate, has_another_projection, has_another_norm, is_merged, is_sharded]
)
def test_models_that_were_changed_go_through_their_own_layers(change: Callable[[Any], None]) -> None:
    model = tiny_causal_lm("llama")
    change(model)
    assert not engine.can_decode(model)
