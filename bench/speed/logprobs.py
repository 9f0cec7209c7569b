"""Log-probabilities and entropy of tokens, from hidden states through the head, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.speed.measure import DEVICE, Found, Run, in_turns, peak_mb
from bench.speed.models import ARITHMETIC, DTYPE
from bench.speed.products import Products
from rlhf_core.functional.logprobs import logprobs_and_entropy
from rlhf_core.models.head_slices import read_logits
from rlhf_core.models.trunk import autocast


class Head:
    """A head and hidden states, as a training step has them: float32 weights, arithmetic maybe in 16 bits.

    The entropy is looked at, and not learnt: so both sides compute it without its gradient.
    """

    def __init__(self, run: Run, vocabulary: int) -> None:
        self.words, rows, tokens, width = (512, 2, 8, 64) if run.tiny else (vocabulary, 16, 48, 576)
        config = LlamaConfig(
            vocab_size=self.words, hidden_size=width, num_hidden_layers=0, num_attention_heads=1,
            tie_word_embeddings=True,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).to(DEVICE)
        self.head = self.model.get_output_embeddings()
        self.hidden = torch.randn(rows, tokens, width, device=DEVICE, requires_grad=True)
        self.tokens = torch.randint(self.words, (rows, tokens), device=DEVICE)

    def ours(self) -> None:
        """Go through `read_logits`, as `response_statistics` does."""
        read = partial(logprobs_and_entropy, temperature=1.0, entropy_needs_grad=False)
        with autocast(DEVICE, DTYPE):
            logprobs, _ = read_logits(self.model, lambda: self.head(self.hidden), self.tokens, read)
        self._backward(logprobs)

    def theirs(self) -> None:
        """Do the same in PyTorch, with all logits and their log-softmax."""
        with autocast(DEVICE, DTYPE):
            every = self.head(self.hidden).float().log_softmax(-1)
            with torch.no_grad():
                (every.exp() * every).sum(-1).neg()
        self._backward(every.gather(-1, self.tokens[..., None]))

    def told(self) -> dict[str, object]:
        """Return what the row's settings say."""
        rows, tokens = self.tokens.shape
        return {"dtype": ARITHMETIC, "rows": rows, "tokens": tokens, "vocabulary": self.words}

    def _backward(self, logprobs: Tensor) -> None:
        self.hidden.grad = self.head.weight.grad = None
        logprobs.sum().backward()


def seconds(run: Run, vocabulary: int) -> Found:
    """Measure the time of a pass forward and backward."""
    head = Head(run, vocabulary)
    products, tokens = Products([], head.head.weight.detach().to(DTYPE)), head.tokens.numel()

    def floor() -> None:
        products.learn(0, tokens, learns_weights=True)

    ours, theirs, limit = in_turns(run.rounds, head.ours, head.theirs, floor)
    return Found(ours, theirs, limit, head.told() | {"limit": "products alone"})


def megabytes(run: Run, vocabulary: int) -> Found:
    """Measure the most that a pass holds at a time, what is there before left out."""
    head = Head(run, vocabulary)

    def peak(call: Callable[[], None]) -> float:
        call()  # what is made once is made here
        head.hidden.grad = head.head.weight.grad = None
        return peak_mb(call)

    gradients = sum(tensor.numel() * tensor.element_size() for tensor in (head.hidden, head.head.weight))
    return Found(peak(head.ours), peak(head.theirs), gradients / 1e6, head.told() | {"limit": "both gradients"})
