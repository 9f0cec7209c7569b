"""Passes as the configuration may have them: compiled layers give the same numbers; what cannot be had is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError
from torch._dynamo.utils import counters

from rlhf_core.config import LoRAConfig, PPOConfig, SFTConfig
from rlhf_core.errors import ModelError
from rlhf_core.training.modes import prepare_passes
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


def test_compiled_layers_take_the_same_ppo_step_and_every_length_has_the_same_code() -> None:
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
    for rows in ([0, 1, 2, 3], [2, 3, 4]):
        ours.training_step(made.select(rows))
    ours.actor(torch.tensor([[5, 6, 7]]))  # not learning
    assert compiled() == before > 1


def test_compiled_layers_learn_the_same_from_demonstrations_and_compute_activations_again() -> None:
    config = COMPILED.model_copy(update={"gradient_checkpointing": True})
    (plain, history), (other, compiled_history) = train(), train(config)
    assert compiled_history[0] == pytest.approx(history[0], rel=1e-5)
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)


def test_without_a_compiler_layers_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ModelError, match=r"PyTorch cannot compile layers here \(.*, or set compile_layers to false"):
        train(COMPILED)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no layers that can be compiled; set compile_layers to false"):
        prepare_passes(torch.nn.Linear(2, 2), COMPILED, CPU)


def test_flash_attention_is_refused_without_a_gpu() -> None:
    config = SFTConfig(flash_attention=True)
    with pytest.raises(
        ModelError, match="flash_attention needs a GPU and the library flash_attn, and here is CPU; set"
    ):
        prepare_passes(tiny_llama(), config, CPU)
    with pytest.raises(ModelError, match="knows 16 bits alone, but dtype is float32; set it to bfloat16"):
        prepare_passes(tiny_llama(), config.model_copy(update={"dtype": "float32"}), torch.device("cuda"))


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
