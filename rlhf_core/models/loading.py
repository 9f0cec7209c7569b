"""Models and tokenizers on disk: read whole or refused in one sentence, measured, and known by a digest.

A model is data: what transformers would unpickle or run because a directory asks for it is refused before it looks.
Other packages import the functions of this package from here.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_core.counting import counted
from rlhf_core.errors import ModelError
from rlhf_core.models import attention  # noqa: F401 - which transformers then uses
from rlhf_core.models.compatibility import check_same_tokenizer
from rlhf_core.models.locating import find_local, locate_model
from rlhf_core.models.saving import quiet, save_model, save_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "check_same_tokenizer",
    "count_built",
    "count_parameters",
    "default_device",
    "find_local",
    "load_causal_lm",
    "load_tokenizer",
    "locate_model",
    "model_digest",
    "save_model",
    "save_weights",
]

# what transformers, tokenizers and safetensors raise on files that are damaged or of another kind
_READ_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,  # of PyTorch's layers, for sizes that do not fit
    StrictDataclassError,  # of transformers, for a value of another type
    SafetensorError,
)

SAFE = ".safetensors"
_TRIES, _SLOWER = 8, 1.25
"""Products in each arithmetic, in turns, of which the fastest count; and what bfloat16 may take of float32's time: next
to equal times nothing is changed, so that one night decides as the last."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors' names
# what decides a model's outputs; README files and caches do not
_DIGESTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def default_device() -> torch.device:
    """Return the GPU if PyTorch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def has_fast_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 about as fast as float32, or faster.

    It is tried, in some tenths of a second: of two machines that name the same instructions one was twice as fast with
    bfloat16, the other half as fast. Without such instructions PyTorch takes twenty times as long, and tells.
    """
    tells = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # absent in a build without oneDNN
    if tells is not None and not tells():
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # this thread's own time is counted, whatever else the machine does
    try:
        tried = [(_seconds_of_a_product(torch.bfloat16), _seconds_of_a_product(torch.float32)) for _ in range(_TRIES)]
    finally:
        torch.set_num_threads(threads)
    narrow, wide = map(min, zip(*tried, strict=True))
    return bool(narrow <= _SLOWER * wide)


def _seconds_of_a_product(dtype: torch.dtype) -> float:
    """Return this thread's time for one, of the size of a small model's layer, after one that warms up."""
    rows, weight = torch.ones(256, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    for _ in range(2):
        started = time.thread_time()
        torch.nn.functional.linear(rows, weight)
    return time.thread_time() - started


def load_causal_lm(directory: Path, dtype: str | torch.dtype, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Return the causal language model in a directory, in evaluation mode.

    Code that comes with a model is never run.

    Args:
        directory: as `save_pretrained` writes it.
        dtype: of the weights, such as "float32" or "bfloat16".
        device: where they go.

    Raises:
        ModelError: if there is no causal language model, a file is damaged, or weights are missing.
    """
    return load_whole(AutoModelForCausalLM, directory, dtype, what="causal language model", device=device).eval()


def load_whole(
    kind: type,
    directory: Path,
    dtype: str | torch.dtype,
    *,
    what: str,
    device: str | torch.device = "cpu",
    mapped: bool = False,
) -> PreTrainedModel:
    """Return the model in a directory, all of whose weights are there.

    Args:
        kind: one of transformers' auto classes.
        directory: as `save_pretrained` writes it.
        dtype: of the weights.
        what: the model, in words, for messages.
        device: where the weights go, out of the file.
        mapped: leave them in the file, if they are on the CPU and it holds them in this dtype.

    Raises:
        ModelError: if there is none, a file is damaged, or weights are missing.
    """
    _expect(directory, "config.json")
    check_harmless(directory)
    try:
        with quiet():
            model, found = kind.from_pretrained(  # type: ignore[attr-defined]  # the auto classes have no common base
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except _READ_ERRORS as error:
        raise ModelError(f"no {what} can be loaded from {directory}: {_first_line(error)}") from error
    # transformers would draw random numbers for these and only warn
    missing = sorted({*found["missing_keys"], *(str(key) for key in found["mismatched_keys"])})
    if missing:
        raise ModelError(
            f"{directory} lacks {counted(len(missing), 'weight')} of its model, such as {missing[0]}; it is incomplete"
        )
    loaded: PreTrainedModel = model
    if torch.device(device).type == "cpu" and not mapped:
        _into_own_memory(loaded)
    return loaded.to(device)


def _into_own_memory(model: PreTrainedModel) -> None:
    """Copy the weights out of the mapped file, one at a time, into memory that torch aligns.

    In the file they begin wherever its header ends, and the last bit of a matrix product's sums depends on how its
    operands are aligned: two files of the same weights and other metadata would not give the same run.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def check_harmless(directory: Path) -> None:
    """Check that loading a model's directory reads its own JSON and safetensors, and nothing else.

    `trust_remote_code=False` and `use_safetensors=True` do not cover it: an index may name pickled shards or files
    elsewhere, adapters are unpickled where they are not in safetensors, and a configuration may name code of the hub.

    Raises:
        ModelError: if a file of it leads to a pickle, to code, or out of the directory.
    """
    for index in sorted(directory.rglob(f"*{SAFE}.index.json")):
        for shard in _shards_of(index):
            if PurePosixPath(shard).name != shard or not shard.endswith(SAFE):
                raise ModelError(
                    f"{index} names {shard!r}, which is no safetensors file beside it; give a model in safetensors"
                )
    if (directory / "adapter_config.json").is_file() and not (directory / f"adapter_model{SAFE}").is_file():
        raise ModelError(
            f"the adapters in {directory} are not in safetensors, and nothing is unpickled here; "
            "convert them, or merge them into their model"
        )
    for name, value in _implementations(_read_json(directory / "config.json")):
        if isinstance(value, str) and "/" in value:
            raise ModelError(
                f"{directory / 'config.json'} asks for code of the hub ({name}: {value!r}), which is never run; "
                f"remove {name} from it"
            )


def _shards_of(index: Path) -> list[str]:
    named = _read_json(index).get("weight_map")
    return sorted(set(map(str, named.values()))) if isinstance(named, dict) else []


def _implementations(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each setting that picks an implementation, at any depth."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name.endswith("_implementation"):
            yield from ((name, choice) for choice in (inner.values() if isinstance(inner, dict) else [inner]))
        yield from _implementations(inner)


def _read_json(file: Path) -> dict[str, Any]:
    """Return the file's mapping; none where it is missing or damaged, which transformers says better."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory.

    Raises:
        ModelError: if there is none, or a file is damaged.
    """
    _expect(directory, "tokenizer_config.json")
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except _READ_ERRORS as error:
        raise ModelError(f"no tokenizer can be loaded from {directory}: {_first_line(error)}") from error


def count_parameters(directory: Path) -> int:
    """Return the number of parameters in a model's safetensors files, from their headers alone.

    Raises:
        ModelError: if there is none, or one is truncated.
    """
    return sum(_product(tensor["shape"]) for file in _weight_files(directory) for tensor in _tensors_of(file))


def published_dtype(directory: Path) -> torch.dtype:
    """Return the dtype in which a model's safetensors files hold most of its weights.

    Raises:
        ModelError: if there is none, or one is truncated.
    """
    held: dict[str, int] = {}
    for file in _weight_files(directory):
        for tensor in _tensors_of(file):
            held[tensor["dtype"]] = held.get(tensor["dtype"], 0) + _product(tensor["shape"])
    kind = max(held, key=lambda name: held[name], default="")
    if kind not in DTYPES:
        raise ModelError(f"{directory} holds weights of dtype {kind or 'none'}; expected one of {', '.join(DTYPES)}")
    return DTYPES[kind]


def published_bytes(directory: Path) -> int:
    """Return the bytes of a weight as a model's files hold most of them, or four where they hold another kind."""
    try:
        return published_dtype(directory).itemsize
    except ModelError:  # quantised, say: its weights are made wide when they are read
        return torch.float32.itemsize


def count_built(directory: Path) -> int | None:
    """Return the number of parameters that a model's configuration builds, whatever its files hold; tied ones once.

    It is what memory must hold before the files are looked at. Nothing is allocated: the model is built without data.

    Returns:
        None if the configuration builds no causal language model here; who loads it is told why.

    Raises:
        ModelError: if a file leads to a pickle or to code, neither of which is ever looked at.
    """
    if not (directory / "config.json").is_file():
        return None
    check_harmless(directory)
    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            # which attention is taken changes no weight, and may need a library that is not here
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation="eager")
    except Exception:  # a configuration may hold anything, and each model's code fails in its own way
        return None
    return int(model.num_parameters())


def _weight_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob(f"*{SAFE}"))
    if not files:
        raise ModelError(f"{directory} holds no weights in safetensors; convert the model to that format first")
    return files


def _tensors_of(file: Path) -> list[dict[str, Any]]:
    return [entry for name, entry in read_header(file).items() if name != "__metadata__"]


def read_header(file: Path) -> dict[str, Any]:
    """Return the header: eight bytes of length, then that many of JSON, then the tensors."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(min(length, file.stat().st_size)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is not a whole safetensors file; fetch the model again") from error
    if 8 + length + max(ends, default=0) > file.stat().st_size:
        raise ModelError(f"{file} is truncated; fetch the model again")
    return header


def _product(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _expect(directory: Path, name: str) -> None:
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    if not (directory / name).is_file():
        held = ", ".join(sorted(entry.name for entry in directory.iterdir())[:5]) or "nothing"
        raise ModelError(f"{directory} is not a model that transformers can load: it has no {name}, but {held}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def model_digest(directory: Path, *, models_dir: Path | None = None) -> str:
    """Return the SHA-256 over a model's weights, configuration and tokenizer, by content.

    Args:
        directory: of the model.
        models_dir: keeps the digests of files that have not changed in size and time; None computes all of them.

    Raises:
        ModelError: if the directory holds none of these files.
    """
    files = sorted({file for pattern in _DIGESTED for file in directory.glob(pattern) if file.is_file()})
    if not files:
        raise ModelError(f"{directory} holds no model: neither weights nor configuration")
    sidecar = None if models_dir is None else _digest_file(models_dir, directory)
    known = _read_digests(sidecar)
    entries = {file.name: _digest_entry(file, known.get(file.name)) for file in files}
    if sidecar is not None and entries != known:
        _write_digests(sidecar, entries)
    whole = json.dumps([[name, entry[2]] for name, entry in entries.items()])
    return hashlib.sha256(whole.encode()).hexdigest()


_DigestEntry = tuple[int, int, str]  # size, time of change in ns, SHA-256


def _digest_entry(file: Path, known: _DigestEntry | None) -> _DigestEntry:
    facts = file.stat()
    if known is not None and known[:2] == (facts.st_size, facts.st_mtime_ns):
        return known
    with file.open("rb") as stream:
        return facts.st_size, facts.st_mtime_ns, hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_file(models_dir: Path, directory: Path) -> Path:
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]
    return models_dir / "digests" / f"{name}.json"


def _read_digests(sidecar: Path | None) -> dict[str, _DigestEntry]:
    if sidecar is None:
        return {}
    try:
        rows = json.loads(sidecar.read_bytes())
        return {name: (int(row[0]), int(row[1]), str(row[2])) for name, row in rows.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # missing or damaged: it is only a memory of what can be computed


def _write_digests(sidecar: Path, entries: dict[str, _DigestEntry]) -> None:
    sidecar.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=sidecar.parent)
    with os.fdopen(handle, "w") as stream:
        json.dump(entries, stream)
    Path(temporary).replace(sidecar)
