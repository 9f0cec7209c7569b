"""transformers' `generate`, which draws by our uniforms: slower than our loop, and a check on it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float32
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rlhf_core.generation.responses import Responses, pad_left
from rlhf_core.generation.sampling import chooser
from rlhf_core.generation.stopping import watch
from rlhf_core.models.device import device_of
from rlhf_core.models.saving import quiet
from rlhf_core.models.trunk import evaluating, max_positions, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.generation.sampling import Chooser
    from rlhf_core.generation.settings import Generation, GenerationSettings


class HfEngine:
    """Generates with transformers' own loop and cache.

    transformers is told to decode greedily, and sees scores in which the token that our uniforms choose is the
    only one. The generation settings that come with a model (a temperature, say) are not looked at.

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
        model, device = unwrapped(self.model), device_of(self.model)
        limits = settings.response_limits(prompts, positions=max_positions(model))
        strings = watch(settings.stop_strings, self._tokenizer, rows=len(prompts))
        with evaluating(model), torch.no_grad(), quiet():
            responses = Responses(limits, settings, strings, device)
            choose = chooser(settings, uniforms, rows=len(prompts), steps=responses.width, device=device)
            # rows of one limit at a time: transformers would count on for a row that is done, past the last position
            for limit in sorted(set(limits)):
                rows = [row for row, own in enumerate(limits) if own == limit]
                _run(model, prompts, rows, limit, settings.pad_id, choose, responses)
        return responses.with_prompts(*pad_left(prompts, settings.pad_id, device))


def _run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rows: list[int],
    limit: int,
    pad_id: int,
    choose: Chooser,
    responses: Responses,
) -> None:
    tokens, mask = pad_left([prompts[row] for row in rows], pad_id, responses.done.device)
    places = torch.tensor(rows, device=tokens.device)
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, num_beams=1, pad_token_id=pad_id, eos_token_id=None, use_cache=True
    )
    drawing = _Draws(places, tokens.shape[1], limit, choose, responses)
    with _own_settings_put_away(model):
        model.generate(
            tokens,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([_AllDone(places, responses)]),
        )


class _Draws(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Leaves the chosen token alone with a finite score, and notes it."""

    def __init__(self, places: Tensor, width: int, limit: int, choose: Chooser, responses: Responses) -> None:
        self._places, self._width, self._limit = places, width, limit
        self._choose, self._responses = choose, responses

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # on CUDA transformers looks late whether all rows are done, and may ask for a token too many
        step = min(input_ids.shape[1] - self._width, self._limit - 1)
        choice = self._choose(scores, self._places, step)
        self._responses.write(self._places, step, choice)
        return torch.full_like(scores, -torch.inf).scatter_(1, choice.tokens[:, None], 0.0)


class _AllDone(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    def __init__(self, places: Tensor, responses: Responses) -> None:
        self._places, self._responses = places, responses

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002 (transformers' signature)
        return self._responses.done[self._places]


@contextmanager
def _own_settings_put_away(model: Any) -> Iterator[None]:
    """Run the block with empty settings on the model: transformers would add its own to those it is given."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
