"""What an engine is asked for, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from jaxtyping import Bool, Float32, Int
from torch import Tensor

from rlhf_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How responses are drawn, and where they end."""

    max_new_tokens: int
    """Longest response, stop token included."""
    stop_ids: tuple[int, ...]
    """Tokens that end a response and belong to it."""
    pad_id: int
    """Fills what is neither prompt nor response."""
    temperature: float = 1.0
    """Divides the logits before sampling; without effect on greedy decoding."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, after top_k."""
    max_length: int | None = None
    """Longest prompt and response together, of each row by itself; None sets no such limit."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response; the token that completes one belongs to it."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: if a number lies outside its range, or a stop string is empty.
        """
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ConfigError(f"stop_strings takes a list of texts that are not empty, got {self.stop_strings!r}")
        for name, right, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature > 0, "above 0 (for greedy decoding give no uniforms)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 draws from all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not right:
                raise ConfigError(f"{name} is to be {wanted}, got {getattr(self, name)}")

    def response_limits(self, prompts: Sequence[Sequence[int]], *, positions: int | None) -> list[int]:
        """Return the most tokens that each prompt's response may have.

        Args:
            prompts: token ids of each prompt.
            positions: of the model; None if it has no such limit.

        Raises:
            ConfigError: if the model has fewer positions than a prompt and its response may take.
            DataError: if `max_length` leaves a prompt no room for a single token.
            ValueError: if there is no prompt or one of them is empty.
        """
        if not prompts or not all(prompts):
            raise ValueError("expected at least one prompt, and at least one token in each")
        longest = max(map(len, prompts))
        if self.max_length is not None and longest >= self.max_length:
            raise DataError(
                f"a prompt has {longest} tokens, which leaves no room for a response within max_length "
                f"{self.max_length}; raise max_length, or leave out prompts that are so long"
            )
        room = [self.max_new_tokens if self.max_length is None else self.max_length - len(row) for row in prompts]
        limits = [min(self.max_new_tokens, most) for most in room]
        needed = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        if positions is not None and needed > positions:
            raise ConfigError(
                f"prompt and response take up to {needed} tokens, but the model has {positions} positions; "
                "lower max_new_tokens, max_length or max_prompt_tokens, or take a model with more"
            )
        return limits


class Generation(NamedTuple):
    """What one batch of prompts became: prompts padded left, responses right, on the CPU."""

    sequences: Int[Tensor, "B S"]
    """Token ids: prompt, then response; `pad_id` elsewhere."""
    attention_mask: Bool[Tensor, "B S"]
    """True on the tokens of prompt and response."""
    action_mask: Bool[Tensor, "B A"]
    """True on the tokens of the response, the stop token included; a prefix of each row."""
    log_probs: Float32[Tensor, "B A"]
    """Log-probability of each response token under the distribution it was drawn from; zero on padding."""
    ended: Bool[Tensor, " B"]
    """True where the response ends with a stop token or stop string; False where it was cut for its length."""


class GenerationEngine(Protocol):
    """Makes responses."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        *,
        uniforms: Float32[Tensor, "B T"] | None,
    ) -> Generation:
        """Return one response per prompt, sampled with the given uniforms, or greedy without them.

        Every engine gives the same tokens from the same uniforms, as far as the model's arithmetic does:
        in float32, but for a uniform number within rounding of a border between two tokens. Dropout is off.

        Args:
            prompts: token ids of each prompt, at least one each.
            settings: how responses are drawn, and where they end.
            uniforms: from `sample_uniforms`, a column for each new token; None takes the likeliest token.

        Raises:
            ConfigError: if the model has too few positions for the longest prompt and its response.
            DataError: if a prompt has no room for a response.
            ValueError: if there is no prompt, one of them is empty, or uniforms are missing.
        """
