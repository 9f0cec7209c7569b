"""The responses of one batch while they grow; where each of them ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_core.generation.settings import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.generation.sampling import Choice
    from rlhf_core.generation.settings import GenerationSettings
    from rlhf_core.generation.stopping import StopStrings


class Responses:
    """What has been drawn so far, on the model's device.

    Args:
        limits: most tokens of each row.
        settings: where responses end.
        strings: watches for stop strings; None if there are none.
        device: of the tensors.
    """

    def __init__(
        self, limits: Sequence[int], settings: GenerationSettings, strings: StopStrings | None, device: torch.device
    ) -> None:
        rows, width = len(limits), max(limits)
        self.width = width
        self.done: Bool[Tensor, " B"] = torch.zeros(rows, dtype=torch.bool, device=device)
        self.ended = self.done.clone()
        self._limits = torch.tensor(limits, device=device)
        self._stops = torch.tensor(tuple(settings.stop_ids), dtype=torch.long, device=device)
        self._strings = strings
        self._tokens = torch.full((rows, width), settings.pad_id, device=device)
        self._log_probs = torch.zeros(rows, width, device=device)
        self._mask = torch.zeros(rows, width, dtype=torch.bool, device=device)

    def write(self, rows: Int[Tensor, " R"], step: int, choice: Choice) -> None:
        """Note the token of each of these rows, where the row is not done, and see which of them are now.

        Args:
            rows: places in the batch.
            step: of the token in the response, from 0.
            choice: tokens and log-probabilities of these rows.
        """
        done = self.done[rows]
        self._tokens[rows, step] = torch.where(done, self._tokens[rows, step], choice.tokens)
        self._log_probs[rows, step] = torch.where(done, self._log_probs[rows, step], choice.log_probs)
        self._mask[rows, step] |= ~done
        stopped = torch.isin(choice.tokens, self._stops)
        if self._strings is not None:
            stopped = stopped | self._stopped_by_text(self._strings, rows, choice.tokens, done)
        self.ended[rows] |= stopped & ~done
        self.done[rows] |= stopped | (step + 1 >= self._limits[rows])

    def _stopped_by_text(self, strings: StopStrings, rows: Tensor, tokens: Tensor, done: Tensor) -> Tensor:
        answers = [
            not was_done and strings.completed_by(row, token)
            for row, token, was_done in zip(rows.tolist(), tokens.tolist(), done.tolist(), strict=True)
        ]
        return torch.tensor(answers, device=done.device)

    def with_prompts(self, tokens: Int[Tensor, "B P"], mask: Int[Tensor, "B P"]) -> Generation:
        """Return prompts and responses as ordinary tensors on the CPU, as wide as the longest of them."""
        length = int(self._mask.any(0).sum())
        written = self._mask[:, :length]
        parts = (
            torch.cat([tokens, self._tokens[:, :length]], -1),
            torch.cat([mask.bool(), written], -1),
            written,
            self._log_probs[:, :length],
            self.ended,
        )
        # tensors made in inference mode cannot be saved for a backward pass: these are copies
        with torch.inference_mode(mode=False):
            return Generation(*(part.cpu().clone() for part in parts))


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts' token ids [B P] and their mask of ones and zeros, padded on the left."""
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return tokens.to(device), mask.to(device)
