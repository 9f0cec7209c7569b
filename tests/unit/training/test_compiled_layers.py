"""Passes as the configuration may have them: compiled layers give the same numbers; what cannot be had is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from pydantic import ValidationError
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from rlhf_core.config import LoRAConfig, PPOConfig, SFTConfig
from rlhf_core.errors import ConfigError, ModelError, TrainingError
from rlhf_core.models import attention, token_tree
from rlhf_core.models.attention import attend_by_flash
from rlhf_core.models.compiled_layers import CompiledLayers
from rlhf_core.models.critic import Critic
from rlhf_core.models.token_tree import can_branch
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.training import modes
from rlhf_core.training.modes import check_passes
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.test_options import gradients, learner, shifted
from tests.unit.supervised.test_sft import CONFIG as SFT
from tests.unit.supervised.test_sft import train

COMPILED = SFT.model_copy(update={"compile_layers": True})
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield
    torch.compiler.reset()


def compiled() -> int:
    """Return how many blocks of code there are."""
    return int(counters["stats"]["unique_graphs"])


def test_compiled_layers_take_the_same_ppo_step_and_every_length_has_the_same_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, since each form of a layer (with gradients, the first one) is compiled for seconds."""
    plain, ours = (learner(lora=LoRAConfig(r=2), micro_batch_size=8, compile_layers=active) for active in (False, True))
    made = shifted(plain)
    torch.testing.assert_close(
        ours.recompute(made).action_log_probs, plain.recompute(made).action_log_probs, rtol=0, atol=1e-5
    )
    assert ours.training_step(made) == pytest.approx(plain.training_step(made), rel=1e-5, abs=1e-6)
    for role in ("actor", "critic"):
        found = gradients(ours, role)
        for name, gradient in gradients(plain, role).items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())
    before = compiled()
    monkeypatch.setattr(token_tree, "WORTH_A_CALL", 0)  # rows of each length by themselves, where none are compiled
    for rows in ([0, 1, 2, 3], [2, 3, 4]):
        ours.training_step(made.select(rows))
    ours.actor(torch.tensor([[5, 6, 7]]))  # not learning
    assert compiled() == before > 1


def test_compiled_layers_learn_the_same_from_demonstrations_and_compute_activations_again() -> None:
    config = COMPILED.model_copy(update={"gradient_checkpointing": True})
    (plain, history), (other, compiled_history) = train(), train(config)
    assert compiled_history[0] == pytest.approx(history[0], rel=1e-5)
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)


def test_layers_are_compiled_in_the_block_alone_whatever_the_thread_and_how_it_ends() -> None:
    model = tiny_llama()
    ours, layer = CompiledLayers(model), model.model.layers[0]

    def in_a_block() -> tuple[int, int]:
        with suppress(TrainingError), ours.in_use():
            assert layer._compiled_call_impl is not None
            found = torch._dynamo.config.recompile_limit, torch._inductor.config.compile_threads
            raise TrainingError("in the block")
        return found

    in_a_block()
    known = len(eval_frame.cached_backends)
    with ThreadPoolExecutor(1) as other:
        limit, compilers = other.submit(in_a_block).result()
    assert layer._compiled_call_impl is None
    assert limit > torch._dynamo.config.recompile_limit
    assert compilers == 1
    assert len(eval_frame.cached_backends) == known


def test_without_a_compiler_layers_are_not_compiled() -> None:
    torch.compiler.reset()
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with (
        no_compiler,
        pytest.raises(ModelError, match=r"sft.compile_layers: PyTorch cannot compile here \(.*, or set it to false"),
    ):
        train(COMPILED)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no layers that can be compiled; set compile_layers to false"):
        CompiledLayers(torch.nn.Linear(2, 2))


def test_flash_attention_is_refused_without_a_gpu_without_the_library_and_in_32_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SFTConfig(flash_attention=True)
    with pytest.raises(ModelError, match=r"^sft.flash_attention needs a GPU, which is not here; set it to false$"):
        train(config)
    for spec, dtype, told in ((None, "bfloat16", "needs the library flash_attn"), (1, "float32", "knows 16 bits")):
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda _, spec=spec: spec)
        with pytest.raises(ModelError, match=f"^sft.flash_attention {told}"):
            check_passes(config.model_copy(update={"dtype": dtype}), torch.device("cuda"))


def test_a_model_that_cannot_attend_by_flash_is_refused() -> None:
    for model in (tiny_llama(), BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2))):
        kept = model.config._attn_implementation
        with pytest.raises(ModelError, match=rf"^{type(model).__name__} cannot attend by flash_attn \(.*; set"):
            attend_by_flash(model)
        assert model.config._attn_implementation == kept


def test_a_critic_attends_by_flash_and_the_actor_that_it_came_from_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = tiny_llama()
    critic = Critic.from_causal_lm(actor)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda _, name, *__, **___: name)
    attend_by_flash(critic)
    assert critic.trunk.config._attn_implementation == "flash_attention_2"
    assert not can_branch(critic)
    assert actor.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("option", ["compile_layers", "flash_attention"])
def test_layers_that_a_booster_changes_are_left_alone(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainBooster, "keeps_layers", False)
    monkeypatch.setattr(modes, "flash_attention_lacks", lambda _: None)
    with pytest.raises(ConfigError, match=f"ppo.{option} needs layers that no booster changes; give boosters of plain"):
        learner(dtype="bfloat16", **{option: True})


def test_packed_demonstrations_are_not_attended_to_by_flash() -> None:
    with pytest.raises(ValidationError, match=r"sft.packing keeps demonstrations apart by a mask that sft\.flash"):
        SFTConfig(packing=True, flash_attention=True)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"flash_attention": True, "strategy": "3d", "tp": 2, "num_trainers": 2}, "ppo.flash_attention needs layers"),
        ({"compile_layers": True, "strategy": "zero2"}, "ppo.compile_layers needs layers that no strategy changes"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        PPOConfig.model_validate(values)
