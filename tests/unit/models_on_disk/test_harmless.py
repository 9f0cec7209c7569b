"""A directory that would have something unpickled or run is refused, and nothing of it is."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config import TemplateConfig
from rlhf_core.data.template import PromptTemplate
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.models.loading import load_causal_lm, load_tokenizer
from tests.tiny_llama import write_tiny_llama


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._mark,))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-was-run"


@pytest.fixture
def directory(tmp_path: Path, mark: Path) -> Path:
    """A model that asks in every way it can for code of its own."""
    made = write_tiny_llama(tmp_path / "hostile")
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    for name in ("modeling_hostile.py", "configuration_hostile.py", "tokenization_hostile.py", "__init__.py"):
        (made / name).write_text(code)
    (made / "custom_generate").mkdir()
    (made / "custom_generate" / "generate.py").write_text(code)
    change(made / "config.json", auto_map={
        "AutoConfig": "configuration_hostile.C", "AutoModelForCausalLM": "modeling_hostile.M",
    })  # fmt: skip
    change(made / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_hostile.T", None]})
    return made


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_code_beside_a_model_is_not_run(directory: Path, mark: Path) -> None:
    load_tokenizer(directory)
    model = load_causal_lm(directory, "float32")
    assert type(model).__module__.startswith("transformers.")
    assert not mark.exists()


def test_a_model_of_unknown_architecture_is_refused_rather_than_run(directory: Path, mark: Path) -> None:
    change(directory / "config.json", model_type="hostile")
    with pytest.raises(ModelError, match="no causal language model can be loaded"):
        load_causal_lm(directory, "float32")
    assert not mark.exists()


def pickled(directory: Path, mark: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    (directory / "model.safetensors").unlink()


def pickled_tensors(directory: Path, mark: Path) -> None:
    """No bomb at all: what can only be read by unpickling is refused even where that would be safe."""
    del mark
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def an_index(directory: Path, shard: str) -> None:
    names = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled_shards(directory: Path, mark: Path) -> None:
    (directory / "shard.bin").write_bytes(pickle.dumps(Bomb(mark)))
    an_index(directory, "shard.bin")


def shards_elsewhere(directory: Path, mark: Path) -> None:
    (directory.parent / "other.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    an_index(directory, "../other.safetensors")
    del mark


def pickled_adapters(directory: Path, mark: Path) -> None:
    (directory / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}')


def a_kernel(directory: Path, mark: Path) -> None:
    change(directory / "config.json", attn_implementation="somebody/kernel")
    del mark


def a_kernel_deep_down(directory: Path, mark: Path) -> None:
    change(directory / "config.json", text_config={"experts_implementation": {"": "somebody/kernel"}})
    del mark


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (pickled, "no causal language model can be loaded from .*safetensors"),
        (pickled_tensors, "no causal language model can be loaded from .*safetensors"),
        (pickled_shards, "names 'shard.bin', which is no safetensors file beside it"),
        (shards_elsewhere, r"names '\.\./other.safetensors', which is no safetensors file beside it"),
        (pickled_adapters, "not in safetensors, and nothing is unpickled here"),
        (a_kernel, r"asks for code of the hub \(attn_implementation: 'somebody/kernel'\)"),
        (a_kernel_deep_down, r"asks for code of the hub \(experts_implementation: 'somebody/kernel'\)"),
    ],
)
def test_what_would_be_unpickled_or_fetched_is_refused(
    directory: Path, mark: Path, spoil: Callable[[Path, Path], None], complaint: str
) -> None:
    spoil(directory, mark)
    with pytest.raises(ModelError, match=complaint) as refused:
        load_causal_lm(directory, "float32")
    assert len(str(refused.value).splitlines()) == 1
    assert not mark.exists()


def test_the_bomb_would_have_gone_off(mark: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_chat_template_reaches_nothing_but_its_messages(directory: Path, template: str) -> None:
    (directory / "chat_template.jinja").write_text(template)
    prompts = PromptTemplate(load_tokenizer(directory), TemplateConfig())
    with pytest.raises(RlhfError, match="unsafe"):
        prompts.render([{"role": "user", "content": "x"}], for_answer=True)
