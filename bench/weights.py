"""Weights from a trainer to two makers of its node, from publishing to the last swap; one JSON line.

    python bench/weights.py [--rounds 7]

Real Ray actors on a leased cluster, with PPO's threads: two for the trainer, one for a maker. The model has one layer
of Llama-2-7B's form and a small vocabulary, 500 MB in bfloat16, with adapters of PPO's defaults; the trainer holds it
in float32, as a learner does. In each round, in turn: `copy`, of the same bytes within the trainer's process, by one
thread, from and to memory that was used before; `shared_memory`, `objects`; `state_dict`, cast and put into Ray's
object store as torch tensors, got by each maker and loaded; `adapters`, an update of them alone. Two makers take what
is in shared memory and two all else, as one that goes from one way to the other moves its weights. Medians of warm
rounds, in seconds. `checksum`: of the same bytes, against CRC-32. `adapters_share`: bytes of an update over those of a
full publication, here and for whole models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("RAY_worker_niceness", "0")
import numpy as np
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from infra.clusters import connect, disconnect, lease_cluster, release_cluster
from infra.settings import settings
from rlhf_core.config import LoRAConfig
from rlhf_core.models.loading import locate_model
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.weights import Publication, Publisher, Subscriber
from rlhf_core.weights.buckets import xxh3

WAIT_S = 300.0
KINDS = ("copy", "shared_memory", "objects", "state_dict", "adapters")
LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "tie_word_embeddings": False}
ONE_LAYER = LlamaConfig(**LLAMA, num_hidden_layers=1, vocab_size=6000)
LLAMA_7B = LlamaConfig(**LLAMA, num_hidden_layers=32, vocab_size=32000)


def model_of(config: Any, dtype: torch.dtype, *, device: str = "cpu") -> Any:
    """Return a model of a form, with adapters of PPO's defaults."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    attach_lora(model, LoRAConfig(), seed=0)
    return model


@ray.remote
class Maker:
    """Holds the model in bfloat16."""

    def __init__(self) -> None:
        self._model = model_of(ONE_LAYER, torch.bfloat16)
        self._subscriber = Subscriber(lambda: {"actor": self._model})

    def take(self, publication: Publication) -> int:
        """Take what was published."""
        return self._subscriber.take(publication, WAIT_S)

    def load(self, references: list[Any]) -> None:
        """Load a state dict."""
        (state,) = ray.get(references)
        self._model.load_state_dict(state)


@ray.remote
class Trainer:
    """Holds the model in float32, and times one way after the other."""

    def __init__(self, sharing: list[Any], copying: list[Any]) -> None:
        self._makers = {"shared_memory": sharing, "objects": copying, "adapters": copying}
        self._model = model_of(ONE_LAYER, torch.float32)
        self._publishers = {
            kind: Publisher(transport=transport, dtype=torch.bfloat16)  # type: ignore[arg-type]
            for kind, transport in (("shared_memory",) * 2, ("objects",) * 2, ("adapters", "shared_memory"))
        }
        full = sum(parameter.numel() * 2 for parameter in self._model.parameters())
        self._source, self._target = (torch.ones(full, dtype=torch.uint8) for _ in range(2))
        self._version = 0
        self.sizes: dict[str, int] = {}

    def round(self) -> dict[str, float]:
        """Return how long each way takes, once."""
        return {kind: _timed(getattr(self, f"_{kind}")) for kind in KINDS}

    def published_bytes(self) -> dict[str, int]:
        """Return what the last publications held, full and adapters alone."""
        return self.sizes

    def checksums(self) -> dict[str, float]:
        """Return how long a checksum of the same bytes takes."""
        return {"xxh3": _timed(lambda: xxh3(self._source)), "crc32": _timed(lambda: zlib.crc32(self._source.numpy()))}

    def _copy(self) -> None:
        np.copyto(self._target.numpy(), self._source.numpy())

    def _shared_memory(self) -> None:
        self._publish("shared_memory", fully=True)

    def _objects(self) -> None:
        self._publish("objects", fully=True)

    def _adapters(self) -> None:
        self._publish("adapters", fully=False)

    def _state_dict(self) -> None:
        state = {name: tensor.to(torch.bfloat16) for name, tensor in self._model.state_dict().items()}
        reference = ray.put(state)
        ray.get([maker.load.remote([reference]) for maker in self._makers["objects"]], timeout=WAIT_S)

    def _publish(self, kind: str, *, fully: bool) -> None:
        self._version += 1
        named = self._model.named_parameters() if fully else trainable_parameters(self._model).items()
        weights = ((f"actor.{name}", parameter) for name, parameter in named)
        publication = self._publishers[kind].publish(weights, version=self._version, fully=fully)
        ray.get([maker.take.remote(publication) for maker in self._makers[kind]], timeout=WAIT_S)
        self._publishers[kind].retire(in_use={self._version})
        self.sizes["full" if fully else "adapters"] = publication.nbytes


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def share_of(config: Any) -> float:
    """Return the share that adapters have in a whole model's bytes."""
    model = model_of(config, torch.bfloat16, device="meta")
    adapters = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    return adapters / sum(parameter.numel() for parameter in model.parameters())


def measure(rounds: int) -> dict[str, Any]:
    """Return the figures of the cluster that this process is connected to."""
    makers = [Maker.options(num_cpus=1).remote() for _ in range(4)]  # type: ignore[attr-defined]
    trainer = Trainer.options(num_cpus=2).remote(makers[:2], makers[2:])  # type: ignore[attr-defined]
    found = []
    for number in range(rounds + 2):
        found.append(ray.get(trainer.round.remote(), timeout=WAIT_S))
        sys.stderr.write(f"round {number + 1}: {json.dumps({kind: round(s, 3) for kind, s in found[-1].items()})}\n")
    warm = found[2:]
    seconds = {kind: median(one[kind] for one in warm) for kind in KINDS}
    sizes = ray.get(trainer.published_bytes.remote(), timeout=WAIT_S)
    sums = [ray.get(trainer.checksums.remote(), timeout=WAIT_S) for _ in range(3)]
    return {
        "megabytes": round(sizes["full"] / 1e6, 1),
        "seconds": {kind: round(value, 4) for kind, value in seconds.items()},
        "over_copy": round(seconds["shared_memory"] / seconds["copy"], 2),
        "state_dict_over": round(seconds["state_dict"] / seconds["shared_memory"], 1),
        "checksum": {kind: round(median(one[kind] for one in sums), 4) for kind in sums[0]},
        "adapters_share": {"here": round(sizes["adapters"] / sizes["full"], 5)},
    }


def main() -> int:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="warm ones, after two that are left out")
    rounds = parser.parse_args().rounds
    line: dict[str, Any] = {"bench": "weights", "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as directory:
        cluster = lease_cluster("bench-weights", directory=Path(directory), num_cpus=6, object_store_mb=2048)
        try:
            connect(cluster)
            line |= measure(rounds)
        finally:
            disconnect()
            release_cluster("bench-weights")
    small = AutoConfig.from_pretrained(locate_model("smollm2-135m-instruct", models_dir=settings().models_dir))
    line["adapters_share"] |= {"llama_7b": round(share_of(LLAMA_7B), 5), "smollm2_135m": round(share_of(small), 5)}
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
