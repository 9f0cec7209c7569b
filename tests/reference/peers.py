"""Runs TRL's and OpenRLHF's own arithmetic on small inputs, and writes what they answer to golden/peers.json.

Neither library is a dependency: a person installs both somewhere and runs this with the two on the path,

    pip install --no-deps --target SOMEWHERE/trl trl==1.12.0
    pip install --no-deps --target SOMEWHERE/openrlhf openrlhf==0.11.2
    PYTHONPATH=.:SOMEWHERE/trl:SOMEWHERE/openrlhf python -m tests.reference.peers

and `tests/unit/functional/test_peers.py` compares our functions with the file, which holds plain numbers.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "peers.json"

LENGTHS = (5, 2, 4, 1)  # of four responses, two to each of two prompts; the first fills the width
WIDTH, WORDS = 5, 7

Inputs = dict[str, Tensor]


def make_inputs() -> Inputs:
    """Return one small rollout batch, rounded to four digits so that the file holds it exactly enough."""
    generator = torch.Generator().manual_seed(20)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale * 1e4).round() / 1e4

    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    old = -draw(4, WIDTH).abs()
    return {
        "mask": mask,
        "old_logprobs": old,
        "logprobs": old + draw(4, WIDTH, scale=0.4),
        "ref_logprobs": old + draw(4, WIDTH, scale=0.3),
        "rollout_logprobs": old + draw(4, WIDTH, scale=0.5),
        "advantages": draw(4, WIDTH, scale=2.0),
        "values": torch.where(mask, draw(4, WIDTH), 0.0),
        "old_values": torch.where(mask, draw(4, WIDTH), 0.0),
        "returns": draw(4, WIDTH),
        "rewards": torch.where(mask, draw(4, WIDTH), 0.0),
        "scores": draw(4),
        "rejected": draw(4),
        "margin": draw(4).abs(),
        "logits": draw(4, WIDTH, WORDS, scale=3.0),
        "tokens": torch.randint(WORDS, (4, WIDTH), generator=generator),
    }


def with_gradient(loss: Tensor, source: Tensor) -> dict[str, Any]:
    (gradient,) = torch.autograd.grad(loss, source)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def plain(found: Any) -> Any:
    """Turn tensors in nested dictionaries into lists of numbers."""
    if isinstance(found, dict):
        return {name: plain(value) for name, value in found.items()}
    return found.tolist() if isinstance(found, Tensor) else found


def one_line_each(golden: dict[str, dict[str, Any]]) -> str:
    """Write a line for each quantity: as readable as thousands of numbers can be."""
    sections = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in section.items())
        + "\n}"
        for name, section in golden.items()
    )
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> None:
    from tests.reference import peer_openrlhf, peer_trl

    torch.set_num_threads(1)
    inputs = make_inputs()
    golden = {
        "versions": {name: version(name) for name in ("trl", "openrlhf", "torch")},
        "inputs": plain(inputs),
        "trl": plain(peer_trl.answers(inputs)),
        "openrlhf": plain(peer_openrlhf.answers(inputs)),
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(one_line_each(golden))


if __name__ == "__main__":
    main()
