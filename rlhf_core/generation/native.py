"""Our own decoding loop: one forward pass over the prompts, then one per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float32, Int
from torch import Tensor

from rlhf_core.generation.cache import reserve_cache
from rlhf_core.generation.responses import Responses, pad_left
from rlhf_core.generation.sampling import chooser
from rlhf_core.generation.stopping import watch
from rlhf_core.models.device import device_of
from rlhf_core.models.trunk import evaluating, forward_takes, max_positions, unwrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.generation.sampling import Chooser
    from rlhf_core.generation.settings import Generation, GenerationSettings


class _Rows(NamedTuple):
    """The rows still in the batch, and what their next forward pass needs."""

    place: Int[Tensor, " R"]
    """Each row's place in the batch that was asked for."""
    mask: Int[Tensor, "R S"]
    """Ones from the prompt's first token to the end of the reserved memory."""
    position: Int[Tensor, " R"]
    """Of the row's newest token."""


class NativeEngine:
    """Generates with a loop of its own over a key-value cache whose memory is reserved at once.

    The head sees the last position only; the samples of one prompt share one pass over it; keys and values are
    written once and never copied, except when rows that have finished leave the batch, once they are half of it.
    All of that depends on the batch alone, so the same batch gives the same bits (for one dtype, number of
    threads and kind of device).

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: reads the text for stop strings; needed for these only.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None) -> None:
        self.model = model
        self._tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        *,
        uniforms: Float32[Tensor, "B T"] | None,
    ) -> Generation:
        """Return one response per prompt; see `GenerationEngine`."""
        limits = settings.response_limits(prompts, positions=max_positions(self.model))
        device = device_of(self.model)
        strings = watch(settings.stop_strings, self._tokenizer, rows=len(prompts))
        with evaluating(self.model), torch.inference_mode():
            responses = Responses(limits, settings, strings, device)
            choose = chooser(settings, uniforms, rows=len(prompts), steps=responses.width, device=device)
            _decode(self.model, prompts, settings.pad_id, choose, responses)
        return responses.with_prompts(*pad_left(prompts, settings.pad_id, device))


def _decode(model: Any, prompts: Sequence[Sequence[int]], pad_id: int, choose: Chooser, responses: Responses) -> None:
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    number = {prompt: index for index, prompt in enumerate(distinct)}
    tokens, prompt_mask = pad_left(distinct, pad_id, responses.done.device)
    width = tokens.shape[1]
    cache = reserve_cache(unwrapped(model).config, width + responses.width)
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(distinct), responses.width)], -1)
    positions = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
    logits = _last_logits(model, tokens, prompt_mask, positions, cache)
    source = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=tokens.device)
    if len(distinct) < len(prompts):
        cache.reorder_cache(source)
    rows = _Rows(torch.arange(len(prompts), device=tokens.device), mask[source], positions[source, -1])
    logits = logits[source]
    for step in range(responses.width):
        choice = choose(logits, rows.place, step)
        responses.write(rows.place, step, choice)
        done = responses.done[rows.place]
        # a row that is done waits where it is: one step further may be past the model's last position
        rows = rows._replace(position=rows.position + (~done).long())
        inputs = choice.tokens
        left = (~done).nonzero()[:, 0]
        if not len(left):
            break
        if 2 * len(left) <= len(done):  # copying the cache is not free, so it is not done for every row that ends
            cache.reorder_cache(left)
            rows, inputs = _Rows(*(field[left] for field in rows)), inputs[left]
        seen = rows.mask[:, : width + step + 1]
        logits = _last_logits(model, inputs[:, None], seen, rows.position[:, None], cache)


def _last_logits(model: Any, inputs: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
    optional = {"position_ids": positions, "logits_to_keep": 1}
    output = model(
        input_ids=inputs,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        **{name: value for name, value in optional.items() if forward_takes(model, name)},
    )
    logits: Tensor = output.logits[:, -1]
    return logits
