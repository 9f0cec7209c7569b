"""Tokens that stand after the same tokens go through a model's products once, and padding never.

What a decoder makes of a token depends on those before it alone. So rows that begin alike, as samples of one prompt,
the two responses of a pair or the prompts of one template do, are branches of a tree. Its tokens are one long row to
the model; attention alone looks along rows, and gets them laid out as rows (`models/attention.py`). A token's gradient
is the sum over its rows, as if each row had its own.

For the forms of decoder that are known here, on a CPU, without dropout, which draws for each row anew. The head goes
over what is read of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from rlhf_core.models import attention  # noqa: F401 - knows what `token_tree` is among its arguments
from rlhf_core.models.head_slices import read_logits
from rlhf_core.models.trunk import model_inputs, position_ids, unwrapped

_FORMS = (
    *(LlamaForCausalLM, LlamaModel, MistralForCausalLM, MistralModel),
    *(Qwen2ForCausalLM, Qwen2Model, Qwen3ForCausalLM, Qwen3Model),
)
ROWS_APART = "rows_apart"
"""Attribute of a transformer to which each row is one of its own."""
WORTH_A_CALL = 4096
"""Padding's scores, for each head, that cost what a call of attention does."""
_each_by_itself: ContextVar[bool] = ContextVar("rows each by itself", default=False)
_in_one_group: ContextVar[bool] = ContextVar("rows in one group", default=False)


@dataclass(frozen=True, eq=False, slots=True)
class TokenTree:
    """The rows of a batch, as branches of one tree; no tuple, into which ColossalAI would look for numbers to cast."""

    input_ids: Tensor
    """[1 T]"""
    position_ids: Tensor
    """[1 T]"""
    at: Tensor
    """[B S], which of them stands here; on padding the row's first or last."""
    laid: Tensor
    """[N], which of them stands where attention looks: of groups of rows, one after the other, b s of each."""
    groups: list[tuple[int, int]]
    """Of each, b rows of s tokens. All rows begin in the first column: padding, which is behind, is seen by none."""
    read: Tensor
    """[T], where in `laid` each stands first."""

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a forward pass over the tokens, as one row."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),  # of this form transformers makes no other
            "use_cache": False,
            "token_tree": self,
        }

    def in_rows(self, found: Tensor) -> Tensor:
        """Return what is there of each token, [T ...], where it stands in the batch, [B S ...]."""
        laid: Tensor = _InRows.apply(found, self.at.flatten())  # type: ignore[no-untyped-call]
        return laid.view(*self.at.shape, *found.shape[1:])

    def in_groups(self, found: Tensor) -> list[Tensor]:
        """Return what is there of each token, [T ...], of each group, [b s ...]."""
        laid: Tensor = _InRows.apply(found, self.laid)  # type: ignore[no-untyped-call]
        parts = torch.split(laid, [rows * width for rows, width in self.groups])
        return [part.view(*shape, *found.shape[1:]) for part, shape in zip(parts, self.groups, strict=True)]

    def in_tree(self, found: Sequence[Tensor]) -> Tensor:
        """Return of what stands in the groups, [b s ...] each, that of each token, [T ...]."""
        return torch.cat([each.flatten(0, 1) for each in found]).index_select(0, self.read)


class _InRows(torch.autograd.Function):
    """Rows of a matrix, some of them several times; gradients of these are added in float32."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.number = len(found)
        return found.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,), (gradient,) = ctx.saved_tensors, gradients
        sums = torch.zeros(ctx.number, *gradient.shape[1:], dtype=torch.promote_types(gradient.dtype, torch.float32))
        return sums.index_add_(0, places, gradient.to(sums.dtype)).to(gradient.dtype), None


def each_by_itself() -> AbstractContextManager[None]:
    """Have every row computed whole in the block, padding too, as releases before 0.3 did."""
    return _true(_each_by_itself)


def in_one_group() -> AbstractContextManager[None]:
    """Have all rows of a tree attend together in the block, with all padding: the same code for each tree."""
    return _true(_in_one_group)


@contextmanager
def _true(what: ContextVar[bool]) -> Iterator[None]:
    before = what.set(True)
    try:
        yield
    finally:
        what.reset(before)


def tree_of(model: Any, input_ids: Tensor, attention_mask: Tensor) -> TokenTree | None:
    """Return a batch as a tree; None if the model is not known to be able to, or nothing would be saved.

    Args:
        model: a trunk or a causal language model, wrapped or not.
        input_ids: [B S].
        attention_mask: [B S], True on tokens; padding is on either side. What is read beside them is of the row's
            first or last token.
    """
    if _each_by_itself.get() or input_ids.device.type != "cpu" or not has_form(model):
        return None
    if any(each.training and dropout_of(each) for each in unwrapped(model).modules()):
        return None
    mask = attention_mask.bool()
    found = _branches(input_ids.numpy(), mask.numpy())
    if found is None:
        return None
    at, first = found
    laid, groups, read = _in_groups(at, first, mask.numpy())
    ids, places = (each.flatten()[torch.from_numpy(first)][None] for each in (input_ids, position_ids(mask)))
    return TokenTree(ids, places, torch.from_numpy(at), torch.from_numpy(laid), groups, torch.from_numpy(read))


def hidden_states(trunk: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the trunk's last hidden state, [B S H]; of a tree's padding, that of the row's first or last token."""
    if (tree := tree_of(trunk, input_ids, attention_mask)) is not None:
        return tree.in_rows(trunk(**tree.inputs()).last_hidden_state[0])
    hidden: Tensor = trunk(**model_inputs(trunk, input_ids, attention_mask)).last_hidden_state
    return hidden


def read_columns(
    model: Any, tree: TokenTree, columns: Tensor, tokens: Tensor, read: Callable[[Tensor, Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """Return what is read from the logits at some columns of every row; see `head_slices.read_logits`.

    Args:
        model: a causal language model, maybe wrapped.
        tree: the rows.
        columns: [A], where the logits stand that predict the tokens.
        tokens: [B A].
        read: as there.
    """
    kept = tree.at[:, columns].flatten()

    def keep(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        kept_states: Tensor = _InRows.apply(given[0][0], kept)  # type: ignore[no-untyped-call]
        return (kept_states[None],)

    def forward() -> Tensor:
        # not by `logits_to_keep`: what is read several times would get its gradients added in any order
        handle = unwrapped(model).get_output_embeddings().register_forward_pre_hook(keep)
        try:
            logits: Tensor = model(**tree.inputs()).logits
        finally:
            handle.remove()
        return logits

    return [each.view(tokens.shape) for each in read_logits(model, forward, tokens.reshape(1, -1), read)]


def can_branch(model: Any) -> bool:
    """Return whether a model, a critic or reward model too, computes rows as a tree, also in training mode."""
    return has_form(model) and not any(map(dropout_of, model.modules()))


def common_length(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """Return how many tokens two rows begin with in common."""
    length = min(len(one), len(other))
    differ = np.asarray(one[:length]) != np.asarray(other[:length])
    return int(differ.argmax()) if differ.any() else length


def has_form(model: Any) -> bool:
    """Return whether a model, a critic or reward model too, computes rows as a tree where it drops nothing."""
    for each in (model, getattr(model, "module", None)):  # a prompt that is learnt stands in front of each row
        if getattr(getattr(each, "active_peft_config", None), "is_prompt_learning", False):
            return False
    inner = unwrapped(model)
    inner = getattr(inner, "trunk", inner)
    if type(inner) not in _FORMS or inner.device.type != "cpu" or inner.config._attn_implementation != "sdpa":
        return False
    if getattr(inner.base_model, ROWS_APART, False):
        return False
    return getattr(inner.config, "sliding_window", None) is None


def dropout_of(module: Any) -> float:
    """Return the share that a module drops in training mode."""
    found: float = module.p if isinstance(module, _DropoutNd) else getattr(module, "attention_dropout", 0.0)
    return found


def _branches(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return `at` and `first` of a tree; None if each place has its own token, or a row has gaps or nothing."""
    rows, width = ids.shape
    begins, counts = mask.argmax(axis=1), mask.sum(axis=1)
    if not counts.all() or any(not mask[row, begins[row] : begins[row] + counts[row]].all() for row in range(rows)):
        return None
    branches = [ids[row, begins[row] : begins[row] + counts[row]] for row in range(rows)]
    at, first, number = np.zeros((rows, width), dtype=np.int64), [], 0
    former = np.zeros(0, dtype=np.int64)  # the branch before, and its tokens in the tree
    before = former
    for row in sorted(range(rows), key=lambda row: branches[row].tolist()):
        branch, begin = branches[row], begins[row]
        common = common_length(former, branch)
        new = np.arange(number, number := number + len(branch) - common)
        former, before = branch, np.concatenate([before[:common], new])
        at[row, :begin], at[row, begin : begin + len(branch)], at[row, begin + len(branch) :] = (
            before[0], before, before[-1],
        )  # fmt: skip
        first.append(row * width + begin + np.arange(common, len(branch)))
    return None if number == ids.size else (at, np.concatenate(first))


def _in_groups(
    at: np.ndarray, first: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
    """Return `laid`, `groups` and `read` of a tree: rows of one length, or whose padding costs less than a call."""
    begins, lengths = mask.argmax(axis=1), mask.sum(axis=1)
    groups: list[list[int]] = []
    padding = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        padding += int(lengths[groups[-1][0]] ** 2 - lengths[row] ** 2) if groups else 0
        if not groups or (padding > WORTH_A_CALL and not _in_one_group.get()):
            groups.append([])
            padding = 0
        groups[-1].append(row)
    laid, starts, number = [], np.zeros(len(at), dtype=np.int64), 0
    for rows in groups:
        width = lengths[rows[0]]
        for row in rows:
            starts[row], number = number - begins[row], number + width
            laid.append(at[row, np.minimum(begins[row] + np.arange(width), begins[row] + lengths[row] - 1)])
    row, column = np.divmod(first, at.shape[1])
    return np.concatenate(laid), [(len(rows), int(lengths[rows[0]])) for rows in groups], starts[row] + column
