from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_core.config import LoRAConfig
from rlhf_core.detached.weights import (
    Bucket,
    WeightsError,
    WeightsManifest,
    pack,
    published_weights,
    replace_weights,
    unpack,
)
from rlhf_core.models.critic import Critic
from tests.tiny_llama import tiny_llama
from tests.unit.trainer.test_ppo_learner import LORA, learner

Packed = tuple[WeightsManifest, list[Bucket]]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "actor.weight": torch.randn(4, 3, generator=generator),
        "actor.bias": torch.randn(4, generator=generator),
        "critic.weight": torch.randn(1, 3, generator=generator),
        "critic.bias": torch.randn(1, generator=generator),
    }


def packed(*, version: int = 1, dtype: torch.dtype = torch.float32, bucket_bytes: int = 64 << 20) -> Packed:
    cast = {name: tensor.to(dtype) for name, tensor in weights().items()}
    return pack(cast.items(), version=version, put=np.copy, bucket_bytes=bucket_bytes)


def models() -> dict[str, torch.nn.Module]:
    return {"actor": torch.nn.Linear(3, 4), "critic": torch.nn.Linear(3, 1)}


@pytest.mark.parametrize("bucket_bytes", [1, 20, 64 << 20])
def test_weights_arrive_as_they_were_cast_whatever_the_buckets(bucket_bytes: int) -> None:
    manifest, buckets = packed(version=3, dtype=torch.bfloat16, bucket_bytes=bucket_bytes)
    arrived = unpack(manifest, buckets)
    assert manifest.version == 3
    assert list(arrived) == list(weights())
    for name, tensor in weights().items():
        assert torch.equal(arrived[name], tensor.to(torch.bfloat16))


def test_buckets_that_cannot_be_written_are_read() -> None:
    manifest, buckets = packed()
    for bucket in buckets:
        bucket.flags.writeable = False  # what Ray hands out
    assert torch.equal(unpack(manifest, buckets)["actor.bias"], weights()["actor.bias"])


def test_a_flipped_bit_is_noticed_and_its_bucket_named() -> None:
    manifest, buckets = packed(bucket_bytes=20)
    buckets[1] = np.bitwise_xor(buckets[1], 1)
    with pytest.raises(WeightsError, match="bucket 1 of weights version 1 arrived damaged"):
        unpack(manifest, buckets)


def test_a_missing_bucket_is_noticed() -> None:
    manifest, buckets = packed(bucket_bytes=20)
    with pytest.raises(WeightsError, match="buckets, but"):
        unpack(manifest, buckets[:-1])


def test_weights_replace_and_never_add() -> None:
    held = models()
    for _ in range(3):
        replace_weights(held, weights())
    assert torch.equal(held["actor"].weight, weights()["actor.weight"])
    assert torch.equal(held["critic"].bias, weights()["critic.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor.extra": torch.ones(1)}, "unknown"),
        ({"critic.bias": None}, "missing"),
        ({"critic.bias": torch.ones(2)}, "another shape"),
    ],
)
def test_weights_that_do_not_fit_leave_every_model_as_it_was(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    held = models()
    before = {role: {n: p.clone() for n, p in model.named_parameters()} for role, model in held.items()}
    wrong = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with pytest.raises(WeightsError, match=message):
        replace_weights(held, wrong)
    for role, model in held.items():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[role][name])


@pytest.mark.parametrize("lora", [None, LORA])
def test_transformers_travel_in_the_makers_dtype_and_the_critics_head_in_float32(lora: LoRAConfig | None) -> None:
    ours = learner(lora=lora)
    with torch.no_grad():
        ours.critic.head.bias.fill_(10.03)  # 10.0 in bfloat16
    manifest, buckets = pack(published_weights(ours, torch.bfloat16), version=1, put=np.copy)
    arrived = unpack(manifest, buckets)
    assert arrived["critic.head.bias"].item() == ours.critic.head.bias.item()
    in_single = {name for name, tensor in arrived.items() if tensor.dtype != torch.bfloat16}
    assert in_single == {"critic.head.weight", "critic.head.bias"}
    critic = Critic.from_causal_lm(tiny_llama().to(torch.bfloat16))
    replace_weights({"actor": tiny_llama().to(torch.bfloat16), "critic": critic}, arrived)
    assert torch.equal(critic.head.weight, ours.critic.head.weight)
