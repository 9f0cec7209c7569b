"""One frozen base: a model's weights in a read-only file of our own, which every process of a machine maps.

However many processes and roles use it, the system holds it in memory once: actor, critic, reference and reward model
are adapters and heads over the same tensors. The file is a copy of the model's weights:

    cut        at the borders of tensors, each of which begins at a multiple of 64 bytes
    order      the model's own, but weights before biases: q, k and v stand side by side, and so do gate and up
    dtype      as it is computed in, where that is bfloat16; else as the model was published
    mode       read-only, whole or not there, in a directory that is called after the model's digest

A processor without fast bfloat16 computes in float32. Weights of 16 bits stay as they are then: a matrix is widened a
piece at a time, when it is used. The numbers are those of the model in float32, up to the order of sums.

A mapped file that is truncated ends its readers by a bus error, and one that is written to changes their weights in
silence. So a copy's inode, size and time are compared (`check_unchanged`) before anything is made of it.
"""

from __future__ import annotations

import copy
import ctypes
import json
import logging
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.errors import BaseChangedError, ModelError
from rlhf_core.models import base_on_gpu
from rlhf_core.models.loading import load_whole, published_dtype
from rlhf_core.models.saving import quiet

WEIGHTS = "model.safetensors"
ALIGNMENT = 64
"""Of a tensor in the file: that of PyTorch's own memory."""
COPY_TIMEOUT_S = 1800.0
"""Longest wait for another process that makes the same copy."""
UNUSED_DAYS = 7
"""A copy that nobody has used for so long goes when another is made."""
PIECE_BYTES = 1 << 22
"""Of a matrix, widened: small enough for a processor's cache, large enough for a product. For a matrix 11,008 wide this
takes 1.3 times as long as float32, a quarter of it 2.2 times."""
_FORM = 1
"""Of the file; a copy of another form is made anew."""
_PAGE = 4096
_MADV_PAGEOUT = 21
"""Of Linux; Python's `mmap` does not name it."""
_MARK, _BASE = "of_shared_base", "shared_base"  # attributes of each weight, and of the transformer
_COPIES, _USED, _FACTS, _GAP = "bases", "used", "base.json", "gap."
_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Of dtypes, in safetensors; buffers may be of the last ones."""
_Module = TypeVar("_Module", bound=nn.Module)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Base:
    """A copy of a model's weights on this machine."""

    directory: Path
    digest: str
    """Of the model that it is a copy of."""
    dtype: torch.dtype
    file: tuple[int, int, int]
    """Inode, bytes and time of change of the file of weights, as they were when it was opened."""

    def check_unchanged(self) -> None:
        """Check that the file is what it was when it was opened.

        Raises:
            BaseChangedError: if it is gone, or another, or was written to.
        """
        with suppress(OSError):  # another user's
            os.utime(self.directory / _USED)
        if _facts(self.directory / WEIGHTS) != self.file:
            raise BaseChangedError(
                f"{self.directory / WEIGHTS}, the base that the models of this run share, was changed or removed while "
                "it was in use; leave it alone: it is copied anew, and the run goes on from its last commit"
            )


def open_base(
    source: Path,
    digest: str,
    *,
    arithmetic: torch.dtype,
    models_dir: Path,
    check: Callable[[], None] = lambda: None,
) -> Base:
    """Return the base of a model, whose copy is made first if need be.

    Args:
        source: the model's directory, as `save_pretrained` writes it.
        digest: of the model.
        arithmetic: in which it is computed.
        models_dir: the copies lie in `bases` there.
        check: called when a copy has been made, which every later run would take for what the digest says; raises if
            the source is another model.

    Raises:
        ModelError: if the model cannot be read, or the disk has no room for its copy.
    """
    published = published_dtype(source)
    dtype = torch.bfloat16 if arithmetic == torch.bfloat16 else published
    name = str(dtype).removeprefix("torch.")
    directory = models_dir / _COPIES / f"{digest[:32]}-{name}"
    if not _is_in_use(directory):
        if (directory / WEIGHTS).exists():  # whoever read what was cut off was ended by a bus error, and said nothing
            log.warning(
                "%s, the base that models share, was changed since it was written: it is copied anew", directory
            )
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with _lock(directory, timeout=COPY_TIMEOUT_S):
                if not _is_in_use(directory):
                    _make_room(directory)
                    _copy(source, directory, dtype, check)
        except Timeout as error:
            raise ModelError(
                f"another process has been copying {source} to {directory} for {COPY_TIMEOUT_S:.0f} s; end it, and try "
                "again"
            ) from error
        except OSError as error:
            raise ModelError(
                f"the base of {source} cannot be copied to {directory}: {error.strerror or error}"
            ) from error
    return Base(directory, digest, dtype, _facts(directory / WEIGHTS))


def load_base(base: Base, *, arithmetic: torch.dtype, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Return the frozen model, its weights mapped from the file; on a GPU, views of the copy that is there.

    Args:
        base: what `open_base` returned.
        arithmetic: float32 over weights of 16 bits widens them as they are used; else they are used as they are.
        device: where they go.

    Raises:
        ModelError: if the copy cannot be read.
    """
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:  # a GPU may hold a copy, and then the file is not read
        _read_ahead(base.directory / WEIGHTS)
    model = load_whole(AutoModelForCausalLM, base.directory, base.dtype, what="causal language model", mapped=True)
    if not on_cpu:
        base_on_gpu.move_to_gpu(model, base.directory / WEIGHTS, base.file, torch.device(device))
    model.eval().requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        setattr(parameter, _MARK, True)
    setattr(model.base_model, _BASE, base)  # of the transformer, which a critic has without the rest
    if arithmetic == torch.float32 != base.dtype:
        _compute_in_float32(model)
    return model


def is_shared(tensor: Tensor) -> bool:
    """Return whether a weight is of a base: the same in every process, and never to be written."""
    return bool(getattr(tensor, _MARK, False))


def check_bases(*models: nn.Module | None) -> None:
    """Check that the bases of models are what they were when these were loaded; nothing, for models without.

    Raises:
        BaseChangedError: if one is not.
    """
    for model in models:
        for module in () if model is None else model.modules():
            if (base := getattr(module, _BASE, None)) is not None:
                base.check_unchanged()


def copies_of(digest: str, models_dir: Path) -> list[Base]:
    """Return this machine's copies of a model, as they were when they were made.

    For whoever waits for processes that map them: where a mapped file becomes shorter, the system ends its readers by a
    bus error, and they say nothing.
    """
    found = []
    for facts in (models_dir / _COPIES).glob(f"{digest[:32]}-*/{_FACTS}"):
        with suppress(OSError, ValueError, LookupError, TypeError):  # one that is made anew, or of another form
            dtype = getattr(torch, facts.parent.name.rpartition("-")[2])
            found.append(Base(facts.parent, digest, dtype, tuple(json.loads(facts.read_bytes())["file"])))
    return found


def own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights and buffers of a model that are its process's own."""
    yield from (tensor for tensor in (*model.parameters(), *model.buffers()) if not is_shared(tensor))


def over_same_weights(model: _Module) -> _Module:
    """Return another model over the very same weights: adapters that one gets, the other has not."""
    same: dict[int, Tensor] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, dict(same))


# --- the copy


def _copy(source: Path, directory: Path, dtype: torch.dtype, check: Callable[[], None]) -> None:
    """Write the copy under another name, and rename it when it is whole."""
    for left in directory.parent.glob(f"{_part(directory)}*"):  # by processes that were killed: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    workplace = Path(mkdtemp(prefix=_part(directory), dir=directory.parent))
    try:
        model = load_whole(
            AutoModelForCausalLM, source, published_dtype(source), what="causal language model", mapped=True
        )
        tensors = _in_order(model)
        size = sum(tensor.numel() * dtype.itemsize for tensor in tensors.values())
        if (free := shutil.disk_usage(workplace).free) < size:
            raise ModelError(
                f"the base of {source} takes {size / 1e9:.3g} GB in {directory.parent}, where {free / 1e9:.3g} GB are "
                "free; make room, or choose another directory (RLHF_HOME)"
            )
        with quiet():
            config = copy.deepcopy(model.config)
            config.dtype = dtype
            config.save_pretrained(workplace)
        _write(workplace / WEIGHTS, tensors, dtype)
        check()
        (workplace / _FACTS).write_text(json.dumps({"form": _FORM, "file": _facts(workplace / WEIGHTS)}))
        (workplace / _USED).touch()
        workplace.chmod(0o755)  # mkdtemp's 0700 is for secrets
        shutil.rmtree(directory, ignore_errors=True)  # one that was changed
        workplace.rename(directory)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _read_ahead(file: Path) -> None:
    """Have the system read what it lacks of a file, in the file's order: passes would wait for one page each."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with suppress(OSError), file.open("rb") as stream:  # one that cannot be read is told by who loads it
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _let_go(tensor: Tensor) -> None:
    """Drop a mapped tensor's pages from memory, which is for the copy: both may be more than there is.

    What another process maps, or another user owns, stays; what is not mapped may be swapped. Needs Linux 5.4.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if sys.platform == "linux" and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_PAGEOUT)


def _in_order(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by name: those of one layer's parts together, weights before biases; then what is kept so.

    Tied weights come once.
    """
    kept = model.state_dict(keep_vars=True)
    named = [*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in kept)]
    first: dict[str, int] = {}

    def place(number: int, name: str) -> tuple[int, bool, int]:
        around = name.rpartition(".")[0].rpartition(".")[0]  # of model.layers.0.mlp.up_proj.weight, the mlp
        return first.setdefault(around, number), name.endswith(".bias"), number

    places = {name: place(number, name) for number, (name, _) in enumerate(named)}
    return dict(sorted(named, key=lambda entry: places[entry[0]]))


def _write(file: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write a safetensors file whose tensors begin at multiples of `ALIGNMENT`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if gap := -offset % ALIGNMENT:  # the format allows no holes, but any number of tensors
            header[f"{_GAP}{offset}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [offset, offset + gap]}
            offset += gap
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        end = offset + tensor.numel() * kind.itemsize
        header[name] = {"dtype": _NAMES[kind], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        begin = stream.tell()
        for tensor in tensors.values():
            stream.write(bytes(-(stream.tell() - begin) % ALIGNMENT))
            for part in _parts(tensor, dtype if tensor.is_floating_point() else tensor.dtype):
                stream.write(part)
            _let_go(tensor)
        stream.flush()
        os.fsync(stream.fileno())
    file.chmod(0o444)


def _parts(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield a tensor's bytes in a dtype, a few megabytes at a time."""
    flat = tensor.detach().reshape(-1)
    for part in torch.split(flat, 1 << 22):
        yield part.to(dtype).contiguous().view(torch.uint8).numpy().data


def _facts(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_whole(directory: Path) -> bool:
    """Return whether a copy is there, and is what was written."""
    try:
        written = json.loads((directory / _FACTS).read_bytes())
        return written["form"] == _FORM and tuple(written["file"]) == _facts(directory / WEIGHTS)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _is_in_use(directory: Path) -> bool:
    """Return whether a copy is there as it was written, and note that it is used."""
    with suppress(OSError):  # another user's, or not there
        os.utime(directory / _USED)
    return _is_whole(directory)


def _make_room(kept: Path) -> None:
    """Remove the copies that nobody has used for a week; a mapped one lives on in its processes until they end."""
    long_ago = time.time() - UNUSED_DAYS * 86_400
    for used in kept.parent.glob(f"*/{_USED}"):
        with suppress(OSError, Timeout):  # another process was quicker or copies it, or it is another user's
            if used.parent != kept and used.stat().st_mtime < long_ago:
                with _lock(used.parent, timeout=0):
                    if used.stat().st_mtime < long_ago:
                        shutil.rmtree(used.parent)


def _lock(directory: Path, *, timeout: float) -> FileLock:
    return FileLock(f"{directory}.lock", timeout=timeout)


def _part(directory: Path) -> str:
    """Return how the names of unfinished copies begin."""
    return f".copying-{directory.name}-"


# --- float32 over weights of 16 bits


def _compute_in_float32(model: nn.Module) -> None:
    """Have a frozen model of 16-bit weights compute in float32, in place.

    Linear layers and embeddings keep their weights. What else there is (norms, biases) is small, and is copied in
    float32.
    """
    for module in model.modules():
        kind = _WIDE.get(type(module))
        if kind is not None:
            module.__class__ = kind
        for name, parameter in module.named_parameters(recurse=False):
            if (kind is None or name != "weight") and parameter.dtype != torch.float32:
                setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))


class _Product(torch.autograd.Function):
    """x W^T in float32, [... O] from [... I], of a frozen matrix [O I] of 16 bits; a gradient for x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return wide_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients
        return wide_gradient(gradient, weight), None


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in float32, [... O] from [... I], of a matrix [O I] of 16 bits."""
    return torch.cat([x @ piece.float().T for piece in _pieces(weight)], dim=-1)


def wide_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of `wide_product` for x, [... I] from [... O]."""
    pieces = _pieces(weight)
    parts = torch.split(gradient, [len(piece) for piece in pieces], dim=-1)
    result = parts[0] @ pieces[0].float()
    for part, piece in zip(parts[1:], pieces[1:], strict=True):
        result += part @ piece.float()
    return result


def is_widened(layer: nn.Module) -> bool:
    """Return whether a linear layer computes in float32 with a weight of 16 bits."""
    return isinstance(layer, _WideLinear | _WideConv1D)


def _pieces(weight: Tensor) -> tuple[Tensor, ...]:
    rows = len(weight) if weight.is_cuda else max(1, PIECE_BYTES // (4 * weight.shape[1]))
    return torch.split(weight, rows)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(device_type=x.device.type, enabled=False):
        product: Tensor = _Product.apply(x.float(), weight)  # type: ignore[no-untyped-call]
    return product


class _WideLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = _product(input, self.weight)
        return product if self.bias is None else product + self.bias


class _WideConv1D(Conv1D):  # type: ignore[misc]  # transformers is not typed
    """GPT-2's layer, which keeps its weights transposed."""

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor = self.bias
        return _product(x, self.weight.T) + bias


class _WideEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


_WIDE: dict[type, type] = {nn.Linear: _WideLinear, Conv1D: _WideConv1D, nn.Embedding: _WideEmbedding}
