"""How many of the stored evaluation's greedy answers a fetched policy gives again; one JSON line.

    rlhf run quickstart && python bench/quickstart_fetched.py [policy/quickstart@latest] [--problems 100]

The policy is fetched as adapters, which peft loads, and merged, which transformers loads; neither uses code of ours.
Each answers in float32, in which evaluations are made, and in bfloat16. Exits 1 if an answer in float32 is another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.artifacts import Manifest, open_default_store
from infra.errors import StoreError
from rlhf_core.config import PipelineConfig

LOADERS = {"adapters": AutoPeftModelForCausalLM, "merged": AutoModelForCausalLM}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def answers(model: Any, tokenizer: Any, config: PipelineConfig, prompts: list[str]) -> Iterator[str]:
    """Yield greedy answers, one prompt at a time: padding would change the last bits."""
    template = config.template
    assert template.prompt is not None
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in template.stop]
    for prompt in prompts:
        text = template.prompt.replace("{prompt}", prompt)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        limit = config.evaluation.max_new_tokens
        found = model.generate(input_ids=ids, max_new_tokens=limit, do_sample=False, eos_token_id=stops, pad_token_id=0)
        out = found[0, ids.shape[1] :].tolist()
        end = next((place for place, token in enumerate(out) if token in stops), len(out))
        yield tokenizer.decode(out[:end])


def main() -> int:
    """Fetch, ask, print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", nargs="?", default="policy/quickstart@latest")
    parser.add_argument("--problems", type=int, default=100)
    given = parser.parse_args()
    store = open_default_store()
    try:
        policy: Manifest = store.resolve(given.policy)
    except StoreError as error:
        raise SystemExit(str(error)) from None
    config = PipelineConfig.model_validate(policy.config)
    evaluations = [each for each in store.list("evaluation") if each.metrics["policy"] == policy.uri]
    if not evaluations:
        raise SystemExit(f"{policy.uri} was never evaluated; `rlhf run quickstart` does it")
    evaluation = evaluations[-1]
    lines = store.read_bytes(evaluation, "outcomes.jsonl").decode().splitlines()[: given.problems]
    outcomes = [json.loads(line) for line in lines]
    prompts, stored = ([each[key] for each in outcomes] for key in ("prompt", "response"))
    equal: dict[str, float] = {}
    for form, loader in LOADERS.items():
        with TemporaryDirectory() as folder:
            directory = Path(folder) / "policy"
            rlhf = Path(sys.executable).with_name("rlhf")
            whole = ["--merged"] if form == "merged" else []
            subprocess.run([rlhf, "artifacts", "fetch", policy.uri, directory, *whole], check=True, stdout=sys.stderr)
            tokenizer = AutoTokenizer.from_pretrained(directory)
            for name, dtype in DTYPES.items():
                model = loader.from_pretrained(directory, dtype=dtype).eval()
                found = list(answers(model, tokenizer, config, prompts))
                same = sum(one == other for one, other in zip(found, stored, strict=True))
                equal[f"{form} {name}"] = round(same / len(stored), 4)
    line = {"bench": "quickstart_fetched", "policy": policy.uri, "problems": len(stored), "equal": equal}
    sys.stdout.write(json.dumps(line) + "\n")
    return int(any(share < 1 for name, share in equal.items() if name.endswith("float32")))


if __name__ == "__main__":
    sys.exit(main())
