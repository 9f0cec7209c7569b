"""HybridAdam takes AdamW's steps, whatever its gradients are scaled by; its kernel is built once, or its want told."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.kernels.building import KernelError, alone
from rlhf_core.strategy.colossal import kernel
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.adam import check_nvcc, hybrid_adam
from rlhf_core.strategy.colossal.kernel import load_kernel

BETAS = (0.9, 0.95)
LR = 1e-2
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", autouse=True)
def has_kernel() -> None:
    hybrid_adam([{"params": [nn.Parameter(torch.zeros(1))]}], betas=BETAS)


def weights(generator: torch.Generator) -> list[nn.Parameter]:
    # the kernel takes 64 numbers at a time, then 32, then 8, and single ones at the end
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in (1003, 70, 1)]


def groups(members: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": members[:1], "lr": LR, "weight_decay": 0.1},
        {"params": members[1:], "lr": LR / 10, "weight_decay": 0.0},
    ]


def test_it_takes_the_steps_of_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = weights(generator)
    theirs = [nn.Parameter(member.detach().clone()) for member in ours]
    hybrid = hybrid_adam(groups(ours), betas=BETAS)
    reference = torch.optim.AdamW(groups(theirs), betas=BETAS)
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(mine.shape, generator=generator)
            mine.grad = other.grad.clone()
        hybrid.step()
        reference.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other)
            assert hybrid.state[mine]["step"] == reference.state[other]["step"]
            for moment in ("exp_avg", "exp_avg_sq"):
                assert_close(hybrid.state[mine][moment], reference.state[other][moment])


def momentum(kind: Callable[..., Any], gradient: Tensor, div_scale: float) -> Tensor:
    """The first moment after one step from a gradient that is narrower than its weight, as Gemini's are."""
    member = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    member.grad = gradient.clone()
    member.data = torch.zeros(gradient.shape)
    optimizer = kind([{"params": [member], "lr": LR}], betas=BETAS)
    optimizer.step(div_scale=div_scale)
    found: Tensor = optimizer.state[member]["exp_avg"]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_divided_in_the_precisions_of_the_kernel(dtype: torch.dtype) -> None:
    gradient = torch.linspace(-1, 1, 101).to(dtype)
    found = momentum(hybrid_adam, gradient, 3.0)
    assert_close(found, 0.1 * gradient.float() / 3.0)


def test_upstream_still_forgets_to_divide_bfloat16() -> None:
    gradient = torch.linspace(-1, 1, 101).bfloat16()
    found = momentum(hybrid_adam, gradient, 3.0)
    assert_close(found, 0.1 * gradient.float())


def after_steps(kind: Callable[..., Any], steps: int, *, again_at: int | None = None) -> Tensor:
    """One weight after steps of an optimizer whose place another takes, with its state, before one of them."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(1003, generator=generator))
    optimizer = kind([{"params": [weight], "lr": LR}], betas=BETAS)
    for step in range(1, steps + 1):
        if step == again_at:
            state = optimizer.state[weight]
            optimizer = kind([{"params": [weight], "lr": LR}], betas=BETAS)
            optimizer.state[weight] = state
        weight.grad = torch.randn(1003, generator=generator)
        optimizer.step()
    return weight


def test_a_run_that_was_interrupted_goes_on_to_the_bit() -> None:
    assert torch.equal(after_steps(hybrid_adam, 20), after_steps(hybrid_adam, 20, again_at=12))


def test_upstream_still_goes_on_otherwise() -> None:
    theirs = upstream("colossalai.nn.optimizer").HybridAdam
    assert not torch.equal(after_steps(theirs, 20), after_steps(theirs, 20, again_at=12))


def test_upstream_still_has_no_kernel_without_cuda() -> None:
    loader = upstream("colossalai.kernel.kernel_loader")
    theirs = [kind for kind in loader.CPUAdamLoader.REGISTRY if kind.__module__.startswith("colossalai")]
    assert theirs
    assert torch.cuda.is_available() or not any(kind().is_available() for kind in theirs if "X86" in kind.__name__)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A kernel that is compiled in a moment: an extension of Python's without torch."""
    source = tmp_path / "csrc" / kernel._SOURCES["x86_64"]
    source.parent.mkdir(parents=True)
    source.write_text(
        "#include <Python.h>\n"
        'static PyModuleDef self = {PyModuleDef_HEAD_INIT, "host_adam"};\n'
        "PyMODINIT_FUNC PyInit_host_adam() { return PyModule_Create(&self); }\n"
    )
    return tmp_path / "csrc"


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.platform, "machine", lambda: "x86_64")


@pytest.mark.integration
def test_a_kernel_is_built_once_and_says_so(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_kernel(sources, cache=tmp_path / "cache")
        first, last = caplog.messages
        assert "building HybridAdam's kernel" in first
        assert "about 10 s" in first
        assert "built HybridAdam's kernel in" in last
        load_kernel(sources, cache=tmp_path / "cache")
        assert len(caplog.messages) == 2
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".lock", ".so"]


@pytest.mark.integration
def test_of_several_processes_one_builds(sources: Path, tmp_path: Path) -> None:
    program = (
        "import logging; from pathlib import Path; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from rlhf_core.strategy.colossal.kernel import load_kernel\n"
        f"load_kernel(Path({str(sources)!r}), cache=Path({str(tmp_path / 'cache')!r}))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert "".join(told).count("built HybridAdam's kernel") == 1


@pytest.mark.integration
def test_whoever_waits_too_long_says_for_whom(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    monkey = load_kernel(sources, cache=tmp_path / "other")  # tells the file's name
    lock = tmp_path / "cache" / Path(monkey.__file__).with_suffix(".lock").name
    with alone(lock, 1.0), pytest.raises(KernelError, match=r"another process has been building .* for 0 s"):
        load_kernel(sources, cache=tmp_path / "cache", deadline_s=0.2)


@pytest.mark.integration
def test_a_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    program = (
        "import sys, time; from pathlib import Path; from rlhf_core.kernels.building import alone\n"
        f"with alone(Path({str(lock)!r}), 1.0): print('mine', flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    process.kill()
    process.wait(timeout=10)
    started = time.monotonic()
    with alone(lock, 5.0):
        assert time.monotonic() - started < 5.0


def test_without_a_compiler_it_says_so(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match="needs a C\\+\\+ compiler, and there is no g\\+\\+"):
        load_kernel(sources, cache=tmp_path / "cache")


def test_what_the_compiler_says_is_told(sources: Path, tmp_path: Path) -> None:
    (sources / kernel._SOURCES["x86_64"]).write_text("#include <not_there.h>\n")
    with pytest.raises(KernelError, match=r"cannot build its kernel \(.*not_there.h: No such file"):
        load_kernel(sources, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_processor_without_a_kernel_is_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.platform, "machine", lambda: "riscv64")
    with pytest.raises(KernelError, match="not riscv64"):
        load_kernel(sources, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (None, "need nvcc of CUDA 13, and there is none"),
        (
            "Cuda compilation tools, release 12.8, V12.8.93",
            "nvcc of CUDA 13, which torch was built with; .* is of CUDA 12",
        ),
        ("command not understood", "cannot be asked for its release"),
        ("Cuda compilation tools, release 13.0, V13.0.48", ""),
    ],
)
def test_nvcc_must_be_of_the_release_that_torch_was_built_with(
    told: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None if told is None else str(tmp_path))
    if told is not None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '{told}'\n")
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    if not sentence:
        check_nvcc()
        return
    with pytest.raises(KernelError, match=sentence):
        check_nvcc()
