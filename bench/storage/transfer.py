"""The same bytes to a server and back: by the store, by plain s3fs and by boto3, in turns."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import boto3
import numpy as np
import s3fs
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config
from safetensors.numpy import save_file

from infra.artifacts import ArtifactStore
from infra.artifacts.s3 import S3Backend
from tests.integration.seaweed import Seaweed

SHARDS = 20
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "metrics.jsonl")
OURS = "ours"


@dataclass(frozen=True)
class Way:
    """One way to bring a directory to the server and back."""

    name: str
    send: Callable[[Path], Any]
    get: Callable[[Path], Any]


class CountingBackend(S3Backend):
    """Counts the bytes of all bodies that are sent."""

    sent = 0

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object unless one is there."""
        self.sent += len(data)
        return super().create(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        """Write a small object if it is still in a state."""
        self.sent += len(data)
        return super().replace(key, data, tag)

    def upload(self, key: str, body: bytes) -> None:
        """Send a blob."""
        self.sent += len(body)
        super().upload(key, body)


def open_counting(server: Seaweed, cache: Path) -> tuple[ArtifactStore, CountingBackend]:
    """Return a store on the server, and what counts its bytes."""
    options = server.options
    backend = CountingBackend(f"s3://{server.bucket}/store", server.bucket, "store", options)
    return ArtifactStore(backend, cache), backend


def make_model(directory: Path, megabytes: int, seed: int) -> int:
    """Write a directory like a model's: shards of random bytes and a few small files; return its size in bytes."""
    directory.mkdir(parents=True)
    for index in range(SHARDS):
        write_shard(directory, index, megabytes * 1_000_000 // SHARDS, [seed, index])
    for name in SMALL_FILES:
        (directory / name).write_text(f"{name} {seed}\n" * 100)
    return sum(file.stat().st_size for file in directory.iterdir())


def write_shard(directory: Path, index: int, size: int, seed: list[int]) -> None:
    """Write a safetensors file of random bytes over whatever has its name."""
    body = np.frombuffer(np.random.default_rng(seed).bytes(size), dtype=np.uint8)
    save_file({"weight": body}, directory / f"model-{index:05d}.safetensors")


def compare(server: Seaweed, root: Path, megabytes: int, number: int) -> dict[str, dict[str, float]]:
    """Return the megabytes a second of each way, there and back; one round begins with another of them.

    Args:
        server: a fresh one.
        root: an empty directory.
        megabytes: how much.
        number: of the round, from 0.
    """
    model = root / "model"
    size = make_model(model, megabytes, seed=number)
    ways = [_ours(server, root / "cache"), _s3fs(server), _boto3(server)]
    ways = ways[number % len(ways) :] + ways[: number % len(ways)]
    _warm_up(root / "warm", ways)
    rates: dict[str, dict[str, float]] = {"send": {}, "get": {}}
    for way in ways:
        rates["send"][way.name] = size / 1e6 / seconds_of(way.send, model)
    for way in ways:
        back = root / "back"
        rates["get"][way.name] = size / 1e6 / seconds_of(way.get, back)
        check_same(model, back)
        shutil.rmtree(back)
    return rates


def seconds_of(function: Callable[..., Any], *arguments: Any) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median rate of each way, and that of the ratio to the better of the others in the same round."""
    ratios = [rates[OURS] / max(rate for name, rate in rates.items() if name != OURS) for rates in rounds]
    names = sorted(rounds[0])
    return {
        "mb_per_s": {name: round(median(rates[name] for rates in rounds)) for name in names},
        "ratio_to_better": round(median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def second_version(server: Seaweed, root: Path, megabytes: int) -> dict[str, Any]:
    """Return what the second of two versions that share nine tenths of their bytes sends, and how long it takes."""
    model = root / "model"
    size = make_model(model, megabytes, seed=1_000)
    store, backend = open_counting(server, root / "cache")
    _warm_up(root / "warm", [_ours(server, root / "cache")])
    first_s = seconds_of(store.commit, "policy", "shared", model)
    first = backend.sent
    for index in range(SHARDS // 10):
        write_shard(model, index, megabytes * 1_000_000 // SHARDS, [2_000, index])
    second_s = seconds_of(store.commit, "policy", "shared", model)
    second = backend.sent - first
    again_s = seconds_of(store.commit, "policy", "shared", model)
    return {
        "sent_share": round(second / size, 3),
        "seconds_share": round(second_s / first_s, 2),
        "same_again_sent_bytes": backend.sent - first - second,
        "same_again_seconds_share": round(again_s / first_s, 2),
    }


def check_same(there: Path, back: Path) -> None:
    """See that what came back is what was sent."""
    for file in there.iterdir():
        if (back / file.name).read_bytes() != file.read_bytes():
            raise SystemExit(f"{file.name} did not come back as it was sent")


def _warm_up(directory: Path, ways: list[Way]) -> None:
    """Send a little by each way: the first bodies have a server make its volumes, and each client its connections."""
    make_model(directory, SHARDS, seed=3_000)
    for way in ways:
        way.send(directory)


def _ours(server: Seaweed, cache: Path) -> Way:
    store, _ = open_counting(server, cache)
    return Way(
        OURS,
        lambda model: store.commit("policy", "bench", model),
        lambda directory: store.fetch("policy/bench", directory),
    )


def _s3fs(server: Seaweed) -> Way:
    files = s3fs.S3FileSystem(
        key=server.access_key,
        secret=server.secret_key,
        endpoint_url=server.endpoint_url,
        client_kwargs={"region_name": "us-east-1"},
        config_kwargs={"s3": {"addressing_style": "path"}},
        skip_instance_cache=True,
    )
    place = f"{server.bucket}/s3fs"

    def get(directory: Path) -> None:
        names = [name for name in files.ls(place, detail=False) if not name.endswith("/")]
        directory.mkdir()
        files.get(names, [str(directory / name.rpartition("/")[2]) for name in names])

    def send(model: Path) -> None:
        sources = sorted(model.iterdir())
        files.put([str(file) for file in sources], [f"{place}/{file.name}" for file in sources])

    return Way("s3fs", send, get)


def _boto3(server: Seaweed) -> Way:
    """Return boto3's own way for many files: multipart transfers of all of them in one pool of threads."""
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=16),
    )

    def send(model: Path) -> None:
        with create_transfer_manager(client, TransferConfig()) as manager:
            for future in [manager.upload(str(file), server.bucket, f"boto3/{file.name}") for file in model.iterdir()]:
                future.result()

    def get(directory: Path) -> None:
        directory.mkdir()
        listed = client.list_objects_v2(Bucket=server.bucket, Prefix="boto3/")["Contents"]
        keys = [item["Key"] for item in listed]
        with create_transfer_manager(client, TransferConfig()) as manager:
            for future in [manager.download(server.bucket, key, str(directory / key[6:])) for key in keys]:
                future.result()

    return Way("boto3", send, get)
