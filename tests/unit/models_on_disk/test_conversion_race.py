"""The packaged model is converted: by two processes at once, or not at all; its file is read once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest

from rlhf_core.models import smollm2
from rlhf_core.models.loading import load_causal_lm
from tests.tiny_llama import tiny_llama, tiny_tokenizer


def test_two_conversions_at_once_end_with_one_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_started = threading.Barrier(2, timeout=60)

    def read_something_small(_file: Path):
        both_started.wait()  # neither has a target to find when it begins
        return tiny_llama(), tiny_tokenizer()

    monkeypatch.setattr(smollm2, "_read_gguf", read_something_small)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(smollm2.convert_smollm2, [tmp_path, tmp_path])
    assert first == second
    assert list(tmp_path.iterdir()) == [first]
    load_causal_lm(first, "float32")


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_file: Path):
        raise OSError("no space left")

    monkeypatch.setattr(smollm2, "_read_gguf", fail)
    with pytest.raises(OSError, match="no space"):
        smollm2.convert_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_read_once_and_gguf_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def reader(file: str) -> object:
        read.append(file)
        return object()

    monkeypatch.setattr(gguf, "GGUFReader", reader)
    with smollm2._read_once():
        assert gguf.GGUFReader("model.gguf") is gguf.GGUFReader("model.gguf")
    assert read == ["model.gguf"]
    assert gguf.GGUFReader is reader
