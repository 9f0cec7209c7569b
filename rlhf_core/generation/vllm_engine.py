"""vLLM as an engine, where it is installed: its scheduler, paged cache and kernels, and our choice of each token.

It works within this process, on one device, and is asked step by step. A logits processor chooses each token as in the
other engines, and leaves it as the only one with a finite score. vLLM holds weights of its own. Before each batch it is
given the model's: adapters as it loads them by itself, over weights that it was given once, or else all weights. So it
holds what was published last, whoever published it.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from rlhf_core.errors import ConfigError
from rlhf_core.generation.responses import Responses, pad_left, watch
from rlhf_core.generation.sampling import Choice, Chooser, chooser
from rlhf_core.models.adapters import write_adapters
from rlhf_core.models.lora import MergedWeight, addable_adapters, each_merged, weights_below
from rlhf_core.models.trunk import device_of, max_positions, unwrapped

if TYPE_CHECKING:
    from rlhf_core.generation.settings import Generation, GenerationSettings

PACKAGE = "vllm"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters that vLLM makes room for."""
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where the model is
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one asks no logits processor
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are this process's, and stay where they are
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_BLOCK = 128
"""Tokens to which a row's room is rounded up: at least as many as vLLM's blocks have."""


def check_vllm() -> None:
    """Check that vLLM is installed.

    Raises:
        ConfigError: if it is not.
    """
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "ppo.engine vllm needs the package vllm, which is not installed; run `make vllm` (docs/presets.md), or "
            "set ppo.engine to native"
        )


class VllmEngine:
    """Generates with vLLM.

    What it made for a model, it keeps as long as the model lives: weights, cache, compiled code.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: reads the text for stop strings; needed for these only.

    Raises:
        ConfigError: if vLLM is not installed.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None) -> None:
        check_vllm()
        self.model = model
        self._tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        *,
        uniforms: Float32[Tensor, "B T"] | None,
    ) -> Generation:
        """Return one response per prompt; see `GenerationEngine`.

        Raises:
            ConfigError: also if vLLM was made for another kind of device, or several processes hold the model.
        """
        model, device = unwrapped(self.model), device_of(self.model)
        positions = max_positions(model)
        limits = settings.response_limits(prompts, positions=positions)
        strings = watch(settings.stop_strings, self._tokenizer, rows=len(prompts))
        responses = Responses(limits, settings, strings, device)
        choose = chooser(settings, uniforms, rows=len(prompts), steps=responses.width, device=device)
        lengths = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
        served = _served_for(model, lengths, positions)
        try:
            with torch.autocast(device.type, enabled=False):  # vLLM computes in the dtype that it was made for
                served.generate(model, prompts, limits, choose, responses)
        except BaseException:
            _forget(model)  # requests are left in it
            raise
        return responses.with_prompts(*pad_left(prompts, settings.pad_id, device))


class _Choices:
    """Chooses in vLLM's batch, whose rows come, go and change places between its steps."""

    def __init__(self) -> None:
        self.choose: Chooser | None = None
        self.log_probs: dict[tuple[int, int], Tensor] = {}
        """By row of our batch and number of the token."""
        self._rows: dict[int, tuple[int, Sequence[int]]] = {}
        """Row of our batch, and its tokens so far, by place in vLLM's."""

    def follow(self, update: Any) -> None:
        """Take in what changed of vLLM's batch."""
        for place in update.removed:
            self._rows.pop(place, None)
        for place, asked, _, made in update.added:
            self._rows[place] = asked.extra_args["row"], made
        for here, there, kind in update.moved:
            moved, former = self._rows.pop(here), self._rows.pop(there, None)
            self._rows[there] = moved
            if kind.name == "SWAP" and former is not None:
                self._rows[here] = former

    def apply(self, logits: Tensor) -> Tensor:
        """Return scores of which those of the chosen tokens alone are finite."""
        if self.choose is None or len(self._rows) < len(logits):  # vLLM tries itself out
            return logits
        held = [self._rows[place] for place in range(len(logits))]
        rows, steps = [row for row, _ in held], [len(made) for _, made in held]
        choice = self.choose(logits, *(torch.tensor(each, device=logits.device) for each in (rows, steps)))
        self.log_probs.update(zip(zip(rows, steps, strict=True), choice.log_probs, strict=True))
        return torch.full_like(logits, -torch.inf).scatter_(1, choice.tokens[:, None], 0.0)


class _Served:
    """One model in vLLM.

    Args:
        model: without what is wrapped around it.
        dtype: of weights, cache and arithmetic.
        length: most tokens of a row.
        tokens: of all rows together, which the cache has room for; where a batch has more, some rows wait.
    """

    def __init__(self, model: Any, dtype: torch.dtype, length: int, tokens: int) -> None:
        self.dtype, self.length = dtype, length
        self._choices, self._numbers = _Choices(), count(1)
        adapters = addable_adapters(model)
        self.rank = None if adapters is None else adapters.rank
        device = device_of(model)
        _check_place(device)
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - it is not in the lock, and takes seconds

        with TemporaryDirectory() as directory, _process_left_alone():
            config = type(model.config).from_dict(model.config.to_dict())
            config.architectures = [type(model).__name__]
            config.tie_word_embeddings = False  # vLLM replaces weights layer by layer, and would leave a tied head
            config.save_pretrained(directory)
            lora: dict[str, Any] = {}
            if self.rank is not None:
                room = next((rank for rank in RANKS if rank >= self.rank), self.rank)
                lora = {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}
            try:
                self._engine = LLMEngine.from_engine_args(
                    EngineArgs(
                        model=directory, skip_tokenizer_init=True, runner="generate", load_format="dummy",
                        dtype=str(dtype).removeprefix("torch."), max_model_len=length,
                        enforce_eager=device.type == "cpu", disable_log_stats=True, async_scheduling=False,
                        gpu_memory_utilization=0.01,  # others are on the GPU, and the cache's size is said
                        kv_cache_memory_bytes=_cache_bytes(model.config, dtype, max(tokens, length)),
                        logits_processors=[_processor(self._choices)], generation_config="vllm", **lora,
                    )
                )  # fmt: skip
                self._load(model, each_merged(model) if self.rank is None else weights_below(model))
            except Exception as error:
                raise ConfigError(
                    f"vllm cannot have {type(model).__name__} in {dtype} ({error}); set ppo.engine to native"
                ) from error

    def generate(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        choose: Chooser,
        responses: Responses,
    ) -> None:
        """Write a response to each prompt, by the model's weights of now."""
        from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415 - as above
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        with self._weights(model) as adapter:
            self._choices.choose = choose
            for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                asked = SamplingParams(
                    temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False, extra_args={"row": row},
                    output_kind=RequestOutputKind.DELTA,
                )  # fmt: skip
                self._engine.add_request(
                    str(row), TokensPrompt(prompt_token_ids=[*prompt]), asked, lora_request=adapter
                )
            written = [0] * len(prompts)
            while self._engine.has_unfinished_requests():
                new = {int(each.request_id): each.outputs[0].token_ids for each in self._engine.step()}
                rows = [row for row, tokens in new.items() if tokens]
                if rows:
                    self._write(rows, [written[row] for row in rows], [new[row][0] for row in rows], responses)
                for row in rows:
                    written[row] += 1
                done = responses.done.tolist()
                if ended := [str(row) for row in rows if done[row]]:
                    self._engine.abort_request(ended)
            self._choices.log_probs.clear()

    def close(self) -> None:
        """Free what vLLM holds."""
        self._engine.engine_core.shutdown()

    def _write(self, rows: list[int], steps: list[int], tokens: list[int], responses: Responses) -> None:
        log_probs = torch.stack([self._choices.log_probs.pop(each) for each in zip(rows, steps, strict=True)])
        device = responses.done.device
        places, numbers, chosen = (torch.tensor(each, device=device) for each in (rows, steps, tokens))
        responses.write(places, numbers, Choice(chosen, log_probs))

    @contextmanager
    def _weights(self, model: Any) -> Iterator[Any]:
        """Give vLLM the model's weights of now; yield what asks for its adapters."""
        self._engine.reset_prefix_cache()
        adapters = addable_adapters(model)
        if adapters is None:
            self._load(model, each_merged(model))
            yield None
            return
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - as above

        number = next(self._numbers)
        with TemporaryDirectory() as directory:
            write_adapters(adapters, Path(directory))
            request = LoRARequest(str(number), number, directory)
            self._engine.add_lora(request)
        try:
            yield request
        finally:
            self._engine.remove_lora(number)

    def _load(self, model: Any, weights: Iterable[tuple[str, Tensor] | MergedWeight]) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._with_head(model, weights)})

    def _with_head(
        self, model: Any, weights: Iterable[tuple[str, Tensor] | MergedWeight]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in vLLM's dtype, and a head that is tied a second time, by its own name."""
        names = {id(module): name for name, module in model.named_modules()}
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        for name, weight, *_ in weights:
            yield name, weight.to(self.dtype)
            if name == f"{names[id(embeddings)]}.weight" and head.weight is embeddings.weight:
                yield f"{names[id(head)]}.weight", weight.to(self.dtype)


_served: WeakKeyDictionary[Any, _Served] = WeakKeyDictionary()


def _served_for(model: Any, lengths: Sequence[int], positions: int | None) -> _Served:
    """Return what serves a model, made anew where it does not fit any more."""
    device, needed = device_of(model), max(lengths)
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    adapters, served = addable_adapters(model), _served.get(model)
    rank = None if adapters is None else adapters.rank
    if served is not None and (served.length < needed or (served.dtype, served.rank) != (dtype, rank)):
        _forget(model)
        served = None
    if served is None:
        length = min(_rounded(2 * needed), positions or _rounded(2 * needed))  # longer batches to come are foreseen
        served = _served[model] = _Served(model, dtype, length, sum(map(_rounded, lengths)))
    return served


def _forget(model: Any) -> None:
    if (served := _served.pop(model, None)) is not None:
        served.close()


def _rounded(tokens: int) -> int:
    return -(-tokens // _BLOCK) * _BLOCK


def _cache_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Return what keys and values of so many tokens take, and of a block that vLLM keeps for itself."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = size * (getattr(config, "num_key_value_heads", None) or heads)
    return int(2 * config.num_hidden_layers * keys * dtype.itemsize * (_rounded(tokens) + _BLOCK))


def _check_place(device: torch.device) -> None:
    """Check that vLLM can work where the model is.

    Raises:
        ConfigError: if it was made for another kind of device, or several processes hold the model.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns at each batch of what it does not replace
    from vllm.platforms import current_platform  # noqa: PLC0415 - as above

    if current_platform.device_type != device.type or device.index not in (None, 0):
        raise ConfigError(
            f"this vllm computes on {current_platform.device_type or 'no device'}, on the first there is, and the "
            f"model is on {device}; install vllm for {device.type}, or set ppo.engine to native"
        )
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            "vllm works within a process of its own, and here several train together; have experience makers sample "
            "(ppo.cluster.num_makers), or set ppo.engine to native"
        )


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Put back what vLLM changes in its process while it is set up: random numbers, and how threads are set."""
    set_threads, drawn, drawn_by_numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_threads
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)


def _processor(choices: _Choices) -> type:
    """Return the class of a logits processor that chooses tokens, as vLLM takes it."""
    from vllm.v1.sample.logits_processor import LogitsProcessor  # noqa: PLC0415 - as above

    class Chooses(LogitsProcessor):  # type: ignore[misc]  # vLLM is not in the lock
        def __init__(self, *_: Any) -> None: ...

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            if batch_update is not None:
                choices.follow(batch_update)

        def apply(self, logits: Tensor) -> Tensor:
            return choices.apply(logits)

    return Chooses
