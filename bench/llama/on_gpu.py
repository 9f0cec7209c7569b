"""Llama-2 7B with adapters on one GPU: a trainer, and a maker that borrows its base; one JSON line.

    python bench/llama/on_gpu.py DIR [--micro 2,8,16,64] [--chunk 16,64]

DIR gets a model of Llama-2 7B's form with random weights, unless it is there: 13.5 GB, and a copy beside it. Neither
Ray nor Prefect is needed: the maker is a process that is handed the base by CUDA IPC, as a run's maker is.

    trainer    one optimizer step of actor and critic on 64 rows of 33 + 32 tokens, in micro-batches
    maker      chunks of so many samples: drawn, and scored by actor, initial model and critic

Bytes are what PyTorch has reserved at the peak and, of the whole GPU, what the driver says is taken. `estimated` is
what `rlhf_core/models/working_memory.py` says of the trainer's peak or the maker's, whichever is larger.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.llama.model import PROMPT, estimated, make_model
from flows.presets import resolve
from rlhf_core.config import PPOConfig
from rlhf_core.freed_memory import give_back
from rlhf_core.generation import Generation, GenerationSettings
from rlhf_core.models.base import Base, load_base, open_base, over_same_weights
from rlhf_core.models.base_on_gpu import Loan, borrowing, loans_of
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import adapters_off, attach_lora
from rlhf_core.models.trunk import trunk_of
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.rewards.scoring import ScoringBatch
from rlhf_core.rollout.experience import draw, state_values, token_logprobs
from rlhf_core.types import Experience, Prompt

RESPONSE, ROWS, REPEATED = 32, 64, 3
VOCABULARY = 32_000
MAKER_S = 300
"""Longest wait for a chunk."""
DEVICE = "cuda"


class Models(NamedTuple):
    """What both processes have over one base."""

    actor: PreTrainedModel
    critic: Critic


def models_over(base: Base, config: PPOConfig) -> Models:
    """Return actor and critic: sets of adapters over one base."""
    actor = load_base(base, arithmetic=torch.bfloat16, device=DEVICE)
    critic = Critic(over_same_weights(trunk_of(actor)))
    assert config.lora is not None
    for number, model in enumerate((actor, critic.trunk)):
        attach_lora(model, config.lora, seed=number)
    return Models(actor.to(DEVICE), critic.to(DEVICE))


def measured(what: str, work: Callable[[], object]) -> dict[str, Any]:
    """Return the fewest seconds of some turns of a work, and what PyTorch held at its peak."""
    give_back()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(REPEATED):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "what": what,
        "seconds": round(min(seconds), 3),
        "allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "of_the_gpu_gb": taken(),
    }


def taken() -> float:
    """Return gigabytes of the GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 2)


# --- maker


def make(channel: Connection, loans: Sequence[Loan], base: Base, config: PPOConfig, sizes: Sequence[int]) -> None:
    """Draw and score a chunk of each size, and tell of each."""
    with borrowing(loans):
        models = models_over(base, config)
    for model in models:
        model.eval()
    for size in sizes:
        for told in chunk_of(size, models, config):
            channel.send(told)
    give_back()
    channel.send(None)
    channel.recv()  # the trainer measures while this process exists


def chunk_of(size: int, models: Models, config: PPOConfig) -> Iterator[dict[str, Any]]:
    """Draw and score a chunk, and yield what each took."""
    settings = GenerationSettings(max_new_tokens=RESPONSE, stop_ids=(), pad_id=0, temperature=config.temperature)
    ids = torch.randint(3, VOCABULARY, (size, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Prompt(tuple(row), "", None, str(number)) for number, row in enumerate(ids)]
    drawn: list[Generation] = []

    def sample() -> None:
        drawn[:] = [
            draw(
                models.actor, prompts, [0] * size, config=config, generation=settings, tokenizer=None, seed=0, episode=0
            )
        ]

    def score() -> None:
        found = drawn[0]
        batch = ScoringBatch([], [], found.ended, found.sequences, found.attention_mask, found.action_mask)
        token_logprobs(models.actor, batch, temperature=config.temperature, config=config)
        with adapters_off(models.actor):
            token_logprobs(models.actor, batch, temperature=config.temperature, config=config)
        state_values(models.critic, batch, config=config)

    yield measured(f"sampling {size}", sample)
    yield measured(f"scoring {size}", score)


# --- trainer


def experience() -> Experience:
    """Return a minibatch of random tokens."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        return torch.randn(ROWS, RESPONSE, generator=generator)

    return Experience(
        sequences=torch.randint(3, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator),
        action_log_probs=numbers(), values=numbers(), reward=numbers(), kl=numbers(), advantages=numbers(),
        attention_mask=torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.bool),
        action_mask=torch.ones(ROWS, RESPONSE, dtype=torch.bool),
        policy_version=torch.zeros(ROWS, dtype=torch.long), rollout_log_probs=numbers(), returns=numbers(),
    )  # fmt: skip


def main() -> int:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the model, which is made unless it is there")
    parser.add_argument("--micro", default="2,8,16,64", help="rows of a micro-batch, with commas between them")
    parser.add_argument("--chunk", default="16,64", help="samples of a maker's chunk, likewise")
    given = parser.parse_args()
    micros, chunks = ([int(each) for each in text.split(",")] for text in (given.micro, given.chunk))
    line: dict[str, Any] = {"bench": "llama7b_on_gpu", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    start = time.perf_counter()
    if not given.directory.is_dir():
        make_model(given.directory, device=DEVICE, tokenizer=False)
    made = time.perf_counter()
    config = resolve("llama7b")
    base = open_base(
        given.directory, "0" * 64, arithmetic=torch.bfloat16, models_dir=given.directory.with_name("copies")
    )
    copied = time.perf_counter()
    models = models_over(base, config.ppo)
    line["seconds"] = {
        "made": round(made - start, 1),
        "copied": round(copied - made, 1),
        "on_the_gpu": round(time.perf_counter() - copied, 1),
    }
    line["built_gb"] = {"reserved": round(torch.cuda.memory_reserved() / 1e9, 2), "of_the_gpu": taken()}

    ours, theirs = multiprocessing.Pipe()
    maker = multiprocessing.get_context("spawn").Process(
        target=make, args=(theirs, loans_of(*models), base, config.ppo, chunks), daemon=True
    )
    maker.start()
    theirs.close()  # else its end would not be noticed
    line["maker"] = []
    while True:
        if not ours.poll(MAKER_S):
            raise SystemExit(f"the maker has not told anything for {MAKER_S} s")
        told = ours.recv()
        if told is None:
            break
        line["maker"].append(told)
    give_back()
    line["trainer"] = []
    for micro in micros:
        ppo = config.ppo.model_copy(update={"micro_batch_size": micro, "train_batch_size": ROWS})
        learner = PPOLearner.build(*models, ppo, device=DEVICE)
        batch = learner.recompute(experience())
        told = measured(f"step of {ROWS} rows, {micro} at once", lambda: learner.training_step(batch))  # noqa: B023
        need = estimated(config.model_copy(update={"ppo": ppo}), given.directory, gpus=1)
        told["estimated_gb"] = round((need.held + need.passes) / 1e9, 2)  # both processes, which work in turn
        line["trainer"].append(told)
        del learner
    ours.send(None)
    maker.join(60)
    maker.kill()
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
