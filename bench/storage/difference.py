"""What two consecutive training states have in common, and what a lossless difference between them would save."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from numpy.typing import NDArray
from safetensors import safe_open

from infra.artifacts import Manifest

Words = NDArray[np.uint32]
BLOCK_WORDS = 1 << 16
SAMPLE_WORDS = 1 << 25
"""Most numbers of a group that are packed: of more, evenly spaced blocks are taken."""


class Pair(NamedTuple):
    """The numbers of one group in two states, or a sample of them, as the bits of float32."""

    former: Words
    latter: Words
    total_bytes: int
    """Of the whole group."""


def shared_bytes(former: Manifest, latter: Manifest) -> dict[str, Any]:
    """Return how many bytes of a version are blobs that the one before it has already."""
    there = {blob.sha256 for blob in former.blobs}
    total = sum(blob.size for blob in latter.blobs)
    shared = sum(blob.size for blob in latter.blobs if blob.sha256 in there)
    return {"mb": round(total / 1e6, 1), "shared_share": round(shared / total, 4)}


def read_pairs(former: Path, latter: Path) -> dict[str, Pair]:
    """Return the float32 tensors of two states by role and part: `actor.weights`, `critic.exp_avg_sq` and the like."""
    places = _places(latter)
    groups: dict[str, list[str]] = {}
    for name in sorted(places):
        if (group := _group(name)) is not None:
            groups.setdefault(group, []).append(name)
    before = _places(former)
    return {group: _sampled(names, before, places) for group, names in groups.items()}


def packed_shares(pairs: Mapping[str, Pair]) -> dict[str, Any]:
    """Return what is left of the bytes, by encoding and packer, for every group and for all of them together."""
    found: dict[str, Any] = {}
    total = sum(pair.total_bytes for pair in pairs.values())
    for encoding, encode in ENCODINGS.items():
        for packer, pack in PACKERS.items():
            shares, seconds, size = {}, 0.0, 0
            for group, pair in pairs.items():
                started = time.perf_counter()
                body = _planes(encode(pair.former, pair.latter))
                packed = len(pack(body))
                seconds += time.perf_counter() - started
                size += len(body)
                shares[group] = packed / len(body)
            left = sum(shares[group] * pair.total_bytes for group, pair in pairs.items()) / total
            found[f"{encoding} {packer}"] = {
                "saved": round(1 - left, 3),
                "mb_per_s": round(size / 1e6 / seconds),
                "saved_by_group": {group: round(1 - share, 3) for group, share in shares.items()},
            }
    return found


def _alone(former: Words, latter: Words) -> Words:  # noqa: ARG001 - what packing saves without the former state
    return latter


def _xor(former: Words, latter: Words) -> Words:
    return former ^ latter


def _subtracted(former: Words, latter: Words) -> Words:
    """Return the distances in steps of the last bit, small ones as small numbers: 0, -1, 1, -2, ..."""
    distance = (_ordered(latter) - _ordered(former)).view(np.int32)
    zigzag: Words = ((distance << 1) ^ (distance >> 31)).view(np.uint32)
    return zigzag


def _ordered(words: Words) -> Words:
    """Return numbers that grow as the floats do of which the words are the bits."""
    negative = (words >> np.uint32(31)).astype(bool)
    ordered: Words = np.where(negative, ~words, words | np.uint32(1 << 31))
    return ordered


def _planes(words: Words) -> bytes:
    """Return all first bytes, then all second ones, and so on: sign and exponent apart from the noise."""
    return words.view(np.uint8).reshape(-1, 4).T.tobytes()


def _zstd(level: int) -> Callable[[bytes], Any]:
    pack: Callable[[bytes], Any] = pyarrow.Codec("zstd", compression_level=level).compress
    return pack


ENCODINGS: dict[str, Callable[[Words, Words], Words]] = {"alone": _alone, "xor": _xor, "subtract": _subtracted}
PACKERS: dict[str, Callable[[bytes], Any]] = {
    "zlib-1": lambda body: zlib.compress(body, 1),
    "zstd-1": _zstd(1),
    "zstd-3": _zstd(3),
}


def _group(name: str) -> str | None:
    """Return role and part of a tensor's name, or None for what is too small to matter."""
    role, _, rest = name.partition(".")
    part, _, rest = rest.partition(".")
    if part == "weights":
        return f"{role}.weights"
    moment = rest.partition(".")[0]
    return f"{role}.{moment}" if part == "optimizer" and moment.startswith("exp_avg") else None


def _places(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="np") as shard:
            found |= dict.fromkeys(shard.keys(), file)
    return found


def _sampled(names: Sequence[str], former: Mapping[str, Path], latter: Mapping[str, Path]) -> Pair:
    """Read a group from both states, and keep every so many blocks of it."""
    total = sum(_words(latter, name).size for name in names)
    step = -(-total // SAMPLE_WORDS)
    kept: list[tuple[Words, Words]] = []
    for name in names:
        before, after = _words(former, name), _words(latter, name)
        starts = range(0, after.size, BLOCK_WORDS * step)
        kept += [(before[at : at + BLOCK_WORDS].copy(), after[at : at + BLOCK_WORDS].copy()) for at in starts]
    return Pair(np.concatenate([pair[0] for pair in kept]), np.concatenate([pair[1] for pair in kept]), 4 * total)


def _words(places: Mapping[str, Path], name: str) -> Words:
    with safe_open(places[name], framework="np") as shard:
        tensor = shard.get_tensor(name)
    if tensor.dtype != np.float32:
        raise SystemExit(f"{name} is {tensor.dtype}; expected float32")
    words: Words = np.ascontiguousarray(tensor).reshape(-1).view(np.uint32)
    return words
