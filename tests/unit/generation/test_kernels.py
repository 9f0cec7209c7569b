"""The library of kernels is compiled once, and where it cannot be, PyTorch does its work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhf_core.errors import ModelError
from rlhf_core.generation import sampling
from rlhf_core.generation.sampling import choose_greedy, choose_sampled
from rlhf_core.kernels import compiled


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in which the library is looked for again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.library.cache_clear()
    yield tmp_path / "rlhf-flows" / "kernels"
    compiled.library.cache_clear()


def test_the_library_is_compiled_once(anew: Path) -> None:
    assert compiled.library() is not None
    (file,) = anew.iterdir()
    written = file.stat().st_mtime_ns
    compiled.library.cache_clear()
    assert compiled.library() is not None
    assert (list(anew.iterdir()), file.stat().st_mtime_ns) == ([file], written)
    assert file.name.startswith(compiled.kind())


def test_without_a_compiler_there_are_none(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.COMPILER, "")
    assert compiled.library() is None
    assert compiled.kind() == "none"
    assert not compiled.has_kernels(torch.zeros(1))
    assert not anew.exists()


def test_a_compiler_that_fails_is_named(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no such option >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv(compiled.COMPILER, str(broken))
    with caplog.at_level(logging.WARNING):
        assert compiled.library() is None
    assert "broken-c++" in caplog.text
    assert "no such option" in caplog.text
    assert list(anew.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [1, 1023, 1024, 5000])
def test_tokens_and_their_log_probs_are_those_of_pytorch(
    dtype: torch.dtype, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(words)
    logits = (3 * torch.randn(64, words, generator=generator)).to(dtype)
    logits[1, 1:words:7] = -torch.inf
    uniforms = torch.randint(2**24, (64,), generator=generator) / 2**24
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-24])

    def chosen() -> list[sampling.Choice]:
        drawn = [choose_sampled(logits=logits, uniforms=uniforms, temperature=each) for each in (1.0, 0.7)]
        return [*drawn, choose_greedy(logits)]

    ours = chosen()
    monkeypatch.setattr(sampling, "has_kernels", lambda _tensor: False)
    for found, expected in zip(ours, chosen(), strict=True):
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_refused(wrong: float) -> None:
    logits = torch.zeros(3, 2000)
    logits[1] = wrong
    for choose in (choose_greedy, lambda each: choose_sampled(logits=each, uniforms=torch.zeros(3), temperature=1.0)):
        with pytest.raises(ModelError, match="not finite numbers"):
            choose(logits)
