"""A decoder's shape, and the memory that follows from it: of adapters, and of a pass through the model.

For n tokens at once, L layers of hidden size d and intermediate size f, all heads' queries together q wide, keys k:

    adapters of rank r    L r (7 d + 2 q + 2 k + 3 f)            parameters, on all linear layers
    kept for backward     n L (a d + b q + c f)                  bytes; a, b, c are in `_KEPT`
      scores              6 n L h s                              bytes more, in 16 bits, for h heads and rows of at
                                                                 most `SHORT_ROW` tokens s (`models/attention.py`);
                                                                 counted on GPUs too, where they are not kept
      computed again      n L 4 d, and one layer's of the above  (gradient_checkpointing)
    logits                2 m V w                                bytes, with their gradient, for m tokens that are
                                                                 learnt, a vocabulary of V, and w bytes a number;
                                                                 as for 4 m V = `LOGITS_BYTES` where that is less,
                                                                 if the head can be cut (`models/head_slices.py`)
    scoring               4 m V up to `LOGITS_BYTES`, and one layer's of what is kept
    keys and values       2 n L k w                              bytes, as long as responses are sampled; with vLLM,
                                                                 in blocks, always
    adapters, joined      once more, w bytes a parameter         likewise (`generation/decoder.py`)

a, b and c were counted: they are what PyTorch keeps of a layer of Llama's (tests/unit/models_on_disk/test_shape.py).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedConfig

LOGITS_BYTES = 1 << 30
"""Of all logits at once, if they were float32: more are computed in several passes, or a slice at a time."""
MOST_TOKENS = 2048
"""Of a pass of several rows on a CPU: a token of 4,096 costs a fifth more, since memory for them is new each time."""
NO_LIMIT = 1 << 40
"""In its place, where passes may have any number of tokens."""
SHORT_ROW = 128
"""Tokens of a row whose scores are written out, where they are computed in 16 bits on a CPU."""
BLOCK, SPARE_TOKENS = 128, 256
"""Tokens to which a row is rounded up in vLLM's cache, whose blocks have no more; and what it may keep for itself."""
_SCORE = 6
"""Bytes of a score that are kept: in float32, and in 16 bits."""
_KEPT = {
    ("float32", True): (24, 8, 16),
    ("float32", False): (32, 8, 16),
    ("bfloat16", True): (18, 4, 8),
    ("bfloat16", False): (30, 4, 8),
}
"""Bytes, by arithmetic and by whether adapters are trained; float16 as bfloat16."""
_tried: dict[tuple[type, str], bool] = {}
"""What `head_is_last` found, by configuration."""


class PassRows(NamedTuple):
    """Rows that go through a model at once."""

    number: int
    prompt: int
    """Tokens of each."""
    response: int
    """Tokens after them, which are learnt."""
    most: int = NO_LIMIT
    """Tokens of all together: where there would be more, rows go through it in turn."""

    @property
    def tokens(self) -> int:
        """Return how many there are."""
        return min(self.number * (self.prompt + self.response), self.most)

    @property
    def learnt(self) -> int:
        """Return how many of them are learnt, as shorter prompts leave room for more rows."""
        return min(self.number * self.response, self.tokens)


class Shape(NamedTuple):
    """A decoder's shape."""

    layers: int
    hidden: int
    intermediate: int
    queries: int
    """Width of all heads together."""
    keys: int
    """As `queries`; values are as wide."""
    vocabulary: int
    heads: int
    head_is_cut: bool = False
    """Whether the head goes over some positions at a time."""

    def adapter_parameters(self, rank: int) -> int:
        """Return how many parameters adapters on all linear layers have."""
        return self.layers * rank * (7 * self.hidden + 2 * self.queries + 2 * self.keys + 3 * self.intermediate)

    def learning_bytes(
        self, rows: PassRows, arithmetic: str, *, adapters: bool, checkpointing: bool, head: bool
    ) -> int:
        """Return what one micro-batch needs on its way forward and backward.

        Args:
            rows: of the micro-batch.
            arithmetic: float32, bfloat16 or float16.
            adapters: whether they are trained, or else all weights.
            checkpointing: whether activations are computed again.
            head: whether there are logits.
        """
        layer = self._layer_bytes(rows, arithmetic, adapters=adapters)
        kept = rows.tokens * self.layers * 4 * self.hidden + layer if checkpointing else self.layers * layer
        logits = 4 * rows.learnt * self.vocabulary if head else 0
        return kept + _width(arithmetic) // 2 * (min(logits, LOGITS_BYTES) if self.head_is_cut else logits)

    def sampling_bytes(self, rows: PassRows, arithmetic: str, *, rank: int, keeps_cache: bool = False) -> int:
        """Return what sampling rows and then scoring them needs.

        Args:
            rows: of a chunk.
            arithmetic: float32 or bfloat16.
            rank: of all sets of adapters together, none of which is merged.
            keeps_cache: whether what sampling needs is held while they are scored.
        """
        length = rows.prompt + rows.response
        tokens = rows.number * in_blocks(length) + SPARE_TOKENS if keeps_cache else rows.tokens
        cached = 2 * tokens * self.layers * self.keys * _width(arithmetic)
        cached += _width(arithmetic) * self.adapter_parameters(rank)
        row = 4 * rows.response * self.vocabulary
        logits = min(rows.number * row, max(LOGITS_BYTES, row))
        scoring = self._layer_bytes(rows, arithmetic, adapters=True) + logits
        return cached + scoring if keeps_cache else max(cached, scoring)

    def _layer_bytes(self, rows: PassRows, arithmetic: str, *, adapters: bool) -> int:
        hidden, queries, intermediate = _KEPT["float32" if arithmetic == "float32" else "bfloat16", adapters]
        token = hidden * self.hidden + queries * self.queries + intermediate * self.intermediate
        if arithmetic == "float32":
            return rows.tokens * token
        short = min(rows.prompt + rows.response, SHORT_ROW)  # others of the data's rows may be, where these are not
        return max(rows.tokens * token, min(rows.number * short, rows.tokens) * (token + _SCORE * self.heads * short))


def in_blocks(tokens: int) -> int:
    """Return the tokens that a row takes in vLLM's cache."""
    return -(-tokens // BLOCK) * BLOCK


def _width(arithmetic: str) -> int:
    return 4 if arithmetic == "float32" else 2


def head_is_last(config: PreTrainedConfig) -> bool:
    """Return whether an architecture's logits are what its head returns, at the positions that are asked for.

    A model without any data is tried on two tokens, once for each configuration.
    """
    try:
        key = type(config), config.to_json_string()
    except Exception:  # a configuration may hold anything
        return False
    if key not in _tried:
        _tried[key] = _try_head(config)
    return _tried[key]


def _try_head(config: PreTrainedConfig) -> bool:
    # seconds, which a formula should not cost
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from rlhf_core.models.saving import quiet  # noqa: PLC0415
    from rlhf_core.models.trunk import model_inputs  # noqa: PLC0415

    seen: list[Tensor] = []
    try:
        with quiet(), torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # which transformers changes
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
            ).eval()
            model.get_output_embeddings().register_forward_hook(lambda *told: seen.append(told[-1]))
            ids = torch.zeros(1, 2, dtype=torch.long)
            logits = model(**model_inputs(model, ids, torch.ones_like(ids)), logits_to_keep=ids[0, :1]).logits
    except Exception:  # each architecture's code fails in its own way
        return False
    return len(seen) == 1 and logits is seen[0] and logits.shape[1] == 1


def shape_of(directory: Path) -> Shape | None:
    """Return the shape of a model by its configuration; None if that does not say it."""
    from transformers import AutoConfig  # noqa: PLC0415 - as above

    try:
        whole = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config = whole.get_text_config()
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or hidden // heads)
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        keys = size * int(getattr(config, "num_key_value_heads", None) or heads)
        return Shape(
            int(config.num_hidden_layers), hidden, int(inner), size * heads, keys, int(config.vocab_size), heads,
            head_is_cut=head_is_last(whole),
        )  # fmt: skip
    except Exception:  # a configuration may hold anything
        return None
