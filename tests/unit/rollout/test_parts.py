"""What a model contributes to experience, by itself."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import RolloutConfig
from rlhf_core.rewards.scoring import ScoringBatch
from rlhf_core.rollout import parts
from tests.tiny_llama import tiny_llama

FP32 = RolloutConfig(rollout_dtype="float32")


def test_logits_never_exist_for_more_rows_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, width = tiny_llama(initializer_range=0.3), 3
    sequences = torch.randint(3, 200, (5, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(sequences, dtype=torch.bool)
    batch = ScoringBatch([], [], mask[:, 0], sequences, mask, mask[:, -width:])
    whole = parts.token_logprobs(model, batch, temperature=1.0, config=FP32)
    rows: list[int] = []
    model.register_forward_hook(lambda _model, _inputs, output: rows.append(len(output.logits)))
    monkeypatch.setattr(parts, "LOGITS_BYTES", 2 * 4 * width * model.config.vocab_size)
    torch.testing.assert_close(parts.token_logprobs(model, batch, temperature=1.0, config=FP32), whole)
    assert rows == [2, 2, 1]
