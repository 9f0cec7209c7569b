"""Rollouts: our engine against transformers' `generate`, of rows that end alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from bench.speed.measure import DEVICE, Found, Run, in_turns
from bench.speed.models import ARITHMETIC, DTYPE, directory, load, random_ids, with_adapters, with_peft
from bench.speed.products import Products, distinct
from rlhf_core.generation import Generation, GenerationSettings, engine, make_engine, sample_uniforms
from rlhf_core.generation.sampling import Choice, Chooser
from rlhf_core.models.loading import load_tokenizer
from rlhf_core.models.saving import quiet
from rlhf_core.models.trunk import autocast

ENGINE = "native_graphs" if DEVICE.type == "cuda" else "native"
QUESTIONS = 8


class Sizes(NamedTuple):
    """Of a rollout."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        """Return how many responses there are."""
        return self.prompts * self.samples


def to_the_end(run: Run, *, adapters: bool = False) -> Found:
    """Measure rows that all go to the full length."""
    sizes = Sizes(4, 1, 8, 6) if run.tiny else Sizes(32, 1, 64, 48)
    return _against_generate(run, sizes, torch.full((sizes.rows,), sizes.new_tokens), adapters=adapters)


def ragged(run: Run) -> Found:
    """Measure rows of which each ends at a length of its own, evenly spread and in mixed order."""
    sizes, least = (Sizes(4, 1, 8, 6), 2) if run.tiny else (Sizes(32, 1, 64, 64), 8)
    spread = torch.linspace(least, sizes.new_tokens, sizes.rows).round().long()
    order = torch.randperm(sizes.rows, generator=torch.Generator().manual_seed(0))
    return _against_generate(run, sizes, spread[order])


def shared_prompt(run: Run) -> Found:
    """Measure several samples of each prompt."""
    sizes = Sizes(2, 2, 16, 6) if run.tiny else Sizes(4, 8, 256, 48)
    return _against_generate(run, sizes, torch.full((sizes.rows,), sizes.new_tokens))


def until_stop(run: Run) -> Found:
    """Measure rows that end where the model ends them.

    Both engines draw by the same uniforms: the same tokens, but for rounding.
    """
    model, tokenizer = load(run, ARITHMETIC), load_tokenizer(directory(run))
    steps, samples = (6, 1) if run.tiny else (32, 4)
    questions = [f"What is {' + '.join(str(7 * term + row) for term in range(2 + row))}?" for row in range(QUESTIONS)]
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    settings = GenerationSettings(max_new_tokens=steps, stop_ids=(tokenizer.eos_token_id,), pad_id=0)
    kept: dict[str, Generation] = {}

    def generate(name: str) -> None:
        kept[name] = make_engine(name, model).generate(rows, settings, uniforms=_uniforms(len(rows), steps))

    ours, theirs = in_turns(run.rounds, lambda: generate(ENGINE), lambda: generate("hf"))
    lengths, peer_tokens = kept[ENGINE].action_mask.sum(1), int(kept["hf"].action_mask.sum())
    limit = _floor(run, model, prompts, lengths)
    told = _told(rows=len(rows), tokens=int(lengths.sum()), peer_tokens=peer_tokens, prompts=QUESTIONS)
    return Found(ours, theirs, limit, told)


def _against_generate(run: Run, sizes: Sizes, lengths: Tensor, *, adapters: bool = False) -> Found:
    model = load(run, ARITHMETIC)
    prompts = random_ids(model, sizes.prompts, sizes.prompt_tokens)
    limit = _floor(run, model, prompts, lengths)
    peer = with_peft(load(run, ARITHMETIC)) if adapters else model
    ours = with_adapters(model) if adapters else model
    stop = model.config.vocab_size - 1
    is_ragged = bool((lengths < sizes.new_tokens).any())
    made: dict[str, int] = {}

    def native() -> None:
        made["native"] = _native(ours, prompts, sizes, lengths, stop=stop if is_ragged else None)

    def generate() -> None:
        made["generate"] = _generate(peer, prompts, sizes, lengths, stop=stop if is_ragged else None)

    # adapters are float32, so their products are as a run has them under autocast alone
    with autocast(DEVICE, DTYPE if adapters else torch.float32):
        native_s, generate_s = in_turns(run.rounds, native, generate)
    if set(made.values()) != {int(lengths.sum())}:
        raise RuntimeError(f"expected both to make {int(lengths.sum())} tokens, got {made}")
    return Found(native_s, generate_s, limit, _told(rows=sizes.rows, tokens=int(lengths.sum()), **sizes._asdict()))


def _native(model: Any, prompts: list[list[int]], sizes: Sizes, lengths: Tensor, *, stop: int | None) -> int:
    """Generate by our engine, and return the number of tokens."""
    rows = [prompt for prompt in prompts for _ in range(sizes.samples)]
    stops = () if stop is None else (stop,)
    settings = GenerationSettings(max_new_tokens=sizes.new_tokens, stop_ids=stops, pad_id=0)
    with nullcontext() if stop is None else _ending(lengths, stop):
        found = make_engine(ENGINE, model).generate(rows, settings, uniforms=_uniforms(sizes.rows, sizes.new_tokens))
    return int(found.action_mask.sum())


def _generate(model: Any, prompts: list[list[int]], sizes: Sizes, lengths: Tensor, *, stop: int | None) -> int:
    """Generate by transformers with its own sampling, and return the number of tokens up to the stop."""
    ids = torch.tensor(prompts, device=DEVICE)
    ends: dict[str, Any] = {"min_new_tokens": sizes.new_tokens}
    if stop is not None:
        processors = LogitsProcessorList([_Ends(lengths, stop, ids.shape[1])])
        ends = {"eos_token_id": stop, "logits_processor": processors}
    with quiet():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            num_return_sequences=sizes.samples, pad_token_id=0, max_new_tokens=sizes.new_tokens, **ends,
        )  # fmt: skip
    drawn: Tensor = found[:, ids.shape[1] :]
    if stop is None:
        return drawn.numel()
    stops = (drawn == stop).long()
    return int((stops.cumsum(1) - stops == 0).sum())


@contextmanager
def _ending(lengths: Tensor, stop: int) -> Iterator[None]:
    """Let our engine choose the stop token where a row's length is reached, and nowhere before."""
    real = engine.chooser  # type: ignore[attr-defined]  # it is the engine's own import of it that is replaced

    def chooser(*arguments: Any, **options: Any) -> Chooser:
        choose: Callable[[Tensor, Tensor, int], Choice] = real(*arguments, **options)
        ends = lengths.to(DEVICE)

        def chosen(logits: Tensor, place: Tensor, step: int) -> Choice:
            choice = choose(logits, place, step)
            tokens = torch.where(ends[place] == step + 1, stop, choice.tokens.clamp(max=stop - 1))
            return Choice(tokens, choice.log_probs)

        return chosen

    with mock.patch.object(engine, "chooser", chooser):
        yield


class _Ends(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Does the same for `generate`."""

    def __init__(self, lengths: Tensor, stop: int, width: int) -> None:
        self._lengths, self._stop, self._width = lengths.to(DEVICE), stop, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = self._lengths == input_ids.shape[1] - self._width + 1
        scores[:, self._stop] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, self._stop] = 0.0
        return scores


def _uniforms(rows: int, steps: int) -> Tensor:
    return sample_uniforms(
        seed=0, episode=0, keys=[str(row) for row in range(rows)], samples=[0] * rows, max_new_tokens=steps
    )


def _floor(run: Run, model: Any, prompts: list[list[int]], lengths: Tensor) -> float:
    products = Products.of(model, DTYPE)
    with torch.inference_mode():
        return in_turns(run.rounds, lambda: products.generate(len(prompts), distinct(prompts), lengths))[0]


def _told(**sizes: int) -> dict[str, Any]:
    return {"dtype": ARITHMETIC, **sizes, "limit": "products alone, those of adapters left out"}
