"""The library of kernels is compiled once, and where it cannot be, PyTorch does its work."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf_core.errors import ModelError
from rlhf_core.generation import sampling
from rlhf_core.generation.decoder import product
from rlhf_core.generation.sampling import choose_greedy, choose_sampled
from rlhf_core.kernels import compiled


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home directory, in which the library is looked for again."""
    monkeypatch.setenv("HOME", str(tmp_path))
    compiled.library.cache_clear()
    yield tmp_path / ".cache" / "rlhf-flows" / "kernels"
    compiled.library.cache_clear()


def test_the_library_is_built_once(anew: Path) -> None:
    loaded = compiled.library()
    assert loaded is not None
    (file,) = anew.glob("*.so")
    written = file.stat().st_mtime_ns
    compiled.library.cache_clear()
    assert compiled.library() is not None
    assert [(each, each.stat().st_mtime_ns) for each in anew.glob("*.so")] == [(file, written)]
    assert compiled.used_on(torch.device("cpu")) == loaded.name
    assert compiled.used_on(torch.device("cuda")) == "none"


def broken_compiler(home: Path) -> None:
    (home / "g++").write_text("#!/bin/sh\necho error: no such option >&2\nexit 1\n")
    (home / "g++").chmod(0o755)


def no_directory(home: Path) -> None:
    (home / ".cache").write_text("a file")


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _home: None, "needs a C\\+\\+ compiler, and there is no g\\+\\+"),
        (broken_compiler, "g\\+\\+ cannot build its kernel \\(error: no such option\\)"),
        (no_directory, "cannot be kept in"),
    ],
)
def test_without_a_library_pytorch_does_the_work(
    spoil: Callable[[Path], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(tmp_path)
    monkeypatch.setattr(shutil, "which", partial(shutil.which, path=str(tmp_path)))
    with caplog.at_level(logging.WARNING):
        assert not compiled.has_kernels(torch.zeros(1))
    assert re.search(f"our library is not used, and all takes longer: .*{said}", caplog.text)
    assert compiled.used_on(torch.device("cpu")) == "none"
    assert not list(tmp_path.rglob(".building-*"))


def test_a_damaged_library_is_named(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(target: Path, *_: object, **__: object) -> None:
        target.parent.mkdir(parents=True)
        target.write_bytes(b"not a library")

    monkeypatch.setattr(compiled, "have_built", build)
    with caplog.at_level(logging.WARNING):
        assert compiled.library() is None
    assert re.search(rf"{anew}/kernels-\w+\.so cannot be loaded \(.*\); delete that file", caplog.text)


def test_tensors_whose_memory_is_elsewhere_have_none() -> None:
    class Shard(torch.Tensor):
        pass

    assert compiled.has_kernels(torch.nn.Parameter(torch.zeros(1)))
    assert not compiled.has_kernels(torch.zeros(1).as_subclass(Shard))
    compiled.library.cache_clear()
    assert not compiled.has_kernels(torch.zeros(1, device="meta"))
    assert compiled.library.cache_info().misses == 0, "nothing is built for tensors on a GPU"
    assert not compiled.has_kernels(torch.zeros(1).half())


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
    uniforms = uniforms.double()  # of which the first 24 bits count

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


def test_a_number_of_one_takes_the_last_token() -> None:
    chosen = choose_sampled(logits=torch.zeros(2, 3000), uniforms=torch.ones(2), temperature=1.0)
    assert chosen.tokens.tolist() == [2999, 2999]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_pytorchs_default_dtype_changes_nothing(default: torch.dtype) -> None:
    logits, uniforms = torch.randn(4, 3000), torch.full((4,), 0.5)
    expected = choose_sampled(logits=logits, uniforms=uniforms, temperature=1.0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = choose_sampled(logits=logits, uniforms=uniforms, temperature=1.0)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("size", "read", "until"), [(8, 0, 1), (20, 5, 16), (64, 33, 17), (128, 100, 70)])
def test_a_token_attends_to_its_prompt_and_to_its_own_row(
    dtype: torch.dtype, group: int, size: int, read: int, until: int
) -> None:
    generator, shared = torch.Generator().manual_seed(size), 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    prompts = torch.tensor([2, 0, 0, 1, 2])
    lengths = read, until + 3
    prompt_keys, own_keys = (draw(rows + 1, shared, size, each) for rows, each in zip((3, 5), lengths, strict=True))
    prompt_values, own_values = (draw(rows, shared, each, size) for rows, each in zip((3, 5), lengths, strict=True))
    firsts = torch.tensor([0, read // 2, read // 2, read, 0])
    qkv = draw(5, group * shared + 2 * shared, size)
    out = torch.empty(5, group * shared, size, dtype=dtype)
    form = group * shared, shared, size, lengths[1]
    apart = prompt_keys, prompt_values, prompts, read, lengths[0]
    compiled.call("attend", dtype, qkv, *apart, own_keys, own_values, firsts, out, 5, until, 0.3, *form)

    keys = torch.cat([prompt_keys[prompts], own_keys[:5, ..., :until]], dim=-1).double()
    values = torch.cat([prompt_values[prompts], own_values[:, :, :until]], dim=-2).double()
    scores = qkv[:, : group * shared].double().unflatten(1, (shared, group)) @ keys * 0.3
    unseen = torch.arange(read + until) < firsts[:, None]
    expected = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1) @ values
    close = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double(), expected.flatten(1, 2), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 33, 49, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (24, 64), (37, 71), (130, 2), (100, 257)])
def test_a_product_of_few_rows_is_that_of_doubles(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, before = (torch.randn(rows, each + 3, generator=generator)[:, :each] for each in (inputs, outputs))
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    expected = x.double() @ weight.double().T

    def made(rows: slice = slice(None), *, adds: bool = False) -> torch.Tensor:
        wide = torch.randn(len(x[rows]), outputs + 5)
        out = wide[:, :outputs].copy_(before[rows])
        kept = wide[:, outputs:].clone()
        call = x[rows], weight, out, x.stride(0), out.stride(0), len(out), outputs, inputs, adds
        compiled.call("multiply", dtype, *call)
        assert torch.equal(wide[:, outputs:], kept)
        return out

    torch.testing.assert_close(made().double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(made(adds=True).double(), before + expected, rtol=1e-5, atol=1e-4)
    one = slice(rows // 2, rows // 2 + 1)
    assert torch.equal(made(one), made()[one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 4, 128, 129, 224, 225])
def test_whoever_makes_a_product_it_is_the_same(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 60), torch.randn(90, 60).to(dtype)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(product(x, weight), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(product(x.T.contiguous().T, weight), expected, rtol=1e-5, atol=1e-4)


def test_a_product_does_not_depend_on_threads() -> None:
    x, weight, threads = torch.randn(40, 300), torch.randn(500, 300), torch.get_num_threads()
    found = []
    try:
        for torch_threads in (1, 2, 3):
            torch.set_num_threads(torch_threads)
            found.append(torch.empty(40, 500))
            compiled.call("multiply", x.dtype, x, weight, found[-1], 300, 500, 40, 500, 300, False)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
