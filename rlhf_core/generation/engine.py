"""Our own decoding loop: one forward pass over the prompts, then one per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor
from transformers import StaticCache

from rlhf_core.errors import ConfigError
from rlhf_core.generation.sampling import Choice, choose_greedy, choose_sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    """True where the response ends with a stop token; False where it was cut at `max_new_tokens`."""


class _Rows(NamedTuple):
    """The rows still in the batch, and what their next forward pass needs."""

    place: Int[Tensor, " R"]
    """Each row's place in the batch that was asked for."""
    mask: Int[Tensor, "R S"]
    position: Int[Tensor, " R"]
    """Of the row's newest token."""
    done: Bool[Tensor, " R"]


@dataclass(slots=True)
class _Record:
    """The responses so far."""

    tokens: Int[Tensor, "B A"]
    log_probs: Float32[Tensor, "B A"]
    mask: Bool[Tensor, "B A"]

    @classmethod
    def empty(cls, batch: int, length: int, pad_id: int, device: torch.device) -> _Record:
        """Return a record of responses without a token."""
        return cls(
            torch.full((batch, length), pad_id, device=device),
            torch.zeros(batch, length, device=device),
            torch.zeros(batch, length, dtype=torch.bool, device=device),
        )

    def write(self, rows: _Rows, step: int, choice: Choice) -> None:
        """Note the token of each unfinished row."""
        alive = rows.place[~rows.done]
        self.tokens[alive, step] = choice.tokens[~rows.done]
        self.log_probs[alive, step] = choice.log_probs[~rows.done]
        self.mask[alive, step] = True


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    temperature: float = 1.0,
    uniforms: Float32[Tensor, "B T"] | None,
) -> Generation:
    """Return one response per prompt, sampled with the given uniforms, or greedy without them.

    The head sees the last position only; keys and values are kept in a static cache (measured faster than a
    growing one); rows that have finished leave the batch once they are half of it. All of that depends on the
    batch alone, so the same batch gives the same bits (for one dtype, number of threads and kind of device).
    Dropout is off meanwhile.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        prompts: token ids of each prompt, at least one each.
        max_new_tokens: longest response, stop token included.
        stop_ids: tokens that end a response and belong to it.
        pad_id: fills what is neither prompt nor response.
        temperature: divides the logits before sampling; without effect on greedy decoding.
        uniforms: from `sample_uniforms`; None takes the likeliest token each time.

    Returns:
        The responses with their masks and log-probabilities.

    Raises:
        ConfigError: if the model has fewer positions than the longest prompt and `max_new_tokens` need.
        ValueError: if there is no prompt or one of them is empty.
    """
    if not prompts or not all(prompts):
        raise ValueError("generate needs at least one prompt, and at least one token in each")
    _check_positions(model, max(map(len, prompts)) + max_new_tokens)
    noise = None if uniforms is None else uniforms.to(next(model.parameters()).device)

    def choose(logits: Tensor, place: Tensor, step: int) -> Choice:
        if noise is None:
            return choose_greedy(logits)
        return choose_sampled(logits=logits, uniforms=noise[place, step], temperature=temperature)

    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            decoded = _decode(model, prompts, choose, max_new_tokens=max_new_tokens, stop_ids=stop_ids, pad_id=pad_id)
    finally:
        model.train(was_training)
    # tensors made in inference mode cannot be saved for a backward pass: hand out ordinary ones
    return Generation(*(tensor.clone() for tensor in decoded))


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    choose: Callable[[Tensor, Tensor, int], Choice],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Generation:
    device = next(model.parameters()).device
    tokens, prompt_mask = _pad_left(prompts, pad_id, device)
    batch, width = tokens.shape
    record = _Record.empty(batch, max_new_tokens, pad_id, device)
    stops = torch.tensor(tuple(stop_ids), dtype=torch.long, device=device)
    cache = StaticCache(config=model.config, max_cache_len=width + max_new_tokens)
    # the mask covers the whole cache from the start: causality hides what is not yet written
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(batch, max_new_tokens)], -1)
    positions = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    rows = _Rows(torch.arange(batch, device=device), mask, positions[:, -1], done)
    ended, inputs = done.clone(), tokens
    for length in range(1, max_new_tokens + 1):
        logits = _last_logits(model, inputs, rows.mask, positions, cache)
        choice = choose(logits, rows.place, length - 1)
        record.write(rows, length - 1, choice)
        rows = rows._replace(done=rows.done | torch.isin(choice.tokens, stops), position=rows.position + 1)
        ended[rows.place] = rows.done
        if bool(rows.done.all()):
            break
        rows, inputs = _drop_finished(rows, choice.tokens[:, None], cache)
        positions = rows.position[:, None]
    return Generation(
        torch.cat([tokens, record.tokens[:, :length]], -1).cpu(),
        torch.cat([prompt_mask.bool(), record.mask[:, :length]], -1).cpu(),
        record.mask[:, :length].cpu(),
        record.log_probs[:, :length].cpu(),
        ended.cpu(),
    )


def _last_logits(model: Any, inputs: Tensor, mask: Tensor, positions: Tensor, cache: StaticCache) -> Tensor:
    output = model(
        input_ids=inputs,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _drop_finished(rows: _Rows, tokens: Tensor, cache: StaticCache) -> tuple[_Rows, Tensor]:
    """Return the rows and their last tokens without the finished ones, once these are half of the batch.

    Copying the cache is not free, so it is not done for every row that ends.
    """
    unfinished = (~rows.done).nonzero()[:, 0]
    if 2 * len(unfinished) > len(rows.done):
        return rows, tokens
    cache.reorder_cache(unfinished)
    return _Rows(*(field[unfinished] for field in rows)), tokens[unfinished]


def _pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return tokens.to(device), mask.to(device)


def _check_positions(model: Any, needed: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and needed > limit:
        raise ConfigError(
            f"prompt and response take up to {needed} tokens, but the model has {limit} positions; "
            "lower max_new_tokens or max_prompt_tokens, or take a model with more"
        )
