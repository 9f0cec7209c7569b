"""The responses of one batch while they grow, and where each ends: at its limit, a stop token or a stop string."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_core.errors import ConfigError
from rlhf_core.generation.settings import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.generation.sampling import Choice
    from rlhf_core.generation.settings import GenerationSettings

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of a character to


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

    def write(self, rows: Int[Tensor, " R"], step: int | Tensor, choice: Choice) -> None:
        """Note the token of each of these rows, where the row is not done, and see which of them are now.

        Args:
            rows: places in the batch.
            step: of the token in the response, from 0; one for all, or one for each.
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


@dataclass(slots=True)
class _Text:
    """One response, as far as it is read."""

    ids: list[int] = field(default_factory=list)
    context: int = 0
    """Tokens from here on are decoded again, so that spaces between tokens come out right."""
    read: int = 0
    """Tokens before this one are in `tail`."""
    tail: str = ""
    """The end of the text, as long as a stop string may reach back."""


class StopStrings:
    """Watches the responses of one batch.

    A token's text depends on the token before it (spaces), and a character may be spread over several tokens:
    so tokens are decoded with those just before them, and stay unread until their characters are whole. The
    cost of a token does not grow with the response.

    Args:
        strings: texts that end a response.
        tokenizer: reads tokens, special ones too.
        rows: number of responses.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any, rows: int) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._reach = max(map(len, strings)) - 1
        self._texts = [_Text() for _ in range(rows)]

    def completed_by(self, row: int, token: int) -> bool:
        """Return whether this next token of a row completes a stop string."""
        text = self._texts[row]
        text.ids.append(token)
        before = self._decode(text.ids[text.context : text.read])
        new = self._decode(text.ids[text.context :])[len(before) :]
        found = any(string in text.tail + new for string in self._strings)
        if not new.endswith(UNFINISHED):
            text.tail = (text.tail + new)[-self._reach :] if self._reach else ""
            text.context, text.read = text.read, len(text.ids)
        return found

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def watch(strings: Sequence[str], tokenizer: Any, *, rows: int) -> StopStrings | None:
    """Return a watch for these stop strings; None if there are none.

    Raises:
        ConfigError: if there are some, and no tokenizer to read the text with.
    """
    if not strings:
        return None
    if tokenizer is None:
        raise ConfigError(
            "stop_strings need the text of the responses, and the engine has no tokenizer to read it with; "
            "give make_engine one"
        )
    return StopStrings(strings, tokenizer, rows)
