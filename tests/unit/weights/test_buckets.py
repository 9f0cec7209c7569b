"""Buckets: what comes out is what went in, cast once, and damage is noticed."""

from __future__ import annotations

import pytest
import torch
import xxhash
from torch import Tensor

from rlhf_core.weights import buckets as laying
from rlhf_core.weights.buckets import ALIGNMENT, Publication, WeightsError, lay_out, verify, view, word_sum
from tests.unit.weights.published import weights


class Writer:
    """Keeps buckets in this process; room comes with rubbish in it, as used memory does."""

    def __init__(self) -> None:
        self.buckets: list[Tensor] = []

    def open(self, size: int) -> Tensor:
        self._open = torch.full((size,), 0xAB, dtype=torch.uint8)
        return self._open

    def close(self, filled: int) -> None:
        self.buckets.append(self._open[:filled])

    def place(self) -> None: ...


def laid_out(
    tensors: dict[str, Tensor], *, dtype: torch.dtype = torch.bfloat16, bucket_bytes: int = 64 << 20
) -> tuple[Publication, list[Tensor]]:
    writer = Writer()
    publication = lay_out(
        tensors.items(),
        writer,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        version=3,
        fully=True,
        incarnation="trainer",
    )
    return publication, writer.buckets


@pytest.mark.parametrize("bucket_bytes", [1, 100, 64 << 20])
def test_weights_arrive_as_they_were_cast_whatever_the_buckets(bucket_bytes: int) -> None:
    publication, buckets = laid_out(weights(), bucket_bytes=bucket_bytes)
    verify(publication, buckets)
    assert [slot.name for slot in publication.slots] == list(weights())
    for slot in publication.slots:
        dtype = torch.float32 if slot.name.startswith("critic.head.") else torch.bfloat16
        expected = weights()[slot.name].to(dtype)
        assert torch.equal(view(buckets, slot), expected), slot.name
        assert view(buckets, slot).dtype == dtype
        assert slot.offset % ALIGNMENT == 0
    assert publication.nbytes == (12 + 4 + 9 + 3) * 2 + (3 + 1) * 4
    assert len(buckets) == {1: 6, 100: 3, 64 << 20: 1}[bucket_bytes]  # at 100, each bias goes with its weights


def test_a_tensor_of_several_pieces_is_cast_and_summed_up_whole() -> None:
    large = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    publication, buckets = laid_out(
        {"actor.x": large.reshape(1, -1), "actor.empty": torch.empty(0), "actor.t": large[:6]}
    )
    verify(publication, buckets)
    assert torch.equal(view(buckets, publication.slots[0]), large.reshape(1, -1).bfloat16())
    assert view(buckets, publication.slots[1]).shape == (0,)
    assert publication.buckets[0].checksum == xxhash.xxh3_64(buckets[0].numpy().tobytes()).intdigest()


def test_a_transposed_tensor_and_one_of_integers_arrive() -> None:
    table = torch.arange(6.0).reshape(2, 3).t()
    publication, buckets = laid_out({"actor.t": table, "actor.steps": torch.tensor([1 << 40])})
    assert torch.equal(view(buckets, publication.slots[0]), table.bfloat16())
    assert view(buckets, publication.slots[1]).item() == 1 << 40


@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_bit_is_noticed_and_its_bucket_named(place: int) -> None:
    publication, buckets = laid_out(weights(), bucket_bytes=1)
    buckets[1][place] ^= 1
    with pytest.raises(WeightsError, match="bucket 1 of weights version 3 arrived damaged"):
        verify(publication, buckets)


@pytest.mark.parametrize("change", ["one less", "a shorter one"])
def test_a_missing_bucket_is_noticed(change: str) -> None:
    publication, buckets = laid_out(weights(), bucket_bytes=1)
    buckets = buckets[:-1] if change == "one less" else [*buckets[:-1], buckets[-1][:-1]]
    with pytest.raises(WeightsError, match="publish them again"):
        verify(publication, buckets)


def test_the_sum_of_words_is_that_of_pythons_integers_and_notices_any_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laying, "_AT_ONCE", 3)  # words
    body = torch.randint(0, 256, (29,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = bytes(body.tolist()) + bytes(3)
    odd, expected = 0x9E3779B97F4A7C15, 0
    for place in range(4):
        mixed = (int.from_bytes(padded[8 * place : 8 * place + 8], "little") + (2 * place + 1) * odd) % 2**64
        mixed = (mixed ^ mixed >> 32) * odd % 2**64
        expected += mixed ^ mixed >> 29
    assert word_sum(body) == expected % 2**64
    changes = [torch.tensor(bytearray(1 << bit if at == place else 0 for at in range(29)), dtype=torch.uint8)
               for place in range(29) for bit in range(8)]  # fmt: skip
    pairs = [changes[7] ^ changes[-1], changes[63] ^ changes[127]]  # the highest bits of two words among them
    exchanged = torch.cat([body[8:16], body[:8], body[16:]])
    found = {
        word_sum(body),
        word_sum(exchanged),
        *(word_sum(body ^ one) for one in [*changes, *pairs]),
    }
    assert len(found) == 2 + 29 * 8 + 2
