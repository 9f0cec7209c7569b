"""Llama-2 7B's form with random weights: 13.5 GB, made where no hub can be reached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from rlhf_core.config import PipelineConfig
from rlhf_core.data.gym import draw_problems
from rlhf_core.models.loading import published_bytes
from rlhf_core.models.memory import ModelSize
from rlhf_core.models.shape import shape_of
from rlhf_core.models.working_memory import LongestRow, WorkingMemory, working_memory

SUMS = {"min_terms": 8, "max_terms": 8, "min_digits": 1, "max_digits": 2}
PROMPT = 33
"""Tokens of such a problem's prompt."""


def estimated(config: PipelineConfig, directory: Path, *, gpus: int) -> WorkingMemory:
    """Return what PPO needs by our own estimate."""
    shape = shape_of(directory)
    assert shape is not None
    size = ModelSize(config.model.num_parameters or 0, published_bytes=published_bytes(directory), shape=shape)
    return working_memory(config, "ppo", size, shape, LongestRow(PROMPT), gpus=gpus)


def make_model(directory: Path, *, device: str = "cpu", tokenizer: bool = True) -> None:
    """Write the model, a layer to a file, and a tokenizer of 32,000 words at most.

    Args:
        directory: becomes the model's.
        device: where weights are drawn; another one draws others.
        tokenizer: whether there is to be one.
    """
    made = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
        max_position_embeddings=4096, rms_norm_eps=1e-5, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(made)
    width, inner = config.hidden_size, config.intermediate_size
    layer = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    layer |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    files = [
        {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        for number in range(config.num_hidden_layers)
    ]
    words = (config.vocab_size, width)
    files.append({"model.embed_tokens.weight": words, "model.norm.weight": (width,), "lm_head.weight": words})
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    size = 0
    for number, shapes in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.randn(shape, generator=generator, device=device).mul_(config.initializer_range).bfloat16().cpu()
            for name, shape in shapes.items()
        }
        save_file(tensors, made / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    facts = {"metadata": {"total_size": size}, "weight_map": index}
    (made / "model.safetensors.index.json").write_text(json.dumps(facts))
    if tokenizer:
        _tokenizer().save_pretrained(made)
    made.rename(directory)


def _tokenizer() -> Any:
    """Return a tokenizer that has learnt its words from the preset's problems."""
    special = ["<unk>", "<s>", "</s>"]  # as in Llama 2
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    learning = trainers.BpeTrainer(
        vocab_size=32000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    problems = draw_problems("chain_sum", SUMS, seed=0, count=512)
    made.train_from_iterator((f"Question: {each.prompt}\nAnswer:\n" for each in problems), learning)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
