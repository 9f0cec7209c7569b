"""The engines that make the responses: our own decoding loop, transformers' `generate` as a check on it, and vLLM.

Ours passes over the prompts, then over a token of each row at a time, with keys and values whose greatest length is
known from the start: by `Decoder` for models of Llama's form, by transformers' layers for others.
`generate` draws by the same uniforms, and is slower. vLLM, where it is installed, does, too (`vllm_engine.py`).
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from rlhf_core.errors import ConfigError
from rlhf_core.generation.decoder import FIXED_ANGLES, Decoder, PromptPass, can_decode
from rlhf_core.generation.responses import Responses, pad_left, watch
from rlhf_core.generation.sampling import chooser
from rlhf_core.generation.vllm_engine import VllmEngine
from rlhf_core.models.base import is_widened
from rlhf_core.models.saving import quiet
from rlhf_core.models.trunk import device_of, evaluating, forward_takes, max_positions, unwrapped
from rlhf_core.training.micro_batches import cost_on, of_like_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.config import PPOOptions, SamplingConfig
    from rlhf_core.generation.sampling import Chooser
    from rlhf_core.generation.settings import Generation, GenerationEngine, GenerationSettings


WORTH_A_PASS = 64
"""Tokens that are not read again because all prompts begin with them: fewer are not worth a pass of their own."""


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


class _ReservedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values in memory that is reserved at once, of which the written part is shown.

    transformers' growing layer copies all it holds for each token; its static layer copies nothing, but has
    attention run over the whole length at every step, what is not yet written included.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._memory: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values behind the others, and return all of them."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._memory is None:
            self.lazy_initialization(key_states, value_states)
            keys, values = (
                new.new_empty(*new.shape[:2], self._length, new.shape[-1]) for new in (key_states, value_states)
            )
            self._memory = keys, values
        for memory, new in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, start:end] = new
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, each as often as it is named."""
        length = self.get_seq_length()
        if self._memory is not None:
            keys, values = (memory.index_select(0, beam_idx) for memory in self._memory)
            self._memory = keys, values
            self._show(length)

    def _show(self, length: int) -> None:
        assert self._memory is not None
        self.keys, self.values = (memory[:, :, :length] for memory in self._memory)


def reserve_cache(config: Any, length: int) -> DynamicCache:
    """Return an empty cache for sequences of this length.

    Layers of other kinds (sliding windows, states of linear attention) stay as transformers makes them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_ReservedLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _Steps(Protocol):
    """Takes in a token of each row, and gives the scores of the next: `Decoder`, or a model's own layers."""

    def keep(self, rows: Int[Tensor, " N"]) -> None:
        """Keep these rows, each as often as it is named."""

    def next_logits(self, tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Take in a token of each row, and return the scores of the next."""


class _OwnLayers:
    """Steps through transformers' layers, of any architecture."""

    def __init__(self, model: Any, cache: DynamicCache, mask: Int[Tensor, "R S"], seen: int) -> None:
        self._model, self._cache, self._mask, self._seen = model, cache, mask, seen

    def keep(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._mask = self._mask[rows]

    def next_logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self._seen += 1
        return _last_logits(self._model, tokens[:, None], self._mask[:, : self._seen], positions[:, None], self._cache)


class NativeEngine:
    """Generates with a loop of its own over a key-value cache whose memory is reserved at once.

    The head sees the last position only; the samples of one prompt share one pass over it; keys and values are copied
    when the prompts are read, and when rows that have finished leave the batch, once they are half of it. All of that
    depends on the batch alone, so the same batch gives the same bits (for one dtype, kernels, number of threads and
    kind of device).

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: reads the text for stop strings; needed for these only.
        graphs: have a `Decoder`'s steps recorded on CUDA.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, graphs: bool = False) -> None:
        self.model = model
        self._tokenizer, self._graphs = tokenizer, graphs

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
            _decode(self.model, prompts, settings.pad_id, choose, responses, graphs=self._graphs)
        return responses.with_prompts(*pad_left(prompts, settings.pad_id, device))


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    pad_id: int,
    choose: Chooser,
    responses: Responses,
    *,
    graphs: bool,
) -> None:
    distinct, device = list(dict.fromkeys(map(tuple, prompts))), responses.done.device
    number = {prompt: index for index, prompt in enumerate(distinct)}
    read = partial(_read_to_decode, graphs=graphs) if can_decode(model) else _read_with_own_layers
    steps, logits = read(model, distinct, pad_id, responses.width, device)
    source = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=device)
    if len(distinct) < len(prompts):
        steps.keep(source)
    logits = logits[source]
    position = torch.tensor([max(0, len(prompt) - 1) for prompt in prompts], device=device)
    place = torch.arange(len(prompts), device=device)  # of each row, in the batch that was asked for
    for step in range(responses.width):
        choice = choose(logits, place, step)
        responses.write(place, step, choice)
        done = responses.done[place]
        # a row that is done waits where it is: one step further may be past the model's last position
        position = position + (~done).long()
        inputs = choice.tokens
        left = (~done).nonzero()[:, 0]
        if not len(left):
            break
        if 2 * len(left) <= len(done):  # copying the cache is not free, so it is not done for every row that ends
            steps.keep(left)
            place, position, inputs = place[left], position[left], inputs[left]
        logits = steps.next_logits(inputs, position)


def _read_with_own_layers(
    model: Any, prompts: Sequence[Sequence[int]], pad_id: int, new_tokens: int, device: torch.device
) -> tuple[_Steps, Tensor]:
    """Return what goes on from the prompts by so many tokens, and the scores of the first."""
    tokens, mask = pad_left(prompts, pad_id, device)
    width = tokens.shape[1]
    cache = reserve_cache(unwrapped(model).config, width + new_tokens)
    logits = _last_logits(model, tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
    return _OwnLayers(model, cache, torch.cat([mask, mask.new_ones(len(prompts), new_tokens)], -1), width), logits


def _read_to_decode(
    model: Any, prompts: Sequence[Sequence[int]], pad_id: int, new_tokens: int, device: torch.device, *, graphs: bool
) -> tuple[_Steps, Tensor]:
    """Return a decoder that goes on from the prompts, and the first scores.

    What all begin with is read once, and the rest in passes over prompts of like length.
    """
    angles_stay = unwrapped(model).model.rotary_emb.rope_type in FIXED_ANGLES
    shared = _shared_tokens(prompts) if angles_stay else 0
    beginning = DynamicCache(config=unwrapped(model).config)
    if shared:
        ids = torch.tensor([prompts[0][:shared]], device=device)
        _last_logits(model, ids, torch.ones_like(ids), torch.arange(shared, device=device)[None], beginning)
    rests = [prompt[shared:] for prompt in prompts]
    cuts = [list(range(len(rests)))]
    if angles_stay and device.type == "cpu":  # else the longest row decides on the angles of all; or passes are dear
        cuts = of_like_length([*map(len, rests)], len(rests), cost_on(device, model))
    passes: list[PromptPass] = []
    scores: Tensor | None = None
    for places in cuts:
        cache = copy.deepcopy(beginning)
        if shared:
            cache.batch_repeat_interleave(len(places))
        tokens, mask = pad_left([rests[place] for place in places], pad_id, device)
        seen = torch.cat([mask.new_ones(len(places), shared), mask], dim=-1)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, shared:]
        found, rows = _last_logits(model, tokens, seen, positions, cache), torch.tensor(places, device=device)
        scores = found.new_empty(len(prompts), found.shape[1]) if scores is None else scores
        scores[rows] = found
        passes.append(PromptPass(rows, cache, tokens.shape[1] - mask.sum(-1)))
    assert scores is not None  # there is a prompt
    length = max(map(len, prompts)) + new_tokens
    return Decoder(model, passes, length, shared=shared, graphs=graphs), scores


def _shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts have in common; 0 if to read them once would save too little.

    The last token of a prompt never counts: its scores are wanted.
    """
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)  # up to the shortest one's end
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return shared if shared * (len(prompts) - 1) >= WORTH_A_PASS else 0


def _last_logits(model: Any, inputs: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
    # A tensor of places, since the number 1 gives the head a view, whose rows PyTorch multiplies one by one on a CPU:
    # with a copy of the weights for each, 300 times as long in bfloat16.
    last = torch.arange(inputs.shape[1] - 1, inputs.shape[1], device=inputs.device)
    optional = {"position_ids": positions, "logits_to_keep": last}
    output = model(
        input_ids=inputs,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        **{name: value for name, value in optional.items() if forward_takes(model, name)},
    )
    logits: Tensor = output.logits[:, -1]
    return logits


_ENGINES: dict[str, Callable[..., GenerationEngine]] = {
    "native": NativeEngine,
    "native_graphs": partial(NativeEngine, graphs=True),
    "hf": HfEngine,
    "vllm": VllmEngine,
}


def make_engine(
    name: Literal["native", "native_graphs", "hf", "vllm"] | str, model: Any, *, tokenizer: Any = None
) -> GenerationEngine:
    """Return an engine around a model, which stays the caller's.

    Args:
        name: native, our own decoding loop; native_graphs, the same with its steps recorded on CUDA; hf,
            transformers' `generate`; vllm, where it is installed.
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: reads the text for stop strings; needed for these only.

    Raises:
        ConfigError: if there is no engine of this name, or vLLM is not installed.
    """
    if name not in _ENGINES:
        raise ConfigError(f"there is no generation engine {name!r}; choose one of {', '.join(_ENGINES)}")
    return _ENGINES[name](model, tokenizer=tokenizer)


def notes_suffice(options: PPOOptions, sampling: SamplingConfig | GenerationSettings, model: Any) -> bool:
    """Return whether an engine notes the log-probabilities that the policy's own pass over the responses would give.

    In float32 they are 3e-6 apart, in bfloat16 0.04. With top-k or top-p the note is of the tokens that are left, and
    where angles depend on how long a pass is, of another pass.

    Args:
        options: engine and arithmetic.
        sampling: how responses are drawn.
        model: the policy, whose own arithmetic a `rollout_dtype` of float32 leaves alone.
    """
    drawn_from_all = not sampling.top_k and sampling.top_p == 1
    if options.rollout_dtype != "float32" or options.engine == "vllm" or not drawn_from_all or options.legacy:
        return False
    modules = list(model.modules())
    if any(getattr(each, "rope_type", "default") not in FIXED_ANGLES for each in modules):
        return False
    is_float32 = all(each.dtype == torch.float32 for each in model.parameters() if each.is_floating_point())
    return is_float32 or any(map(is_widened, modules))
