"""The layers of one model in stages: each process computes its own, of a few rows at a time, and sends these on.

While the next stage has the first rows, this one has the next (GPipe: Huang et al. 2019, arXiv:1811.06965); gradients
come back in the opposite order. Words and head are cut over all stages (`tensor_parallel`): every process of a model
looks up words, gets the last hidden states, and computes the same losses from them. So who learns from a model need not
know that it has stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf_core.errors import TrainingError
from rlhf_core.models.token_tree import ROWS_APART
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.strategy.sequence_parallel import Columns

CHUNKS = 4
"""A pass over at least as many rows is cut into this number for each stage: of the time that a stage computes, it waits
for a quarter of (stages - 1) / stages in addition."""


def stage_of(layer: int, layers: int, stages: int) -> int:
    """Return which stage a layer belongs to; stages that have one more come last, as the first wait for them."""
    return next(stage for stage in range(stages) if layer < layers * (stage + 1) // stages)


_WHOLE_ROWS = ("inputs_embeds", "past_key_values", "output_hidden_states", "output_attentions")
"""Arguments of a trunk that ask for something else than the last hidden state of whole rows."""


class Pipeline:
    """This process's stage of a model, which may be all layers, over its columns of a batch, which may be all.

    Args:
        trunk: a transformer, whole; the weights of others' layers may be cut away afterwards.
        stages: this process among those that have the other layers.
        columns: of a batch that this process has in between.
        by_heads: as for `Columns.cut`.
    """

    def __init__(self, trunk: PreTrainedModel, stages: Ranks, columns: Columns, *, by_heads: bool) -> None:
        self.stages, self.columns = stages, columns
        self.is_last = stages.rank == stages.world_size - 1
        self._own, self._words = trunk.forward, trunk.get_input_embeddings()
        self._norm: Callable[[Tensor], Tensor] = trunk.norm.forward
        self._learns_before = any(each.requires_grad for each in self._words.parameters())
        self._sent: list[Callable[[], object]] = []
        self._chunks = CHUNKS * stages.world_size if stages.world_size > 1 else 1
        trunk.norm.forward = _pass_on
        own = []
        for number, layer in enumerate(trunk.layers):
            stage = stage_of(number, len(trunk.layers), stages.world_size)
            if stage == stages.rank:
                own.append(layer)
            else:
                layer.forward = _pass_on
            if stage < stages.rank:
                self._learns_before |= any(each.requires_grad for each in layer.parameters())
        if columns.ranks.world_size > 1:
            columns.cut(own, by_heads=by_heads)
        setattr(trunk, ROWS_APART, stages.world_size > 1)
        trunk.forward = self.forward

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """Return the model's last hidden state, the same on every stage, as the trunk does; all stages call it.

        Args:
            input_ids: [B S].
            attention_mask: [B ...] or [1 ...], as the trunk takes it.
            position_ids: [B S] or [1 S].
            options: others.

        Raises:
            TrainingError: if something else is asked of it.
        """
        others = {name: options.pop(name, None) for name in _WHOLE_ROWS}
        asked = [name for name, value in others.items() if value is not None and value is not False]
        if asked or options.get("return_dict") is False:
            raise TrainingError(
                "a model in stages, or with rows in parts, takes tokens of whole rows and returns their last hidden "
                f"states, but was asked for {', '.join(asked) or 'return_dict False'}; use the strategy's plain model"
            )
        options["use_cache"] = False
        self.settle()
        embedded = _begin(self._words(input_ids), self)
        sizes = [len(each) for each in input_ids.tensor_split(min(len(input_ids), self._chunks))]
        masks, positions = (_split(each, sizes) for each in (attention_mask, position_ids))
        found = []
        for rows, mask, places in zip(torch.split(embedded, sizes), masks, positions, strict=True):
            given = self._received(rows)
            done = self._own(inputs_embeds=given, attention_mask=mask, position_ids=places, **options)
            found.append(self._sent_on(done.last_hidden_state, rows.dtype))
        ended = _end(embedded.detach(), self._anchor(embedded, learns=True), self, *found)
        return BaseModelOutputWithPast(last_hidden_state=self._norm(ended))

    def _received(self, rows: Tensor) -> Tensor:
        """Return the hidden states that the stage before has sent, or on the first one the words."""
        if self.stages.rank == 0:
            return rows
        received = _receive(self.columns.of(rows), self._anchor(rows, learns=self._learns_before), self)
        return self.columns.among_zeros(received, rows.shape[1])

    def _sent_on(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Send hidden states to the next stage; return what stands for them, or on the last one themselves."""
        if hidden.dtype != dtype:
            raise TrainingError(f"expected layers to return {dtype}, as the words are, got {hidden.dtype}; take zero2")
        return hidden if self.is_last else _send(hidden, self)

    def send(self, tensor: Tensor, stage: int) -> None:
        """Begin to send a tensor."""
        self._sent.append(self.stages.send(tensor, stage))

    def settle(self) -> None:
        """Let go of what was sent."""
        for wait in self._sent:
            wait()
        self._sent.clear()

    @staticmethod
    def _anchor(like: Tensor, *, learns: bool) -> Tensor:
        """Return what makes a result of received numbers require a gradient."""
        return torch.zeros((), device=like.device, requires_grad=learns)


def _split(tensor: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
    """Return what belongs to each part of the rows; what is for all of them is for each."""
    if tensor is None or len(tensor) < sum(sizes):
        return [tensor] * len(sizes)
    return torch.split(tensor, sizes)


def _pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


class _Begin(torch.autograd.Function):
    """The same there; back, the first stage's gradient."""

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        pipeline = ctx.pipeline
        if pipeline.stages.rank == 0:  # of others' columns it is zero
            gradient = pipeline.columns.ranks.sum(gradients[0]).contiguous()
        else:
            gradient = torch.empty(gradients[0].shape, dtype=gradients[0].dtype, device=gradients[0].device)
        pipeline.stages.broadcast_from(gradient, 0)
        return gradient, None


class _Receive(torch.autograd.Function):
    """Receives from the stage before; back, sends it the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, _: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        return pipeline.stages.receive(rows, pipeline.stages.rank - 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        ctx.pipeline.send(gradient, ctx.pipeline.stages.rank - 1)
        return gradient.new_zeros(()).expand_as(gradient), None, None


class _Send(torch.autograd.Function):
    """Sends to the next stage; back, receives its gradient. What it returns says nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline, ctx.like = pipeline, hidden.new_empty(()).expand_as(hidden)
        pipeline.send(hidden, pipeline.stages.rank + 1)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.pipeline.stages.receive(ctx.like, ctx.pipeline.stages.rank + 1), None


class _End(torch.autograd.Function):
    """What the last stage has, on every one; back, its gradient to that one, where all have the whole of it."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, _: Tensor, pipeline: Pipeline, *found: Tensor) -> Tensor:
        ctx.columns, ctx.sizes = pipeline.columns, [len(each) for each in found] if pipeline.is_last else None
        ctx.number = len(found)
        if pipeline.is_last:
            whole = pipeline.columns.together(torch.cat(found), like.shape[1])
        else:
            whole = torch.empty_like(like)
        pipeline.stages.broadcast_from(whole, pipeline.stages.world_size - 1)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sizes is None:
            return None, None, None, *[gradients[0].new_zeros(())] * ctx.number
        return None, None, None, *torch.split(ctx.columns.of(gradients[0]), ctx.sizes)


_begin: Callable[[Tensor, Pipeline], Tensor] = _Begin.apply
_receive: Callable[[Tensor, Tensor, Pipeline], Tensor] = _Receive.apply
_send: Callable[[Tensor, Pipeline], Tensor] = _Send.apply
_end: Callable[..., Tensor] = _End.apply
