"""Do models, tokenizers and data mean the same by a token's number, and does the model know it?"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.counting import counted
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.trunk import unwrapped


def check_same_tokenizer(first: Any, second: Any, *, what: str) -> None:
    """Check that token ids mean the same to both; nothing else would tell, as any id below the vocabulary is an input.

        tokenizer and tokenizer    the same tokens under the same ids
        model and tokenizer        an embedding for each token; more is padding to a round number
        model and model            embeddings for equally many tokens

    Args:
        first: a model (critic and reward model too), or a tokenizer.
        second: a model, or a tokenizer.
        what: the two, in words, for the message: "the reward model and the actor".

    Raises:
        ModelError: if they differ.
    """
    tokenizers = [part for part in (first, second) if isinstance(part, PreTrainedTokenizerBase)]
    models = [part for part in (first, second) if not isinstance(part, PreTrainedTokenizerBase)]
    if not models:
        _check_tokenizers(*tokenizers, what=what)
        return
    sizes = [_embeddings(model) for model in models]
    if len(models) == 2:  # noqa: PLR2004 (both of them)
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"{what} have different vocabularies: {sizes[0]} and {sizes[1]} tokens; take models of one tokenizer"
            )
        return
    needed = 1 + max(tokenizers[0].get_vocab().values())
    if sizes[0] < needed:
        raise ModelError(
            f"{what} do not fit: the tokenizer has ids up to {needed - 1}, but the model has embeddings for "
            f"{sizes[0]} tokens; take the tokenizer that comes with the model"
        )


def check_vocabulary(ids: Tensor, size: int | None, *, what: str) -> None:
    """Check that the model knows every token id; past its embedding, a GPU stops without a word.

    Args:
        ids: in host memory.
        size: rows of the model's embedding; None if they cannot be known.
        what: names the sequences in the error.

    Raises:
        DataError: if one is outside.
    """
    if size is None or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise DataError(
            f"{what} hold the token id {low if low < 0 else high}, but the model's vocabulary has {size} entries; "
            "encode them with this model's own tokenizer"
        )


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the rows of the embedding of a language or reward model, wrapped or not; None if it does not say."""
    inner: Any = unwrapped(model)
    inner = getattr(inner, "trunk", inner)
    embedding: Any = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings  # its weight may be sharded, and have no rows here
    return int(embedding.weight.shape[0]) if isinstance(getattr(embedding, "weight", None), Tensor) else None


def _check_tokenizers(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, *, what: str) -> None:
    ours, theirs = first.get_vocab(), second.get_vocab()
    if ours == theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise ModelError(
        f"{what} have different tokenizers: they differ in {counted(len(differing), 'token')}, such as "
        f"{differing[0]!r} ({ours.get(differing[0], 'absent')} and {theirs.get(differing[0], 'absent')}); take models "
        "of one tokenizer"
    )


def _embeddings(model: Any) -> int:
    inner = unwrapped(model)
    inner = getattr(inner, "trunk", inner)  # of a critic or reward model
    size: int = inner.get_input_embeddings().num_embeddings
    return size
