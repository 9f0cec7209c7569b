"""A batch that training cannot go on from, kept for whoever looks for the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhf_core.errors import TrainingError
from rlhf_core.training.checkpoint import write_json
from rlhf_core.types import Experience, Sample

KeepBatch = Callable[[Callable[[Path], None]], str]
"""Is given what writes a failed batch to a directory; returns the end of a sentence that says where the batch is."""


def check_finite(experience: Experience, samples: Sequence[Sample]) -> None:
    """Check that every number of an experience that counts is one, and every score before it was clipped.

    Raises:
        TrainingError: naming the first field with NaN or infinity, and the rows.
    """
    for name in ("reward", "values", "kl", "advantages", "returns", "action_log_probs", "rollout_log_probs"):
        tensor = getattr(experience, name)
        if tensor is None:
            continue
        wrong = (~tensor.isfinite() & experience.action_mask).any(dim=1)
        if wrong.any():
            rows = torch.nonzero(wrong).flatten().tolist()
            raise TrainingError(
                f"the {name} of {len(rows)} of {len(experience)} responses is not a finite number (rows "
                f"{', '.join(map(str, rows[:5]))}); look at what scored them"
            )
    if not all(isfinite(sample.score) and isfinite(sample.kl) for sample in samples):
        raise TrainingError(
            "a score or divergence of the episode is not finite, so that no later reward could be set by it; look at "
            "the reward functions and the policy"
        )


def keep_in(directory: Path | None, name: str) -> KeepBatch:
    """Return what keeps a failed batch in `directory/failed-batch-<name>`; without a directory, it says what to give.

    Args:
        directory: of the run.
        name: of the place in the run, and of the rank.
    """

    def keep(write: Callable[[Path], None]) -> str:
        if directory is None:
            return "give save_dir to have such a batch kept"
        place = directory / f"failed-batch-{name}"
        try:
            write(place)
        except Exception as failure:  # a full disk is an OSError to Python, and a SafetensorError to safetensors
            return f"the batch could not be kept in {place} ({failure})"
        return f"the batch is kept in {place}"

    return keep


def write_failed_batch(
    directory: Path,
    reason: str,
    experience: Experience,
    samples: Sequence[Sample],
    *,
    decode: Callable[[list[int]], str],
) -> None:
    """Write the batch as `experience.safetensors`, and as rows to read with the reason as `batch.json`.

    Args:
        directory: is made if it is not there.
        reason: what was wrong.
        experience: the batch.
        samples: the same rows as text; none if they are not at hand.
        decode: returns the text of token ids.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {field: tensor.detach().cpu().contiguous() for field, tensor in experience.tensors().items()}
    save_file(tensors, directory / "experience.safetensors")
    write_json(directory / "batch.json", {"error": reason, "rows": _rows(experience, samples, decode)})


def _rows(
    experience: Experience, samples: Sequence[Sample], decode: Callable[[list[int]], str]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for row, mask in enumerate(experience.action_mask):
        # As text: JSON has no word for NaN and infinity, which are what is looked for.
        shown: dict[str, object] = {}
        if samples:
            said = asdict(samples[row])
            shown = {name: str(value) if isinstance(value, float) else value for name, value in said.items()}
            shown["raw_scores"] = {name: str(value) for name, value in samples[row].raw_scores.items()}
        for name in ("reward", "values", "advantages", "action_log_probs"):
            shown[name] = [f"{number:.6g}" for number in getattr(experience, name)[row][mask].tolist()]
        attended = experience.sequences[row][experience.attention_mask[row]]
        shown["text"] = decode(attended.tolist())
        rows.append(shown)
    return rows
