"""Our decoding loop against transformers' `generate` on SmolLM2, in turns in the same run; one JSON line.

    python bench/generation.py

Two comparisons: every row to its full length, against `generate` with transformers' own sampling; and responses
that end where the model ends them, the same tokens from the same uniforms, against our `hf` engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from infra.settings import settings
from rlhf_core.generation import Generation, GenerationSettings, make_engine, sample_uniforms
from rlhf_core.models.loading import load_causal_lm, load_tokenizer, locate_model
from rlhf_core.models.saving import quiet

PROMPTS, SAMPLES, STEPS, ROUNDS = 8, 4, 32, 2
DTYPE = "bfloat16"


def prompts(tokenizer: Any) -> list[list[int]]:
    """Return questions of different lengths as the model's chat has them, each as often as it is sampled."""
    questions = [f"What is {' + '.join(str(7 * term + row) for term in range(2 + row))}?" for row in range(PROMPTS)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts for _ in range(SAMPLES)]


def fastest(*calls: Callable[[], object]) -> list[float]:
    """Return the least seconds of each call, all of them called in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, seconds in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return [min(seconds) for seconds in times]


def main() -> int:
    """Measure both and print the line."""
    directory = locate_model("smollm2-135m-instruct", models_dir=settings().models_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_causal_lm(directory, DTYPE, device=device), load_tokenizer(directory)
    rows = prompts(tokenizer)
    uniforms = sample_uniforms(
        seed=0, episode=0, keys=[str(row) for row in range(len(rows))], samples=[0] * len(rows), max_new_tokens=STEPS
    )
    until_stop = GenerationSettings(max_new_tokens=STEPS, stop_ids=(tokenizer.eos_token_id,), pad_id=0)
    to_the_end = replace(until_stop, stop_ids=())
    native, hf = (make_engine(name, model) for name in ("native", "hf"))
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)

    def theirs() -> Any:
        with quiet():
            return model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                min_new_tokens=STEPS, max_new_tokens=STEPS,
            )  # fmt: skip

    kept: dict[str, Generation] = {}

    def until_stopped(name: str) -> None:
        engine = native if name == "native" else hf
        kept[name] = engine.generate(rows, until_stop, uniforms=uniforms)

    whole = fastest(lambda: native.generate(rows, to_the_end, uniforms=uniforms), theirs)
    stopped = fastest(lambda: until_stopped("native"), lambda: until_stopped("hf"))
    tokens = len(rows) * STEPS
    line = {
        "bench": "generation",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "dtype": DTYPE,
        "rows": len(rows),
        "prompts": PROMPTS,
        "new_tokens": STEPS,
        "native_tokens_per_s": round(tokens / whole[0]),
        "generate_tokens_per_s": round(tokens / whole[1]),
        "ratio": round(whole[1] / whole[0], 2),
        "until_stop": {
            "mean_length": round(float(kept["native"].action_mask.sum(1).float().mean()), 1),
            "native_s": round(stopped[0], 2),
            "hf_s": round(stopped[1], 2),
            "ratio": round(stopped[1] / stopped[0], 2),
        },
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
